"""The tq3 and tq4 block codec on numpy arrays, in C (libtq, through cffi).

What the KV cache stores and how, is in docs/codec.md; `tq_ggml.reference` is the same in numpy, to read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tq_ggml._kernels import ffi, lib
from tq_ggml.cache_types import resolve
from tq_ggml.errors import CacheTypeError

BLOCK = 32


class TypeInfo(NamedTuple):
    """A codec type: its name, values per block, bytes per block and stored bits per value."""

    name: str
    block_size: int
    block_bytes: int
    bits_per_value: float


def _c_types() -> dict[str, int]:
    types: dict[str, int] = {}
    while (info := lib.tq_get_type_info(len(types))) != ffi.NULL:
        types[ffi.string(info.name).decode()] = len(types)
    return types


_C_TYPES = _c_types()


def _c_type(name: str | int) -> int:
    known = resolve(name).name
    if known not in _C_TYPES:
        raise CacheTypeError(f"{name!r} has no codec here; the types are {', '.join(_C_TYPES)}")
    return _C_TYPES[known]


def type_info(name: str | int) -> TypeInfo:
    """Size of a type's blocks.

    Raises:
        CacheTypeError (a ValueError): `name` is not tq3, tq4, an alias or an id of them.
    """
    info = lib.tq_get_type_info(_c_type(name))
    return TypeInfo(ffi.string(info.name).decode(), BLOCK, info.block_bytes, 8 * info.block_bytes / BLOCK)


def _array(x: ArrayLike, dtype: type, what: str) -> NDArray:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{what} must be a numpy array of {np.dtype(dtype)}, not {type(x).__name__}")
    if x.dtype != dtype:
        raise TypeError(f"{what} must be of dtype {np.dtype(dtype)}, not {x.dtype}; convert with .astype")
    if x.ndim == 0:
        raise ValueError(f"{what} must have at least one dimension")
    if not x.flags.c_contiguous:
        raise ValueError(f"{what} must be C-contiguous; use numpy.ascontiguousarray")
    if not x.flags.aligned:
        raise ValueError(f"{what} must be aligned to its {x.dtype.itemsize} bytes; use .copy()")
    return x


def _values(x: ArrayLike, what: str) -> NDArray[np.float32]:
    array = _array(x, np.float32, what)
    if array.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension of {what} is {array.shape[-1]}, not a multiple of {BLOCK}")
    return array


def _blocks(data: ArrayLike, info: TypeInfo) -> NDArray[np.uint8]:
    array = _array(data, np.uint8, "data")
    if array.shape[-1] % info.block_bytes:
        raise ValueError(
            f"the last dimension of data is {array.shape[-1]} bytes, not a multiple of {info.name}'s {info.block_bytes}"
        )
    return array


def _floats(x: NDArray[np.float32]):
    return ffi.from_buffer("float[]", x)


def _check(error) -> None:
    if error != ffi.NULL:
        raise ValueError(ffi.string(error).decode())


def quantize(x: NDArray[np.float32], cache_type: str | int) -> NDArray[np.uint8]:
    """Encode values as the KV cache stores them (ggml: ``from_float`` of the type).

    Args:
        x: float32, C-contiguous and aligned, shape (..., n) with n a multiple of 32. NaN is encoded as 0, what lies
            beyond +-65504 (infinities included) as +-65504.
        cache_type: ``"tq3"``, ``"tq4"``, an alias or a ggml id.

    Returns:
        uint8 of shape (..., n / 32 * 14) for tq3, (..., n / 32 * 18) for tq4.

    Raises:
        TypeError: not a float32 numpy array.
        ValueError: shape, contiguity, alignment or type name as above.
    """
    info = type_info(cache_type)
    x = _values(x, "x")
    out = np.empty((*x.shape[:-1], x.shape[-1] // BLOCK * info.block_bytes), np.uint8)
    _check(
        lib.tq_quantize(
            _c_type(cache_type),
            _floats(x),
            x.size,
            ffi.from_buffer(out, require_writable=True),
            out.nbytes,
        )
    )
    return out


def dequantize(data: NDArray[np.uint8], cache_type: str | int) -> NDArray[np.float32]:
    """Decode what `quantize` returned (ggml: ``to_float`` of the type).

    Args:
        data: uint8, C-contiguous, shape (..., m) with m a multiple of the type's bytes per block.
        cache_type: as for `quantize`.

    Returns:
        float32 of shape (..., m / block_bytes * 32).

    Raises:
        TypeError: not a uint8 numpy array.
        ValueError: shape, contiguity, alignment or type name as above.
    """
    info = type_info(cache_type)
    data = _blocks(data, info)
    out = np.empty((*data.shape[:-1], data.shape[-1] // info.block_bytes * BLOCK), np.float32)
    _check(
        lib.tq_dequantize(
            _c_type(cache_type),
            ffi.from_buffer(data),
            data.nbytes,
            _floats(out),
            out.size,
        )
    )
    return out


def dot(data: NDArray[np.uint8], query: NDArray[np.float32], cache_type: str | int) -> NDArray[np.float32]:
    """Dot products of encoded rows with one query, in the rotated domain (ggml: ``vec_dot`` of the type).

    The query is rotated and rounded to int8 once for all rows, as attention does with it.

    Args:
        data: uint8, C-contiguous, shape (..., m): rows from `quantize`.
        query: float32, C-contiguous, shape (n,), n = 32 * m / block_bytes.
        cache_type: as for `quantize`.

    Returns:
        float32 of shape (...): one dot product a row.

    Raises:
        TypeError, ValueError: as for `quantize`; also when the lengths do not fit.
    """
    info = type_info(cache_type)
    data, query = _blocks(data, info), _values(query, "query")
    n = data.shape[-1] // info.block_bytes * BLOCK
    if query.shape != (n,):
        raise ValueError(f"query has shape {query.shape}; rows of {data.shape[-1]} {info.name} bytes need ({n},)")
    out = np.zeros(data.shape[:-1], np.float32)
    _check(
        lib.tq_dot(_c_type(cache_type), ffi.from_buffer(data), data.nbytes, out.size, _floats(query), n, _floats(out))
    )
    return out


def simd_level() -> str:
    """Name of the kernels that run: scalar, avx2, avx512bw, avx512 (with VNNI), neon or dotprod."""
    return ffi.string(lib.tq_simd_level()).decode()


def simd_levels() -> list[str]:
    """The levels this CPU can run, best first."""
    levels: list[str] = []
    while (name := lib.tq_simd_available(len(levels))) != ffi.NULL:
        levels.append(ffi.string(name).decode())
    return levels


def set_simd_level(name: str) -> None:
    """Run another level's kernels, for tests and comparisons; TQ_SIMD does the same from outside.

    Raises:
        ValueError: this CPU cannot run it; the message lists what it can.
    """
    if not lib.tq_set_simd_level(name.encode()):
        raise ValueError(f"SIMD level {name!r} cannot run here; choose one of {', '.join(simd_levels())}")
