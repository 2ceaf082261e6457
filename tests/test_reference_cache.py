"""`KVCacheSim`: attention over compressed keys and values, and the bytes that it reports."""

from __future__ import annotations

import numpy as np
import pytest

from tq_ggml.reference import METHODS, BlockCodec, KVCacheSim, TurboQuantMSE, Uniform, nmse, turbo_quant_prod

D, D_V = 64, 32


def rows(n: int, d: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d))


def softmax_attention(q, k, v) -> np.ndarray:
    scores = q @ k.T / np.sqrt(k.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ v / weights.sum(axis=1, keepdims=True)


def test_fine_methods_attend_as_the_formula_says():
    cache = KVCacheSim(TurboQuantMSE(D, 8), TurboQuantMSE(D_V, 8))
    k, v, q = rows(200, D, 0), rows(200, D_V, 1), rows(5, D, 2)
    cache.push(k, v)
    np.testing.assert_allclose(cache.attention_scores(q), q @ k.T / 8, atol=0.05)
    np.testing.assert_allclose(cache.attention_scores(q, scale=2.0), 2 * q @ k.T, atol=0.8)
    assert nmse(softmax_attention(q, k, v), cache.attend(q)) < 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_pieces_are_as_good_as_the_whole(name):
    k, v, q = rows(100, D, 0), rows(100, D, 1), rows(3, D, 2)
    whole, pieces = (KVCacheSim(METHODS[name](D, 4), METHODS[name](D, 4)) for _ in range(2))
    whole.push(k, v)
    for start, end in ((0, 0), (0, 1), (1, 40), (40, 40), (40, 100)):
        pieces.push(k[start:end], v[start:end])
    np.testing.assert_allclose(pieces.attend(q), whole.attend(q), rtol=5e-3, atol=5e-3)
    assert pieces.memory() == whole.memory()


def test_better_methods_are_nearer():
    k, v, q = rows(300, D, 0), rows(300, D, 1), rows(20, D, 2)
    exact, errors = softmax_attention(q, k, v), {}
    for name in ("tq4", "tq3"):
        cache = KVCacheSim(BlockCodec(D, name), BlockCodec(D, name))
        cache.push(k, v)
        errors[name] = nmse(exact, cache.attend(q))
    prod = KVCacheSim(turbo_quant_prod(D, 4), BlockCodec(D, "tq4"))
    prod.push(k, v)
    # A bit for QJL costs more in keys than its missing bias is worth.
    assert errors["tq4"] < 0.4 * errors["tq3"] and errors["tq4"] < 0.5 * nmse(exact, prod.attend(q))


def test_memory():
    cache = KVCacheSim(BlockCodec(D, "tq4"), BlockCodec(D_V, "tq3"))
    assert cache.memory().tokens == 0 and np.isnan(cache.memory().ratio)
    cache.push(rows(10, D, 0), rows(10, D_V, 1))
    report = cache.memory()
    assert (report.tokens, report.bytes_f16, report.bytes_stored) == (10, 10 * 2 * 96, 10 * (36 + 14))
    assert report.ratio == pytest.approx(3.84)


def test_what_waits_for_its_group_is_kept_in_f16_and_counted():
    cache = KVCacheSim(Uniform(D, 2, per="channel"), BlockCodec(D, "tq4"))
    k, v = rows(40, D, 0), rows(40, D, 1)
    cache.push(k, v)
    assert cache.memory().bytes_stored == 32 * D * 3 / 8 + 8 * D * 2 + 40 * 36
    exact = k @ k.T / 8
    found = cache.attention_scores(k)
    assert nmse(exact[:, 32:], found[:, 32:]) < 1e-6 < 0.01 < nmse(exact[:, :32], found[:, :32])


def test_misuse_is_named():
    cache = KVCacheSim(BlockCodec(D, "tq4"), BlockCodec(D_V, "tq4"))
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.attend(rows(1, D, 0))
    with pytest.raises(ValueError, match="2 keys and 3 values"):
        cache.push(rows(2, D, 0), rows(3, D_V, 0))
    with pytest.raises(ValueError, match=r"shape \(n, 64\), got \(2, 32\)"):
        cache.push(rows(2, D_V, 0), rows(2, D_V, 0))
    assert cache.memory().tokens == 0
