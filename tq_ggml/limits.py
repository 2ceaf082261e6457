"""Does a KV cache fit: the type's block into the model's heads, the whole cache into this machine's memory?

Asked before llama.cpp is, because it answers the first with a null pointer and the second with the kernel's killer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path

from tq_ggml import rpc
from tq_ggml.cache_types import CACHE_TYPES, CacheType, resolve
from tq_ggml.conditioning import conditioned
from tq_ggml.errors import CacheTypeError, EngineError
from tq_ggml.library import activate, kv_cache_bytes, require_type, uninterrupted
from tq_ggml.models import GgufInfo

_MIB = 1 << 20
_CELLS = 256  # llama.cpp rounds a context up to this many tokens
_LONGEST = (1 << 31) - _CELLS  # the last that is still an int32 when rounded
_PROBE = 1 << 17  # tokens; longer than any sliding window, so above it the bytes grow by a constant per token


def check_cache(info: GgufInfo, type_k: CacheType, type_v: CacheType, n_ctx: int, weights: int = 0) -> None:
    """Refuse a cache that cannot work.

    Args:
        n_ctx: tokens; 0 is the model's training context.
        weights: bytes of the model that are still to be loaded beside the cache.

    Raises:
        CacheTypeError: a block does not divide the head size, or the libraries lack the type.
        EngineError: ``n_ctx`` is no size, or the cache is certainly larger than the free memory.
    """
    if not isinstance(n_ctx, Integral) or not 0 <= n_ctx <= _LONGEST:
        raise EngineError(f"n_ctx must be a whole number from 0 (the model's own) to {_LONGEST}, not {n_ctx!r}")
    for what, cache_type, head_size in (("key", type_k, info.head_size_k), ("value", type_v, info.head_size_v)):
        require_type(cache_type)
        _check_head_size(info, what, cache_type, head_size)
    _check_memory(info, type_k, type_v, n_ctx or info.n_ctx_train, weights)


def fits_heads(cache_type: CacheType, head_size: int) -> bool:
    """Whether whole blocks of a type make up a head."""
    return head_size % cache_type.block_size == 0


def _check_head_size(info: GgufInfo, what: str, cache_type: CacheType, head_size: int) -> None:
    if fits_heads(cache_type, head_size):
        return
    fitting = ", ".join(t.name for t in CACHE_TYPES if fits_heads(t, head_size) and t.name != "f32")
    raise CacheTypeError(
        f"cache type {cache_type} has blocks of {cache_type.block_size} values, but the {what} head size {head_size} "
        f"of {info.path.name} is not a multiple of {cache_type.block_size}; use {fitting}"
    )


def _check_memory(info: GgufInfo, type_k: CacheType, type_v: CacheType, n_ctx: int, weights: int) -> None:
    free = available_memory()
    if free is None or rpc.servers():  # whose memory is not this machine's
        return
    # Weights are mapped and may be larger than the memory, at disk speed; then only the cache has to fit.
    room = free - weights if weights < free else free
    if sum(kv_bytes_at_most(info, type_k, type_v, n_ctx)) <= room:
        return
    needed = planned_kv_bytes(info.path, type_k, type_v, n_ctx)
    if sum(needed) <= room:
        return
    longest = int(n_ctx * room / sum(needed)) // _CELLS * _CELLS
    hint = f"use a context of at most {longest} tokens" if longest else "close other programs"
    if longest > info.n_ctx_train:
        hint += f" (the model was trained on {info.n_ctx_train})"
    raise EngineError(
        f"a context of {n_ctx} tokens needs {sum(needed) / _MIB:.0f} MiB for its KV cache (K {type_k}, V {type_v}), "
        f"but {room / _MIB:.0f} MiB of memory are free for it; {hint}{_smaller_type(needed, type_k, type_v, room)}"
    )


def _smaller_type(needed: tuple[int, int], type_k: CacheType, type_v: CacheType, room: int) -> str:
    for candidate in (resolve("tq4"), resolve("tq3")):
        scaled = sum(
            n * candidate.bits_per_value / t.bits_per_value for n, t in zip(needed, (type_k, type_v), strict=True)
        )
        if scaled <= room:
            return f", or cache type {candidate} ({scaled / _MIB:.0f} MiB)"
    return ""


def kv_bytes_at_most(info: GgufInfo, type_k: CacheType, type_v: CacheType, n_ctx: int) -> tuple[int, int]:
    """Bytes of keys and of values if every layer kept every token.

    Exact for plain transformers; sliding windows, shared, latent (MLA) or recurrent layers need less.
    """
    heads = sum(info.n_head_kv) if isinstance(info.n_head_kv, tuple) else info.n_layer * info.n_head_kv
    cells = rounded(n_ctx)
    return (
        int(cells * heads * info.head_size_k * type_k.bits_per_value / 8),
        int(cells * heads * info.head_size_v * type_v.bits_per_value / 8),
    )


def rounded(n_ctx: int) -> int:
    """The tokens of the context that llama.cpp makes when it is asked for ``n_ctx``."""
    return -(-n_ctx // _CELLS) * _CELLS


def planned_kv_bytes(path: Path, type_k: CacheType, type_v: CacheType, n_ctx: int) -> tuple[int, int]:
    """Bytes of keys and of values as llama.cpp itself plans them, for any architecture; ``(0, 0)`` if it cannot."""
    with planner(path) as plan:
        return plan(type_k, type_v, n_ctx)


@contextmanager
def planner(path: Path) -> Iterator[Callable[[CacheType, CacheType, int], tuple[int, int]]]:
    """`planned_kv_bytes` of one model for many contexts: a dry run in which llama.cpp lays out model and caches without
    allocating either (its ``no_alloc``)."""
    llama_cpp = activate()
    params = llama_cpp.llama_model_default_params()
    params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
    with uninterrupted():
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)

    def plan(type_k: CacheType, type_v: CacheType, n_ctx: int) -> tuple[int, int]:
        n_ctx = rounded(n_ctx)
        if n_ctx <= _PROBE:
            return _plan(model, type_k, type_v, n_ctx)
        half, full = (_plan(model, type_k, type_v, n) for n in (_PROBE // 2, _PROBE))
        k, v = (f + (f - h) * (n_ctx - _PROBE) // (_PROBE // 2) for h, f in zip(half, full, strict=True))
        return k, v

    try:
        yield plan
    finally:
        if model:
            llama_cpp.llama_model_free(model)


def _plan(model: int | None, type_k: CacheType, type_v: CacheType, n_ctx: int) -> tuple[int, int]:
    llama_cpp = activate()
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.type_k, params.type_v = n_ctx, type_k.ggml_id, type_v.ggml_id
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    with uninterrupted(), conditioned(None):
        ctx = llama_cpp.llama_init_from_model(model, params) if model else None
        try:
            return kv_cache_bytes(ctx) if ctx else (0, 0)
        finally:
            if ctx:
                llama_cpp.llama_free(ctx)


def available_memory() -> int | None:
    """Bytes this process can still use: Linux's MemAvailable, less where a cgroup says so. None on other systems."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    kib = next((line.split()[1] for line in meminfo.splitlines() if line.startswith("MemAvailable:")), None)
    return None if kib is None else min(int(kib) * 1024, *cgroup_room(), 1 << 62)


def cgroup_room(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes left under every memory limit (cgroup v1 or v2) on this process; page cache counts as free."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, usage_file = mount, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_file, usage_file = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's, and then only the mount's root is there.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            limit = _read(folder / limit_file)
            if limit.isdecimal():
                yield int(limit) - int(_read(folder / usage_file) or 0) + _page_cache(folder)


def _page_cache(folder: Path) -> int:
    entries = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return sum(int(entry[1]) for entry in entries if entry[0] in ("inactive_file", "active_file"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
