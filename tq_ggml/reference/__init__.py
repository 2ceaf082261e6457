"""TurboQuant and its relatives in numpy: what the C kernels must match, and what the paper and tutorials describe.

- `blocks`: the tq3 and tq4 block formats, byte for byte (docs/codec.md)
- `rotations`: dense Haar and Walsh-Hadamard rotations
- `methods`, `polar`: vector quantisers behind one interface, with every stored bit counted; `METHODS` lists them
- `cache`: a KV cache of one head over any of them

Densities, Lloyd-Max levels and distortions are in `tq_ggml.codebooks`. docs/paper.md has the experiments.
"""

from __future__ import annotations

from collections.abc import Callable

from tq_ggml.reference.blocks import (
    BLOCK,
    MAX_INPUT,
    SIGNS,
    Codes,
    dequantize,
    nmse,
    quantize,
    rotate,
    rotated_values,
    unpack,
    unrotate,
)
from tq_ggml.reference.cache import KVCacheSim, MemoryReport
from tq_ggml.reference.methods import (
    QJL,
    BlockCodec,
    Compressed,
    Method,
    TurboQuantMSE,
    TwoStage,
    Uniform,
    turbo_quant_prod,
)
from tq_ggml.reference.polar import PolarRecursive, PolarSequential
from tq_ggml.reference.rotations import Haar, Hadamard, Rotation

METHODS: dict[str, Callable[[int, int], Method]] = {
    "TurboQuant-MSE": TurboQuantMSE,
    "TurboQuant-MSE, WHT": lambda d, bits: TurboQuantMSE(d, bits, rotation=Hadamard(d)),
    "TurboQuant-prod": turbo_quant_prod,
    "QJL": lambda d, bits: QJL(d, bits * d),
    "PolarQuant, sequential": PolarSequential,
    "PolarQuant, sequential, Lloyd-Max": lambda d, bits: PolarSequential(d, bits, codebook="lloyd"),
    "PolarQuant, recursive": lambda d, bits: PolarRecursive(d, bits - 1),
    "PolarQuant + QJL": lambda d, bits: TwoStage(PolarSequential(d, bits - 1), QJL(d)),
    "KIVI, by channel": lambda d, bits: Uniform(d, bits, per="channel"),
    "KIVI, by token": lambda d, bits: Uniform(d, bits, per="token"),
    "QuaRot": lambda d, bits: Uniform(d, bits, group=d, rotation=Hadamard(d)),
    "block": lambda d, bits: BlockCodec(d, f"tq{bits}"),
}
"""Name to a factory of (d, bits); bits count a value's code, `Method.bits_per_value` all. ``block`` has 3 or 4 bits,
the methods with a second stage 2 at least, as PolarQuant's recursive form."""

__all__ = [
    "BLOCK",
    "MAX_INPUT",
    "METHODS",
    "QJL",
    "SIGNS",
    "BlockCodec",
    "Codes",
    "Compressed",
    "Haar",
    "Hadamard",
    "KVCacheSim",
    "MemoryReport",
    "Method",
    "PolarRecursive",
    "PolarSequential",
    "Rotation",
    "TurboQuantMSE",
    "TwoStage",
    "Uniform",
    "dequantize",
    "nmse",
    "quantize",
    "rotate",
    "rotated_values",
    "turbo_quant_prod",
    "unpack",
    "unrotate",
]
