"""The tq3 and tq4 block codecs in numpy: the specification that the C kernels must match byte for byte.

TurboQuant's MSE stage (arXiv 2504.19874) on blocks of 32 values: a signed Walsh-Hadamard transform, then Lloyd-Max
codes and one fp16 scale. Float operations are IEEE float32, rounded to nearest even after each one (no FMA), and
their order is part of the format. All functions work on all blocks at once; the last axis is the block.

=====  =====  ==================================================================================================
type   bytes  layout
=====  =====  ==================================================================================================
tq4    18     fp16 scale; 16 bytes: code of element j in the low nibble of byte j, of j+16 in the high one;
              code = magnitude index | sign << 3
tq3    14     fp16 scale; 8 bytes: magnitude indices of elements j, j+8, j+16, j+24 at bits 0, 2, 4, 6 of byte j;
              4 bytes: bit j of byte m is the sign of element 4j + m
=====  =====  ==================================================================================================

A value is ±level · scale / 32 in the rotated domain. An all-zero block is 32 zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tq_ggml.cache_types import resolve
from tq_ggml.codebooks import N_BUCKETS, BlockTable, block_table, sign_mask
from tq_ggml.errors import CacheTypeError

BLOCK = 32
MAX_INPUT = np.float32(65504)  # the largest fp16, for inputs and for the block scale
MIN_LARGEST = np.float32(1e-8)  # blocks of smaller values, as transformed, are zeros: fp16 has no such scale
LEVEL_STEP = np.float32(1 / 32)  # keeps the scale of ordinary data in fp16's normal range
WHT_SCALE = np.float32(1 / np.sqrt(32))
SIGNS = np.where(sign_mask() >> np.arange(BLOCK) & 1, -1, 1).astype(np.float32)

_BITS = {"tq3": 3, "tq4": 4}


@dataclass(frozen=True, eq=False)
class Codes:
    """Blocks before packing: ``scale`` float16 (m,), ``index`` uint8 (m, 32), ``negative`` bool (m, 32)."""

    scale: np.ndarray
    index: np.ndarray
    negative: np.ndarray


# ---- the public functions ----


def quantize(x: np.ndarray, type_name: str, scale: str = "search") -> np.ndarray:
    """Encode float32 values.

    Args:
        x: float32 (..., n), n a multiple of 32. NaN counts as 0 and values are clamped to ±65504.
        type_name: "tq3" or "tq4", or an alias.
        scale: "search" tries eight scales and refits the best by least squares, as the kernels do; "norm" takes the
            scale from the block's norm, as MNN does, for comparison.

    Returns:
        uint8 (..., n/32 · type size).

    Raises:
        TypeError: ``x`` is not float32.
        ValueError: the last axis is not a multiple of 32; unknown type or scale.
    """
    name, size = _block_type(type_name)
    encode = {"search": _encode_search, "norm": _encode_norm}.get(scale)
    if encode is None:
        raise ValueError(f"scale={scale!r}: choose 'search' or 'norm'")
    blocks = _blocks(x)
    packed = _pack(encode(_hadamard(_finite(blocks) * SIGNS), block_table(_BITS[name])), name)
    return packed.reshape(*x.shape[:-1], x.shape[-1] // BLOCK * size)


def dequantize(data: np.ndarray, type_name: str) -> np.ndarray:
    """Decode what `quantize` wrote.

    Args:
        data: uint8 (..., n/32 · type size).
        type_name: "tq3" or "tq4", or an alias.

    Returns:
        float32 (..., n).

    Raises:
        TypeError: ``data`` is not uint8.
        ValueError: the last axis is not a whole number of blocks; unknown type.
    """
    name, size = _block_type(type_name)
    values = unrotate(rotated_values(unpack(data, name), name))
    return values.reshape(*data.shape[:-1], data.shape[-1] // size * BLOCK)


def unpack(data: np.ndarray, type_name: str) -> Codes:
    """The scales and codes of what `quantize`, the kernels or the engine wrote.

    Args:
        data: uint8 (..., n/32 · type size).
        type_name: "tq3" or "tq4", or an alias.

    Returns:
        `Codes` of all blocks in order, m = data.size / type size; `rotated_values` tells what they stand for.

    Raises:
        TypeError, ValueError: as `dequantize`.
    """
    name, size = _block_type(type_name)
    return _unpack(_array(data, np.uint8, size, f"bytes of a {name} block").reshape(-1, size), name)


def rotated_values(codes: Codes, type_name: str) -> np.ndarray:
    """What `unpack` found as float32 (m, 32), still rotated: ±level · scale / 32."""
    name, _ = _block_type(type_name)
    return _values(codes, block_table(_BITS[name]).levels)


def rotate(x: np.ndarray) -> np.ndarray:
    """Fixed signs, then the orthonormal Walsh-Hadamard transform, on each 32 values of the last axis.

    Args:
        x: float32 (..., n), n a multiple of 32.

    Returns:
        float32 (..., n).

    Raises:
        TypeError, ValueError: as `quantize`.
    """
    return (_hadamard(_blocks(x) * SIGNS) * WHT_SCALE).reshape(x.shape)


def unrotate(y: np.ndarray) -> np.ndarray:
    """The inverse of `rotate`; same shapes and errors."""
    return (_hadamard(_blocks(y)) * WHT_SCALE * SIGNS).reshape(y.shape)


def nmse(x: np.ndarray, decoded: np.ndarray) -> float:
    """Squared error of ``decoded`` over the energy of ``x``, summed in float64.

    Raises:
        ValueError: the shapes differ, or ``x`` has no energy.
    """
    if np.shape(x) != np.shape(decoded):
        raise ValueError(f"shapes {np.shape(x)} and {np.shape(decoded)} differ")
    x = np.asarray(x, dtype=np.float64)
    energy = float(np.sum(x * x))
    if energy == 0:
        raise ValueError("the NMSE of all-zero data is undefined")
    return float(np.sum((x - decoded) ** 2)) / energy


# ---- checks ----


def _block_type(type_name: str) -> tuple[str, int]:
    found = resolve(type_name)
    if found.name not in _BITS:
        raise CacheTypeError(f"the reference codec knows {' and '.join(_BITS)}, not {found.name}")
    return found.name, found.type_size


def _array(a: np.ndarray, dtype: type, multiple: int, what: str) -> np.ndarray:
    if not isinstance(a, np.ndarray) or a.dtype != dtype:
        found = a.dtype if isinstance(a, np.ndarray) else type(a).__name__
        name = np.dtype(dtype).name
        raise TypeError(f"expected a {name} array, got {found}; convert with np.asarray(x, dtype=np.{name})")
    if a.ndim == 0 or a.shape[-1] % multiple:
        raise ValueError(f"the last axis of shape {a.shape} must be a multiple of {multiple}, the {what}")
    return a


def _blocks(x: np.ndarray) -> np.ndarray:
    return _array(x, np.float32, BLOCK, "values of a block").reshape(-1, BLOCK)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.clip(np.where(np.isnan(x), np.float32(0), x), -MAX_INPUT, MAX_INPUT)


# ---- encoder ----


def _hadamard(x: np.ndarray) -> np.ndarray:
    """Unnormalised Walsh-Hadamard transform of (m, 32) float32, strides 1 to 16."""
    for h in (1, 2, 4, 8, 16):
        pairs = x.reshape(-1, BLOCK // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack((a + b, a - b), axis=2)
    return x.reshape(-1, BLOCK)


def _encode_search(w: np.ndarray, table: BlockTable) -> Codes:
    """Code with the best of the candidate scales, then fit the scale to the codes by least squares.

    ``w`` is rotated but not yet divided by √32; the tables' scales allow for it.
    """
    a = np.abs(w)
    largest = a.max(axis=1)
    zero = largest < MIN_LARGEST
    inverse = np.float32(1) / np.where(zero, np.float32(1), largest)
    best = _best_candidate(a, inverse, table)
    steps = np.trunc(a * (table.steps_of_largest[best] * inverse)[:, None]).astype(np.int32)
    index = _count_reached(steps, table.edges)
    scale = largest * table.scale_of_largest[best] * (np.float32(1) + _relative_error(steps, index, table))
    return _codes(scale, index, w, zero)


def _best_candidate(a: np.ndarray, inverse: np.ndarray, table: BlockTable) -> np.ndarray:
    """The candidate scale with the least squared error, (m,), the first of equals; by the tables, not exactly."""
    bucket = np.rint(a * (np.float32(N_BUCKETS - 1) * inverse)[:, None]).astype(np.uint8)
    return np.argmin([errors[bucket].sum(axis=1, dtype=np.int32) for errors in table.errors], axis=0)


def _relative_error(steps: np.ndarray, index: np.ndarray, table: BlockTable) -> np.ndarray:
    """How far, relative to it, the candidate scale is below the least-squares one, Σ magnitude·level / Σ level²."""
    level = table.levels[index].astype(np.int32)
    residual = 2 * steps + 1 - table.half_steps * level  # in half steps, from the middle of the magnitude's step
    dot, norm = (np.sum(level * x, axis=1, dtype=np.int32).astype(np.float32) for x in (residual, level))
    return dot / norm * np.float32(1 / table.half_steps)


def _encode_norm(w: np.ndarray, table: BlockTable) -> Codes:
    """MNN's encoder, norm as scale: one level unit is the block's RMS over the codebook's σ."""
    y = np.abs(w) * WHT_SCALE
    rms = np.sqrt(np.mean(y * y, axis=1, dtype=np.float64)).astype(np.float32)
    ends = (table.levels[1:].astype(np.int32) + table.levels[:-1]).astype(np.float32) / (2 * table.multiplier)
    index = _count_reached(y, rms[:, None] * ends)
    return _codes(rms / (LEVEL_STEP * table.multiplier), index, w, rms == 0)


