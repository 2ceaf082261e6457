"""The quantisers of `tq_ggml.reference` against theory, faulty twins of their own, the kernels and faiss."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from tq_ggml import codebooks, kernels
from tq_ggml import reference as ref
from tq_ggml.reference import METHODS, QJL, Haar, Hadamard, TurboQuantMSE, TwoStage, Uniform, polar, turbo_quant_prod

D = 128
SIZES = {"norm": 16, "residual norm": 16, "low": 16, "step": 16, "radius": 16, "positive": 1, "residual positive": 1}


def directions(n: int, d: int = D, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng([seed, 9]).standard_normal((n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


# ---- rotations -----------------------------------------------------------------------------------------------------

ROTATIONS = {
    "Haar": Haar(96),
    "Haar of 1": Haar(1),
    "WHT": Hadamard(64),
    "WHT of an odd size": Hadamard(96),
    "WHT in blocks": Hadamard(128, 32),
    "WHT without signs": Hadamard(32, signs=False),
}
every_rotation = pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS.keys())


@every_rotation
def test_a_rotation_is_orthonormal_and_inverse_is_its_inverse(rotation):
    d = rotation.matrix.shape[0] if isinstance(rotation, Haar) else rotation.signs.size
    turned = rotation.forward(np.eye(d))
    np.testing.assert_allclose(turned @ turned.T, np.eye(d), atol=1e-12)
    x = np.random.default_rng(0).standard_normal((2, 3, d))
    np.testing.assert_allclose(rotation.inverse(rotation.forward(x)), x, atol=1e-12)


def test_the_wht_of_blocks_is_the_codecs():
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    np.testing.assert_allclose(Hadamard(96, 32).forward(x), ref.rotate(x), atol=1e-5)
    np.testing.assert_array_equal(codebooks.golden_signs(32), ref.SIGNS)
    assert abs(codebooks.golden_signs(4096).mean()) < 0.02


@pytest.mark.parametrize("block", [0, 3, 64])
def test_a_block_that_does_not_divide(block):
    with pytest.raises(ValueError, match=f"block={block}: a power of two that divides d=96"):
        Hadamard(96, block)


def first_entries(n: int = 400, d: int = 8) -> np.ndarray:
    return np.array([Haar(d, seed).matrix[0, 0] for seed in range(n)])


def test_haar_has_no_preferred_sign(monkeypatch):
    """An entry has the mean 0 and the variance 1/d: 5 standard errors of 400. LAPACK's own first column is negative."""
    limit = 5 / math.sqrt(400 * 8)
    assert abs(first_entries().mean()) < limit
    monkeypatch.setattr(np, "sign", np.ones_like)
    assert abs(first_entries().mean()) > 2 * limit


# ---- what theory says ----------------------------------------------------------------------------------------------


