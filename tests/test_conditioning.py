"""Key conditioning: its arithmetic against complex numbers, row filters, and what the engine makes of constants."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from cache_rows import decode, nmse
from scipy.linalg import hadamard

from tq_ggml import calibration, conditioning, engine, evaluation
from tq_ggml.calibration import Calibration, cut_tokens, default_text
from tq_ggml.conditioning import KeyMoments, KeyTransform, Rope, Rows, common_share, conditioned, filtering, layer_rope
from tq_ggml.engine import Context, Model
from tq_ggml.errors import EngineError

N_HEAD, HEAD = 3, 32


def rope(n_rot: int, is_neox: bool, base: float = 10000.0) -> Rope:
    half = np.arange(n_rot // 2)
    pairs = np.stack([half, half + half.size] if is_neox else [2 * half, 2 * half + 1])
    return Rope(pairs, base ** (-2.0 * half / n_rot))


# The whole head turns, or its first half, or nothing.
ROPES = [rope(HEAD, True), rope(HEAD, False), rope(HEAD // 2, True), rope(0, True)]
every_rope = pytest.mark.parametrize("rope", ROPES, ids=["neox", "norm", "partial", "none"])


def turned(rows: np.ndarray, rope: Rope, positions: np.ndarray) -> np.ndarray:
    """RoPE in complex numbers: a pair is one, and a position multiplies it by exp(i angle)."""
    out = rows.astype(np.float64)
    first, second = rope.pairs
    pair = (rows[..., first] + 1j * rows[..., second]) * np.exp(1j * positions[:, None] * rope.angle)[:, None, :]
    out[..., first], out[..., second] = pair.real, pair.imag
    return out


@pytest.fixture
def moments() -> KeyMoments:
    rng = np.random.default_rng(1)
    mean, start = rng.normal(0, 3, (2, N_HEAD, HEAD)).astype(np.float32)
    variance, energy = rng.lognormal(0, 2, (2, N_HEAD, HEAD)).astype(np.float32)
    return KeyMoments(mean, start, variance, np.zeros_like(mean), energy, np.zeros_like(mean))


@pytest.fixture
def keys() -> np.ndarray:
    return np.random.default_rng(2).normal(0, 2, (40, N_HEAD, HEAD)).astype(np.float32)


@every_rope
def test_turn_back_undoes_rope(rope, keys):
    positions = np.arange(len(keys), dtype=np.int32) * 100
    np.testing.assert_allclose(rope.turn_back(turned(keys, rope, positions), positions), keys, atol=1e-4)


@every_rope
@pytest.mark.parametrize("block", [1, 2, 8, 64])
@pytest.mark.parametrize("constant", [False, True])
def test_restore_is_the_inverse_of_condition(rope, block, constant, moments, keys):
    transform = KeyTransform(moments, rope, 64, block, constant=constant)
    positions = np.arange(len(keys), dtype=np.int32)
    stored = transform.condition(keys, positions)
    assert stored.dtype == np.float32 and stored.shape == keys.shape
    assert np.abs(stored - keys).max() > 1
    np.testing.assert_allclose(transform.restore(stored, positions), keys, atol=1e-4)


@every_rope
def test_a_scale_is_positive_and_has_no_size_of_its_own(rope, moments):
    scale = KeyTransform(moments, rope, 4096).scale
    assert scale.shape == (N_HEAD, HEAD) and (scale > 0).all()
    np.testing.assert_allclose(np.log(scale).mean(axis=1), 0, atol=1e-12)
    fast = rope.pairs[:, rope.angle > 0.1]
    np.testing.assert_allclose(scale[:, fast[0]], scale[:, fast[1]], rtol=0.01)
    rest = np.setdiff1d(np.arange(HEAD), rope.pairs)
    assert len(np.unique(scale[0, rest])) == len(rest)


def test_a_scale_balances_keys_and_queries(moments):
    """Without a mean, of all scales (variance / energy)^1/4 makes keys and queries alike."""
    still = dataclasses.replace(moments, mean=np.zeros((N_HEAD, HEAD), np.float32))
    scale = KeyTransform(still, ROPES[3], 256).scale
    variance, energy = (x + 0.01 * x.mean(axis=1, keepdims=True) for x in (still.variance, still.query_energy))
    ratio = (variance / scale**2) / (energy * scale**2)
    np.testing.assert_allclose(ratio / ratio[:, :1], 1, rtol=1e-5)


def test_squares_with_rope_are_those_of_the_turned_rows(keys):
    """Pairs of every speed, over all positions that there are."""
    turning, n = Rope(ROPES[0].pairs, np.geomspace(1, 1e-6, HEAD // 2)), 4000
    before = keys[:1] * np.linspace(0.1, 2, HEAD, dtype=np.float32)
    after = turned(np.broadcast_to(before, (n, N_HEAD, HEAD)), turning, np.arange(n))
    squares, products = before[0].astype(np.float64) ** 2, (before * turning.partners(before))[0].astype(np.float64)
    found = conditioning.squares_with_rope(squares, products, turning, n)
    np.testing.assert_allclose(found, (after**2).mean(axis=0), atol=2e-3 * squares.max())
    assert np.abs(found - squares).max() > 0.1


@pytest.mark.parametrize("nothing", ["variance", "query_energy"])
def test_no_statistics_no_scale(nothing, moments):
    zeros = np.zeros((N_HEAD, HEAD), np.float32)
    found = KeyTransform(dataclasses.replace(moments, mean=zeros, **{nothing: zeros}), ROPES[0], 256).scale
    np.testing.assert_array_equal(found, np.ones((N_HEAD, HEAD)))


def test_the_share_of_a_turning_vector():
    for angle in (1.0, 0.3, 1e-3, 1e-13, 0.0):
        for n in (1, 8, 100):
            sum_of_turns = np.exp(1j * angle * np.arange(n)).mean()
            middle = np.exp(1j * angle * (n - 1) / 2)
            assert common_share(np.float64(angle), n) == pytest.approx((sum_of_turns / middle).real, abs=1e-9)


@every_rope
@pytest.mark.parametrize("block", [1, 4, 8])
def test_the_mean_of_a_block_is_the_mean_of_its_positions(rope, block, moments):
    transform = KeyTransform(moments, rope, 256, block)
    positions = np.arange(block, 9 * block)
    exact = turned(np.broadcast_to(moments.mean, (len(positions), N_HEAD, HEAD)), rope, positions)
    averages = exact.reshape(-1, block, N_HEAD, HEAD).mean(axis=1).repeat(block, axis=0)
    np.testing.assert_allclose(transform.mean_at(positions), averages, atol=1e-4)


def test_position_0_has_a_mean_of_its_own(moments):
    mean = KeyTransform(moments, ROPES[0], 256).mean_at(np.array([0, 1, 2, 0]))
    np.testing.assert_array_equal(mean[[0, 3]], np.stack([moments.start] * 2))
    np.testing.assert_array_equal(mean[1], mean[2])
    assert np.abs(mean[1] - moments.start).max() > 1


def test_a_constant_mean_has_the_slow_pairs_alone(moments):
    n_ctx, rope = 256, ROPES[0]
    mean = KeyTransform(moments, rope, n_ctx, constant=True).mean_at(np.arange(300))
    assert (mean == mean[0]).all()
    slow = rope.angle * n_ctx <= 1
    assert 0 < slow.sum() < slow.size
    assert not mean[0][:, rope.pairs[:, ~slow]].any()
    everywhere = turned(np.broadcast_to(moments.mean, (n_ctx, N_HEAD, HEAD)), rope, np.arange(n_ctx)).mean(axis=0)
    np.testing.assert_allclose(mean[0][:, rope.pairs[:, slow]], everywhere[:, rope.pairs[:, slow]], atol=1e-4)


# ---- row filters ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Model(smollm2_path) as model:
        yield model


@pytest.fixture(scope="module")
def tokens(model) -> np.ndarray:
    return cut_tokens(model, default_text(), 48)


def test_a_filter_sees_the_rows_and_can_change_them(model, tokens):
    seen = []

    def double_values(batch):
        seen.append((batch.kind, batch.layer, batch.rows.shape, batch.positions.tolist(), batch.logit_scale))
        if batch.kind == Rows.V:
            batch.rows[:] *= 2

    with filtering(double_values) as check, model.context("f16", n_ctx=256) as context:
        changed = context.decode(tokens[:8], 0, logits="last").copy()
        check()
    with model.context("f16", n_ctx=256) as context:
        before = len(seen)
        plain = context.decode(tokens[:8], 0, logits="last").copy()
    assert len(seen) == before == 3 * 30  # the context that was made outside is not filtered
    for kind, n_head in ((Rows.K, 3), (Rows.V, 3), (Rows.Q, 9)):
        assert [s[1:] for s in seen if s[0] == kind] == [
            (il, (8, n_head, 64), list(range(8)), 0.125) for il in range(30)
        ]
    assert np.abs(changed - plain).max() > 1


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_failure_in_a_filter_is_raised_by_check(model, tokens, kind, capfd):
    calls = []

    def fail(batch):
        calls.append(batch.layer)
        raise kind("mine")

    with filtering(fail) as check, model.context("f16", n_ctx=256) as context:
        check()
        context.decode(tokens[:8], 0)
        with pytest.raises(kind, match="mine"):
            check()
    assert calls == [0]
    assert capfd.readouterr() == ("", "")


def test_the_rope_of_a_layer(model):
    with model.context("f16", n_ctx=256) as context:
        found = layer_rope(context.handle, 0)
        np.testing.assert_allclose(found.angle, 100000.0 ** (-np.arange(32) / 32), rtol=1e-6)
        np.testing.assert_array_equal(found.pairs, [np.arange(0, 64, 2), np.arange(1, 64, 2)])
        assert layer_rope(context.handle, 30) is layer_rope(context.handle, -1) is None


# ---- the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(model) -> Calibration:
    return calibration.calibrate(model, cut_tokens(model, default_text(), 128))


def with_layers(calibrated: Calibration, change) -> Calibration:
    return dataclasses.replace(calibrated, layers={il: change(layer) for il, layer in calibrated.layers.items()})


def open_context(model: Model, constants: Calibration | None, types: tuple[str, str] = ("tq4", "tq4")) -> Context:
    model.calibration = constants
    try:
        return model.context(*types, n_ctx=256)
    finally:
        model.calibration = None


def test_how_layers_are_conditioned(model, calibrated):
    every = dataclasses.replace(calibrated, every_type=True)
    for types, constants, expected in (
        (("tq4", "tq4"), calibrated, "positional"),
        (("tq3", "f16"), calibrated, "positional"),
        (("tq4", "tq4"), None, "plain"),
        (("f16", "tq4"), calibrated, "plain"),
        (("q8_0", "q8_0"), calibrated, "plain"),
        (("q8_0", "q8_0"), every, "constant"),
        (("f16", "f16"), every, "plain"),
    ):
        with open_context(model, constants, types) as context:
            assert {name: n for name, n in vars(context.layers).items() if n} == {expected: 30}, types


def stored_keys(context: Context, n_cells: int) -> np.ndarray:
    """What the first layer's cells hold, float64 (n_cells, 3, 64), from a saved state."""
    llama_cpp, cache_type = context._llama_cpp, context.type_k
    state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(context.handle, 0))()
    llama_cpp.llama_state_seq_get_data(context.handle, state, len(state), 0)
    row = 3 * 64 // cache_type.block_size * cache_type.type_size
    header = struct.pack("<iQ", cache_type.ggml_id, row)  # of a layer's keys: type, bytes of a cell
    first = bytes(state).index(header) + len(header)
    rows = np.frombuffer(state, np.uint8, n_cells * row, first).reshape(n_cells, row)
    return decode(rows, cache_type.name).reshape(n_cells, 3, 64)


