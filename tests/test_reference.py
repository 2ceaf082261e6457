"""The numpy block codec: quality, layout, invariances, and inputs that are not numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tq_ggml import reference as ref
from tq_ggml.codebooks import block_table, sign_mask

SIZES = {"tq3": 14, "tq4": 18}
BITS = {"tq3": 3, "tq4": 4}
TYPES = pytest.mark.parametrize("name", SIZES)
# A rotated block with all its energy in one element is the worst: 31 zeros are coded as the smallest level.
WORST_NMSE = {"tq3": 0.30, "tq4": 0.07}


def gaussian(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def blocks(**floats):
    return arrays(np.float32, st.tuples(st.integers(1, 3), st.just(64)), elements=st.floats(width=32, **floats))


def round_trip(x, name, scale="search"):
    return ref.dequantize(ref.quantize(x, name, scale), name)


def hadamard_matrix():
    h = np.ones((1, 1))
    while len(h) < 32:
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    return h / np.sqrt(32)


# ---- quality ----


@pytest.mark.parametrize("scale", [1.0, 300.0, 1e-3])
@pytest.mark.parametrize(("name", "limit"), [("tq3", 0.0262), ("tq4", 0.0060)])
def test_nmse_on_gaussian_data(name, limit, scale):
    x = gaussian(20_000, 32, scale=scale)
    assert 4.0 ** -(8 * SIZES[name] / 32) < ref.nmse(x, round_trip(x, name)) <= limit


@pytest.mark.parametrize(("name", "known"), [("tq3", 0.0326), ("tq4", 0.0089)])
def test_nmse_of_norm_as_scale(name, known):
    x = gaussian(20_000, 32)
    assert ref.nmse(x, round_trip(x, name, "norm")) == pytest.approx(known, rel=0.03)


@TYPES
def test_worst_block(name):
    spike = np.zeros((32, 32), np.float32)
    np.fill_diagonal(spike, 1.0)
    x = ref.unrotate(spike)
    levels = block_table(BITS[name]).levels.astype(float)
    energy = levels[-1] ** 2 + 31 * levels[0] ** 2
    assert ref.nmse(x, round_trip(x, name)) == pytest.approx(31 * levels[0] ** 2 / energy, rel=0.01)


@TYPES
@given(x=blocks(min_value=-1000, max_value=1000))
def test_no_block_is_worse_than_the_worst(name, x):
    x = x.reshape(-1, 32)
    x = x[np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1)) > 1e-2]  # below, the fp16 scale loses digits
    for row, decoded in zip(x, round_trip(x, name), strict=True):
        assert ref.nmse(row, decoded) < WORST_NMSE[name]


@TYPES
def test_codes_are_nearly_the_nearest_levels(name):
    """They are the nearest ones for the scale before the last correction, which is small."""
    x = gaussian(2000, 32, seed=1)
    y = ref.rotate(x)
    packed = ref.quantize(x, name)
    levels = block_table(BITS[name]).levels.astype(np.float64)
    unit = np.ascontiguousarray(packed[:, :2]).view("<f2").astype(np.float64) / 32
    grid = unit * np.concatenate((-levels[::-1], levels))
    best = np.abs(y[:, :, None] - grid[:, None, :]).min(axis=2)
    chosen = np.abs(y - ref.rotate(ref.dequantize(packed, name)))
    assert np.mean(chosen <= best + 1e-5) > 0.98
    assert np.sum(chosen**2) < 1.006 * np.sum(best**2)


@TYPES
def test_scale_is_the_least_squares_one(name):
    y = ref.rotate(gaussian(2000, 32, seed=2)).astype(np.float64)
    decoded = ref.rotate(round_trip(ref.unrotate(y.astype(np.float32)), name)).astype(np.float64)
    gain = np.sum(y * decoded, axis=1) / np.sum(decoded * decoded, axis=1)
    assert gain == pytest.approx(1, abs=5e-3)  # magnitudes are steps of a byte; the scale is fp16
    assert np.mean(gain) == pytest.approx(1, abs=1e-4)


@TYPES
def test_no_scale_is_much_better(name):
    """Against 200 scales, each with its nearest codes."""
    x = gaussian(2000, 32, seed=4)
    y = np.abs(ref.rotate(x)).astype(np.float64)
    levels = block_table(BITS[name]).levels.astype(np.float64)
    least = np.full(len(y), np.inf)
    for scale in np.linspace(0.7, 1.5, 200):
        grid = scale * y.max(axis=1)[:, None, None] / levels[-1] * levels
        least = np.minimum(least, np.sum(np.abs(y[:, :, None] - grid).min(axis=2) ** 2, axis=1))
    assert ref.nmse(x, round_trip(x, name)) < 1.03 * np.sum(least) / np.sum(y * y)


# ---- rotation ----


def test_rotate_is_the_signed_hadamard_matrix():
    signs = np.array([-1.0 if sign_mask() >> i & 1 else 1.0 for i in range(32)])
    x = gaussian(50, 32)
    assert ref.rotate(x) == pytest.approx((x * signs) @ hadamard_matrix(), abs=2e-6)


def test_rotate_is_orthonormal():
    q = ref.rotate(np.eye(32, dtype=np.float32)).astype(np.float64)
    assert q @ q.T == pytest.approx(np.eye(32), abs=1e-6)


def test_rotate_keeps_inner_products():
    a, b = gaussian(4, 96), gaussian(4, 96, seed=1)
    assert np.sum(ref.rotate(a) * ref.rotate(b), -1) == pytest.approx(np.sum(a * b, -1), abs=1e-4)


@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96)])
def test_unrotate_inverts(shape):
    x = gaussian(*shape)
    assert ref.rotate(x).shape == shape
    assert ref.unrotate(ref.rotate(x)) == pytest.approx(x, abs=2e-6)


# ---- layout, by hand-made blocks ----


def test_tq4_layout():
    """Scale 32 makes the rotated values the integer levels themselves."""
    codes = [(5 * i + 3) % 16 for i in range(32)]
    packed = bytes.fromhex("0050") + bytes(codes[j] | codes[j + 16] << 4 for j in range(16))
    levels = block_table(4).levels.tolist()
    wanted = [-levels[c - 8] if c >= 8 else levels[c] for c in codes]
    assert_decodes_to(packed, "tq4", wanted)


def test_tq3_layout():
    index = [(3 * i + i // 4) % 4 for i in range(32)]
    signs = bytes((0x80, 0x01, 0xF0, 0x0D))
    low = [index[j] | index[j + 8] << 2 | index[j + 16] << 4 | index[j + 24] << 6 for j in range(8)]
    packed = bytes.fromhex("0050") + bytes(low) + signs
    levels = block_table(3).levels.tolist()
    wanted = [(-1 if signs[i % 4] >> i // 4 & 1 else 1) * levels[index[i]] for i in range(32)]
    assert_decodes_to(packed, "tq3", wanted)


def assert_decodes_to(packed, name, rotated):
    data = np.frombuffer(packed, np.uint8)
    assert len(data) == SIZES[name]
    assert ref.rotate(ref.dequantize(data, name)) == pytest.approx(np.array(rotated), abs=1e-3)


@TYPES
def test_encoder_writes_that_layout(name):
    """Decoded data, well spread over the levels, is encoded to the same codes again."""
    packed = ref.quantize(gaussian(200, 32, seed=3), name)
    again = ref.quantize(ref.dequantize(packed, name), name)
    same = (packed[:, 2:] == again[:, 2:]).all(axis=1)
    assert same.mean() > 0.9


@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96), (0, 32), (3, 0)])
@TYPES
def test_shapes(name, shape):
    x = gaussian(*shape)
    packed = ref.quantize(x, name)
    assert packed.dtype == np.uint8
    assert packed.shape == (*shape[:-1], shape[-1] // 32 * SIZES[name])
    decoded = ref.dequantize(packed, name)
    assert decoded.dtype == np.float32 and decoded.shape == shape


@TYPES
def test_blocks_are_independent(name):
    x = gaussian(4, 96)
    whole = ref.quantize(x, name).reshape(-1, SIZES[name])
    for row, packed in zip(x.reshape(-1, 32), whole, strict=True):
        assert np.array_equal(ref.quantize(row, name), packed)


def test_strided_input_and_aliases():
    x = gaussian(8, 128)
    assert np.array_equal(ref.quantize(x[::2, 32:96], "turbo4"), ref.quantize(x[::2, 32:96].copy(), "tq4"))
    assert np.array_equal(ref.quantize(x, "tbq3"), ref.quantize(x, "TQ3"))


# ---- invariances ----


@TYPES
@given(x=blocks(min_value=-8, max_value=8), exponent=st.integers(-3, 8))
def test_a_power_of_two_moves_only_the_scale(name, x, exponent):
    x = x.reshape(-1, 32)
    x = x[np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1)) > 0.1]  # fp16 scales stay normal
    packed, moved = ref.quantize(x, name), ref.quantize(x * np.float32(2.0**exponent), name)
    assert np.array_equal(packed[:, 2:], moved[:, 2:])
    assert np.array_equal(ref.dequantize(packed, name) * np.float32(2.0**exponent), ref.dequantize(moved, name))


@TYPES
def test_negation_flips_only_the_signs(name):
    x = gaussian(500, 32)
    packed, negated = ref.quantize(x, name), ref.quantize(-x, name)
    assert np.array_equal(packed[:, :2], negated[:, :2])
    y, z = ref.rotate(ref.dequantize(packed, name)), ref.rotate(ref.dequantize(negated, name))
    assert np.abs(y) == pytest.approx(np.abs(z), abs=1e-5)
    assert np.mean(np.sign(y) == -np.sign(z)) > 0.999  # values that round to 0 count as positive both times


# ---- inputs that are no ordinary numbers ----


@TYPES
@given(x=blocks())
def test_any_float32_decodes_to_finite_values(name, x):
    for scale in ("search", "norm"):
        packed = ref.quantize(x, name, scale)
        assert np.isfinite(packed.reshape(-1, SIZES[name])[:, :2].copy().view("<f2")).all()
        assert np.isfinite(ref.dequantize(packed, name)).all()


@TYPES
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-30, -1e-9, 3e-9, np.nan])
def test_nothing_to_store_gives_zero_bytes(name, value):
    packed = ref.quantize(np.full((2, 32), value, np.float32), name)
    assert not packed.any()
    assert not ref.dequantize(packed, name).any()


@TYPES
def test_an_underflowing_scale_gives_zero_bytes(name):
    """Above the smallest sum of squares, but the fp16 scale rounds to 0."""
    x = ref.unrotate(np.full(32, 2e-8, np.float32))
    assert not ref.quantize(x, name).any()


@TYPES
def test_subnormal_scales_keep_the_size(name):
    x = gaussian(500, 32, scale=1e-6)
    assert ref.nmse(x, round_trip(x, name)) < 0.06


@TYPES
def test_nan_counts_as_zero(name):
    x = gaussian(3, 32)
    x[:, ::5] = 0
    holed = x.copy()
    holed[:, ::5] = np.nan
    assert np.array_equal(ref.quantize(holed, name), ref.quantize(x, name))


@TYPES
def test_infinity_counts_as_65504(name):
    x = gaussian(3, 32)
    x[:, 3], x[:, 8] = np.inf, -np.inf
    clamped = np.clip(x, -65504, 65504)
    assert np.array_equal(ref.quantize(x, name), ref.quantize(clamped, name))
    assert np.array_equal(ref.quantize(clamped, name), ref.quantize(np.where(x > 65504, np.float32(3e38), x), name))


@TYPES
def test_a_scale_above_fp16_is_capped(name):
    """65504 everywhere, with the signs of the rotation, puts 370,540 in one rotated element."""
    x = (np.float32(65504) * ref.SIGNS)[None]
    packed = ref.quantize(x, name)
    assert packed[0, :2].tobytes().hex() == "ff7b"
    decoded = ref.dequantize(packed, name)
    assert np.isfinite(decoded).all() and ref.nmse(x, decoded) < 0.35


@TYPES
@given(data=st.data())
def test_any_bytes_with_a_finite_scale_decode(name, data):
    body = data.draw(arrays(np.uint8, (3, SIZES[name])))
    body[:, 1] &= 0xBF  # not the exponent of infinity and NaN
    assert np.isfinite(ref.dequantize(body, name)).all()


# ---- mistakes ----


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (np.zeros(32), TypeError, "expected a float32 array, got float64"),
        (np.zeros(32, ">f4"), TypeError, "got >f4"),
        ([0.0] * 32, TypeError, "got list"),
        (np.zeros(33, np.float32), ValueError, r"shape \(33,\) must be a multiple of 32"),
        (np.array(1.0, np.float32), ValueError, r"shape \(\) must be a multiple of 32"),
    ],
)
def test_bad_input_is_named(x, error, words):
    for function in (lambda: ref.quantize(x, "tq4"), lambda: ref.rotate(x), lambda: ref.unrotate(x)):
        with pytest.raises(error, match=words):
            function()


def test_bad_bytes_are_named():
    with pytest.raises(TypeError, match="expected a uint8 array, got int8"):
        ref.dequantize(np.zeros(18, np.int8), "tq4")
    with pytest.raises(ValueError, match=r"shape \(18,\) must be a multiple of 14, the bytes of a tq3 block"):
        ref.dequantize(np.zeros(18, np.uint8), "tq3")


def test_bad_names_are_named():
    x = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="unknown cache type 'tq5'"):
        ref.quantize(x, "tq5")
    with pytest.raises(ValueError, match="knows tq3 and tq4, not q8_0"):
        ref.quantize(x, "q8_0")
    with pytest.raises(ValueError, match="scale='best'"):
        ref.quantize(x, "tq4", "best")


def test_nmse_mistakes():
    assert ref.nmse(np.array([3.0, 4.0]), np.array([3.0, 3.0])) == pytest.approx(1 / 25)
    with pytest.raises(ValueError, match="differ"):
        ref.nmse(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="undefined"):
        ref.nmse(np.zeros(2), np.zeros(2))
