"""Rotations: after one, every coordinate of a unit vector has the same known density (`tq_ggml.codebooks`).

All of them are orthonormal: inner products survive, ⟨Πq, Πk⟩ = ⟨q, k⟩, and the inverse is the transpose.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tq_ggml.codebooks import golden_signs


class Rotation(Protocol):
    """What the methods take. Both functions map float (..., d) to float64 (..., d)."""

    def forward(self, x: np.ndarray) -> np.ndarray: ...

    def inverse(self, y: np.ndarray) -> np.ndarray: ...


class Haar:
    """A dense rotation drawn uniformly from O(d), as the paper has it (arXiv 2504.19874, Algorithm 1): O(d²) a vector.

    The Q of a Gaussian matrix's QR decomposition is uniform only once each column has the sign that makes R's
    diagonal positive (Mezzadri, arXiv math-ph/0609050): LAPACK's own choice of signs is not random.

    Args:
        d: dimension, at least 1.
        seed: of the Gaussian matrix.
    """

    def __init__(self, d: int, seed: int = 0) -> None:
        # The 2 keeps it apart from data that somebody draws with the same seed, and from the S of QJL.
        q, r = np.linalg.qr(np.random.default_rng([seed, 2]).standard_normal((d, d)))
        self.matrix = q * np.sign(np.diagonal(r))

    def forward(self, x: np.ndarray) -> np.ndarray:
        return x @ self.matrix.T

    def inverse(self, y: np.ndarray) -> np.ndarray:
        return y @ self.matrix


class Hadamard:
    """Fixed signs, then an orthonormal Walsh-Hadamard transform, block by block: O(d log block) a vector, no matrix.

    It does for ordinary vectors what a random rotation does (QuaRot, arXiv 2404.00456). With ``block=32`` it is the
    rotation of the tq3 and tq4 block formats.

    Args:
        d: dimension.
        block: a power of two that divides d; None for the largest one.
        signs: False leaves the signs out.

    Raises:
        ValueError: ``block`` is no power of two that divides ``d``.
    """

    def __init__(self, d: int, block: int | None = None, signs: bool = True) -> None:
        self.block = d & -d if block is None else block
        if self.block < 1 or self.block & (self.block - 1) or d % self.block:
            raise ValueError(f"block={block}: a power of two that divides d={d}")
        self.signs = np.tile(golden_signs(self.block), d // self.block) if signs else np.ones(d)

    def forward(self, x: np.ndarray) -> np.ndarray:
        return self._transform(x * self.signs)

    def inverse(self, y: np.ndarray) -> np.ndarray:
        return self._transform(y) * self.signs

    def _transform(self, x: np.ndarray) -> np.ndarray:
        return walsh_hadamard(x.reshape(*x.shape[:-1], x.shape[-1] // self.block, self.block)).reshape(
            x.shape
        ) / np.sqrt(self.block)


def walsh_hadamard(x: np.ndarray) -> np.ndarray:
    """The unnormalised transform along the last axis, whose length is a power of two; it is its own inverse over n.

    log2(n) stages of butterflies: (a, b) → (a + b, a - b) for values that are 1, 2, 4 ... apart.
    """
    shape, n, apart = x.shape, x.shape[-1], 1
    while apart < n:
        pairs = x.reshape(*shape[:-1], n // (2 * apart), 2, apart)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(shape)
        apart *= 2
    return x
