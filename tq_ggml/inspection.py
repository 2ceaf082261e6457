"""Why a cache type hurts a model: statistics of its keys and values, the logit error of each type, the KL divergence
that follows.

All of it is computed from one calibration run (`tq_ggml.calibration.gather`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from tq_ggml import kernels, reference
from tq_ggml.calibration import Layer
from tq_ggml.conditioning import KeyTransform, Rows

CODECS = ("q8_0", "q4_0", "tq4", "tq3")
"""The types that are inspected."""

CONDITIONED = ("tq4", "tq3")
"""Those that are conditioned by themselves."""


# ---- codecs, as the engine applies them ----------------------------------------------------------------------------


def decoded(rows: np.ndarray, cache_type: str, size: int) -> np.ndarray:
    """Rows, float32 (..., head_size), through a cache of a type.

    Args:
        size: of the Hadamard transform that llama.cpp puts around its own types; 1 for none.
    """
    if cache_type in CONDITIONED:
        return kernels.dequantize(kernels.quantize(rows, cache_type), cache_type)
    kind = gguf.GGMLQuantizationType[cache_type.upper()]
    blocks = gguf.quants.dequantize(gguf.quants.quantize(hadamard(rows, size), kind), kind)
    return hadamard(blocks.astype(np.float32), size)


def hadamard(rows: np.ndarray, size: int) -> np.ndarray:
    """The orthonormal Walsh-Hadamard transform over ``size`` neighbours on the last axis; its own inverse."""
    x = rows.reshape(-1, size)
    h = 1
    while h < size:
        pairs = x.reshape(len(x), -1, 2, h)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(len(x), -1)
        h *= 2
    return np.ascontiguousarray((x / np.sqrt(size)).reshape(rows.shape), dtype=np.float32)


# ---- one layer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerReport:
    """What inspection finds in a layer.

    Attributes:
        layer: its index.
        key_variance, value_variance: mean over the channels of the variance about the mean (before RoPE).
        key_mean_share, value_mean_share: share (0..1) of the energy that the mean has.
        key_peak: the largest channel's energy over the average channel's.
        key_kurtosis: of the keys as tq types store them without conditioning, after the rotation: 3 is Gaussian.
        logit_error: by cache type the standard deviation of a logit's error, conditioned where the type is.
        logit_error_plain: the same without conditioning.
        value_error: by cache type the NMSE of values.
    """

    layer: int
    key_variance: float
    value_variance: float
    key_mean_share: float
    value_mean_share: float
    key_peak: float
    key_kurtosis: float
    logit_error: Mapping[str, float]
    logit_error_plain: Mapping[str, float]
    value_error: Mapping[str, float]

    def row(self) -> dict[str, Any]:
        """The attributes as a flat report row."""
        row = {name: value for name, value in vars(self).items() if not isinstance(value, Mapping)}
        for name in ("logit_error_plain", "logit_error", "value_error"):
            row |= {f"{name}_{cache_type}": value for cache_type, value in getattr(self, name).items()}
        return row


def inspect(gathered: Mapping[int, Layer]) -> list[LayerReport]:
    """A report on each layer of a calibration run."""
    return [_inspect_layer(il, layer) for il, layer in sorted(gathered.items())]


def _inspect_layer(il: int, layer: Layer) -> LayerReport:
    keys, values = layer.sums[Rows.K], layer.sums[Rows.V]
    sample, energy = _Sample(layer), keys.energy
    return LayerReport(
        layer=il,
        key_variance=float(keys.variance.mean()),
        value_variance=float(values.variance.mean()),
        key_mean_share=float(1 - keys.variance.sum() / keys.energy.sum()),
        value_mean_share=float(1 - values.variance.sum() / values.energy.sum()),
        key_peak=float((energy / energy.mean(axis=1, keepdims=True)).max()),
        key_kurtosis=sample.kurtosis(),
        logit_error={name: sample.logit_error(name, name in CONDITIONED) for name in CODECS},
        logit_error_plain={name: sample.logit_error(name, False) for name in CODECS},
        value_error={name: sample.value_error(name) for name in CODECS},
    )


class _Sample:
    """A layer's sampled rows, and what codecs do to them."""

    def __init__(self, layer: Layer) -> None:
        self.positions = np.concatenate(layer.positions)
        self.keys, self.values, self.queries = (np.concatenate(layer.sample[kind]) for kind in Rows)
        self.transform = KeyTransform(layer.key_moments(), layer.rope, _N_CTX)
        self.head_size, self.logit_scale = self.keys.shape[-1], layer.logit_scale

    def kurtosis(self) -> float:
        rotated = reference.rotate(self.keys).astype(np.float64)
        return float(np.mean(rotated**4) / np.mean(rotated**2) ** 2)

    def logit_error(self, cache_type: str, conditioned: bool) -> float:
        """Standard deviation over keys of what a softmax sees of the error, root mean square over queries."""
        if conditioned:
            stored = self.transform.condition(self.keys, self.positions)
            error = (decoded(stored, cache_type, self.head_size) - stored) * self.transform.scale
        else:
            error = decoded(self.keys, cache_type, self.head_size & -self.head_size) - self.keys
        n, n_head_kv, d = error.shape
        queries = self.queries.reshape(n, n_head_kv, -1, d)
        logits = self.logit_scale * np.einsum("qhgd,khd->hgqk", queries, error, optimize=True)
        return float(np.sqrt(logits.var(axis=-1).mean()))

    def value_error(self, cache_type: str) -> float:
        return reference.nmse(self.values, decoded(self.values, cache_type, min(64, self.head_size & -self.head_size)))


# ---- prediction ----------------------------------------------------------------------------------------------------

_N_CTX = 2048
"""Of the contexts that predictions are for."""

_PER_LOGIT_ERROR, _PER_VALUE_ERROR = 0.0140, 0.0300
"""Nats of KL divergence per unit of logit error variance and of value NMSE, summed over layers (docs/quality.md)."""

ACCURACY = (
    "On the models of docs/quality.md predictions for tq types were within 20 % on SmolLM2 and Qwen2.5, "
    "and about half of what was measured on Gemma."
)

CANDIDATES = (("tq3", "tq3"), ("tq4", "tq3"), ("tq4", "tq4"), ("q8_0", "tq4"), ("q8_0", "q8_0"))
"""Pairs that can be recommended, the smallest first. tq keys are conditioned, q8_0 keys are not."""


def predict(reports: list[LayerReport], type_k: str, type_v: str, *, conditioned: bool = True) -> float:
    """The KL divergence, in nats, that keys and values of these types should have against an f16 cache.

    Small errors add up; a logit error of more than 1 no longer counts in full, since a softmax that is wrong anyway
    does not get more so in proportion.
    """
    errors = [(r.logit_error if conditioned else r.logit_error_plain)[type_k] ** 2 for r in reports]
    keys = sum(error if error <= 1 else error**0.7 for error in errors)
    return _PER_LOGIT_ERROR * keys + _PER_VALUE_ERROR * sum(r.value_error[type_v] for r in reports)


def predict_pairs(reports: list[LayerReport]) -> dict[str, float]:
    """`predict` for all `CANDIDATES`, by name: ``tq4``, or ``tq4/tq3``."""
    return {k if k == v else f"{k}/{v}": predict(reports, k, v) for k, v in CANDIDATES}


def recommend(klds: Mapping[str, float], max_kld: float) -> str:
    """The smallest candidate whose KL divergence is acceptable; ``f16`` where none is."""
    return next((name for name, kld in klds.items() if kld <= max_kld), "f16")