def _codes(scale: np.ndarray, index: np.ndarray, w: np.ndarray, zero: np.ndarray) -> Codes:
    scale = np.minimum(scale, MAX_INPUT).astype(np.float16)
    zero = zero | (scale == 0)
    return Codes(
        scale=np.where(zero, np.float16(0), scale),
        index=np.where(zero[:, None], np.uint8(0), index),
        negative=np.signbit(w) & ~zero[:, None],
    )


def _count_reached(a: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How many of the ends of cells, (n,) or (m, n), each magnitude (m, 32) reaches: its level's index, uint8."""
    return sum((a >= ends[..., j, None]).astype(np.uint8) for j in range(ends.shape[-1]))


# ---- layouts ----


def _pack(codes: Codes, name: str) -> np.ndarray:
    scale = codes.scale.astype("<f2")[:, None].view(np.uint8)
    body = _pack_tq4(codes) if name == "tq4" else _pack_tq3(codes)
    return np.concatenate((scale, *body), axis=1)


def _pack_tq4(codes: Codes) -> tuple[np.ndarray, ...]:
    code = codes.index | codes.negative.astype(np.uint8) << 3
    return (code[:, :16] | code[:, 16:] << 4,)


def _pack_tq3(codes: Codes) -> tuple[np.ndarray, ...]:
    index = codes.index.reshape(-1, 4, 8)
    planes = index[:, 0] | index[:, 1] << 2 | index[:, 2] << 4 | index[:, 3] << 6
    signs = codes.negative.reshape(-1, 8, 4).transpose(0, 2, 1)
    return planes, np.packbits(signs, axis=2, bitorder="little")[..., 0]


def _unpack(blocks: np.ndarray, name: str) -> Codes:
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2")[:, 0]
    if name == "tq4":
        code = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1)
        return Codes(scale, code & 7, code >= 8)
    index = np.concatenate([blocks[:, 2:10] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    signs = np.unpackbits(blocks[:, 10:, None], axis=2, bitorder="little").transpose(0, 2, 1)
    return Codes(scale, index, signs.reshape(-1, BLOCK).astype(bool))


def _values(codes: Codes, levels: np.ndarray) -> np.ndarray:
    """Rotated values, float32 (m, 32)."""
    signed = np.where(codes.negative, -levels[codes.index], levels[codes.index]).astype(np.float32)
    return signed * (codes.scale.astype(np.float32) * LEVEL_STEP)[:, None]
