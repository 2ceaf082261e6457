"""Rows of every cache type that our attention takes, and attention over them in float64: the oracle of its tests.

Nothing here shares a line with the C that is tested: tq3 and tq4 come from ``tq_ggml.reference``, the others from the
gguf package.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, quants

from tq_ggml import reference

TYPES = ("tq3", "tq4", "q4_0", "iq4_nl", "q8_0", "f16")  # in the order of tq_cache_type
BLOCK = 32


def encode(x: np.ndarray, name: str) -> np.ndarray:
    """Rows of float32 as bytes, uint8 (..., row_bytes)."""
    rows = x.reshape(-1, x.shape[-1])
    if name.startswith("tq"):
        data = reference.quantize(rows, name)
    elif name == "iq4_nl":
        data = _encode_iq4_nl(rows)
    else:
        data = quants.quantize(rows, GGMLQuantizationType[name.upper()]).view(np.uint8)
    return data.reshape(*x.shape[:-1], -1)


def decode(data: np.ndarray, name: str) -> np.ndarray:
    """What the bytes stand for, float64."""
    if name.startswith("tq"):
        return reference.dequantize(data, name).astype(np.float64)
    if name == "f16":
        return data.view(np.float16).astype(np.float64)
    return quants.dequantize(data, GGMLQuantizationType[name.upper()]).astype(np.float64)


def _encode_iq4_nl(rows: np.ndarray) -> np.ndarray:
    """The nearest levels under a scale that gives the largest value the level -127; gguf has the decoder only."""
    x = rows.reshape(-1, BLOCK)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    scale = (largest / -127).astype(np.float16)
    levels = np.array(quants.IQ4_NL.kvalues, np.float32)
    steps = np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
    codes = np.abs(steps[..., None] - levels).argmin(axis=-1).astype(np.uint8)
    packed = codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4
    return np.concatenate((scale.view(np.uint8), packed), axis=1).reshape(len(rows), -1)


def int8_queries(rng: np.random.Generator, n_rows: int, head: int, rotates: bool) -> np.ndarray:
    """Queries that lose nothing when attention rounds them to int8, after the rotation where the key's type has one.

    A row has one scale, and each of its blocks the largest level: rounding by the block and by the row agree.
    """
    levels = np.clip(np.rint(rng.standard_normal((n_rows, head // BLOCK, BLOCK)) * 42), -127, 127)
    levels[..., 5] = rng.choice((-127, 127), levels.shape[:2])
    scale = rng.uniform(0.5, 2, (n_rows, 1)) / 48
    rows = (levels.reshape(n_rows, head) * scale).astype(np.float32)
    return reference.unrotate(rows).astype(np.float32) if rotates else rows


def attention(queries, keys, values, mask, *, scale, softcap=0.0, slope=1.0, sink=None) -> np.ndarray:
    """Softmax attention of float64 rows; zeros for a row that sees nothing.

    Args:
        queries, keys, values: (n_rows, head_k), (n_keys, head_k), (n_keys, head_v).
        mask: (n_rows, n_keys), added to the logits after ``slope``, a number or one per row; -inf is not seen.
        sink: a logit without a value, or None.
    """
    logits = queries.astype(np.float64) @ keys.T * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    logits = logits + mask.astype(np.float64) * np.reshape(slope, (-1, 1))
    top = logits.max(axis=1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=1, keepdims=True) + (0 if sink is None else np.exp(sink - top))
    return np.divide(weights @ values, total, out=np.zeros((len(queries), values.shape[1])), where=total > 0)


def nmse(found: np.ndarray, want: np.ndarray) -> float:
    """Squared error over the squares of what is wanted; infinite where anything is not a number."""
    if not np.isfinite(found).all():
        return np.inf
    return float(((found - want) ** 2).sum() / max((want**2).sum(), 1e-30))
