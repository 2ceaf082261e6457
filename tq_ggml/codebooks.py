"""Lloyd-Max codebooks for one coordinate of a randomly rotated vector, and their int8 form for the kernels.

A coordinate of a uniformly random unit vector in R^d has the density f(t) ∝ (1-t²)^((d-3)/2) on [-1, 1] (TurboQuant,
arXiv 2504.19874, Lemma 1), with variance 1/d. Everything here is in the σ=1 convention, x = t·√d, whose limit for
large d is the standard normal; ``d=None`` (or infinity) means that limit. No data is involved.

Every density is symmetric, so a codebook of b bits is its 2^(b-1) magnitudes; a code is an index and a sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

MAX_BITS = 8
INT8_MAX = 127
N_CANDIDATES = 8  # scales the encoder tries for each block
N_BUCKETS = 32  # magnitudes of a block, as fractions of its largest, that the encoder's search tells apart
# Scales the encoder tries for each block / the scale whose largest level is the block's largest magnitude.
CANDIDATE_RATIOS = {
    3: (0.75, 0.80, 0.84, 0.88, 0.92, 0.96, 1.00, 1.05),
    4: (0.90, 0.93, 0.96, 0.99, 1.02, 1.06, 1.26, 1.34),
}
HALF_STEPS = {3: 3, 4: 4}  # half steps of the encoder's bytes in one level unit; a block's largest value fits a byte
GOLDEN_RATIO_32 = 0x9E3779B9  # 2^32 / golden ratio, the multiplier of Fibonacci hashing

_TAIL = 14.0  # the normal density is below 1e-42 from here on
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)


def _dimension(d: float | None) -> float:
    d = math.inf if d is None else float(d)
    if not d >= 2:
        raise ValueError(f"d={d:g}: a coordinate has a density only for d >= 2 (None for the Gaussian limit)")
    return d


def _check_bits(bits: int) -> None:
    if bits not in range(1, MAX_BITS + 1):
        raise ValueError(f"bits={bits}: codebooks have 1 to {MAX_BITS} bits")


def support(d: float | None = None) -> float:
    """The largest value of a coordinate: √d, infinity in the Gaussian limit."""
    return math.sqrt(_dimension(d))


def density(x: np.ndarray | float, d: float | None = None) -> np.ndarray:
    """Probability density of a coordinate scaled by √d.

    Args:
        x: where, any shape, in units of σ.
        d: dimension of the unit vector, at least 2; None for the Gaussian limit.

    Returns:
        float64 of the shape of ``x``; 0 outside ±√d.

    Raises:
        ValueError: ``d`` below 2.
    """
    d = _dimension(d)
    x = np.asarray(x, dtype=np.float64)
    if math.isinf(d):
        return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    inside = x * x < d
    log_f = (d - 3) / 2 * np.log1p(-(np.where(inside, x, 0.0) ** 2) / d)
    return np.where(inside, np.exp(log_f + _log_norm(d)), 0.0)


def _log_norm(d: float) -> float:
    """log of the constant before (1 - x²/d)^((d-3)/2) that makes its integral 1."""
    return math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - math.log(math.pi * d) / 2


def integrate(function, lo: np.ndarray, hi: np.ndarray, d: float | None = None) -> np.ndarray:
    """∫ function(x) f(x) dx over the intervals [lo, hi], by Gauss-Legendre quadrature.

    Args:
        function: maps an array of points to an array of the same shape (n, nodes).
        lo, hi: float64 (n,), ends of the intervals, within ±√d; ±infinity is cut at 14 σ.
        d: as for `density`.

    Returns:
        float64 (n,).
    """
    d = _dimension(d)
    lo, hi = np.clip(lo, -_TAIL, _TAIL), np.clip(hi, -_TAIL, _TAIL)
    if math.isinf(d):
        x, weights = _nodes(lo, hi)
        return np.sum(weights * density(x) * function(x), axis=-1)
    # With x = √d·sin(θ) the integrand becomes a power of cos(θ): smooth also where f itself is not, at ±√d.
    root = math.sqrt(d)
    angle, weights = _nodes(*(np.arcsin(np.clip(end / root, -1, 1)) for end in (lo, hi)))
    return np.sum(weights * np.cos(angle) ** (d - 2) * function(root * np.sin(angle)), axis=-1) * _scale(d)


def _scale(d: float) -> float:
    return math.sqrt(d) * math.exp(_log_norm(d))


def _nodes(lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    half, middle = (hi - lo)[:, None] / 2, (hi + lo)[:, None] / 2
    return middle + half * _NODES, half * _WEIGHTS


def _edges(levels: np.ndarray, d: float | None) -> np.ndarray:
    """Ends of the magnitudes' cells: 0, the midpoints between neighbours, the end of the support."""
    return np.concatenate(([0.0], (levels[1:] + levels[:-1]) / 2, [min(support(d), _TAIL)]))


