"""A KV cache in numpy: any method for its keys and any for its values, to see what attention makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tq_ggml.reference.methods import Compressed, Method, vectors


@dataclass(frozen=True)
class MemoryReport:
    """What `KVCacheSim` holds.

    Attributes:
        tokens: pushed so far.
        bytes_f16: that they would take in f16.
        bytes_stored: that the methods' bits take, and the f16 of what waits for its group to be whole.
    """

    tokens: int
    bytes_f16: float
    bytes_stored: float

    @property
    def ratio(self) -> float:
        return self.bytes_f16 / self.bytes_stored if self.bytes_stored else math.nan


class _Side:
    """Keys or values: whole groups compressed, the rest in float16."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.parts: list[Compressed] = []
        self.n_compressed = 0
        self.tail = np.empty((0, method.d), np.float16)

    def push(self, x: np.ndarray) -> None:
        rows = np.concatenate([self.tail.astype(np.float64), vectors(x, self.method.d)])
        n = len(rows) - len(rows) % self.method.group
        if n:
            self.parts.append(self.method.compress(rows[:n]))
            self.n_compressed += n
        limit = float(np.finfo(np.float16).max)
        self.tail = np.clip(rows[n:], -limit, limit).astype(np.float16)

    def stored(self) -> Compressed | None:
        if len(self.parts) > 1:
            self.parts = [{name: np.concatenate([p[name] for p in self.parts]) for name in self.parts[0]}]
        return self.parts[0] if self.parts else None

    def rows(self) -> np.ndarray:
        stored = self.stored()
        decoded = np.empty((0, self.method.d)) if stored is None else self.method.decompress(stored)
        return np.concatenate([decoded, self.tail.astype(np.float64)])

    def inner_product(self, q: np.ndarray) -> np.ndarray:
        stored, tail = self.stored(), q @ self.tail.astype(np.float64).T
        return tail if stored is None else np.concatenate([self.method.inner_product(q, stored), tail], axis=1)

    @property
    def n_bytes(self) -> float:
        return self.n_compressed * self.method.d * self.method.bits_per_value / 8 + self.tail.nbytes


class KVCacheSim:
    """Keys and values of one head, compressed as they come.

    Args:
        key_method, value_method: of head size d and d_v.
    """

    def __init__(self, key_method: Method, value_method: Method) -> None:
        self.keys, self.values = _Side(key_method), _Side(value_method)
        self.n_tokens = 0

    def push(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Add tokens: keys float (n, d), values float (n, d_v).

        Raises:
            ValueError: other shapes.
        """
        keys, values = vectors(keys, self.keys.method.d), vectors(values, self.values.method.d)
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys and {len(values)} values: as many of both")
        self.keys.push(keys)
        self.values.push(values)
        self.n_tokens += len(keys)

    def attention_scores(self, q: np.ndarray, scale: float | None = None) -> np.ndarray:
        """scale·⟨q, k⟩ as the key method estimates it: queries (m, d) to float64 (m, tokens); scale 1/√d by default."""
        q = vectors(q, self.keys.method.d)
        return self.keys.inner_product(q) * (self.keys.method.d**-0.5 if scale is None else scale)

    def attend(self, q: np.ndarray, scale: float | None = None) -> np.ndarray:
        """softmax(scores)·values: queries (m, d) to float64 (m, d_v).

        Raises:
            ValueError: the cache is empty.
        """
        if self.n_tokens == 0:
            raise ValueError("the cache is empty: push keys and values first")
        scores = self.attention_scores(q, scale)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True) @ self.values.rows()

    def memory(self) -> MemoryReport:
        sides = self.keys, self.values
        return MemoryReport(
            self.n_tokens, sum(2.0 * self.n_tokens * s.method.d for s in sides), sum(s.n_bytes for s in sides)
        )
