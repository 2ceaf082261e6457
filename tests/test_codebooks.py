"""Codebooks against published figures, closed forms, sampled vectors, faiss, and the generated header."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tq_ggml import codebooks as cb

REPO = Path(__file__).resolve().parent.parent
GENERATOR = REPO / "scripts" / "generate_codebooks.py"

# Max (1960), table I, and TurboQuant (arXiv 2504.19874), section 3.1.
KNOWN_LEVELS = {
    1: [0.7979],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1520],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326],
}
KNOWN_DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
DIMENSIONS = [32, 64, 128, None]


def normal_cells(levels):
    """Probability and mean of each positive cell under the standard normal, in closed form."""
    edges = [0.0, *((levels[1:] + levels[:-1]) / 2), math.inf]
    cdf = np.array([math.erf(e / math.sqrt(2)) / 2 for e in edges])
    pdf = np.array([math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges])
    mass = np.diff(cdf)
    return mass, -np.diff(pdf) / mass


def whole_line_moment(power, d):
    end = np.array([cb.support(d)])
    return float(cb.integrate(lambda x: x**power, -end, end, d)[0])


@pytest.mark.parametrize("d", [2, 3, 4, *DIMENSIONS])
def test_density_has_unit_mass_and_variance(d):
    assert whole_line_moment(0, d) == pytest.approx(1, abs=1e-12)
    assert whole_line_moment(1, d) == pytest.approx(0, abs=1e-12)
    assert whole_line_moment(2, d) == pytest.approx(1, abs=1e-12)
    kurtosis = 3.0 if d is None else 3 * d / (d + 2)
    assert whole_line_moment(4, d) == pytest.approx(kurtosis, abs=1e-11)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_density_sums_to_one_pointwise(d):
    """`density` itself, by the trapezoidal rule: `integrate` uses a substituted form of it for finite d."""
    end = min(cb.support(d), 12.0)
    x, step = np.linspace(-end, end, 200_001, retstep=True)
    assert cb.density(x, d).sum() * step == pytest.approx(1, abs=1e-9)


def test_density_is_zero_outside_the_ball_and_normal_in_the_limit():
    assert cb.density(np.array([8.01, -9.0]), 64).tolist() == [0, 0]
    x = np.linspace(-4, 4, 33)
    assert np.allclose(cb.density(x, 10**7), cb.density(x), atol=1e-6)
    assert cb.density(0.0) == pytest.approx(0.3989422804)
    assert np.array_equal(cb.density(x, math.inf), cb.density(x))


@pytest.mark.parametrize("bits", KNOWN_LEVELS)
def test_known_levels(bits):
    assert np.abs(cb.lloyd_max(bits) - KNOWN_LEVELS[bits]).max() < 1e-4


@pytest.mark.parametrize("bits", KNOWN_DISTORTION)
def test_known_distortion(bits):
    assert cb.distortion(cb.lloyd_max(bits)) == pytest.approx(KNOWN_DISTORTION[bits], rel=5e-4)


@pytest.mark.parametrize("bits", range(1, cb.MAX_BITS + 1))
def test_levels_are_the_closed_form_centroids(bits):
    levels = cb.lloyd_max(bits)
    assert len(levels) == 2 ** (bits - 1)
    assert (np.diff(levels) > 0).all()
    _, means = normal_cells(levels)
    assert np.abs(levels - means).max() < 1e-9


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("bits", range(1, cb.MAX_BITS + 1))
def test_distortion_bounds(bits, d):
    """TurboQuant, theorems 1 and 3."""
    scaled = cb.distortion(cb.lloyd_max(bits, d), d) * 4**bits
    assert 1 < scaled < math.sqrt(3) * math.pi / 2


@pytest.mark.parametrize("bits", range(1, 5))
def test_moments(bits):
    """Of a Lloyd-Max table the mean square is 1 - D_mse: a table in the wrong unit of σ cannot pass."""
    levels = cb.lloyd_max(bits)
    mass, _ = normal_cells(levels)
    assert 2 * mass.sum() == pytest.approx(1, abs=1e-12)
    assert 2 * mass @ levels**2 == pytest.approx(1 - cb.distortion(levels), abs=1e-12)


@pytest.mark.parametrize("d", [32, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_distortion_of_sampled_vectors(bits, d):
    x = np.random.default_rng(bits).standard_normal((20_000, d))
    x *= math.sqrt(d) / np.linalg.norm(x, axis=1, keepdims=True)
    levels = cb.lloyd_max(bits, d)
    index = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(x))
    measured = np.mean((np.abs(x) - levels[index]) ** 2)
    assert measured == pytest.approx(cb.distortion(levels, d), rel=0.01)


@pytest.mark.parametrize("nudge", [-1e-3, 1e-3])
def test_no_better_table_nearby(nudge):
    levels = cb.lloyd_max(3, 64)
    for i in range(len(levels)):
        moved = levels.copy()
        moved[i] += nudge
        assert cb.distortion(moved, 64) > cb.distortion(levels, 64)


@pytest.mark.parametrize("bits", [3, 4])
def test_int8_levels_are_the_best_integer_multiple(bits):
    levels = cb.lloyd_max(bits)
    ints, m = cb.int8_levels(levels)
    assert ints.dtype == np.int8
    assert ints.max() <= cb.INT8_MAX and (np.diff(ints) > 0).all()
    assert np.array_equal(ints, np.rint(levels * m))
    error = cb.distortion(ints / m)
    assert error < 1.002 * cb.distortion(levels)
    for other in range(10, int(cb.INT8_MAX / levels[-1]) + 1):
        assert error <= cb.distortion(np.rint(levels * other) / other)


def test_int8_levels_prefers_the_larger_of_equal_multipliers():
    assert cb.int8_levels(np.array([1.0])) == (np.array([127], np.int8), 127)


def test_int8_refuses_tables_that_collapse():
    with pytest.raises(ValueError, match="at most 6 bits"):
        cb.int8_levels(cb.lloyd_max(8))


@pytest.mark.parametrize("bits", [3, 4])
def test_bucket_errors(bits):
    """Against sampled magnitudes, as fractions of the block's largest."""
    table = cb.block_table(bits)
    assert table.errors.shape == (8, 32) and table.errors.dtype == np.uint8 and table.errors.max() == 255
    x = np.random.default_rng(bits).random(200_000)
    bucket = np.rint(31 * x).astype(int)
    grid = table.ratios[:, None] * table.levels / table.levels[-1]
    sampled = [np.bincount(bucket, ((x[:, None] - levels) ** 2).min(axis=1)) / np.bincount(bucket) for levels in grid]
    found, sampled = table.errors[:, :31].astype(float), np.array(sampled)[:, :31]
    unit = np.sum(sampled * found) / np.sum(found * found)
    assert found * unit == pytest.approx(sampled, rel=0.02, abs=unit)
    assert table.errors[:, 31] * unit == pytest.approx(((1 - grid) ** 2).min(axis=1), rel=0.02, abs=unit)


