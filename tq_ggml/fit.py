"""``tq-ggml fit``: what weights and KV cache take at several contexts, and the longest context that fits.

llama.cpp itself plans the cache in a dry run that allocates nothing (`tq_ggml.limits.planner`), so sliding
windows, shared, latent (MLA) and recurrent layers count as it counts them.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable

from tq_ggml import report
from tq_ggml.cache_types import CacheType, Pair, parse_pair, resolve
from tq_ggml.errors import TqError
from tq_ggml.limits import available_memory, fits_heads, planner, rounded
from tq_ggml.models import GgufInfo, check_gguf, resolve_model

TYPES = ("f16", "q8_0", "tq4", "q4_0", "tq4/tq3", "tq3")
CONTEXTS = (4096, 16384, 65536)
_MIB = 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_STEP = 256


class Plan:
    """A model's KV cache in bytes, from what llama.cpp plans for f16.

    Args:
        info: of the model.
        planned: `tq_ggml.limits.planner`'s function.
    """

    def __init__(self, info: GgufInfo, planned: Callable[[CacheType, CacheType, int], tuple[int, int]]) -> None:
        f16 = resolve("f16")
        self.info, self._planned = info, planned
        self._f16 = functools.cache(lambda n_ctx: planned(f16, f16, n_ctx))

    def takes(self, pair: Pair) -> bool:
        """Whether llama.cpp makes such a cache: one of latents (MLA) has keys and values in one."""
        return pair[0] == pair[1] or sum(self._planned(*pair, _STEP)) > 0

    def kv_bytes(self, pair: Pair, n_ctx: int) -> int:
        """Bytes of keys and values at a context of ``n_ctx`` tokens. Whole blocks: exact for every type."""
        sides = zip(self._f16(rounded(n_ctx)), pair, strict=True)
        return sum(int(n_bytes * t.bits_per_value / 16) for n_bytes, t in sides)

    def longest(self, pair: Pair, room: int) -> int:
        """The longest context, up to the model's own, whose cache fits in ``room`` bytes; 0 for none."""
        low, high = 0, self.info.n_ctx_train // _STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.kv_bytes(pair, middle * _STEP) <= room else (low, middle - 1)
        return low * _STEP


def rows(info: GgufInfo, memory: int, contexts: list[int]) -> list[dict]:
    """A row for each cache type that the model's heads take: bytes by context, and the longest context.

    Raises:
        TqError: the model has no KV cache that llama.cpp can plan.
    """
    with planner(info.path) as planned:
        return _rows(Plan(info, planned), memory, contexts)


def _rows(plan: Plan, memory: int, contexts: list[int]) -> list[dict]:
    info, found = plan.info, []
    for name in TYPES:
        pair = parse_pair(name)
        if not all(map(fits_heads, pair, (info.head_size_k, info.head_size_v))) or not plan.takes(pair):
            continue
        kv = {n: plan.kv_bytes(pair, n) for n in contexts}
        if not all(kv.values()):
            raise TqError(f"llama.cpp plans no KV cache for {info.path.name}")
        row = {"cache_type": name, "longest": plan.longest(pair, memory - info.size)}
        for n, n_bytes in kv.items():
            row |= {f"kv_mib_{n}": n_bytes / _MIB, f"total_mib_{n}": (n_bytes + info.size) / _MIB}
        found.append(row)
    return found


def parse_memory(text: str) -> int:
    """``8G``, ``512M``, ``7.5GiB`` or bytes, as bytes; units are powers of 1024.

    Raises:
        ValueError: anything else.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found or not (n_bytes := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise ValueError(f"{text!r} is not an amount of memory, such as 8G or 512M")
    return n_bytes


def fit(args: argparse.Namespace) -> None:
    """``tq-ggml fit``."""
    info = check_gguf(resolve_model(args.model))
    memory = args.memory or available_memory()
    if memory is None:
        raise TqError("this system does not tell how much memory is free; give --memory, such as --memory 8G")
    contexts = args.ctx or [n for n in CONTEXTS if n < info.n_ctx_train] + [info.n_ctx_train]
    table = rows(info, memory, contexts)
    columns = [report.Column("cache type", "cache_type")]
    columns += [report.Column(f"MiB at {n}", f"total_mib_{n}", ".0f") for n in contexts]
    columns.append(report.Column("longest context", "longest"))
    print(
        f"{info.path.name}: {info.size / _MIB:.0f} MiB of weights; {memory / _MIB:.0f} MiB of memory; trained on "
        f"{info.n_ctx_train} tokens. Weights and cache are counted, not llama.cpp's working buffers.",
        file=sys.stderr,
    )
    sys.stdout.write(report.render(table, args.output, columns))
    print(_advice(table, info), file=sys.stderr)


def _advice(table: list[dict], info: GgufInfo) -> str:
    best = max(table, key=lambda row: row["longest"])["longest"]
    if not best:
        return "Not even the smallest cache fits beside the weights: take smaller weights."
    first = next(row for row in table if row["longest"] == best)
    if first["cache_type"] == "f16":
        return f"f16 takes the whole context of {best} tokens."
    f16 = table[0]["longest"]
    return f"{first['cache_type']} takes {best} tokens, f16 {f16}; `tq-ggml recommend` tells what it costs."
