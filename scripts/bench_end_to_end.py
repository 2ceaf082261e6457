"""Whole models for scripts/bench.py: prefill, decode at depth and memory, of Qwen3 shapes with random Q4_0 weights.

All caches are measured in one process, llama.cpp's own attention among them, in turn. Memory is that of a process of
its own for each type:

    python scripts/bench_end_to_end.py MODEL TYPE N_CTX THREADS
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import make_qwen3_gguf
from tq_ggml.benchmark import BATCH, Speed, Test, to_rows
from tq_ggml.engine import Context, Model
from tq_ggml.errors import TqError
from tq_ggml.library import activate

Row = dict[str, Any]
N_GEN = 16
DECODE_ROUNDS_PER_PREFILL = 3


class Setup(NamedTuple):
    preset: str
    layers: int
    depth: int


class Cache(NamedTuple):
    name: str
    stock: bool = False

    @property
    def is_slow(self) -> bool:
        """llama.cpp prefills a quantised cache several times slower, ten minutes at a depth of 8k: once must do."""
        return self.stock and self.name != "f16"


SETUPS = (Setup("0.6B", 28, 8192), Setup("4B", 9, 4096))
CACHES = (
    Cache("f16", True),  # the ratios of the document are against the first
    Cache("q8_0", True),
    Cache("f16"),
    Cache("q8_0"),
    Cache("q4_0"),
    Cache("tq4"),
    Cache("tq3"),
)
TYPES = tuple(dict.fromkeys(cache.name for cache in CACHES))


class Run(NamedTuple):
    cache: Cache
    context: Context
    speed: Speed


def measure_all(folder: Path, threads: int, rounds: int, note: Callable[..., None]) -> list[Row]:
    """A row of each setup and cache, and one of each setup and type for the memory (``part`` tells them apart)."""
    rows = []
    for setup in SETUPS:
        path = make_model(setup, folder)
        about = {**setup._asdict(), "of_layers": make_qwen3_gguf.PRESETS[setup.preset].layers}
        for name in TYPES:
            note("memory", setup.preset, name)
            rows.append(about | {"part": "memory", "type": name} | memory_of(path, name, setup.depth, threads))
        rows += [about | {"part": "speed"} | row for row in measure(path, setup.depth, threads, rounds, note)]
    return rows


def make_model(setup: Setup, folder: Path) -> Path:
    """The model's path; it is made once."""
    out = folder / f"qwen3-{setup.preset}-{setup.layers}.gguf"
    if not out.exists():
        options = ["--preset", setup.preset, "--layers", str(setup.layers), "-o", str(out)]
        make_qwen3_gguf.run(make_qwen3_gguf.parse_arguments(options))
    return out


def use_stock(stock: bool) -> None:
    """Let llama.cpp attend f16, q8_0, q4_0 and iq4_nl caches, or tq-ggml again."""
    function = activate().llama_cpp._lib.tq_attention_use_stock
    function.argtypes, function.restype = [ctypes.c_bool], None
    function(stock)


def measure(path: Path, depth: int, threads: int, rounds: int, note: Callable[..., None], caches=CACHES) -> list[Row]:
    """Tokens per second of each cache: prefill of ``depth`` tokens, and decoding after them.

    `tq_ggml.benchmark.bench` fills a cache anew for every round of decoding, which at these depths takes minutes; here
    the rounds of decoding follow the last prefill.
    """
    with Model(path) as model, contextlib.ExitStack() as stack:
        tokens = np.random.default_rng(0).integers(0, model.n_vocab, depth + N_GEN, dtype=np.int32)
        runs = [stack.enter_context(opened(model, cache, depth, threads)) for cache in caches]
        stack.callback(use_stock, False)
        for run in runs:
            timed(run, tokens[:BATCH], 0)  # warms up
        for i in range(rounds):
            for run in runs:
                if i == 0 or not run.cache.is_slow:
                    note("prefill", depth, run.cache.name, "stock" if run.cache.stock else "")
                    run.context.clear()
                    run.speed.prefill.append(depth / timed(run, tokens[:depth], 0))
        for _ in range(DECODE_ROUNDS_PER_PREFILL * rounds):
            for run in runs:
                steps = range(depth, depth + N_GEN)
                run.speed.decode.append(N_GEN / sum(timed(run, tokens[at : at + 1], at) for at in steps))
        return [as_row(run, row) for run, row in zip(runs, to_rows([run.speed for run in runs]), strict=True)]


@contextlib.contextmanager
def opened(model: Model, cache: Cache, depth: int, threads: int):
    with model.context(cache.name, n_ctx=depth + N_GEN, n_batch=BATCH, n_threads=threads) as context:
        speed = Speed(context.type_k, context.type_v, context.kv_bytes, context.kv_bytes_f16, Test(depth, N_GEN))
        yield Run(cache, context, speed)


def timed(run: Run, tokens: np.ndarray, pos: int) -> float:
    use_stock(run.cache.stock)
    start = time.perf_counter()
    run.context.decode(tokens, pos, logits="last")
    return time.perf_counter() - start


def as_row(run: Run, row: Row) -> Row:
    return row | {
        "type": run.cache.name,
        "path": "stock" if run.cache.stock else "ours",
        "rounds": len(run.speed.prefill),
        "values_per_token": run.speed.f16_bytes // 2 // run.context.n_ctx,
    }


# ---- memory --------------------------------------------------------------------------------------------------------


def memory_of(path: Path, name: str, n_ctx: int, threads: int) -> Row:
    """`peak` of a process of its own."""
    command = [sys.executable, __file__, str(path), name, str(n_ctx), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TqError(f"measuring the memory of {name} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def peak(path: str, name: str, n_ctx: int, threads: int) -> Row:
    """MiB of the cache as the engine allocated it, and of this process at its largest, after one batch.

    llama.cpp zeroes the whole cache when it makes one, so all of it counts without being filled.
    """
    with Model(path) as model, model.context(name, n_ctx=n_ctx, n_batch=BATCH, n_threads=threads) as context:
        context.decode(np.zeros(min(BATCH, n_ctx), np.int32), 0, logits="last")
        return {"kv_mib": context.kv_bytes / 2**20, "peak_mib": peak_bytes() / 2**20}


def peak_bytes() -> int:
    """The most memory this process ever had. Linux's ru_maxrss would count what its parent had before exec."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac


if __name__ == "__main__":
    print(json.dumps(peak(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
