"""Conditioned keys of several sequences in one cache: each attends as it does alone."""

from __future__ import annotations

import numpy as np
import pytest

from tq_ggml.cache_types import resolve
from tq_ggml.calibration import choose
from tq_ggml.conditioning import conditioned, conditioned_layers
from tq_ggml.engine import Model
from tq_ggml.evaluation import log_softmax

TEXTS = (
    "The sea was calm, and the old harbour lay asleep under a pale moon while the boats rocked gently on the water.",
    "A compiler reads a program and writes another one, which does the same thing in the language of the machine.",
)
TQ4 = resolve("tq4")


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Model(smollm2_path) as model:
        model.calibration = choose("auto", model.info, [TQ4])
        yield model


def alone(model: Model, tokens: np.ndarray) -> np.ndarray:
    with model.context("tq4", n_ctx=256) as context:
        for position, token in enumerate(tokens):
            logits = context.decode([token], position, logits="last")
        return log_softmax(logits[0])


def together(model: Model, sequences: list[np.ndarray], unified: bool) -> list[np.ndarray]:
    """The last token's log-probabilities of sequences whose tokens come in turn, a token of each per batch."""
    llama_cpp = model._llama_cpp
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = 512, len(sequences), unified
    params.type_k = params.type_v = TQ4.ggml_id
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    with conditioned(model.calibration.constants_for(TQ4)):
        ctx = llama_cpp.llama_init_from_model(model._model, params)
    batch = llama_cpp.llama_batch_init(len(sequences), 0, 1)
    found: list[np.ndarray] = [np.empty(0)] * len(sequences)
    try:
        assert conditioned_layers(ctx).positional == 30
        for position in range(max(map(len, sequences))):
            live = [s for s, tokens in enumerate(sequences) if position < len(tokens)]
            batch.n_tokens = len(live)
            for i, s in enumerate(live):
                batch.token[i], batch.pos[i] = int(sequences[s][position]), position
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, s, True
            assert llama_cpp.llama_decode(ctx, batch) == 0
            for i, s in enumerate(live):
                row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, i), shape=(model.n_vocab,))
                found[s] = log_softmax(row.copy())
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(ctx)
    return found


@pytest.mark.parametrize(("unified", "limit"), [(True, 0.06), (False, 1e-6)], ids=["one stream", "a stream each"])
def test_sequences_do_not_disturb_each_other(model, unified, limit):
    """In one stream the cells of both alternate, so sums have another order; a stream each leaves nothing different."""
    sequences = [model.tokenize(text, add_bos=True) for text in TEXTS]
    assert len(sequences[0]) != len(sequences[1])
    for tokens, found in zip(sequences, together(model, sequences, unified), strict=True):
        expected = alone(model, tokens)
        assert np.exp(expected) @ (expected - found) < limit
