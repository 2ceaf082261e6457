"""The C codec: every SIMD level against the numpy reference, byte for byte, and the Python boundary."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tq_ggml
from tq_ggml import kernels, reference

TYPES = ("tq3", "tq4")
LEVELS = {"x86_64": ("avx2", "avx512bw", "avx512"), "aarch64": ("neon", "dotprod"), "arm64": ("neon", "dotprod")}
MACHINE_FLAGS = {"avx2": "avx2", "avx512bw": "avx512bw", "avx512": "avx512_vnni", "neon": "asimd", "dotprod": "asimddp"}


@pytest.fixture(params=("scalar", *LEVELS.get(platform.machine(), ())))
def level(request):
    """Each level of this architecture, active during the test; what this CPU cannot run skips with its name."""
    before = kernels.simd_level()
    if request.param not in kernels.simd_levels():
        pytest.skip(f"this CPU cannot run {request.param}; it has {', '.join(kernels.simd_levels())}")
    kernels.set_simd_level(request.param)
    assert kernels.simd_level() == request.param
    yield request.param
    kernels.set_simd_level(before)


def hard_rows() -> np.ndarray:
    """Rows of 128 that take every path of the encoder: usual data, outliers, and what is not a number."""
    rng = np.random.default_rng(7)
    gaussian = rng.standard_normal((64, 128))
    with np.errstate(over="ignore"):
        rows = [
            gaussian,
            gaussian * np.exp(rng.normal(0, 6, (64, 128))),
            gaussian * (10.0 ** rng.uniform(-12, 9, (64, 1))),
            rng.integers(-2, 3, (32, 128)),
            np.eye(128)[:32] * 3.7,
            np.full((1, 128), 1.0),
            np.full((1, 128), 3e38) * rng.choice([-1, 1], 128),
            np.zeros((1, 128)),
            np.full((1, 128), 1e-40),
        ]
    x = np.concatenate(rows).astype(np.float32)
    odd = rng.standard_normal((8, 128)).astype(np.float32)
    odd[:, ::7] = np.resize(np.array([np.nan, np.inf, -np.inf, 1e-42, 65504, -65505], np.float32), (8, 19))
    return np.concatenate([x, odd])


@pytest.mark.parametrize("cache_type", TYPES)
def test_every_level_gives_the_references_bytes(level, cache_type):
    x = hard_rows()
    expected = reference.quantize(x, cache_type)
    np.testing.assert_array_equal(kernels.quantize(x, cache_type), expected)
    decoded = kernels.dequantize(expected, cache_type)
    np.testing.assert_array_equal(decoded.view(np.uint32), reference.dequantize(expected, cache_type).view(np.uint32))
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("cache_type", TYPES)
def test_every_level_decodes_any_code(level, cache_type):
    size = kernels.type_info(cache_type).block_bytes
    blocks = np.random.default_rng(3).integers(0, 256, (512, size), dtype=np.uint8)
    blocks[0], blocks[1] = 0x00, 0xFF
    scales = np.random.default_rng(4).uniform(-8, 8, 512).astype(np.float16)
    blocks[2:, :2] = scales[2:, None].view(np.uint8)
    got, want = kernels.dequantize(blocks, cache_type), reference.dequantize(blocks, cache_type)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~np.isnan(want)], want[~np.isnan(want)])
    assert not got[0].any(), "a zero-filled buffer must decode to zeros"


@pytest.mark.parametrize("n", [32, 64, 96, 128, 160, 256, 576])
@pytest.mark.parametrize("cache_type", TYPES)
def test_dot_is_the_dot_product_of_the_decoded_row(level, cache_type, n):
    rng = np.random.default_rng(n)
    rows = kernels.quantize(rng.standard_normal((50, n)).astype(np.float32), cache_type)
    query = rng.standard_normal(n).astype(np.float32)
    exact = kernels.dequantize(rows, cache_type).astype(np.float64) @ query
    # int8 queries: an error of 127 steps to the largest of 32 values, 3e-5 of the energy
    assert np.mean((kernels.dot(rows, query, cache_type) - exact) ** 2) < 1e-4 * np.mean(exact**2)


@pytest.mark.parametrize(("cache_type", "limit"), [("tq4", 0.0060), ("tq3", 0.0262)])
def test_error_on_gaussian_data(level, cache_type, limit):
    x = np.random.default_rng(0).standard_normal((4000, 128)).astype(np.float32)
    error = kernels.dequantize(kernels.quantize(x, cache_type), cache_type) - x
    assert (error**2).sum() / (x**2).sum() <= limit


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (3, 64), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
def test_any_floats_give_the_references_bytes_and_finite_values(x):
    for cache_type in TYPES:
        data = kernels.quantize(x, cache_type)
        np.testing.assert_array_equal(data, reference.quantize(x, cache_type))
        assert np.isfinite(kernels.dequantize(data, cache_type)).all()


def test_what_is_not_a_number_is_encoded_as_documented():
    x = np.random.default_rng(1).standard_normal((1, 32)).astype(np.float32)
    for bad, good in ((np.nan, 0.0), (np.inf, 65504.0), (-np.inf, -65504.0), (1e30, 65504.0)):
        with_bad, with_good = x.copy(), x.copy()
        with_bad[0, 5], with_good[0, 5] = bad, good
        np.testing.assert_array_equal(kernels.quantize(with_bad, "tq4"), kernels.quantize(with_good, "tq4"))


def test_no_byte_outside_the_row_is_touched(level):
    for cache_type in TYPES:
        size = kernels.type_info(cache_type).block_bytes
        x = np.random.default_rng(5).standard_normal(96).astype(np.float32)
        guarded = np.full(size * 3 + 64, 0xAB, np.uint8)
        ffi, lib = kernels.ffi, kernels.lib
        target = ffi.from_buffer(guarded)[0 : guarded.nbytes]
        error = lib.tq_quantize(TYPES.index(cache_type), ffi.from_buffer("float[]", x), 96, target, size * 3)
        assert error == ffi.NULL
        np.testing.assert_array_equal(guarded[: size * 3], reference.quantize(x, cache_type))
        assert (guarded[size * 3 :] == 0xAB).all()


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ([1.0] * 32, TypeError, "numpy array"),
        (np.zeros(32), TypeError, "float64"),
        (np.zeros(33, np.float32), ValueError, "33, not a multiple of 32"),
        (np.zeros((32, 64), np.float32)[:, ::2], ValueError, "C-contiguous"),
        (np.float32(1), TypeError, "numpy array"),
        (np.zeros((), np.float32), ValueError, "dimension"),
        (np.zeros(32, np.dtype(np.float32).newbyteorder()), TypeError, "[<>]f4; convert"),
        (np.zeros(129, np.uint8)[1:].view(np.float32), ValueError, "aligned to its 4 bytes"),
    ],
)
def test_bad_values_are_refused_with_a_reason(x, error, words):
    with pytest.raises(error, match=words):
        kernels.quantize(x, "tq4")


@pytest.mark.parametrize("name", ["q4_0", "tq5", "", 2, 45, None])
def test_types_without_a_codec_are_refused(name):
    with pytest.raises(ValueError, match="tq3"):
        kernels.quantize(np.zeros(32, np.float32), name)


def test_bad_blocks_and_queries_are_refused_with_a_reason():
    with pytest.raises(ValueError, match="19 bytes, not a multiple of tq4's 18"):
        kernels.dequantize(np.zeros(19, np.uint8), "tq4")
    with pytest.raises(TypeError, match="int8"):
        kernels.dequantize(np.zeros(18, np.int8), "tq4")
    with pytest.raises(ValueError, match="query must be aligned"):
        kernels.dot(np.zeros((3, 18), np.uint8), np.zeros(129, np.uint8)[1:].view(np.float32), "tq4")
    with pytest.raises(ValueError, match=r"need \(64,\)"):
        kernels.dot(np.zeros((3, 36), np.uint8), np.zeros(32, np.float32), "tq4")


def test_shapes_are_kept():
    x = np.zeros((2, 0, 64), np.float32)
    assert kernels.quantize(x, "tq3").shape == (2, 0, 28)
    assert kernels.dequantize(np.zeros((2, 3, 28), np.uint8), "tq3").shape == (2, 3, 64)
    assert kernels.dot(np.zeros((2, 3, 28), np.uint8), np.zeros(64, np.float32), "turbo3").shape == (2, 3)
    assert tq_ggml.type_info("tq4") == ("tq4", 32, 18, 4.5)
    assert tq_ggml.type_info(tq_ggml.TQ3) == ("tq3", 32, 14, 3.5)


def level_of(forced: str) -> tuple[str, str]:
    """(level that ran, stderr) of a fresh process with TQ_SIMD set."""
    code = "import tq_ggml; print(tq_ggml.simd_level())"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TQ_SIMD": forced}, capture_output=True, text=True, check=True
    )
    return run.stdout.strip(), run.stderr


@pytest.mark.parametrize("forced", kernels.simd_levels())
def test_tq_simd_forces_a_level(forced):
    ran, _ = level_of(forced)
    assert ran == forced


def test_tq_simd_that_cannot_run_falls_back_and_says_so():
    ran, said = level_of("altivec")
    assert ran == kernels.simd_levels()[0]
    assert "TQ_SIMD=altivec cannot run here" in said and ran in said
    with pytest.raises(ValueError, match="altivec"):
        kernels.set_simd_level("altivec")


def test_the_levels_are_those_of_this_cpu():
    """Detection against the kernel's own list of CPU features."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = set(file.read().split())
    except OSError:
        pytest.skip("no /proc/cpuinfo on this system to compare with")
    expected = {name for name, flag in MACHINE_FLAGS.items() if flag in flags} | {"scalar"}
    assert set(kernels.simd_levels()) == expected
