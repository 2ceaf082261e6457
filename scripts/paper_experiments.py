"""The experiments of `scripts/reproduce_paper.py`: each takes an effort and returns a `Table`.

Vectors are unit vectors of d = 128 from fixed seeds unless a docstring says otherwise. Paper: arXiv 2504.19874.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np

from cache_lab import Rows, take_samples, trellis
from tq_ggml import codebooks, models
from tq_ggml import reference as ref
from tq_ggml.calibration import cut_tokens, default_text
from tq_ggml.engine import Model
from tq_ggml.library import activate, lib_dir
from tq_ggml.reference import (
    METHODS,
    QJL,
    BlockCodec,
    Haar,
    Hadamard,
    Method,
    PolarSequential,
    TurboQuantMSE,
    TwoStage,
    turbo_quant_prod,
)
from tq_ggml.reference.methods import directions

D = 128


class Table(NamedTuple):
    headers: list[str]
    rows: list[list[str | float]]


def unit(n: int, d: int = D, seed: int = 0) -> np.ndarray:
    return directions(np.random.default_rng([seed, 17]).standard_normal((n, d)))


def slope(estimates: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """What estimates multiply the truth with, over seeds: mean and standard error."""
    found = [float(np.sum(estimate * truth) / np.sum(truth * truth)) for estimate, truth in estimates]
    return float(np.mean(found)), float(np.std(found, ddof=1) / math.sqrt(len(found)))


# ---- the paper -----------------------------------------------------------------------------------------------------

PAPER_MSE = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
PAPER_PROD = {1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047}


def distortion(effort: int) -> Table:
    """D_mse, and d·D_prod of unit queries, beside the paper's figures (Theorems 1 and 2) and the bounds."""
    x, q = unit(1000 * effort), unit(1000, seed=1)
    rows: list[list[str | float]] = []
    for bits in (1, 2, 3, 4, 5):
        mse = TurboQuantMSE(D, bits)
        d_mse = np.sum((mse.decompress(mse.compress(x)) - x) ** 2, axis=1).mean()
        d_prod = np.mean([prod_error(turbo_quant_prod(D, bits, seed=s), x[:1000], q) for s in range(2 + effort)])
        rest = codebooks.distortion(codebooks.lloyd_max(bits - 1, D), D) if bits > 1 else 1.0
        rows.append(
            [
                bits,
                d_mse,
                codebooks.distortion(codebooks.lloyd_max(bits, D), D),
                PAPER_MSE.get(bits, "–"),
                4.0**-bits,
                math.sqrt(3) * math.pi / 2 * 4.0**-bits,
                D * d_prod,
                math.pi / 2 * rest,
                PAPER_PROD.get(bits, "–"),
                math.sqrt(3) * math.pi**2 * 4.0**-bits,
            ]
        )
    names = ["D_mse", "Lloyd-Max", "paper", "≥ 4⁻ᵇ", "≤ √3π/2·4⁻ᵇ", "d·D_prod", "π/2·D_mse(b-1)", "paper", "≤ √3π²·4⁻ᵇ"]
    return Table(["b", *names], rows)


def prod_error(method: Method, x: np.ndarray, q: np.ndarray) -> float:
    return float(np.mean((method.inner_product(q, method.compress(x)) - q @ x.T) ** 2))


def bias(effort: int) -> Table:
    """The slope of ⟨q, x̂⟩ against ⟨q, x⟩; queries lean towards the vectors. Over rotations and S."""
    rows: list[list[str | float]] = []
    for bits in (1, 2, 3, 4):
        found = []
        for make in (TurboQuantMSE, turbo_quant_prod):
            estimates = []
            for seed in range(12 * effort):
                method, x = make(D, bits, seed=seed), unit(300, seed=seed)
                q = x + unit(300, seed=seed + 5000)
                estimates.append((np.sum(q * method.decompress(method.compress(x)), axis=1), np.sum(q * x, axis=1)))
            found.append(slope(estimates))
        theory = 1 - codebooks.distortion(codebooks.lloyd_max(bits, D), D)
        rows.append([bits, *(f"{100 * (mean - 1):+.2f} ± {100 * error:.2f} %" for mean, error in found)])
        rows[-1].insert(1, f"{100 * (theory - 1):+.2f} %")
    return Table(["b", "theory, MSE", "MSE", "prod"], rows)