def check_distortion(method: ref.Method, expected: float, tolerance: float = 0.02) -> None:
    """The relative squared error of 4000 vectors, each of its own length; its standard error is below 0.4 %."""
    x = directions(4000, method.d) * np.random.default_rng(1).uniform(0.5, 40, (4000, 1))
    error = np.sum((method.decompress(method.compress(x)) - x) ** 2, axis=1) / np.sum(x * x, axis=1)
    assert error.mean() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("d", [32, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_turbo_quant_mse_has_the_codebooks_distortion(bits, d):
    check_distortion(TurboQuantMSE(d, bits), codebooks.distortion(codebooks.lloyd_max(bits, d), d))


def pairs(method: ref.Method, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimates and inner products of n independent pairs: unit vectors x, and queries near enough to have one."""
    x, noise = directions(n, method.d, seed), directions(n, method.d, seed + 1000)
    q = x + noise
    stored = method.compress(x)
    one = [method.inner_product(q[i : i + 1], {k: v[i : i + 1] for k, v in stored.items()})[0, 0] for i in range(n)]
    return np.array(one), np.sum(q * x, axis=1)


def slopes(make, seeds: int = 24, n: int = 150) -> np.ndarray:
    """What the inner product is multiplied with, of methods with several seeds: E over S is what is unbiased."""
    found = (pairs(make(seed), n, seed) for seed in range(seeds))
    return np.array([np.sum(estimate * truth) / np.sum(truth * truth) for estimate, truth in found])


def check_slope(make, expected: float) -> None:
    """Within 5 standard errors, which are small enough to tell the biases apart."""
    found = slopes(make)
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert error < 0.008
    assert abs(found.mean() - expected) < 5 * error


def make_prod(bits):
    return lambda seed: turbo_quant_prod(D, bits, seed=seed)


UNBIASED = {
    **{f"prod {bits}": make_prod(bits) for bits in (1, 2, 3, 4)},
    "QJL": lambda seed: QJL(D, seed=seed),
    "QJL of more projections": lambda seed: QJL(D, 3 * D, seed=seed),
    "PolarQuant and QJL": lambda seed: TwoStage(polar.PolarSequential(D, 3, seed=seed), QJL(D, seed=seed)),
}


@pytest.mark.parametrize("make", UNBIASED.values(), ids=UNBIASED.keys())
def test_qjl_and_two_stages_are_unbiased(make):
    check_slope(make, 1.0)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_bias_of_the_mse_quantiser(bits):
    """E[y ŷ] = E[ŷ²] = 1 - D at the levels of Lloyd and Max: 36, 12, 3.4 and 0.9 % too small."""
    check_slope(
        lambda seed: TurboQuantMSE(D, bits, seed=seed), 1 - codebooks.distortion(codebooks.lloyd_max(bits, D), D)
    )


def prod_error(make, seeds: int = 8) -> float:
    """Mean squared error of ⟨q, x⟩ for independent unit vectors, over several S."""
    x, q = directions(600), directions(600, seed=1)
    errors = []
    for seed in range(seeds):
        method = make(seed)
        errors.append(np.mean((method.inner_product(q, method.compress(x)) - q @ x.T) ** 2))
    return float(np.mean(errors))


def check_prod_distortion(make, bits: int) -> None:
    """π/(2d)·D_mse(b-1), less the 1/d-th that the square of the estimate's mean takes off."""
    rest = codebooks.distortion(codebooks.lloyd_max(bits - 1, D), D) if bits > 1 else 1.0
    assert prod_error(make) == pytest.approx((math.pi / 2 - 1 / D) / D * rest, rel=0.03)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_prod_has_the_distortion_of_the_theorem(bits):
    check_prod_distortion(make_prod(bits), bits)


# ---- and what it does not say of faulty ones -----------------------------------------------------------------------


def with_factor(change: float):
    def make(seed):
        method = turbo_quant_prod(D, 3, seed=seed)
        method.qjl.factor *= change
        return method

    return make


class LostNorm(QJL):
    def compress(self, x):
        stored = super().compress(x)
        return stored | {"norm": np.ones_like(stored["norm"])}


FAULTS = {
    "√(π/2) left out": with_factor(math.sqrt(2 / math.pi)),
    "√m for m": with_factor(math.sqrt(D)),
    "the residual's norm left out": lambda seed: TwoStage(TurboQuantMSE(D, 2, seed=seed), LostNorm(D, seed=seed)),
}


@pytest.mark.parametrize("make", FAULTS.values(), ids=FAULTS.keys())
def test_a_changed_factor_is_seen(make):
    with pytest.raises(AssertionError):
        check_prod_distortion(make, 3)
    if make is not FAULTS["√(π/2) left out"]:  # 3.4 % of 12 %
        with pytest.raises(AssertionError):
            check_slope(make, 1.0)


def test_a_norm_that_is_not_stored_is_seen():
    class Lost(TurboQuantMSE):
        def compress(self, x):
            return super().compress(x) | {"norm": np.ones(len(x), np.float16)}

    with pytest.raises(AssertionError):
        check_distortion(Lost(D, 3), codebooks.distortion(codebooks.lloyd_max(3, D), D))


def test_levels_of_another_spread_are_seen():
    """A public fork ships its levels for a σ that is 0.72 of the right one."""
    levels = 0.72 * codebooks.lloyd_max(3, D)
    with pytest.raises(AssertionError):
        check_distortion(TurboQuantMSE(D, 3, levels=levels), codebooks.distortion(codebooks.lloyd_max(3, D), D))


# ---- PolarQuant ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "power", "twice"), [(0, math.pi, 30, False), (0, math.pi / 2, 7, True), (0, math.pi / 2, 1, True)]
)
def test_angle_levels_are_the_means_of_their_cells(low, high, power, twice):
    """Against scipy's quadrature."""
    levels = polar.angle_levels(3, low, high, power, twice)
    edges = np.concatenate([[low], (levels[1:] + levels[:-1]) / 2, [high]])
    for a, b, level in zip(edges, edges[1:], levels, strict=False):
        mass, moment = (
            integrate.quad(lambda t, n=n: t**n * math.sin((1 + twice) * t) ** power, a, b)[0] for n in (0, 1)
        )
        assert level == pytest.approx(moment / mass, abs=1e-4)


def test_angles_have_the_densities_that_their_levels_are_for():
    """By the mean square of the cosine, 1/(n + 2) under sin^n; 5 standard errors of 20000 vectors."""
    method = polar.PolarSequential(16, 8)
    codes = method.compress(directions(20000, 16))["code"]
    for k, levels in enumerate(method.levels):
        cosine = np.cos(levels[codes[:, k]]) ** 2
        assert abs(cosine.mean() - 1 / (16 - k)) < 5 * cosine.std() / math.sqrt(20000) + 1e-3


@pytest.mark.parametrize("make", [polar.PolarSequential, functools.partial(polar.PolarSequential, codebook="lloyd")])
def test_sequential_angles_lose_little_at_eight_bits(make):
    x = directions(500, 32)
    method = make(32, 8)
    assert ref.nmse(x, method.decompress(method.compress(x))) < 5e-3


def test_the_last_angle_takes_the_whole_circle():
    """Half a circle, as the tutorial has it, loses the sign of the last coordinate."""
    x = directions(2000, 8)
    right, wrong = polar.PolarSequential(8, 6), polar.PolarSequential(8, 6)
    wrong.levels[-1] = polar.uniform_levels(6, 0, math.pi)
    errors = [ref.nmse(x, m.decompress(m.compress(x))) for m in (right, wrong)]
    # Of half of the vectors y_7 and with it 2/8 of the energy is on the wrong side.
    assert errors[0] < 0.01 and errors[1] > 0.15


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.04), (3, 0.011), (6, 3e-4)])
def test_the_recursive_form(bits, limit):
    """The paper's own setting is bits=2: 4, 2, 2, 2 bits for the angles of a block of 16."""
    method = polar.PolarRecursive(D, bits)
    x = directions(1000)
    assert 0 < ref.nmse(x, method.decompress(method.compress(x))) < limit
    assert polar.PolarRecursive(D, 2).bits_per_value == (8 * 4 + 4 * 2 + 2 * 2 + 2 + 16) / 16 == 3.875