@pytest.mark.parametrize(("cache_type", "limit"), [("tq4", 0.013), ("q8_0", 1e-4)])
def test_the_engine_stores_what_key_transform_says(model, calibrated, cache_type, limit):
    """Of q8_0 the mean is the constant one, and llama.cpp rotates what it stores. tq4 alone has 0.006, and slow
    pairs have the mean of their window."""
    tokens, found, is_ours = cut_tokens(model, default_text(), 64), {}, cache_type == "tq4"

    def keep(batch) -> None:
        if batch.kind == Rows.K and batch.layer == 0:
            found["rows"], found["positions"] = batch.rows.copy(), batch.positions.copy()

    every = dataclasses.replace(calibrated, every_type=True)
    with filtering(keep) as check, open_context(model, every, (cache_type, cache_type)) as context:
        context.decode(tokens, 0)
        check()
        rope = layer_rope(context.handle, 0)
        stored = stored_keys(context, len(tokens))
    transform = KeyTransform(calibrated.layers[0], rope, context.n_ctx, constant=not is_ours)
    assert np.abs(transform.scale[:, rope.pairs[0]] / transform.scale[:, rope.pairs[1]] - 1).max() > 0.3
    expected = transform.condition(found["rows"], found["positions"])
    assert nmse(stored, expected if is_ours else expected @ hadamard(64) / 8) < limit