def density(effort: int) -> Table:
    """D_mse with the codebook of the right dimension and the Gaussian's; the density's kurtosis is 3d/(d+2)."""
    rows: list[list[str | float]] = []
    for d in (16, 32, 64, 128, 256):
        y = math.sqrt(d) * unit(20000 * effort, d).ravel()[: 300000 * effort]
        row: list[str | float] = [d, float(np.mean(y**4)), 3 * d / (d + 2)]
        for bits in (3, 4):
            exact, gaussian = codebooks.lloyd_max(bits, d), codebooks.lloyd_max(bits)
            row += [codebooks.distortion(exact, d), codebooks.distortion(gaussian, d)]
        rows.append(row)
    names = ["kurtosis", "3d/(d+2)", "D_mse, b=3", "Gaussian codebook", "D_mse, b=4", "Gaussian codebook"]
    return Table(["d", *names], rows)


class _NoRotation:
    @staticmethod
    def forward(x: np.ndarray) -> np.ndarray:
        return x

    inverse = forward


def outliers(effort: int) -> Table:
    """NMSE at 4 bits on Gaussian vectors of which some channels are far larger."""
    methods = {
        "no rotation, norm of the vector": TurboQuantMSE(D, 4, rotation=_NoRotation()),
        "Haar 128, norm of the vector": TurboQuantMSE(D, 4, rotation=Haar(D)),
        "WHT 128 and signs, norm of the vector": TurboQuantMSE(D, 4, rotation=Hadamard(D)),
        "WHT 32 and signs, norm of the vector": TurboQuantMSE(D, 4, rotation=Hadamard(D, 32)),
        "WHT 32 and signs, norm of the block (seed)": BlockCodec(D, "tq4", "norm"),
        "WHT 32 and signs, searched scale of the block (tq4)": BlockCodec(D, "tq4"),
    }
    sizes = {"none": {}, "one of 30": {5: 30.0}, "eight of 10": {5 + 16 * i: 10.0 for i in range(8)}}
    rows: list[list[str | float]] = []
    for name, method in methods.items():
        row: list[str | float] = [name]
        for channels in sizes.values():
            x = np.random.default_rng(3).standard_normal((1000 * effort, D))
            for channel, size in channels.items():
                x[:, channel] *= size
            row.append(ref.nmse(x, method.decompress(method.compress(x))))
        rows.append(row)
    return Table(["outlier channels", *sizes], rows)


# ---- the tutorial --------------------------------------------------------------------------------------------------


class AsTheTutorial(Method):
    """What the tutorial's two stages compute, in our words, with each of its faults to be mended on its own.

    Args:
        total_bits: of which QJL has one.
        mended: of "norm", "root", "circle", "cells".
    """

    def __init__(self, total_bits: int, mended: frozenset[str] = frozenset(), seed: int = 0, two_stages: bool = True):
        super().__init__(D)
        self.bits, self.mended, self.two_stages = total_bits - 1, mended, two_stages
        self.rotation = Haar(D, seed)
        self.projection = np.random.default_rng([seed, 3]).standard_normal((D, D)) / math.sqrt(D)

    def _angles(self, y: np.ndarray) -> np.ndarray:
        rest = np.sqrt(np.cumsum(y[:, ::-1] ** 2, axis=1)[:, ::-1])
        angles = np.arccos(np.clip(y[:, :-1] / rest[:, :-1], -1, 1))
        if "circle" in self.mended:
            angles[:, -1] = np.arctan2(y[:, -1], y[:, -2]) % (2 * math.pi)
        return angles

    def compress(self, x: np.ndarray) -> ref.Compressed:
        angles = self._angles(self.rotation.forward(x))
        step = np.full(D - 1, math.pi / 2**self.bits)
        if "circle" in self.mended:
            step[-1] *= 2
        cell = np.floor(angles / step) + 0.5 if "cells" in self.mended else np.rint(angles / step)
        codes = np.clip(cell, 0, 2**self.bits - (0.5 if "cells" in self.mended else 1))
        stored = {"norm": np.linalg.norm(x, axis=1), "angles": codes * step}
        residual = x - self._first(stored)
        return stored | {"residual": np.linalg.norm(residual, axis=1), "signs": np.sign(residual @ self.projection.T)}

    def _first(self, c: ref.Compressed) -> np.ndarray:
        y = np.concatenate([np.cos(c["angles"]), np.ones((len(c["norm"]), 1))], axis=1)
        y[:, 1:] *= np.cumprod(np.sin(c["angles"]), axis=1)
        return self.rotation.inverse(y) * c["norm"][:, None]

    def decompress(self, c: ref.Compressed) -> np.ndarray:
        if not self.two_stages:
            return self._first(c)
        factor = math.sqrt(math.pi / 2) * (1 / math.sqrt(D) if "root" in self.mended else 1)
        weight = factor * (c["residual"] if "norm" in self.mended else np.ones(len(c["norm"])))
        return self._first(c) + weight[:, None] * (c["signs"] @ self.projection)

    @property
    def bits_per_value(self) -> float:
        return (32 + self.bits * (D - 1) + D) / D


