"""What `tq_ggml.behaviour` asks a model: 40 questions, text to hide a number in, and the chat template around both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from tq_ggml.errors import TqError

if TYPE_CHECKING:
    from tq_ggml.engine import Model

# The parts of 1728 sentences, about 20,000 tokens, that no model has learnt by heart and that have no digit in them.
_WHO = (
    "The baker", "A tired postman", "My neighbour", "The old gardener", "Her cousin", "The ferryman", "A young teacher",
    "The watchmaker", "Nobody but the cook", "The station master", "A travelling painter", "The librarian",
)  # fmt: skip
_WHAT = (
    "swept the yard", "carried two baskets of apples home", "closed the green shutters", "waited for the rain to stop",
    "mended a broken chair", "watched the boats come in", "told a long story about a horse", "lit the stove",
    "counted the geese", "forgot a hat on the bench", "wrote a letter to a friend", "cut bread for the children",
)  # fmt: skip
_WHEN = (
    "before the bells rang", "while the dog slept", "on the way to the market", "as the fog lifted",
    "without saying a word", "at the end of a warm day", "because the road was flooded", "when the music was over",
    "although it was getting late", "to please an aunt", "in spite of the cold wind", "as on every other morning",
)  # fmt: skip


def load_prompts() -> list[str]:
    """The package's 40 prompts: English, Chinese and code in turn, so that the first few are mixed, too."""
    return resources.files("tq_ggml").joinpath("prompts.txt").read_text(encoding="utf-8").splitlines()


def sentences() -> Iterator[str]:
    """Sentences of about twelve words, without end and without a digit; the same ones on every call."""
    rng = random.Random(0)
    while True:
        yield f"{rng.choice(_WHO)} {rng.choice(_WHAT)} {rng.choice(_WHEN)}."


def chat_tokens(model: Model, text: str, answer: str = "") -> np.ndarray:
    """Token ids, int32 (n,), of a user's message in the model's chat template, and of how the reply begins.

    A model without a template gets plain text, a line each, after BOS where it has one.

    Raises:
        TqError: the template fails, or the model has no vocabulary.
    """
    template = model._llama_cpp.llama_model_chat_template(model._model, None)
    if template:
        # As for `Llama`, the control tokens are the template's affair, BOS among them.
        return model.tokenize(_rendered(model, template.decode("utf-8", "replace"), text) + answer, special=True)
    tokens = model.tokenize(f"{text}\n{answer}")
    return tokens if model.bos is None else np.concatenate(([np.int32(model.bos)], tokens))


def _rendered(model: Model, template: str, text: str) -> str:
    # Only here: llama_cpp can be imported once the libraries are chosen, and a Model has chosen them.
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    eos, bos = (_spelling(model, which) for which in ("llama_vocab_eos", "llama_vocab_bos"))
    try:
        formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
        return formatter(messages=[{"role": "user", "content": text}]).prompt
    except Exception as error:  # a program of somebody else's, which can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TqError(f"the chat template of {model.path.name} fails: {reason}") from error


def _spelling(model: Model, which: str) -> str:
    vocab = model._open_vocab()
    token = getattr(model._llama_cpp, which)(vocab)
    return "" if token < 0 else model._llama_cpp.llama_vocab_get_text(vocab, token).decode("utf-8", "replace")
