"""Speed of a cache type: prefill and decode tokens per second with a given number of tokens in the cache.

All types are measured in one process, in turn, round after round: whatever else the machine does in a round
slows all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from tq_ggml.cache_types import CacheType, Pair

if TYPE_CHECKING:
    from tq_ggml.engine import Context, Model

BATCH = 512


@dataclass(frozen=True)
class Test:
    """What one round does.

    Attributes:
        depth: tokens in the cache when decoding starts.
        n_gen: tokens decoded one at a time after them; 0 leaves decoding out.
        n_prompt: tokens whose prefill is timed after the depth; None times the prefill of the depth itself.
    """

    depth: int
    n_gen: int
    n_prompt: int | None = None

    @property
    def prefilled(self) -> int:
        """Tokens in the timed prefill."""
        return self.depth if self.n_prompt is None else self.n_prompt

    @property
    def n_ctx(self) -> int:
        """Context size that holds the longest run of the test, at least one token."""
        return max(self.depth + max(self.n_gen, self.n_prompt or 0), 1)


@dataclass
class Speed:
    """Rates of one cache type at one depth, tokens per second, one sample per round.

    Attributes:
        kv_bytes: the cache of the test's context as the engine allocated it, bytes.
        f16_bytes: what the same values take in f16, bytes.
        prefill, decode: samples; empty where the test leaves the part out.
    """

    type_k: CacheType
    type_v: CacheType
    kv_bytes: int
    f16_bytes: int
    test: Test
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def bench(
    model: Model,
    pairs: Sequence[Pair],
    test: Test,
    *,
    repeats: int = 3,
    n_threads: int | None = None,
) -> list[Speed]:
    """Measure every (key type, value type) pair in ``repeats`` interleaved rounds, after one warm-up batch each.

    One context of ``test.n_ctx`` tokens per pair is alive during the call. Prefill runs in batches of 512.

    Raises:
        TqError: a context cannot be made (from the engine).
    """
    tokens = np.random.default_rng(0).integers(0, model.n_vocab, test.n_ctx, dtype=np.int32)
    with ExitStack() as stack:
        contexts = [
            stack.enter_context(model.context(*pair, n_ctx=test.n_ctx, n_batch=BATCH, n_threads=n_threads))
            for pair in pairs
        ]
        speeds = [Speed(c.type_k, c.type_v, c.kv_bytes, c.kv_bytes_f16, test) for c in contexts]
        for context in contexts:
            context.decode(tokens[:BATCH], 0, logits="last")
        rounds = [(context, speed) for _ in range(repeats) for context, speed in zip(contexts, speeds, strict=True)]
        for context, speed in tqdm(rounds, unit="run", desc=f"speed @ {test.depth}", disable=None):
            _run(context, tokens, speed)
    return speeds


def _run(context: Context, tokens: np.ndarray, speed: Speed) -> None:
    test = speed.test
    fill_seconds = _fill(context, tokens, test.depth)
    if test.n_prompt:
        seconds = _timed(context, tokens[test.depth : test.depth + test.n_prompt], test.depth)
        speed.prefill.append(test.n_prompt / seconds)
        if test.n_gen:
            # A cache is filled again, not rolled back: a sliding window has lost what it would roll back to.
            _fill(context, tokens, test.depth)
    elif test.n_prompt is None and test.depth:
        speed.prefill.append(test.depth / fill_seconds)
    if test.n_gen:
        speed.decode.append(test.n_gen / _decode_seconds(context, tokens, test))


def _fill(context: Context, tokens: np.ndarray, depth: int) -> float:
    context.clear()
    return _timed(context, tokens[:depth], 0) if depth else 0.0


def _timed(context: Context, tokens: np.ndarray, pos: int) -> float:
    start = time.perf_counter()
    context.decode(tokens, pos, logits="last")
    return time.perf_counter() - start


def _decode_seconds(context: Context, tokens: np.ndarray, test: Test) -> float:
    start = time.perf_counter()
    for pos in range(test.depth, test.depth + test.n_gen):
        context.decode(tokens[pos : pos + 1], pos, logits="last")
    return time.perf_counter() - start


def to_rows(speeds: Sequence[Speed]) -> list[dict[str, Any]]:
    """Report rows: ``prefill_tps`` and ``decode_tps`` are medians over the rounds, ``_sd`` their standard deviation.

    ``_vs_f16`` is the median over that of f16 keys and values, None if those were not measured; a part that the
    test leaves out is None, too.
    """
    reference = next((s for s in speeds if s.type_k.name == s.type_v.name == "f16"), None)
    return [_row(speed, reference) for speed in speeds]


def _row(speed: Speed, reference: Speed | None) -> dict[str, Any]:
    test = speed.test
    row = {
        "type_k": str(speed.type_k),
        "type_v": str(speed.type_v),
        "kv_mib": speed.kv_bytes / 2**20,
        "ratio": speed.f16_bytes / speed.kv_bytes,
        "depth": test.depth,
        "n_prompt": test.prefilled,
        "prompt_depth": 0 if test.n_prompt is None else test.depth,
        "n_gen": test.n_gen,
    }
    for part in ("prefill", "decode"):
        samples = getattr(speed, part)
        base = getattr(reference, part, None)
        middle = statistics.median(samples) if samples else None
        row[f"{part}_tps"] = middle
        row[f"{part}_sd"] = statistics.stdev(samples) if len(samples) > 1 else None
        row[f"{part}_vs_f16"] = middle / statistics.median(base) if samples and base else None
    return row
