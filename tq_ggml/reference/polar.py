"""PolarQuant: vectors as a radius and angles, whose densities after a random rotation are known.

Two forms go by that name: the paper's takes pairs of coordinates, pairs of their radii, and so on; the tutorial's takes
the angles of d-dimensional spherical coordinates one after another.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from tq_ggml.reference.methods import Compressed, Method, directions, stored_norm, vectors
from tq_ggml.reference.rotations import Haar, Rotation


@cache
def angle_levels(bits: int, low: float, high: float, power: float, twice: bool = False) -> np.ndarray:
    """Lloyd-Max levels of an angle with the density sin^power(θ), or sin^power(2θ), on [low, high]: float64 (2^bits,).

    Cells and their means come from integrals of the density over a fine grid.
    """
    theta = low + (high - low) * (np.arange(20000) + 0.5) / 20000
    mass = np.abs(np.sin(2 * theta if twice else theta)) ** power
    cumulative, moment = (np.concatenate([[0.0], np.cumsum(x)]) for x in (mass, mass * theta))
    edges = np.interp(np.linspace(0, cumulative[-1], 2**bits + 1), cumulative, np.arange(20001))
    for _ in range(2000):
        weights, sums = (np.diff(np.interp(edges, np.arange(20001), x)) for x in (cumulative, moment))
        levels = sums / weights
        inner = ((levels[1:] + levels[:-1]) / 2 - low) / (high - low) * 20000
        moved, edges = np.abs(inner - edges[1:-1]).max(initial=0), np.concatenate([[0.0], inner, [20000.0]])
        if moved < 1e-4:
            break
    return levels


def uniform_levels(bits: int, low: float, high: float) -> np.ndarray:
    """Middles of 2^bits equal cells of [low, high]."""
    return low + (high - low) * (np.arange(2**bits) + 0.5) / 2**bits


def _nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, x).astype(np.uint8)


class PolarSequential(Method):
    """Spherical coordinates of the rotated vector, as the tutorial has them, put right.

    y_k = r·sin θ_0 ⋯ sin θ_(k-1)·cos θ_k. The angles θ_0 … θ_(d-3) are in [0, π], with the density sin^(d-2-k)(θ_k);
    the last one is in [-π, π): it carries the sign of the last coordinate, and is uniform. An early angle's error
    turns all coordinates after it.

    Args:
        bits: of an angle, 1 to 8.
        codebook: "uniform" cells over the whole range, or "lloyd", the Lloyd-Max levels of each angle's density.
        rotation: None for `Haar` with ``seed``.
        norm_bits: 16 or 32.
    """

    def __init__(
        self,
        d: int,
        bits: int,
        *,
        codebook: str = "uniform",
        rotation: Rotation | None = None,
        norm_bits: int = 16,
        seed: int = 0,
    ) -> None:
        if d < 2 or codebook not in ("uniform", "lloyd"):
            raise ValueError(f"d={d}, codebook={codebook!r}: two dimensions at least, 'uniform' or 'lloyd'")
        super().__init__(d)
        self.bits, self.norm_bits, self.rotation = bits, norm_bits, rotation or Haar(d, seed)
        last = uniform_levels(bits, -math.pi, math.pi)
        if codebook == "uniform":
            first = [uniform_levels(bits, 0, math.pi)] * (d - 2)
        else:
            first = [angle_levels(bits, 0.0, math.pi, d - 2 - k) for k in range(d - 2)]
        self.levels = [*first, last]

    def compress(self, x: np.ndarray) -> Compressed:
        x = vectors(x, self.d)
        y = self.rotation.forward(directions(x))
        rest = np.sqrt(np.cumsum(y[:, ::-1] ** 2, axis=1)[:, ::-1])  # norm of y[k:]
        angles = np.arctan2(rest[:, 1:], y[:, :-1])
        angles[:, -1] = np.arctan2(y[:, -1], y[:, -2])
        codes = [_nearest(levels, angles[:, k]) for k, levels in enumerate(self.levels)]
        return {"norm": stored_norm(x, self.norm_bits), "code": np.stack(codes, axis=1)}

    def decompress(self, c: Compressed) -> np.ndarray:
        angles = np.stack([levels[c["code"][:, k]] for k, levels in enumerate(self.levels)], axis=1)
        sines = np.cumprod(np.sin(angles), axis=1)
        y = np.concatenate([np.cos(angles), np.ones((len(angles), 1))], axis=1)
        y[:, 1:] *= sines
        return self.rotation.inverse(y) * c["norm"].astype(np.float64)[:, None]

    @property
    def bits_per_value(self) -> float:
        return (self.bits * (self.d - 1) + self.norm_bits) / self.d


class PolarRecursive(Method):
    """PolarQuant as its paper has it (arXiv 2502.02617): radii of pairs, of pairs of these, and so on in blocks of 16.

    After the rotation an angle of the first level is uniform in [-π, π); one of level l ≥ 2, between two radii, is in
    [0, π/2] with the density sin^(2^(l-1) - 1)(2θ). Stored: a block's radius and its 15 angles. The first level, whose
    range is four times as large, has two bits more: ``bits=2`` is the paper's 4, 2, 2, 2.

    Args:
        d: a multiple of ``block``.
        bits: of an angle from the second level on, 1 to 6.
        block: a power of two, at least 2.
        rotation: None for `Haar` with ``seed``.
        norm_bits: of a block's radius, 16 or 32.
    """

    def __init__(
        self,
        d: int,
        bits: int,
        *,
        block: int = 16,
        rotation: Rotation | None = None,
        norm_bits: int = 16,
        seed: int = 0,
    ) -> None:
        if block < 2 or block & (block - 1) or d % block:
            raise ValueError(f"block={block}: a power of two, at least 2, that divides d={d}")
        super().__init__(d)
        self.bits, self.block, self.norm_bits = bits, block, norm_bits
        self.rotation, n_levels = rotation or Haar(d, seed), block.bit_length() - 1
        self.levels = [uniform_levels(bits + 2, -math.pi, math.pi)]
        self.levels += [angle_levels(bits, 0.0, math.pi / 2, 2.0**i - 1, twice=True) for i in range(1, n_levels)]

    def compress(self, x: np.ndarray) -> Compressed:
        radius = self.rotation.forward(vectors(x, self.d))
        stored: Compressed = {}
        for i, levels in enumerate(self.levels):
            a, b = radius[:, ::2], radius[:, 1::2]
            stored[f"angle {i + 1}"] = _nearest(levels, np.arctan2(b, a))
            radius = np.hypot(a, b)
        kind = np.float16 if self.norm_bits == 16 else np.float32
        return stored | {"radius": np.minimum(radius, float(np.finfo(kind).max)).astype(kind)}

    def decompress(self, c: Compressed) -> np.ndarray:
        radius = c["radius"].astype(np.float64)
        for i, levels in reversed(list(enumerate(self.levels))):
            angle = levels[c[f"angle {i + 1}"]]
            pair = radius * np.cos(angle), radius * np.sin(angle)
            radius = np.stack(pair, axis=-1).reshape(len(radius), 2 * radius.shape[1])
        return self.rotation.inverse(radius)

    @property
    def bits_per_value(self) -> float:
        angles = sum(len(levels).bit_length() - 1 << len(self.levels) - 1 - i for i, levels in enumerate(self.levels))
        return (angles + self.norm_bits) / self.block
