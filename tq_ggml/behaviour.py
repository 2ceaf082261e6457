"""How a model behaves on a cache type: can it find a number in a long text, and does it still give the same answers?

KL divergence says how far the next token's distribution moves; these say what a reader would notice of it. Decoding is
greedy, token by token, as a program that generates text does it. One context is alive at a time.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from tq_ggml.cache_types import CacheType, Pair
from tq_ggml.errors import TqError
from tq_ggml.evaluation import F16, pair_name
from tq_ggml.limits import check_cache
from tq_ggml.prompts import chat_tokens, sentences

if TYPE_CHECKING:
    from tq_ggml.engine import Context, Model

_DIGITS = 6
_ANSWER_TOKENS = _DIGITS + 4  # one token per digit, at worst, and a space or a quotation mark before them

# Only the sentence with the number says "the pass key is": a base model continues with what followed before.
_TASK = "Find the pass key in the text below and remember it: you will be asked for it at the end.\n\n"
_QUESTION = "\n\nWhat is the pass key in the text above?"
_ANSWER = "The pass key is"


@dataclass(frozen=True)
class Passkey:
    """A prompt that hides a number.

    Attributes:
        length: tokens of prompt and answer together, at most.
        depth: where in the text the number is, 0 at its start to 1 at its end.
        digits: the number.
        prompt: token ids, int32 (n,); the model's answer has begun, and the number is next.
    """

    length: int
    depth: float
    digits: str
    prompt: np.ndarray


@dataclass(frozen=True)
class Retrieval:
    """Shares (0..1) of the hidden digits that a cache type lets the model give back, by context length in tokens."""

    type_k: CacheType
    type_v: CacheType
    found: dict[int, float]

    def row(self) -> dict[str, Any]:
        """As a report row: ``passkey_1024`` and the like, after the type names."""
        row = {"type_k": str(self.type_k), "type_v": str(self.type_v)}
        return row | {f"passkey_{length}": share for length, share in self.found.items()}


@dataclass(frozen=True)
class Agreement:
    """How long a cache type's answers stay those of an f16 cache.

    Attributes:
        type_k, type_v: cache types of keys and values.
        prefix, prefix_err: mean number of tokens before the first that differs, and its standard error over prompts
            (None for one prompt). An answer ends with the model's end token, or when it has all its tokens.
        identical: fraction (0..1) of answers without a difference.
        answer_tokens: mean length of the f16 answers, which ``prefix`` cannot exceed.
        n_answers: answers compared.
    """

    type_k: CacheType
    type_v: CacheType
    prefix: float
    prefix_err: float | None
    identical: float
    answer_tokens: float
    n_answers: int

    def row(self) -> dict[str, Any]:
        """The attributes as a report row, the types by name."""
        return vars(self) | {"type_k": str(self.type_k), "type_v": str(self.type_v)}


# ---- passkey retrieval ---------------------------------------------------------------------------------------------


def hide_passkeys(model: Model, lengths: Iterable[int], depths: Sequence[float] = (0.1, 0.5, 0.9)) -> list[Passkey]:
    """One prompt per length and depth, each with another number; the same ones on every call.

    Raises:
        TqError: a length is beyond the model's training context, or too short for the question and some text; or the
            chat template fails.
    """
    return [_hide(model, length, depth) for length in dict.fromkeys(lengths) for depth in dict.fromkeys(depths)]


def _hide(model: Model, length: int, depth: float) -> Passkey:
    if length > model.n_ctx_train:
        raise TqError(f"a passkey context of {length} tokens is longer than the {model.n_ctx_train} of the training")
    digits = "".join(random.Random(f"{length} {depth}").choices("0123456789", k=_DIGITS))
    needle = f"The pass key is {digits}. Remember it: {digits} is the pass key."
    filler = list(islice(sentences(), max(length // 4, 2)))  # a sentence has more than four words

    def prompt(n_sentences: int) -> np.ndarray:
        text = filler[:n_sentences]
        text.insert(round(depth * n_sentences), needle)
        return chat_tokens(model, _TASK + " ".join(text) + _QUESTION, _ANSWER)

    def n_tokens(n_sentences: int) -> int:
        return len(prompt(n_sentences)) + _ANSWER_TOKENS

    n_fitting = bisect_right(range(len(filler) + 1), length, key=n_tokens) - 1
    if n_fitting < 2:  # a depth means nothing without text before and after
        raise TqError(f"a passkey context of {length} tokens is too short; give at least {n_tokens(2)}")
    return Passkey(length, depth, digits, prompt(n_fitting))


def digits_right(digits: str, answer: str) -> float:
    """Share (0..1) of ``digits`` that are at their place in the first number of ``answer``."""
    number = re.search("[0-9]+", answer)
    given = number.group() if number else ""
    return sum(a == b for a, b in zip(digits, given, strict=False)) / len(digits)


def retrieve(
    model: Model, pairs: Sequence[Pair], passkeys: Sequence[Passkey], *, n_threads: int | None = None
) -> list[Retrieval]:
    """Ask for every number with every (key type, value type) pair; a length's share is the mean over its depths.

    Raises:
        TqError: a context cannot be made, or a cache type makes logits that are not finite.
    """
    n_ctx = max(passkey.length for passkey in passkeys)
    results = []
    with _progress(model, pairs, n_ctx, len(passkeys), "passkey") as progress:
        for pair in pairs:
            shares: dict[int, list[float]] = {}
            with model.context(*pair, n_ctx=n_ctx, n_threads=n_threads) as context:
                for passkey in passkeys:
                    answer = model.detokenize(_answer(context, passkey.prompt, _ANSWER_TOKENS))
                    shares.setdefault(passkey.length, []).append(digits_right(passkey.digits, answer))
                    progress.update()
            results.append(Retrieval(*pair, {length: float(np.mean(each)) for length, each in shares.items()}))
    return results


# ---- greedy agreement ----------------------------------------------------------------------------------------------


def common_prefix(expected: Sequence[int], tokens: Iterable[int]) -> int:
    """Tokens before the first difference; ``tokens`` is read no further than that, nor past ``len(expected)``."""
    length = 0
    for one, other in zip(expected, tokens, strict=False):
        if one != other:
            break
        length += 1
    return length


def pose(model: Model, prompts: Iterable[str], n_tokens: int = 64) -> list[np.ndarray]:
    """The prompts as token ids, int32 (n,) each: a user's message where there is a chat template, else plain text.

    Raises:
        TqError: a prompt and an answer of ``n_tokens`` are longer than the training context, or the template fails.
    """
    questions = [chat_tokens(model, prompt) for prompt in prompts]
    longest = max(map(len, questions)) + n_tokens
    if longest > model.n_ctx_train:
        raise TqError(
            f"a prompt and {n_tokens} tokens of answer take {longest}, but the model was trained on {model.n_ctx_train}"
        )
    return questions


def agree(
    model: Model,
    pairs: Sequence[Pair],
    questions: Sequence[np.ndarray],
    *,
    n_tokens: int = 64,
    n_threads: int | None = None,
) -> list[Agreement]:
    """Decode up to ``n_tokens`` per question with f16 keys and values, and with every pair as long as it says the same.

    Args:
        pairs: distinct (key type, value type); f16/f16 is always run, and agrees with itself.
        questions: at least one, from :func:`pose`.

    Raises:
        TqError: a context cannot be made, or a cache type makes logits that are not finite.
    """
    n_ctx = max(map(len, questions)) + n_tokens
    others = [pair for pair in pairs if pair != F16]
    with _progress(model, [F16, *others], n_ctx, len(questions), "agreement") as progress:
        with model.context(*F16, n_ctx=n_ctx, n_threads=n_threads) as context:
            answers = [_counted(progress, _answer(context, question, n_tokens)) for question in questions]
        prefixes = {F16: [len(answer) for answer in answers]}
        for pair in others:
            with model.context(*pair, n_ctx=n_ctx, n_threads=n_threads) as context:
                prefixes[pair] = [
                    _counted(progress, common_prefix(answer, greedy(context, question)))
                    for question, answer in zip(questions, answers, strict=True)
                ]
    return [summarise(pair, prefixes[pair], prefixes[F16]) for pair in pairs]


def summarise(pair: Pair, prefixes: Sequence[int], lengths: Sequence[int]) -> Agreement:
    """The means of :class:`Agreement` from the prefixes' and the f16 answers' lengths in tokens, both (n,)."""
    n = len(lengths)
    return Agreement(
        *pair,
        prefix=float(np.mean(prefixes)),
        prefix_err=float(np.std(prefixes, ddof=1) / math.sqrt(n)) if n > 1 else None,
        identical=float(np.mean(np.equal(prefixes, lengths))),
        answer_tokens=float(np.mean(lengths)),
        n_answers=n,
    )


# ---- decoding ------------------------------------------------------------------------------------------------------


def greedy(context: Context, prompt: np.ndarray) -> Iterator[int]:
    """The likeliest token after ``prompt`` (n,), the likeliest after that, and so on.

    Raises:
        TqError: logits that are not finite, or a token that no longer fits.
    """
    context.clear()
    logits = context.decode(prompt, 0, logits="last")
    for pos in count(len(prompt)):
        if not math.isfinite(logits.sum(dtype=np.float64)):
            name = pair_name((context.type_k, context.type_v))
            raise TqError(f"cache type {name} gave logits that are not finite; check the model with --types f16 first")
        token = int(logits[0].argmax())
        yield token
        logits = context.decode([token], pos, logits="last")


def _answer(context: Context, prompt: np.ndarray, n_tokens: int) -> list[int]:
    model, answer = context.model, []
    for token in islice(greedy(context, prompt), n_tokens):
        answer.append(token)
        if model._llama_cpp.llama_vocab_is_eog(model._open_vocab(), token):
            break
    return answer


def _progress(model: Model, pairs: Sequence[Pair], n_ctx: int, n_runs: int, what: str) -> tqdm:
    """A bar of all pairs' runs. Contexts are made one after another, so what none can be made for is refused now."""
    for pair in pairs:
        check_cache(model.info, *pair, n_ctx)
    return tqdm(total=len(pairs) * n_runs, unit="run", desc=what, disable=None)


def _counted(progress: tqdm, result: Any) -> Any:
    progress.update()
    return result
