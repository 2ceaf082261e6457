"""Key conditioning in the engine (c_src/ggml/tq_conditioning.h): the constants of a KV cache, and row filters.

Keys are stored as ``(K - mean) / scale`` and queries attend as ``Q * scale``; docs/conditioning.md tells why.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from tq_ggml.errors import EngineError
from tq_ggml.library import activate


@dataclass(frozen=True)
class KeyMoments:
    """What calibration gathers of one layer's keys and queries; each float32 of shape (n_head_kv, head_size).

    Attributes:
        mean: of keys before RoPE.
        start: of keys at position 0, the first token's.
        variance: of keys about that mean.
        covariance: of a channel's keys with those of its partner in the RoPE pair; one without is its own partner.
        query_energy: mean square of the queries before RoPE, over the heads that share a KV head.
        query_product: the mean product of a query's channel with its partner, as ``covariance``.
    """

    mean: np.ndarray
    start: np.ndarray
    variance: np.ndarray
    covariance: np.ndarray
    query_energy: np.ndarray
    query_product: np.ndarray


class Rows(IntEnum):
    """What a row filter is given."""

    K, V, Q = 0, 1, 2


class _LayerConstants(ctypes.Structure):
    _fields_ = [
        ("il", ctypes.c_int32),
        ("n_head_kv", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("mean", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("variance", ctypes.c_void_p),
        ("covariance", ctypes.c_void_p),
        ("query_energy", ctypes.c_void_p),
        ("query_product", ctypes.c_void_p),
    ]


class _KeyConstants(ctypes.Structure):
    _fields_ = [
        ("n_layers", ctypes.c_int32),
        ("layers", ctypes.POINTER(_LayerConstants)),
        ("mean_block", ctypes.c_int32),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("il", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("n_head", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("logit_scale", ctypes.c_float),
        ("positions", ctypes.POINTER(ctypes.c_int32)),
        ("rows", ctypes.POINTER(ctypes.c_float)),
    ]


class _Rope(ctypes.Structure):
    _fields_ = [("n_rot", ctypes.c_int32), ("is_neox", ctypes.c_int32), ("angle", ctypes.c_float * 512)]


class _Layers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("plain", "scaled", "constant", "positional")]


_FILTER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Rows))


@dataclass(frozen=True)
class Batch:
    """Rows of one layer on their way into the cache (or, of queries, to attention).

    Attributes:
        kind, layer: what they are of.
        logit_scale: what attention multiplies the product of query and key with.
        positions: int32 (n_tokens,).
        rows: float32 (n_tokens, n_head, head_size), with RoPE; a filter may change them in place.
    """

    kind: Rows
    layer: int
    logit_scale: float
    positions: np.ndarray
    rows: np.ndarray


RowFilter = Callable[[Batch], None]


@dataclass(frozen=True)
class ConditionedLayers:
    """Layers of a KV cache by what is done to their keys.

    Attributes:
        plain: nothing.
        scaled: divided by a scale.
        constant: also without the mean of the channels that hardly turn with the position.
        positional: also without the mean at each block of positions.
    """

    plain: int
    scaled: int
    constant: int
    positional: int

    def __str__(self) -> str:
        total = sum(vars(self).values())
        return (
            f"keys conditioned in {total - self.plain} of {total} layers" if total > self.plain else "keys as they are"
        )


@dataclass(frozen=True)
class Rope:
    """How RoPE turns a layer's keys.

    Attributes:
        pairs: int of shape (2, n): the first and the second channel of each pair.
        angle: float64 of shape (n,): radians per position.
    """

    pairs: np.ndarray
    angle: np.ndarray

    def turn_back(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Keys or queries, float (n_tokens, n_head, head_size), as they were before RoPE."""
        angle = positions[:, None].astype(np.float64) * self.angle
        cosine, sine = (f(angle).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        first, second = (rows[..., channels] for channels in self.pairs)
        out = rows.copy()
        out[..., self.pairs[0]] = first * cosine + second * sine
        out[..., self.pairs[1]] = second * cosine - first * sine
        return out

    def partners(self, rows: np.ndarray) -> np.ndarray:
        """Rows (..., head_size) with the two channels of every pair in each other's place."""
        out = rows.copy()
        out[..., self.pairs] = rows[..., self.pairs[::-1]]
        return out


MEAN_BLOCK = 8
"""Positions that share a mean (TQ_MEAN_BLOCK)."""

_SCALE_FLOOR = 0.01


class KeyTransform:
    """What the engine does to one layer's keys and queries (tq_conditioning.cpp), in numpy.

    Args:
        moments: the layer's constants.
        rope: how its keys turn.
        n_ctx: positions of the context, over which the scale is the best.
        block: positions that share a mean.
        constant: the mean of an attention that does not add it back (any but ours over tq keys): one for the whole
            context, of the pairs which turn less than a radian in it.

    Attributes:
        scale: float64 (n_head_kv, head_size), positive, of geometric mean 1 in each head.
    """

    def __init__(
        self, moments: KeyMoments, rope: Rope, n_ctx: int, block: int = MEAN_BLOCK, *, constant: bool = False
    ) -> None:
        self.moments, self.rope, self.n_ctx, self.constant = moments, rope, n_ctx, constant
        self.block = n_ctx if constant else block
        share = common_share(rope.angle, self.block)
        if constant:
            share[rope.angle * n_ctx > 1] = 0
        self.mean = moments.mean.astype(np.float64)
        self.mean[:, rope.pairs] *= share
        self.scale = self._scale()

    def _scale(self) -> np.ndarray:
        m, partners = self.moments, self.rope.partners
        whole = m.mean.astype(np.float64)
        left = m.variance + whole**2 - self.mean**2
        shared = m.covariance + whole * partners(whole) - self.mean * partners(self.mean)
        queries = m.query_energy.astype(np.float64), m.query_product.astype(np.float64)
        sides = []
        for squares, products in ((left, shared), queries):
            floor = _SCALE_FLOOR * squares.mean(axis=1, keepdims=True)
            sides.append(squares_with_rope(squares, products, self.rope, self.n_ctx) + floor)
        usable = (sides[0] > 0) & (sides[1] > 0)
        scale = np.where(usable, sides[0] / np.where(usable, sides[1], 1), 1) ** 0.25
        return scale / np.exp(np.log(scale).mean(axis=1, keepdims=True))

    def mean_at(self, positions: np.ndarray) -> np.ndarray:
        """What is taken out of keys at positions, int (n,): float64 (n, n_head_kv, head_size)."""
        blocks = np.zeros_like(positions) if self.constant else positions // self.block
        middle = blocks * self.block + (self.block - 1) / 2
        mean = self.rope.turn_back(np.broadcast_to(self.mean, (len(positions), *self.mean.shape)), -middle)
        if not self.constant:
            mean[positions == 0] = self.moments.start
        return mean

    def condition(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Keys with RoPE, (n, n_head_kv, head_size), as they are stored: float32."""
        return ((keys - self.mean_at(positions)) / self.scale).astype(np.float32)

    def restore(self, stored: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The inverse of `condition`, float64."""
        return stored * self.scale + self.mean_at(positions)


def squares_with_rope(squares: np.ndarray, products: np.ndarray, rope: Rope, n: int) -> np.ndarray:
    """Mean squares over the first ``n`` positions, of rows whose mean squares before RoPE are known.

    The two values of a pair turn into each other: fast pairs come to share theirs, slow ones keep what they have.

    Args:
        squares, products: float64 (n_head, head_size), of the channel and with its partner in the pair.
    """
    turn = 2 * n * rope.angle
    still = turn < 1e-6
    safe = np.where(still, 1.0, turn)
    cosine, sine = np.where(still, 1.0, np.sin(safe) / safe), np.where(still, 0.0, (1 - np.cos(safe)) / safe)
    a, b = rope.pairs
    between = (squares[:, a] + squares[:, b]) / 2
    apart = (squares[:, a] - squares[:, b]) / 2 * cosine - products[:, a] * sine
    out = squares.copy()
    out[:, a], out[:, b] = np.maximum(between + apart, 0), np.maximum(between - apart, 0)
    return out


def common_share(angle: np.ndarray, n: int) -> np.ndarray:
    """Of a vector that turns by ``angle`` radians a position, the share that ``n`` positions have in common."""
    half = np.sin(angle / 2)
    still = np.abs(half) < 1e-12
    return np.where(still, 1.0, np.sin(n * angle / 2) / np.where(still, 1.0, n * half))


@contextmanager
def conditioned(moments: Mapping[int, KeyMoments] | None, *, mean_block: int = 0) -> Iterator[None]:
    """Contexts that this thread makes inside the block get these constants, by layer; None for none.

    Args:
        mean_block: positions that share a mean: 1, 2, 4 or 8; 0 for the engine's own.

    Raises:
        EngineError: any other ``mean_block``, for which the engine has no room.
    """
    if mean_block not in (0, 1, 2, 4, 8):
        raise EngineError(f"mean_block is 1, 2, 4 or 8 positions, not {mean_block}")
    arrays = []  # alive until the engine has copied them

    def address(array: np.ndarray) -> int:
        arrays.append(np.ascontiguousarray(array, dtype=np.float32))
        return arrays[-1].ctypes.data

    layers = [
        _LayerConstants(il, *m.mean.shape, *(address(getattr(m, f.name)) for f in fields(KeyMoments)))
        for il, m in (moments or {}).items()
    ]
    constants = _KeyConstants(len(layers), (_LayerConstants * len(layers))(*layers), mean_block)
    use = _function("tq_use_key_constants", None, ctypes.POINTER(_KeyConstants))
    use(ctypes.byref(constants))  # without layers too: else the engine would take the model's own
    _here.decided = True
    try:
        yield
    finally:
        use(None)
        _here.decided = False


_here = threading.local()


def is_decided() -> bool:
    """Whether this thread is inside `conditioned`, so that nobody else has to choose constants."""
    return getattr(_here, "decided", False)


@contextmanager
def filtering(row_filter: RowFilter) -> Iterator[Callable[[], None]]:
    """Contexts that this thread makes inside the block pass their rows through ``row_filter``, also after it.

    An exception in the filter is not raised there, where llama.cpp calls; the yielded function raises the first one.
    The filter must outlive the contexts, so use them inside the block.
    """
    failures: list[BaseException] = []

    def call(_user: int, given: ctypes._Pointer[_Rows]) -> None:
        if failures:
            return
        r = given.contents
        try:
            positions = np.ctypeslib.as_array(r.positions, shape=(r.n_tokens,))
            rows = np.ctypeslib.as_array(r.rows, shape=(r.n_tokens, r.n_head, r.head_size))
            row_filter(Batch(Rows(r.kind), r.il, r.logit_scale, positions, rows))
        except BaseException as failure:  # noqa: BLE001 - llama.cpp cannot carry it
            failures.append(failure)

    def check() -> None:
        if failures:
            traceback.clear_frames(failures[0].__traceback__)  # rows there are freed memory: nobody must print them
            raise failures[0]

    use = _function("tq_use_row_filter", None, _FILTER, ctypes.c_void_p)
    callback = _FILTER(call)
    use(callback, None)
    try:
        yield check
    finally:
        use(_FILTER(0), None)


def layer_rope(ctx: int, layer: int) -> Rope | None:
    """The RoPE of a layer in a ``llama_context *``; None when it is of a kind that conditioning does not know."""
    rope = _Rope()
    find = _function("tq_layer_rope", ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(_Rope))
    if find(ctx, layer, ctypes.byref(rope)) != 0:
        return None
    half = np.arange(rope.n_rot // 2)
    pairs = np.stack([half, half + half.size] if rope.is_neox else [2 * half, 2 * half + 1])
    return Rope(pairs, np.array(rope.angle[: half.size], dtype=np.float64))


def conditioned_layers(ctx: int) -> ConditionedLayers:
    """What the KV cache of a ``llama_context *`` does to its keys, counted over layers."""
    layers = _Layers()
    _function("tq_kv_conditioning", ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Layers))(ctx, ctypes.byref(layers))
    return ConditionedLayers(layers.plain, layers.scaled, layers.constant, layers.positional)


def _function(name: str, result: type | None, *arguments: type) -> Callable:
    lib = activate().llama_cpp._lib
    if not hasattr(lib, name):
        raise EngineError(f"the loaded libraries do not export {name}; build tq-ggml's own with `make dev`")
    function = getattr(lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function