def _normal(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 23]).standard_normal((n, D))


def _errors(make: Callable[[int], Method], n: int) -> np.ndarray:
    """Errors of ⟨q, k⟩ of n pairs of standard normal vectors, a hundred to a seed of the method."""
    found = []
    for seed in range(n // 100):
        q, k, method = _normal(100, seed), _normal(100, seed + 9000), make(seed)
        found.append(np.sum(q * (method.decompress(method.compress(k)) - k), axis=1))
    return np.concatenate(found)


def _polar_prod(bits: int) -> Callable[[int], Method]:
    return lambda seed: TwoStage(PolarSequential(D, bits - 1, seed=seed), QJL(D, seed=seed))


def tutorial_single(effort: int) -> Table:
    """|error| of one inner product of normal vectors, d = 128 (⟨q, k⟩ itself has a standard deviation of 11.3)."""
    rows: list[list[str | float]] = []
    for bits, claim in ((2, 0.0424), (3, 0.0052), (4, 0.0003)):
        makes = (lambda seed, b=bits: AsTheTutorial(b, seed=seed), _polar_prod(bits))
        makes += (lambda seed, b=bits: turbo_quant_prod(D, b, seed=seed),)
        rows.append([bits, claim, *(float(np.abs(_errors(make, 1000 * effort)).mean()) for make in makes)])
    return Table(["bits", "claimed", "its formulas", "mended: PolarQuant + QJL", "TurboQuant-prod"], rows)


def tutorial_cache(effort: int) -> Table:
    """512 keys at 3 bits, scores of one query: cosine, mean |error|, bytes against f16."""
    keys, query = _normal(512, 1), _normal(1, 2)
    true = query @ keys.T
    rows: list[list[str | float]] = [["the tutorial's claim", 0.9987, 0.0063, "21.50 KB", "5.9x"]]
    for name, method in {
        "its formulas": AsTheTutorial(3),
        "mended: PolarQuant + QJL": _polar_prod(3)(0),
        "TurboQuant-prod": turbo_quant_prod(D, 3),
        "TurboQuant-MSE": TurboQuantMSE(D, 3),
    }.items():
        scores = method.inner_product(query, method.compress(keys))
        cosine = np.sum(scores * true) / np.linalg.norm(scores) / np.linalg.norm(true)
        kib = 512 * D * method.bits_per_value / 8 / 1024
        rows.append([name, float(cosine), float(np.abs(scores - true).mean()), f"{kib:.2f} KB", f"{128 / kib:.2f}x"])
    return Table(["", "cosine", "mean error", "stored", "of f16"], rows)


def tutorial_bias(effort: int) -> Table:
    """1000 pairs: mean and standard deviation of the error; for a bias the slope is what to look at."""
    rows: list[list[str | float]] = []
    for name, claim, make in (
        ("PolarQuant, 2 bits", "0.1823, 0.4217", lambda s: AsTheTutorial(3, seed=s, two_stages=False)),
        ("two stages, 3 bits", "0.0008, 0.1134", lambda s: AsTheTutorial(3, seed=s)),
        ("mended PolarQuant, 2 bits", "", lambda s: PolarSequential(D, 2, seed=s)),
        ("mended two stages, 3 bits", "", _polar_prod(3)),
        ("PolarQuant with Lloyd-Max angles, 3 bits", "", lambda s: PolarSequential(D, 3, codebook="lloyd", seed=s)),
        ("TurboQuant-prod, 3 bits", "", lambda s: turbo_quant_prod(D, 3, seed=s)),
        ("TurboQuant-MSE, 3 bits", "", lambda s: TurboQuantMSE(D, 3, seed=s)),
    ):
        errors, estimates = _errors(make, 1000), []
        for seed in range(6 * effort):
            method, k = make(seed), _normal(300, seed + 70)
            q = k + _normal(300, seed + 8000)
            estimates.append((np.sum(q * method.decompress(method.compress(k)), axis=1), np.sum(q * k, axis=1)))
        mean, error = slope(estimates)
        measured = f"{errors.mean():.3f} ± {errors.std() / math.sqrt(len(errors)):.3f}"
        rows.append([name, claim, measured, float(errors.std()), f"{mean:.3f} ± {error:.3f}"])
    return Table(["", "claimed mean, sd", "mean error", "sd", "slope"], rows)


def tutorial_faults(effort: int) -> Table:
    """Standard deviation of the error of the two stages at 3 bits with one fault after the other mended."""
    steps = {
        "as written": frozenset(),
        "the mean of m signs: one more 1/√m": {"root"},
        "the residual's norm stored and used": {"root", "norm"},
        "the last angle over the full circle": {"root", "norm", "circle"},
        "middles of cells, the top cell not cut": {"root", "norm", "circle", "cells"},
    }
    rows: list[list[str | float]] = []
    for name, mended in steps.items():
        errors = _errors(lambda seed, m=mended: AsTheTutorial(3, frozenset(m), seed), 1000 * effort)
        rows.append([name, float(errors.std())])
    lloyd = _errors(
        lambda seed: TwoStage(PolarSequential(D, 2, codebook="lloyd", seed=seed), QJL(D, seed=seed)), 1000 * effort
    )
    rows.append(["levels for each angle's density (beyond the tutorial)", float(lloyd.std())])
    return Table(["mended so far", "sd of the error of ⟨q, k⟩"], rows)


# ---- real vectors --------------------------------------------------------------------------------------------------


def embeddings(name: str, n: int) -> np.ndarray:
    """Token embeddings of a model as unit vectors, float32 (n, n_embd), evenly spaced over the vocabulary."""
    tensors = {t.name: t for t in gguf.GGUFReader(models.resolve_model(name)).tensors}
    tensor = tensors["token_embd.weight"]
    rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return directions(rows[:: max(1, len(rows) // n)][:n].astype(np.float64)).astype(np.float32)


RECALL_AT = (1, 2, 4, 8, 16, 32, 64)


def recall(effort: int) -> Table:
    """recall@1@k on SmolLM2's token embeddings: how often the true nearest is among the k best by estimate."""
    vectors = embeddings("smollm2", 4000 + 6000 * (effort > 1))
    base, queries = vectors[10:], vectors[::20]
    base = base[np.arange(len(base)) % 20 != 10]  # the queries are not in it
    d = base.shape[1]
    nearest = (queries @ base.T).argmax(axis=1)
    rows: list[list[str | float]] = []
    for bits in (2, 4):
        for name, scores in {**_our_scores(bits, d, base, queries), **_faiss_scores(bits, d, base, queries)}.items():
            order = np.argsort(-scores, axis=1)[:, : RECALL_AT[-1]]
            place = np.where(order == nearest[:, None], np.arange(order.shape[1]), 10**6).min(axis=1)
            rows.append([bits, name, *(float(np.mean(place < k)) for k in RECALL_AT)])
    return Table(["bits", "method", *(f"@{k}" for k in RECALL_AT)], rows)


def _our_scores(bits: int, d: int, base: np.ndarray, queries: np.ndarray) -> dict[str, np.ndarray]:
    methods = {"TurboQuant-MSE": TurboQuantMSE(d, bits), "TurboQuant-prod": turbo_quant_prod(d, bits)}
    return {name: method.inner_product(queries, method.compress(base)) for name, method in methods.items()}


def _faiss_scores(bits: int, d: int, base: np.ndarray, queries: np.ndarray) -> dict[str, np.ndarray]:
    try:
        import faiss
    except ImportError:
        return {}
    faiss.omp_set_num_threads(1)
    indexes = {"faiss PQ, 4-bit codes": faiss.IndexPQ(d, d * bits // 4, 4, faiss.METRIC_INNER_PRODUCT)}
    if bits == 4:
        kind = faiss.ScalarQuantizer.QT_4bit_tqmse
        indexes["faiss tqmse, no rotation"] = faiss.IndexScalarQuantizer(d, kind, faiss.METRIC_INNER_PRODUCT)
    found = {}
    for name, index in indexes.items():
        index.train(base)
        index.add(base)
        found[name] = queries @ index.reconstruct_n(0, len(base)).T
    return found


def captured(effort: int) -> Table:
    """Keys (with RoPE) and values of SmolLM2's layers over our calibration text, each head on its own.

    Logit error: standard deviation over keys of ⟨q, k̂ - k⟩/√d, root mean square over queries, heads and layers. The
    last two columns are what errors would be at b + ½ bits in all, at 6.02 dB a bit.
    """
    n = 256 if effort == 1 else 480
    with Model(models.resolve_model("smollm2")) as model:
        samples = take_samples(model, cut_tokens(model, default_text(), n + 4), 1)
    chosen = list(samples)[:: 10 if effort == 1 else 3]
    rows: list[list[str | float]] = []
    for bits in (3, 4):
        for name, factory in METHODS.items():
            stored, keys, logits, values = _on_heads(factory, bits, [samples[il] for il in chosen], n)
            gain = 2 ** (stored - bits - 0.5)
            rows.append([bits, name, stored, keys, logits, values, logits * gain, values * gain**2])
    equal = ["logit error at b + ½", "NMSE of values at b + ½"]
    return Table(["b", "method", "bits, all", "NMSE of keys", "logit error", "NMSE of values", *equal], rows)


def _on_heads(factory: Callable[[int, int], Method], bits: int, samples: list, n: int) -> list[float]:
    method = factory(samples[0].rows[Rows.K].shape[-1], bits)
    keys, values, logits = [], [], []
    for sample in samples:
        k, v, q = (sample.rows[kind][:n].astype(np.float64).transpose(1, 0, 2) for kind in Rows)
        group = len(q) // len(k)
        for head in range(len(k)):
            error = method.decompress(method.compress(k[head])) - k[head]
            keys.append(np.sum(error**2) / np.sum(k[head] ** 2))
            queries = q[head * group : (head + 1) * group].reshape(-1, k.shape[-1])[::4]
            logits.append(np.mean(np.var(queries @ error.T / math.sqrt(k.shape[-1]), axis=1)))
            values.append(ref.nmse(v[head], method.decompress(method.compress(v[head]))))
    return [method.bits_per_value, float(np.mean(keys)), float(np.sqrt(np.mean(logits))), float(np.mean(values))]


# ---- blocks --------------------------------------------------------------------------------------------------------


def by_ggml(x: np.ndarray, name: str) -> np.ndarray:
    """x, float32 (n, 32·k), through what ggml writes a cache with (quantize_row_*_ref) and back."""
    activate()
    kind = gguf.GGMLQuantizationType[name.upper()]
    data = np.zeros(gguf.quants.quant_shape_to_byte_shape(x.shape, kind), np.uint8)
    quantize = getattr(ctypes.CDLL(str(next(lib_dir().glob("libggml-base.*")))), f"quantize_row_{name}_ref")
    quantize.restype, quantize.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    quantize(x.ctypes.data, data.ctypes.data, x.size)
    return gguf.quants.dequantize(data, kind)


def block_formats(effort: int) -> Table:
    """Gaussian data in blocks of 32 with an fp16 scale; the limit is 4^-bits."""
    x = np.random.default_rng(5).standard_normal((4000 * effort, 32)).astype(np.float32)
    few = x[:2000]
    rows: list[list[str | float]] = []
    for bits, name, decoded, given in (
        (4.5, "norm as scale (seed's TQ4)", ref.dequantize(ref.quantize(x, "tq4", "norm"), "tq4"), x),
        (4.5, "q4_0", by_ggml(x, "q4_0"), x),
        (4.5, "iq4_nl", by_ggml(x, "iq4_nl"), x),
        (4.5, "searched scale (tq4)", ref.dequantize(ref.quantize(x, "tq4"), "tq4"), x),
        (4.5, "trellis, window of 6 bits", trellis(4)(few), few),
        (3.5, "norm as scale (seed's TQ3)", ref.dequantize(ref.quantize(x, "tq3", "norm"), "tq3"), x),
        (3.5, "searched scale (tq3)", ref.dequantize(ref.quantize(x, "tq3"), "tq3"), x),
        (3.5, "trellis, window of 6 bits", trellis(3)(few), few),
    ):
        error = ref.nmse(given, decoded)
        rows.append([bits, name, error, f"{10 * math.log10(error * 4**bits):.2f} dB"])
    return Table(["bits", "format", "NMSE", "above the limit"], rows)


EXPERIMENTS: dict[str, Callable[[int], Table]] = {
    "distortion": distortion,
    "bias": bias,
    "density": density,
    "outliers": outliers,
    "tutorial-single": tutorial_single,
    "tutorial-cache": tutorial_cache,
    "tutorial-bias": tutorial_bias,
    "tutorial-faults": tutorial_faults,
    "recall": recall,
    "captured": captured,
    "blocks": block_formats,
}