# ---- uniform quantisers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["channel", "token"])
def test_a_uniform_quantiser_is_off_by_half_a_step(per):
    x = np.random.default_rng(0).standard_normal((64, 96)) + 5 * np.arange(96)
    method = Uniform(96, 4, per=per)
    stored = method.compress(x)
    error = np.abs(method.decompress(stored) - x)
    assert error.max() < 0.51 * stored["step"].max() + 0.5  # and what fp16 makes of the least value, up to 480
    other = Uniform(96, 4, per="token" if per == "channel" else "channel")
    assert (ref.nmse(x, method.decompress(stored)) < ref.nmse(x, other.decompress(other.compress(x)))) == (
        per == "channel"
    )


def test_the_best_uniform_levels():
    """Max's table of 1960 for the Gaussian: D of 2, 3 and 4 bits; never below Lloyd-Max."""
    for bits, known in ((1, 0.3634), (2, 0.1188), (3, 0.03744), (4, 0.01154)):
        levels = codebooks.uniform(bits)
        assert codebooks.distortion(levels) == pytest.approx(known, rel=2e-3)
        np.testing.assert_allclose(np.diff(levels), 2 * levels[0])
        for d in (32, None):
            best = codebooks.distortion(codebooks.lloyd_max(bits, d), d)
            assert codebooks.distortion(codebooks.uniform(bits, d), d) >= best - 1e-12


# ---- every method --------------------------------------------------------------------------------------------------


def make(name: str, d: int, bits: int) -> ref.Method:
    return METHODS[name](d, bits)


every_method = pytest.mark.parametrize("name", METHODS)


