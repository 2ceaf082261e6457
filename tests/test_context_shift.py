"""Context shift: old tokens are forgotten, and the keys after them are rotated to their new positions in the cache."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tq_ggml.cache_types import parse_pair, resolve
from tq_ggml.calibration import choose
from tq_ggml.engine import Context, Model
from tq_ggml.evaluation import log_softmax

TEXT = "The sea was calm, and the old harbour lay asleep under a pale moon while the boats rocked gently. " * 4
KEPT, FORGOTTEN = 4, 32
Q8_0_WITHOUT_ROTATION = """
import sys
sys.path.insert(0, {tests!r})
from test_context_shift import Model, next_token
with Model({model!r}) as model:
    print(next_token(model, "q8_0").argmax())
"""


def next_token(model: Model, cache_type: str) -> np.ndarray:
    """Log-probabilities after ``TEXT``, of which a part near the start was forgotten before the last token came."""
    tokens = model.tokenize(TEXT)
    with model.context(*parse_pair(cache_type), n_ctx=256) as context:
        context.decode(tokens[:-1], 0)
        shift(context, len(tokens) - 1)
        return log_softmax(context.decode(tokens[-1:], len(tokens) - 1 - FORGOTTEN, logits="last")[0])


def shift(context: Context, n_tokens: int) -> None:
    llama_cpp, memory = context._llama_cpp, context._memory
    assert llama_cpp.llama_memory_can_shift(memory)
    assert llama_cpp.llama_memory_seq_rm(memory, 0, KEPT, KEPT + FORGOTTEN)
    llama_cpp.llama_memory_seq_add(memory, 0, KEPT + FORGOTTEN, n_tokens, -FORGOTTEN)


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Model(smollm2_path) as model:
        yield model


@pytest.fixture(scope="module")
def f16(model):
    return next_token(model, "f16")


@pytest.mark.parametrize(
    ("cache_type", "limit"), [("tq4", 0.012), ("tq3", 0.1), ("tq4/q5_0", 0.1), ("q4_0", 0.03), ("q8_0/tq4", 0.02)]
)
def test_conditioned_keys_are_shifted(smollm2_path, f16, cache_type, limit):
    """tq4/q5_0 is not attended by us, so its keys and those of q4_0 have only a constant mean taken out."""
    with Model(smollm2_path) as model:
        model.calibration = choose("on", model.info, [resolve("tq4")])
        divergence = np.exp(f16) @ (f16 - next_token(model, cache_type))
    assert 0 < divergence < limit


@pytest.mark.parametrize(("cache_type", "limit"), [("q8_0", 0.02), ("tq4", 0.2), ("tq3", 0.6), ("q8_0/tq4", 0.1)])
def test_a_shifted_cache_is_close_to_a_shifted_f16_cache(model, f16, cache_type, limit):
    divergence = np.exp(f16) @ (f16 - next_token(model, cache_type))
    assert 0 < divergence < limit


def test_q8_0_keys_that_the_graph_does_not_rotate(model, f16):
    """Unpatched, llama.cpp follows a null pointer here."""
    code = Q8_0_WITHOUT_ROTATION.format(tests=os.path.dirname(__file__), model=str(model.path))
    environment = {**os.environ, "LLAMA_ATTN_ROT_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == f16.argmax()
