"""What people do with a cache: a long reply and a long prompt with tq4, on a real model."""

from __future__ import annotations

import contextlib
import re
from collections import Counter

import numpy as np
import pytest

from tq_ggml import texts
from tq_ggml.chat import Chat
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.evaluation import log_softmax
from tq_ggml.llama import Llama

QUESTION = "Explain in detail how a steam engine works, and why it changed the world."


def log_probabilities(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Of each token by its row of logits, and of the row's likeliest: (n, 2)."""
    rows = (log_softmax(row) for row in logits)
    return np.array([(row[token], row.max()) for row, token in zip(rows, tokens, strict=True)])


def test_300_greedy_tokens_of_chat_are_coherent(smollm2_path):
    with contextlib.closing(Llama(smollm2_path, cache_type="tq4", n_ctx=512)) as llama:
        chat = Chat(llama, max_tokens=300, sampling={"temperature": 0})
        answer = "".join(chat.reply(QUESTION))
        tokens = llama.input_ids[: llama.n_tokens].copy()
        n_answer = len(llama.tokenize(answer.encode(), add_bos=False))
    assert n_answer > 200, answer
    assert sum(len(word) for word in re.findall(r"[A-Za-z]+", answer)) > 0.7 * len(answer), answer
    stretches = Counter(tuple(tokens[i : i + 20]) for i in range(len(tokens) - n_answer, len(tokens) - 19))
    assert max(stretches.values()) <= 6, answer  # a model caught in a loop says the same 15 times and more

    # Every token is one that an f16 cache would have chosen there, or nearly.
    start = len(tokens) - n_answer
    with Model(smollm2_path) as model, model.context("f16", n_ctx=512) as context:
        logits = context.decode(tokens[:-1], 0, logits="all")[start - 1 :]
        chosen, best = log_probabilities(logits, tokens[start:]).T
    assert np.mean(best - chosen) < 0.25
    assert np.mean(best == chosen) > 0.75


def test_a_prompt_of_6000_tokens(smollm2_path):
    """A passage near the start comes again 5,500 tokens later: the model then copies it out of the cache."""
    try:
        plays = texts.demo_text()
    except TqError as problem:
        pytest.skip(f"needs the demo text, which cannot be fetched: {problem}")
    with Model(smollm2_path) as model, model.context("tq4", n_ctx=8192) as context:
        tokens = model.tokenize(plays[:30_000])
        passage = model.tokenize(plays[500_000:501_000])[:200]
        prompt = np.concatenate((tokens[:200], passage, tokens[200:5600], passage))
        assert len(prompt) == 6000
        means = []
        for start, stop in ((0, 200), (400, 5800)):
            context.decode(prompt[start:stop], start)
            logits = context.decode(prompt[stop : stop + 200], stop, logits="all")
            means.append(log_probabilities(logits[:-1], passage[1:])[50:, 0].mean())
        answer = [int(logits[-1].argmax())]
        for pos in range(6000, 6016):
            logits = context.decode(answer[-1:], pos, logits="last")
            assert np.isfinite(logits).all()
            answer.append(int(logits[0].argmax()))
    first, again = means
    assert again > first + 1, (first, again)
