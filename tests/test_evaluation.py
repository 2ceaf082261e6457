"""The figures against scipy and against hand-made cases, then the whole measurement on real contexts."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
from scipy import special, stats

from tq_ggml import evaluation
from tq_ggml.cache_types import parse_pair
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.evaluation import F16, cut_windows, evaluate, log_softmax, rows_per_chunk, score_token, summarise


@pytest.fixture
def logits():
    rng = np.random.default_rng(1)
    reference = rng.normal(0, 4, (40, 1000)).astype(np.float32) + 500
    return reference, reference + rng.normal(0, 0.3, reference.shape).astype(np.float32)


def test_log_softmax_is_scipys(logits):
    for row in (*logits[0], np.float32([-3e38, 0, 3e38])):
        np.testing.assert_allclose(log_softmax(row), special.log_softmax(row.astype(np.float64)), rtol=1e-12)


def test_token_scores_are_scipys(logits):
    for token, (reference, candidate) in enumerate(zip(*logits, strict=True)):
        score = score_token(log_softmax(reference), log_softmax(candidate), token)
        p, q = special.softmax(reference.astype(np.float64)), special.softmax(candidate.astype(np.float64))
        assert score.nll == pytest.approx(-np.log(q[token]), rel=1e-12)
        assert score.kld == pytest.approx(stats.entropy(p, q), rel=1e-9)
        assert score.same_top == (p.argmax() == q.argmax())
        assert score.p_diff == pytest.approx(q[token] - p[token], abs=1e-15)


def test_a_divergence_by_hand():
    reference, candidate = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    score = score_token(reference, candidate, 0)
    assert score.kld == pytest.approx(0.25 * math.log(2))
    assert (score.same_top, score.p_diff) == (0.0, pytest.approx(-0.25))
    assert score_token(reference, reference, 0)[1:] == (0.0, 1.0, 0.0)


def test_a_divergence_far_below_float32_resolution_survives():
    # Two tokens at 1/2 ± e: KL = 2 e² to first order, here 2e-10, where a float32 log carries 6e-8.
    score = score_token(log_softmax(np.float64([0, 0])), log_softmax(np.float64([2e-5, -2e-5])), 0)
    assert score.kld == pytest.approx(2e-10, rel=1e-3)


def test_summary_by_hand():
    scores = [
        evaluation.TokenScore(*s) for s in ((1, 0.1, 1, 0.3), (2, 0.2, 1, -0.3), (3, 0.6, 0, 0.3), (2, 0.1, 1, 0.3))
    ]
    found = summarise(scores)
    assert found["ppl"] == pytest.approx(math.e**2)
    assert found["ppl_err"] == pytest.approx(math.e**2 * math.sqrt(2 / 3) / 2)
    assert found["kld"] == pytest.approx(0.25)
    assert found["kld_err"] == pytest.approx(stats.sem([0.1, 0.2, 0.6, 0.1]))
    assert found["kld_median"] == pytest.approx(0.15)
    assert found["kld_p999"] == pytest.approx(0.6 - 0.003 * 0.4)
    assert (found["same_top"], found["rms_dp"], found["n_tokens"]) == (0.75, pytest.approx(0.3), 4)


def test_windows_are_consecutive_and_bos_replaces_their_first_token():
    tokens = np.arange(100, 125)
    plain = cut_windows(tokens, 8, 3, None)
    np.testing.assert_array_equal(plain.ravel(), np.arange(100, 124))
    opened = cut_windows(tokens, 8, 3, 1)
    assert list(opened[:, 0]) == [1, 1, 1]
    np.testing.assert_array_equal(opened[:, 1:], plain[:, 1:])
    assert tokens[0] == 100  # the caller's tokens are not touched


def test_a_short_text_names_both_numbers():
    with pytest.raises(TqError, match="has 25 tokens.*4 windows of 8 need 32"):
        cut_windows(np.arange(25), 8, 4, None)


@pytest.mark.parametrize(("n_vocab", "rows"), [(32, 256), (49152, 256), (151936, 110), (1 << 24, 16)])
def test_rows_per_chunk_bound_the_memory(n_vocab, rows):
    assert rows_per_chunk(n_vocab) == rows


def tiny_windows(n_ctx=96, n_windows=2):
    return cut_windows(np.random.default_rng(0).integers(0, 32, n_ctx * n_windows), n_ctx, n_windows, None)


def test_the_second_half_is_scored_against_a_plain_computation(tiny_gguf):
    windows = tiny_windows()
    with Model(tiny_gguf()) as model:
        (f16, q8_0) = evaluate(model, [F16, parse_pair("q8_0")], windows, n_threads=1)
        rows = {}
        for name in ("f16", "q8_0"):
            with model.context(name, n_ctx=96, n_ubatch=256, n_threads=1) as context:
                blocks = []
                for window in windows:
                    context.clear()
                    context.decode(window[:48], 0)
                    logits = context.decode(window[48:95], 48, logits="all").astype(np.float64)
                    blocks.append(special.log_softmax(logits, axis=1))
                rows[name] = np.concatenate(blocks)
    nexts = windows[:, 49:].ravel()
    assert f16.n_tokens == len(nexts) == 94
    for found, name in ((f16, "f16"), (q8_0, "q8_0")):
        assert found.ppl == pytest.approx(np.exp(-rows[name][np.arange(94), nexts].mean()), rel=1e-6)
    divergence = special.rel_entr(np.exp(rows["f16"]), np.exp(rows["q8_0"])).sum(axis=1).mean()
    assert q8_0.kld == pytest.approx(divergence, rel=1e-3)
    assert (f16.kld, f16.kld_err, f16.same_top, f16.rms_dp, f16.ratio) == (0, 0, 1, 0, 1)
    assert q8_0.ratio == pytest.approx(32 / 17, rel=0.01)


def test_the_size_of_a_chunk_changes_nothing(tiny_gguf, monkeypatch):
    with Model(tiny_gguf()) as model:
        (whole,) = evaluate(model, [parse_pair("q4_0")], tiny_windows(), n_threads=1)
        monkeypatch.setattr(evaluation, "LOGIT_BYTES", 0)  # 16 rows
        (chunked,) = evaluate(model, [parse_pair("q4_0")], tiny_windows(), n_threads=1)
    assert chunked.ppl == pytest.approx(whole.ppl, rel=1e-3)
    assert chunked.kld == pytest.approx(whole.kld, rel=0.05)


def test_a_model_that_gives_nan_is_named_not_averaged(tiny_gguf):
    path = tiny_gguf()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    tensors["output.weight"].data[3] = np.nan
    tensors["output.weight"].data.flush()
    with Model(path) as model, pytest.raises(TqError, match="f16 gave logits that are not finite in window 1"):
        evaluate(model, [parse_pair("q8_0")], tiny_windows(), n_threads=1)


def test_finer_types_are_closer_to_f16_on_a_real_model(smollm2_path):
    text = "The sea was calm, and the old harbour lay asleep under a pale moon while the boats rocked gently. " * 4
    pairs = [parse_pair(name) for name in ("q8_0", "tq4", "q8_0/tq4", "tq3")]
    with Model(smollm2_path) as model:
        windows = cut_windows(model.tokenize(text), 64, 1, model.bos)
        q8_0, tq4, mixed, tq3 = evaluate(model, pairs, windows, n_threads=2)
    assert 0 < q8_0.kld < mixed.kld < tq4.kld < tq3.kld
    assert tq4.kld < 0.5
    assert (tq4.ratio, tq3.ratio) == (pytest.approx(32 / 9, rel=0.01), pytest.approx(32 / 7, rel=0.01))