def distortion(levels: np.ndarray, d: float | None = None) -> float:
    """D_mse: mean squared error of rounding a coordinate (σ=1) to the nearest of ±levels.

    Args:
        levels: (n,) ascending magnitudes, all ≥ 0.
        d: as for `density`.
    """
    levels = np.asarray(levels, dtype=np.float64)
    edges = _edges(levels, d)
    return float(2 * integrate(lambda x: (x - levels[:, None]) ** 2, edges[:-1], edges[1:], d).sum())


@cache
def _lloyd_max(bits: int, d: float | None) -> tuple[float, ...]:
    levels = _companded_start(2 ** (bits - 1), d)
    for _ in range(100):
        step = _newton_step(levels, d)
        levels = levels + step
        if np.abs(step).max() < 1e-13:
            return tuple(levels.tolist())
    raise ArithmeticError(f"the Lloyd-Max levels for bits={bits}, d={d} did not converge")


def lloyd_max(bits: int, d: float | None = None) -> np.ndarray:
    """Magnitudes of the Lloyd-Max quantiser: each level is the mean of its cell, each cell ends halfway to the next.

    Args:
        bits: 1 to 8, the sign included.
        d: as for `density`.

    Returns:
        float64 (2^(bits-1),), ascending, in units of σ; multiply by 1/√d for a unit vector's coordinate.

    Raises:
        ValueError: ``bits`` or ``d`` out of range.
    """
    _check_bits(bits)
    d = _dimension(d)
    return np.array(_lloyd_max(int(bits), None if math.isinf(d) else d))


def uniform(bits: int, d: float | None = None) -> np.ndarray:
    """Magnitudes of the best uniform quantiser, for comparison: ½, 1½, 2½ ... of the step with the least D_mse.

    Args, returns, raises: as `lloyd_max`.
    """
    _check_bits(bits)
    odd = np.arange(2 ** (bits - 1)) + 0.5
    low, high = (edge / len(odd) for edge in (0.1, min(support(d), 8.0)))
    inner = (math.sqrt(5) - 1) / 2
    for _ in range(60):  # golden section: D_mse has one minimum in the step
        a, b = high - inner * (high - low), low + inner * (high - low)
        low, high = (low, b) if distortion(a * odd, d) < distortion(b * odd, d) else (a, high)
    return (low + high) / 2 * odd


def golden_signs(n: int) -> np.ndarray:
    """``n`` fixed pseudo-random signs, float64 ±1: minus where the top bit of a golden-ratio hash of i+1 is set."""
    hashed = (np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN_RATIO_32)) & np.uint64(0xFFFFFFFF)
    return np.where(hashed >> np.uint64(31), -1.0, 1.0)


def _companded_start(count: int, d: float | None) -> np.ndarray:
    """Levels of the density f^(1/3), which is optimal for many levels (Panter and Dite, 1951)."""
    x = np.linspace(0, min(support(d), 8.0), 4001)
    x = (x[1:] + x[:-1]) / 2
    mass = np.cumsum(density(x, d) ** (1 / 3))
    return np.interp((np.arange(count) + 0.5) / count, mass / mass[-1], x)


def _newton_step(levels: np.ndarray, d: float | None) -> np.ndarray:
    """Newton's step towards levels == centroids; plain Lloyd iteration needs 10^5 rounds at 8 bits."""
    edges = _edges(levels, d)
    mass = integrate(np.ones_like, edges[:-1], edges[1:], d)
    centroid = integrate(lambda x: x, edges[:-1], edges[1:], d) / mass
    inner, f = edges[1:-1], density(edges[1:-1], d)
    # Moving a cell's end by δ moves its centroid by f·|end - centroid|/mass·δ; an end moves by half its level's move.
    by_upper = f * (inner - centroid[:-1]) / mass[:-1] / 2
    by_lower = f * (centroid[1:] - inner) / mass[1:] / 2
    pull = np.diag(by_upper, 1) + np.diag(by_lower, -1)
    pull += np.diag(np.append(by_upper, 0.0) + np.insert(by_lower, 0, 0.0))
    return np.linalg.solve(np.eye(len(levels)) - pull, centroid - levels)