def test_constants_of_other_heads_are_left_alone(model, calibrated):
    def regroup(layer: KeyMoments) -> KeyMoments:
        return KeyMoments(*(array.reshape(2, 96) for array in vars(layer).values()))

    with open_context(model, with_layers(calibrated, regroup)) as context:
        assert context.layers.plain == 30


@pytest.mark.parametrize("mean_block", [-1, 3, 16, 64])
def test_a_mean_block_that_the_engine_has_no_room_for(calibrated, mean_block):
    with (
        pytest.raises(EngineError, match=f"1, 2, 4 or 8 positions, not {mean_block}"),
        conditioned(calibrated.layers, mean_block=mean_block),
    ):
        pass


def test_quality(model, calibrated, monkeypatch):
    """Conditioning makes the error less; whatever the constants are, attention is the same but for rounding."""
    rng = np.random.default_rng(0)

    def wrong(layer: KeyMoments) -> KeyMoments:
        variance, energy = rng.uniform(0.1, 10, (2, *layer.mean.shape)).astype(np.float32)
        return KeyMoments(0.5 * layer.mean, -layer.start, variance, -layer.covariance, energy, layer.query_product)

    windows = evaluation.cut_windows(model.tokenize(default_text()[4000:]), 128, 2, model.bos)
    with ExitStack() as stack:
        contexts = {
            "f16": open_context(model, None, ("f16", "f16")),
            "off": open_context(model, None),
            "on": open_context(model, calibrated),
            "wrong": open_context(model, with_layers(calibrated, wrong)),
        }
        monkeypatch.setattr(engine, "conditioned", partial(conditioning.conditioned, mean_block=1))
        contexts["block of 1"] = open_context(model, calibrated)
        for context in contexts.values():
            stack.enter_context(context)
        scores = evaluation.score(contexts, "f16", windows)
    kld = {name: evaluation.summarise(of_context)["kld"] for name, of_context in scores.items()}
    assert 0 < kld["on"] < 0.7 * kld["off"], kld
    assert 0 < kld["block of 1"] < 0.7 * kld["off"], kld
    assert 0 < kld["wrong"] < 0.2, kld
