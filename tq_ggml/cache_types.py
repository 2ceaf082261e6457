"""KV cache types: the one table of their names, ggml ids and block sizes.

A new cache type is one row here, one row in ``c_src/tq`` and one in ``c_src/ggml``; the build checks that the
ids agree with the patched ggml.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from tq_ggml.errors import CacheTypeError


@dataclass(frozen=True)
class CacheType:
    """A type that llama.cpp can keep keys or values in.

    Attributes:
        name: as ``ggml_type_name`` and ``--cache-type-k`` spell it.
        ggml_id: the number of ``enum ggml_type``.
        block_size: values per block; it must divide the head size.
        type_size: bytes per block.
        aliases: other spellings users know.
    """

    name: str
    ggml_id: int
    block_size: int
    type_size: int
    aliases: tuple[str, ...] = ()

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, scales included."""
        return 8 * self.type_size / self.block_size

    @property
    def is_quantized(self) -> bool:
        """Whether llama.cpp counts it as quantised (it then needs flash attention for values)."""
        return self.block_size > 1

    def f16_bytes(self, n_bytes: int) -> int:
        """Bytes that the values of ``n_bytes``, a whole number of blocks, take in f16."""
        return n_bytes // self.type_size * self.block_size * 2

    def __str__(self) -> str:
        return self.name


CACHE_TYPES: tuple[CacheType, ...] = (
    CacheType("f32", 0, 1, 4),
    CacheType("f16", 1, 1, 2),
    CacheType("bf16", 30, 1, 2),
    CacheType("q8_0", 8, 32, 34),
    CacheType("q5_1", 7, 32, 24),
    CacheType("q5_0", 6, 32, 22),
    CacheType("q4_1", 3, 32, 20),
    CacheType("q4_0", 2, 32, 18),
    CacheType("iq4_nl", 20, 32, 18),
    CacheType("tq4", 44, 32, 18, ("turbo4", "tbq4")),
    CacheType("tq3", 43, 32, 14, ("turbo3", "tbq3")),
)

Pair = tuple[CacheType, CacheType]
"""Types of keys and of values."""

_BY_NAME = {name: t for t in CACHE_TYPES for name in (t.name, *t.aliases)}
_BY_ID = {t.ggml_id: t for t in CACHE_TYPES}


def resolve(spec: str | int | CacheType) -> CacheType:
    """The cache type that a name, an alias, a ggml id or a digit string means.

    Raises:
        CacheTypeError: nothing of that name or number; the message lists the allowed ones.
    """
    if isinstance(spec, CacheType):
        return spec
    if isinstance(spec, str) and spec.strip().isdecimal():
        spec = int(spec)
    if isinstance(spec, Integral) and not isinstance(spec, bool):  # numpy's integers, too
        found = _BY_ID.get(int(spec))
    else:
        found = _BY_NAME.get(str(spec).strip().lower())
    if found is None:
        raise CacheTypeError(f"unknown cache type {spec!r}; choose one of {names()}")
    return found


def names() -> str:
    """The allowed names as ``f32, f16, ...``, for messages and help texts."""
    return ", ".join(t.name for t in CACHE_TYPES)


def parse_pair(spec: str | int | CacheType) -> Pair:
    """``"tq4"`` is tq4 for keys and values; ``"q8_0/tq4"`` is keys / values.

    Raises:
        CacheTypeError: more than one slash, or an unknown name on either side.
    """
    if not isinstance(spec, str):
        return resolve(spec), resolve(spec)
    sides = spec.split("/")
    if len(sides) > 2:
        raise CacheTypeError(f"cache type {spec!r} has more than one '/'; write KEYS/VALUES, for example q8_0/tq4")
    return resolve(sides[0]), resolve(sides[-1])