def int8_levels(levels: np.ndarray, d: float | None = None) -> tuple[np.ndarray, int]:
    """The integer table that stands in for ``levels``: levels ≈ ints / m.

    Takes the integer m ≤ 127/max(levels) whose rounded table has the smallest D_mse, the larger one of equals.

    Args:
        levels: (n,) ascending magnitudes in units of σ.
        d: as for `density`.

    Returns:
        (int8 (n,), m).

    Raises:
        ValueError: the table has too many levels to stay distinct in int8.
    """
    levels = np.asarray(levels, dtype=np.float64)
    best, best_error, best_m = None, math.inf, 0
    for m in range(int(INT8_MAX / levels[-1]), 0, -1):
        ints = np.rint(levels * m)
        if ints[0] < 1 or (np.diff(ints) < 1).any():
            continue
        error = distortion(ints / m, d)
        if error < best_error:
            best, best_error, best_m = ints.astype(np.int8), error, m
    if best is None:
        raise ValueError(f"{len(levels)} magnitudes do not stay distinct in int8; use at most 6 bits")
    return best, best_m


@dataclass(frozen=True, eq=False)
class BlockTable:
    """What the encoder and the decoder of one block type look up.

    Attributes:
        bits: code width, sign included.
        levels: int8 (2^(bits-1),), ascending magnitudes.
        multiplier: σ in steps of the integer levels; 1/multiplier is the level unit.
        ratios: float64 (8,), the candidate scales.
        errors: uint8 (8, 32), the mean squared error of the magnitudes in a bucket with each candidate scale.
        half_steps: of the encoder's bytes in one level unit; a byte is the magnitude in whole steps, rounded down.
        edges: int (2^(bits-1)-1,), the bytes from which on the next level is nearer.
    """

    bits: int
    levels: np.ndarray
    multiplier: int
    ratios: np.ndarray
    errors: np.ndarray
    half_steps: int
    edges: np.ndarray

    @property
    def steps_of_largest(self) -> np.ndarray:
        """float32 (8,): with each candidate scale, a block's largest magnitude in steps."""
        return (self.half_steps / 2 * self.levels[-1] / self.ratios).astype(np.float32)

    @property
    def scale_of_largest(self) -> np.ndarray:
        """float32 (8,): each candidate as a stored scale / the largest magnitude before the division by √32."""
        return (32 / math.sqrt(32) * self.ratios / self.levels[-1]).astype(np.float32)


@cache
def block_table(bits: int, d: float | None = None) -> BlockTable:
    """The table for blocks of ``bits`` (3 or 4) bits a value.

    Raises:
        ValueError: other widths; they have no candidate scales.
    """
    if bits not in CANDIDATE_RATIOS:
        raise ValueError(f"bits={bits}: blocks have 3 or 4 bits a value")
    levels, multiplier = int8_levels(lloyd_max(bits, d), d)
    ratios = np.array(CANDIDATE_RATIOS[bits])
    edges = np.rint((levels[1:].astype(int) + levels[:-1]) / 4 * HALF_STEPS[bits]).astype(int)
    return BlockTable(bits, levels, multiplier, ratios, _bucket_errors(levels, ratios), HALF_STEPS[bits], edges)


def _bucket_errors(levels: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """Bucket b holds the magnitudes that round to b/31 of the block's largest; 255 is the largest error there is."""
    top = N_BUCKETS - 1
    within = (np.arange(64) + 0.5) / 64 - 0.5
    x = np.abs(np.arange(N_BUCKETS)[:, None] + within) / top
    x[top] = 1  # there is always the largest itself, and seldom another
    grid = ratios[:, None, None, None] * (levels / levels[-1])
    errors = ((x[..., None] - grid) ** 2).min(axis=-1).mean(axis=-1)
    return np.rint(errors * (255 / errors.max())).astype(np.uint8)


def sign_mask() -> int:
    """The 32 `golden_signs` of a block, bit i set to negate element i."""
    return sum(1 << i for i in np.flatnonzero(golden_signs(32) < 0).tolist())
