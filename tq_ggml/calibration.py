"""Calibration: what a model's keys, queries and values are like, gathered in one f16 run over a short text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tq_ggml.conditioning import KeyMoments, Rope, Rows, filtering, layer_rope
from tq_ggml.engine import Model
from tq_ggml.errors import TqError

SINKS = 4
"""First positions that are left out: keys and queries of attention sinks are like no others."""

STARTS = 32
"""Texts of one token that tell what keys at position 0 are like, for models that do not open a text with BOS."""

DEFAULT_TOKENS = 512


def calibration_text() -> str:
    """The text that calibration runs over by default: our own words, in several scripts and programming languages."""
    return (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8")


@dataclass
class _Sums:
    """Running sums over tokens of a layer's rows of one kind, float64 of shape (n_head, head_size)."""

    n: int = 0
    total: np.ndarray | float = 0.0
    squares: np.ndarray | float = 0.0

    def add(self, rows: np.ndarray) -> None:
        self.n += len(rows)
        self.total = self.total + rows.sum(axis=0, dtype=np.float64)
        self.squares = self.squares + np.einsum("thd,thd->hd", rows, rows, dtype=np.float64)


@dataclass
class LayerSums:
    """What calibration keeps of a layer while it runs."""

    rope: Rope
    starts: _Sums = field(default_factory=_Sums)
    sums: dict[Rows, _Sums] = field(default_factory=lambda: {kind: _Sums() for kind in Rows})

    def key_moments(self) -> KeyMoments:
        """The constants of key conditioning."""
        keys, queries = self.sums[Rows.K], self.sums[Rows.Q]
        mean = keys.total / keys.n
        energy = queries.squares / queries.n
        n_head_kv, head_size = mean.shape
        return KeyMoments(
            mean=mean.astype(np.float32),
            start=(self.starts.total / self.starts.n).astype(np.float32),
            variance=np.maximum(keys.squares / keys.n - mean**2, 0.0).astype(np.float32),
            query_energy=energy.reshape(n_head_kv, -1, head_size).mean(axis=1).astype(np.float32),
        )


def _starts(model: Model, tokens: np.ndarray) -> np.ndarray:
    """First tokens to look at: the one that opens every text, or some where there is none."""
    return tokens[:1] if model.bos is not None else tokens[:: -(-len(tokens) // STARTS)]


def gather(model: Model, tokens: np.ndarray, *, n_threads: int | None = None) -> dict[int, LayerSums]:
    """Run ``tokens``, int32 (n,), through an f16 cache and sum up what every layer stores and attends with.

    Raises:
        TqError: fewer tokens than there are sinks, or a model without attention layers.
        EngineError: llama.cpp fails.
    """
    if len(tokens) <= 2 * SINKS:
        raise TqError(f"calibration needs more than {2 * SINKS} tokens, not {len(tokens)}")
    layers: dict[int, LayerSums] = {}

    def observe(kind: Rows, il: int, positions: np.ndarray, rows: np.ndarray) -> None:
        if il not in layers:
            rope = layer_rope(context.handle, il)
            if rope is None:
                return
            layers[il] = LayerSums(rope)
        layer = layers[il]
        if positions[-1] == 0:
            if kind == Rows.K:
                layer.starts.add(rows)
            return
        kept = positions >= SINKS
        rows = rows[kept]
        layer.sums[kind].add(layer.rope.turn_back(rows, positions[kept]) if kind != Rows.V else rows)

    with (
        filtering(observe) as check,
        model.context("f16", n_ctx=len(tokens), n_threads=n_threads) as context,
        tqdm(total=len(tokens), unit="tok", desc="calibrating", disable=None) as progress,
    ):
        for start in range(0, len(tokens), context.n_batch):
            chunk = tokens[start : start + context.n_batch]
            context.decode(chunk, start)
            check()
            progress.update(len(chunk))
        for token in _starts(model, tokens):
            context.clear()
            context.decode([token], 0)
        check()
    return layers