@pytest.mark.parametrize("bits", [3, 4])
def test_steps(bits):
    """What the kernels' byte arithmetic needs: bytes that fit, ends of cells near the middles, and 16 bytes apart."""
    table = cb.block_table(bits)
    levels = table.levels.astype(int)
    per_level = table.half_steps / 2
    assert table.steps_of_largest == pytest.approx(per_level * levels[-1] / table.ratios)
    assert table.steps_of_largest.max() < 255
    assert np.abs(table.edges - per_level * (levels[1:] + levels[:-1]) / 2).max() <= 0.25
    assert len(set(table.edges // 16)) == len(table.edges)
    largest_residual = 2 * table.steps_of_largest.max() + 1 - table.half_steps * levels[-1]
    assert 1 - table.half_steps * levels[0] >= -128 and largest_residual <= 127


@pytest.mark.parametrize("bits", [3, 4])
def test_the_header_s_index_is_the_count_of_ends_reached(bits):
    edges, header = cb.block_table(bits).edges, generate("-o", "/dev/stdout").stdout
    rows = re.search(rf"TQ{bits}_ENCODER = {{\n.*\n    {{(.*)}},\n", header).group(1)
    index = np.array(rows.split(", "), int)
    steps = np.arange(256)
    reached = steps < max(229, edges[-1])
    found = (steps + index[steps // 16]) % 256 // 16
    assert np.array_equal(found[reached], np.searchsorted(edges, steps, side="right")[reached])


def test_sign_mask_is_the_golden_ratio_hash():
    fractions = [(i + 1) * 0x9E3779B9 / 2**32 % 1 for i in range(32)]
    assert [bool(cb.sign_mask() >> i & 1) for i in range(32)] == [f >= 0.5 for f in fractions]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cb.lloyd_max(0), "bits=0"),
        (lambda: cb.lloyd_max(9), "bits=9"),
        (lambda: cb.lloyd_max(2.5), "bits=2.5"),
        (lambda: cb.lloyd_max(3, 1), "d=1"),
        (lambda: cb.density(0.0, -4), "d=-4"),
        (lambda: cb.density(0.0, math.nan), "d=nan"),
        (lambda: cb.block_table(5), "bits=5"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---- the generated header ----


def generate(*arguments):
    return subprocess.run([sys.executable, GENERATOR, *arguments], capture_output=True, text=True, check=False)


def test_header_is_up_to_date():
    result = generate("--check")
    assert result.returncode == 0, result.stderr


def test_header_holds_the_tables(tmp_path):
    header = tmp_path / "out.h"
    assert generate("-o", header).returncode == 0
    text = header.read_text()
    assert text.startswith("// DO NOT EDIT. Written by scripts/generate_codebooks.py")
    assert f"0x{cb.sign_mask():08X}u" in text
    for bits in (3, 4):
        table = cb.block_table(bits)
        levels = ", ".join(map(str, table.levels))
        assert f"TQ{bits}_LEVELS[{len(table.levels)}] = {{{levels}}};" in text
        assert f"#define TQ{bits}_LEVEL_UNIT (1.0f / {table.multiplier})" in text


def test_check_fails_on_a_changed_header(tmp_path):
    header = tmp_path / "out.h"
    generate("-o", header)
    header.write_text(header.read_text().replace("N_BUCKETS 32", "N_BUCKETS 31"))
    result = generate("--check", "-o", header)
    assert result.returncode == 1
    assert "+#define TQ_N_BUCKETS 32" in result.stderr
    assert "out of date" in result.stderr and "Traceback" not in result.stderr


def test_check_fails_on_a_missing_header(tmp_path):
    assert generate("--check", "-o", tmp_path / "absent.h").returncode == 1


def test_other_dimension(tmp_path):
    header = tmp_path / "out.h"
    assert generate("--dim", "64", "-o", header).returncode == 0
    assert "--dim 64" in header.read_text() and f"{cb.lloyd_max(4, 64)[-1]:.9f}" in header.read_text()
    assert generate("--dim", "64", "--check", "-o", header).returncode == 0
    assert generate("--check", "-o", header).returncode == 1


@pytest.mark.parametrize("arguments", [["--dim", "2"], ["--dim", "many"], ["-o", "/absent/folder/out.h"]])
def test_bad_command_line_is_one_message(arguments):
    result = generate(*arguments)
    assert result.returncode == 2
    assert "error:" in result.stderr and "Traceback" not in result.stderr


# ---- an independent implementation ----


@pytest.mark.parametrize("bits", KNOWN_LEVELS)
def test_faiss_has_the_same_levels(bits):
    """faiss ships the Gaussian-limit table over √d, for every d."""
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed: no second opinion on the codebooks")
    d = 128
    quantizer = faiss.ScalarQuantizer(d, getattr(faiss.ScalarQuantizer, f"QT_{bits}bit_tqmse"))
    quantizer.train(np.eye(d, dtype=np.float32))  # looks the table up, whatever the data
    codes = np.random.default_rng(0).integers(0, 256, (500, quantizer.code_size), dtype=np.uint8)
    levels = np.unique(quantizer.decode(codes)) * math.sqrt(d)
    ours = cb.lloyd_max(bits)
    assert levels == pytest.approx(np.concatenate((-ours[::-1], ours)), abs=1e-6)