@every_method
@given(
    d=st.sampled_from([32, 64, 96, 160]),
    groups=st.integers(0, 2),
    bits=st.sampled_from([3, 4]),
    size=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e30]),
    kind=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 9),
)
@settings(max_examples=12, deadline=None)
def test_shapes_and_finite_values(name, d, groups, bits, size, kind, seed):
    method = make(name, d, bits)
    n = groups * method.group
    x = (size * np.random.default_rng(seed).standard_normal((n, d))).astype(kind)
    stored = method.compress(x)
    back, products = method.decompress(stored), method.inner_product(np.ones((3, d)), stored)
    assert back.shape == (n, d) and back.dtype == np.float64 and products.shape == (3, n)
    assert np.isfinite(back).all() and np.isfinite(products).all()
    np.testing.assert_allclose(
        products, np.ones((3, d)) @ back.T, rtol=1e-6, atol=1e-6 * max(np.abs(back).max(initial=0), 1)
    )
    if size == 0 and n:
        assert np.abs(back).max() == 0
    if size == 1 and n and name not in ("PolarQuant, sequential", "PolarQuant + QJL", "QJL", "TurboQuant-prod"):
        assert ref.nmse(x, back) < 0.25


@every_method
def test_every_stored_bit_is_counted(name):
    method = make(name, 64, 4)
    x = np.random.default_rng(0).standard_normal((64, 64))
    total = 0
    for key, array in method.compress(x).items():
        if key == "data":
            size = 8
        elif key in SIZES:
            size = SIZES[key]
            assert array.dtype == (bool if size == 1 else np.float16)
        else:  # codes, of as many bits as the largest needs
            first = getattr(method, "first", method)
            size = first.bits + 2 * (key == "angle 1")
            assert array.dtype == np.uint8 and 2 ** (size - 1) <= array.max() < 2**size
        total += array.size * size
    assert method.bits_per_value == pytest.approx(total / x.size)


@every_method
def test_wrong_shapes_are_named(name):
    method = make(name, 64, 3)
    for x in (np.zeros((2, 63)), np.zeros(64), np.zeros((1, 2, 64))):
        with pytest.raises(ValueError, match=r"expected vectors of shape \(n, 64\)"):
            method.compress(x)
        with pytest.raises(ValueError, match=r"expected vectors of shape \(n, 64\)"):
            method.inner_product(x, method.compress(np.zeros((method.group, 64))))
    if method.group > 1:
        with pytest.raises(ValueError, match="33 vectors are no whole number of groups of 32"):
            method.compress(np.zeros((33, 64)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: turbo_quant_prod(64, 0), "bits=0: one bit is QJL's"),
        (lambda: TurboQuantMSE(64, 9), "bits=9"),
        (lambda: Uniform(64, 4, per="row"), "per='row'"),
        (lambda: Uniform(64, 4, group=48), "group=48"),
        (lambda: polar.PolarSequential(1, 4), "d=1"),
        (lambda: polar.PolarRecursive(40, 4), "block=16: a power of two"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---- outside -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_type", ["tq3", "tq4"])
def test_blocks_are_the_kernels_bytes(cache_type):
    x = np.random.default_rng(0).standard_normal((20, 96)).astype(np.float32)
    method = ref.BlockCodec(96, cache_type)
    stored = method.compress(x)
    np.testing.assert_array_equal(stored["data"], kernels.quantize(x, cache_type))
    np.testing.assert_array_equal(method.decompress(stored), kernels.dequantize(stored["data"], cache_type))
    codes = ref.unpack(stored["data"], cache_type)
    assert codes.scale.shape == (60,) and codes.index.shape == codes.negative.shape == (60, 32)
    np.testing.assert_array_equal(
        ref.unrotate(ref.rotated_values(codes, cache_type)).reshape(x.shape), method.decompress(stored)
    )


@pytest.mark.parametrize("bits", [3, 4])
def test_faiss_loses_as_much(bits):
    """faiss quantises the coordinates of unit vectors with the same levels, and neither rotates nor keeps a norm."""
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed: no second opinion on TurboQuant-MSE")
    x = directions(3000).astype(np.float32)
    quantizer = faiss.ScalarQuantizer(D, getattr(faiss.ScalarQuantizer, f"QT_{bits}bit_tqmse"))
    quantizer.train(x)
    theirs = ref.nmse(x, quantizer.decode(quantizer.compute_codes(x)))
    method = TurboQuantMSE(D, bits, levels=codebooks.lloyd_max(bits))
    assert theirs == pytest.approx(ref.nmse(x, method.decompress(method.compress(x))), rel=0.02)
