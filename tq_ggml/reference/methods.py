"""Vector quantisers for keys and values, each with what it costs in bits: TurboQuant, QJL, and their comparators.

Every method has the four parts of `Method`. A compressed batch is a dict of arrays whose first axis is the vector (or
the group of vectors), so that batches are joined by joining arrays. Numbers are decoded from what is stored: a norm
that is kept in fp16 is used in fp16.

Notation: x is a vector of d values, Π a rotation, b the bits of a value, ⟨q, x⟩ what attention wants.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from tq_ggml import codebooks
from tq_ggml.cache_types import resolve
from tq_ggml.reference import blocks
from tq_ggml.reference.rotations import Haar, Hadamard, Rotation

Compressed = dict[str, np.ndarray]
NORM_TYPES = {16: np.float16, 32: np.float32}


class Method(ABC):
    """A quantiser of vectors of ``d`` values.

    Attributes:
        d: the dimension.
        group: vectors that share parameters; `compress` takes whole groups.
    """

    group = 1

    def __init__(self, d: int) -> None:
        self.d = d

    @abstractmethod
    def compress(self, x: np.ndarray) -> Compressed:
        """Compress vectors, float (n, d).

        Raises:
            ValueError: another shape, or n is not a whole number of groups.
        """

    @abstractmethod
    def decompress(self, c: Compressed) -> np.ndarray:
        """The vectors back, float64 (n, d)."""

    def inner_product(self, q: np.ndarray, c: Compressed) -> np.ndarray:
        """Estimates of ⟨q, x⟩ for queries, float (m, d): float64 (m, n)."""
        return _queries(q, self.d) @ self.decompress(c).T

    @property
    @abstractmethod
    def bits_per_value(self) -> float:
        """Every stored bit, norms and scales included, over d."""


def vectors(x: np.ndarray, d: int, group: int = 1) -> np.ndarray:
    """A checked batch, float64 (n, d)."""
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 2 or x.shape[1] != d:
        raise ValueError(f"expected vectors of shape (n, {d}), got {x.shape}")
    if len(x) % group:
        raise ValueError(f"{len(x)} vectors are no whole number of groups of {group}")
    return x


def _queries(q: np.ndarray, d: int) -> np.ndarray:
    return vectors(q, d)


def stored_norm(x: np.ndarray, norm_bits: int) -> np.ndarray:
    """Euclidean norms of rows as they are kept, (n,): float16 or float32, never infinite."""
    kind = NORM_TYPES[norm_bits]
    return np.minimum(np.linalg.norm(x, axis=-1), float(np.finfo(kind).max)).astype(kind)


def directions(x: np.ndarray) -> np.ndarray:
    """Rows over their norms; zero rows stay zero."""
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    x = x / np.where(largest > 0, largest, 1)  # so that squares neither overflow nor vanish
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norm > 0, norm, 1)


class TurboQuantMSE(Method):
    """TurboQuant for the least squared error (arXiv 2504.19874, Algorithm 1).

    Stored: ‖x‖, and of every coordinate of √d·Π x/‖x‖ the index of the nearest Lloyd-Max level of its density. The
    squared error is D_mse(b)·‖x‖². ⟨q, x̂⟩ is too small by the factor 1 - D_mse(b): at the best levels E[y·ŷ] = E[ŷ²].

    Args:
        bits: b, 1 to 8.
        rotation: Π; None for `Haar` with ``seed``.
        levels: magnitudes in place of the Lloyd-Max ones, float (2^(b-1),), in units of σ.
        norm_bits: 16 or 32.
    """

    def __init__(
        self,
        d: int,
        bits: int,
        *,
        rotation: Rotation | None = None,
        levels: np.ndarray | None = None,
        norm_bits: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(d)
        self.bits, self.norm_bits = bits, norm_bits
        self.rotation = rotation or Haar(d, seed)
        magnitudes = codebooks.lloyd_max(bits, d) if levels is None else np.asarray(levels)
        self.levels = np.concatenate([-magnitudes[::-1], magnitudes]) / math.sqrt(d)

    def compress(self, x: np.ndarray) -> Compressed:
        x = vectors(x, self.d)
        y = self.rotation.forward(directions(x))
        index = np.searchsorted((self.levels[1:] + self.levels[:-1]) / 2, y).astype(np.uint8)
        return {"norm": stored_norm(x, self.norm_bits), "index": index}

    def decompress(self, c: Compressed) -> np.ndarray:
        return self.rotation.inverse(self.levels[c["index"]]) * c["norm"].astype(np.float64)[:, None]

    def inner_product(self, q: np.ndarray, c: Compressed) -> np.ndarray:
        """⟨q, x̂⟩ = ‖x‖·⟨Πq, levels⟩: the query is rotated, no key is rotated back."""
        return self.rotation.forward(_queries(q, self.d)) @ self.levels[c["index"]].T * c["norm"].astype(np.float64)

    @property
    def bits_per_value(self) -> float:
        return self.bits + self.norm_bits / self.d


class QJL(Method):
    """Quantised Johnson-Lindenstrauss: one bit a projection, unbiased inner products (arXiv 2406.03482).

    Stored: ‖x‖ and sign(S x), S of shape (m, d) with standard normal entries. Since E[s·sign(⟨s, x⟩)] = √(2/π)·x/‖x‖
    for a normal s, the estimate ‖x‖·√(π/2)/m·⟨S q, sign(S x)⟩ has the mean ⟨q, x⟩ over S. Without the norm it is an
    estimate of the direction's inner product alone.

    Args:
        m: projections; None for d.
        seed: of S.
        norm_bits: 16 or 32.
    """

    def __init__(self, d: int, m: int | None = None, *, norm_bits: int = 16, seed: int = 0) -> None:
        super().__init__(d)
        self.m, self.norm_bits = m or d, norm_bits
        self.projection = np.random.default_rng([seed, 1]).standard_normal((self.m, d))
        self.factor = math.sqrt(math.pi / 2) / self.m

    def compress(self, x: np.ndarray) -> Compressed:
        x = vectors(x, self.d)
        return {"norm": stored_norm(x, self.norm_bits), "positive": directions(x) @ self.projection.T >= 0}

    def decompress(self, c: Compressed) -> np.ndarray:
        return self._weighted_signs(c) @ self.projection

    def inner_product(self, q: np.ndarray, c: Compressed) -> np.ndarray:
        return _queries(q, self.d) @ self.projection.T @ self._weighted_signs(c).T

    def _weighted_signs(self, c: Compressed) -> np.ndarray:
        signs = np.where(c["positive"], 1.0, -1.0)
        return self.factor * c["norm"].astype(np.float64)[:, None] * signs

    @property
    def bits_per_value(self) -> float:
        return (self.m + self.norm_bits) / self.d


class TwoStage(Method):
    """A quantiser and QJL of what it leaves, x - x̂: unbiased inner products whatever the first stage is.

    The estimate is ⟨q, x̂⟩ + ‖x - x̂‖·√(π/2)/m·⟨S q, sign(S (x - x̂))⟩. The residual's norm is stored: signs do not tell
    how much they correct.

    Args:
        first: the quantiser; None for none, QJL alone.
        qjl: of the residual.
    """

    def __init__(self, first: Method | None, qjl: QJL) -> None:
        super().__init__(qjl.d)
        self.first, self.qjl = first, qjl

    def compress(self, x: np.ndarray) -> Compressed:
        x = vectors(x, self.d)
        stored = self.first.compress(x) if self.first else {}
        residual = x - self.first.decompress(stored) if self.first else x
        return stored | {f"residual {name}": array for name, array in self.qjl.compress(residual).items()}

    @staticmethod
    def _residual(c: Compressed) -> Compressed:
        return {name.removeprefix("residual "): array for name, array in c.items() if name.startswith("residual ")}

    def decompress(self, c: Compressed) -> np.ndarray:
        correction = self.qjl.decompress(self._residual(c))
        return self.first.decompress(c) + correction if self.first else correction

    def inner_product(self, q: np.ndarray, c: Compressed) -> np.ndarray:
        correction = self.qjl.inner_product(q, self._residual(c))
        return self.first.inner_product(q, c) + correction if self.first else correction

    @property
    def bits_per_value(self) -> float:
        return self.qjl.bits_per_value + (self.first.bits_per_value if self.first else 0.0)


def turbo_quant_prod(
    d: int, bits: int, *, rotation: Rotation | None = None, norm_bits: int = 16, seed: int = 0
) -> TwoStage:
    """TurboQuant for inner products (arXiv 2504.19874, Algorithm 2): b-1 bits of `TurboQuantMSE`, one of `QJL`.

    For unit vectors E[(estimate - ⟨q, x⟩)²] = π/(2d)·D_mse(b-1)·‖q‖², up to the O(1/d) that the estimate's own mean
    takes off (`prod_distortion`).

    Raises:
        ValueError: ``bits`` below 1.
    """
    if bits < 1:
        raise ValueError(f"bits={bits}: one bit is QJL's, so there must be one at least")
    first = TurboQuantMSE(d, bits - 1, rotation=rotation, norm_bits=norm_bits, seed=seed) if bits > 1 else None
    return TwoStage(first, QJL(d, norm_bits=norm_bits, seed=seed))


class Uniform(Method):
    """Evenly spaced levels between the least and the greatest value of a group, which are stored in fp16.

    KIVI (arXiv 2402.02750) quantises keys so by channel, over the tokens of a group (``per="channel"``), and values by
    token (``per="token"``); QuaRot (arXiv 2404.00456) by token after a rotation.

    Args:
        bits: of a code, 1 to 8.
        per: "channel": groups of ``group`` vectors; "token": groups of ``group`` values of a vector.
        group: size of a group; "token": it divides d.
        rotation: before it, or None.

    Raises:
        ValueError: ``per`` or ``group`` as above.
    """

    def __init__(
        self, d: int, bits: int, *, per: str = "token", group: int = 32, rotation: Rotation | None = None
    ) -> None:
        super().__init__(d)
        if per not in ("channel", "token") or (per == "token" and d % group):
            raise ValueError(f"per={per!r}, group={group}: 'channel', or 'token' with a group that divides d={d}")
        self.bits, self.per, self.rotation, self.size = bits, per, rotation, group
        self.group = group if per == "channel" else 1

    def compress(self, x: np.ndarray) -> Compressed:
        x = vectors(x, self.d, self.group)
        y = self._grouped(self.rotation.forward(x) if self.rotation else x)
        limit = float(np.finfo(np.float16).max)
        low = np.clip(y.min(axis=1), -limit, limit).astype(np.float16)
        step = np.minimum((y.max(axis=1) - low) / (2**self.bits - 1), limit).astype(np.float16)
        safe = np.where(step > 0, step, 1).astype(np.float64)
        codes = np.clip(np.rint((y - low.astype(np.float64)[:, None]) / safe[:, None]), 0, 2**self.bits - 1)
        return {"low": low, "step": step, "code": codes.astype(np.uint8)}

    def _grouped(self, x: np.ndarray) -> np.ndarray:
        """(groups, size, values that each have parameters of their own)."""
        if self.per == "channel":
            return x.reshape(-1, self.size, self.d)
        return x.reshape(len(x), self.d // self.size, self.size).transpose(0, 2, 1)

    def decompress(self, c: Compressed) -> np.ndarray:
        low, step = (c[name].astype(np.float64)[:, None] for name in ("low", "step"))
        y = low + step * c["code"]
        y = y.reshape(-1, self.d) if self.per == "channel" else y.transpose(0, 2, 1).reshape(-1, self.d)
        return self.rotation.inverse(y) if self.rotation else y

    @property
    def bits_per_value(self) -> float:
        return self.bits + 32 / self.size


class BlockCodec(Method):
    """The cache types tq3 and tq4 (docs/codec.md), byte for byte.

    Args:
        d: a multiple of 32.
        cache_type: "tq3" or "tq4".
        scale: "search" as the kernels do it, "norm" as MNN does.
    """

    def __init__(self, d: int, cache_type: str, scale: str = "search") -> None:
        super().__init__(d)
        self.type, self.scale = resolve(cache_type), scale

    def compress(self, x: np.ndarray) -> Compressed:
        rows = np.ascontiguousarray(vectors(x, self.d), dtype=np.float32)
        return {"data": blocks.quantize(rows, self.type.name, self.scale)}

    def decompress(self, c: Compressed) -> np.ndarray:
        return blocks.dequantize(c["data"], self.type.name).astype(np.float64)

    def inner_product(self, q: np.ndarray, c: Compressed) -> np.ndarray:
        """In the rotated domain, as our attention: one rotation a query, none a key."""
        codes = blocks.unpack(c["data"], self.type.name)
        keys = blocks.rotated_values(codes, self.type.name).astype(np.float64).reshape(-1, self.d)
        return Hadamard(self.d, blocks.BLOCK).forward(_queries(q, self.d)) @ keys.T

    @property
    def bits_per_value(self) -> float:
        return 8 * self.type.type_size / self.type.block_size
