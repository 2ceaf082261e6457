#!/usr/bin/env python3
"""Make a Qwen3-shaped GGUF with random weights: to measure memory and speed, not quality.

No Qwen3 weights come as a package, but a KV cache's size and speed depend only on the shape. The tokenizer is taken
from a GGUF at hand, so that prompts are cut into the usual number of tokens. What the model says is noise.

    python scripts/make_qwen3_gguf.py --preset 4B                 # 2.3 GB, 36 layers
    python scripts/make_qwen3_gguf.py --preset 4B --layers 4      # a thin slice of it
    python scripts/make_qwen3_gguf.py --preset tiny --head-size 96 --heads 4/2 -o tiny.gguf
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, quant_shape_to_byte_shape
from tqdm import tqdm

from tq_ggml import models, streams
from tq_ggml.errors import TqError

F32 = GGMLQuantizationType.F32
# weight type -> (ggml type, file type)
WEIGHT_TYPES = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
BLOCK = 32  # values per q8_0 and q4_0 block
MAX_LAYERS, MAX_HEADS, MAX_HEAD_SIZE = 512, 1024, 4096
SLAB = 1 << 22  # random values drawn at a time, which bounds the memory


@dataclass(frozen=True)
class Shape:
    """What Qwen3's ``config.json`` calls hidden size (width), intermediate size (ffn) and so on."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    head_size: int = 128
    vocab: str = "qwen2.5-coder-0.5b"


PRESETS = {
    "0.6B": Shape(layers=28, width=1024, heads=16, kv_heads=8, ffn=3072),
    "1.7B": Shape(layers=28, width=2048, heads=16, kv_heads=8, ffn=6144),
    "4B": Shape(layers=36, width=2560, heads=32, kv_heads=8, ffn=9728),
    # For tests: the smaller vocabulary, because embeddings are nearly all of it.
    "tiny": Shape(layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocab="smollm2"),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: ``shape`` is (rows, columns), or (columns,) for a norm; ``std`` is None for all ones."""

    name: str
    shape: tuple[int, ...]
    std: float | None = None


def tensors(shape: Shape, n_vocab: int) -> Iterator[Tensor]:
    """All tensors of arch ``qwen3`` with tied embeddings.

    The spreads keep every activation near 1: 1/sqrt(inputs), and what is added to the residual stream is divided by
    the square root of the number of additions.
    """
    width, ffn, head = shape.width, shape.ffn, shape.head_size
    q_rows, kv_rows = shape.heads * head, shape.kv_heads * head
    residual = (2 * shape.layers) ** -0.5
    yield Tensor("token_embd.weight", (n_vocab, width), width**-0.5)
    for i in range(shape.layers):
        yield Tensor(f"blk.{i}.attn_norm.weight", (width,))
        yield Tensor(f"blk.{i}.attn_q.weight", (q_rows, width), width**-0.5)
        yield Tensor(f"blk.{i}.attn_k.weight", (kv_rows, width), width**-0.5)
        yield Tensor(f"blk.{i}.attn_v.weight", (kv_rows, width), width**-0.5)
        yield Tensor(f"blk.{i}.attn_output.weight", (width, q_rows), q_rows**-0.5 * residual)
        yield Tensor(f"blk.{i}.attn_q_norm.weight", (head,))
        yield Tensor(f"blk.{i}.attn_k_norm.weight", (head,))
        yield Tensor(f"blk.{i}.ffn_norm.weight", (width,))
        yield Tensor(f"blk.{i}.ffn_gate.weight", (ffn, width), width**-0.5)
        yield Tensor(f"blk.{i}.ffn_up.weight", (ffn, width), width**-0.5)
        yield Tensor(f"blk.{i}.ffn_down.weight", (width, ffn), ffn**-0.5 * residual)
    yield Tensor("output_norm.weight", (width,))


def random_weights(n: int, std: float, kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """``n`` random weights of zero mean and standard deviation ``std``, in the bytes of ``kind``."""
    if kind == GGMLQuantizationType.F16:
        out = np.empty(n, np.float16)
        for start in range(0, n, SLAB):
            stop = min(start + SLAB, n)
            out[start:stop] = rng.standard_normal(stop - start, np.float32) * np.float32(std)
        return out
    # Random codes are made directly: quantising billions of floats in numpy would take minutes. Codes run from -8 to
    # 7, or -128 to 127, so their mean is -0.5; a random sign of the block's scale takes that out again.
    bits = {GGMLQuantizationType.Q8_0: 8, GGMLQuantizationType.Q4_0: 4}[kind]
    code_std = np.sqrt((4.0**bits - 1) / 12 + 0.25)
    blocks = np.empty(n // BLOCK, np.dtype([("scale", "<f2"), ("codes", np.uint8, BLOCK * bits // 8)]))
    blocks["scale"] = rng.choice(np.array([-1, 1]) * (std / code_std), len(blocks))
    step = SLAB // BLOCK
    for start in range(0, len(blocks), step):
        codes = blocks["codes"][start : start + step]
        codes[:] = rng.integers(0, 256, codes.shape, np.uint8)
    return blocks.view(np.uint8)


@lru_cache(maxsize=2)
def read_tokenizer(path: Path) -> dict:
    """All ``tokenizer.*`` metadata of a GGUF: name -> (value, value type, item type)."""
    models.check_gguf(path)
    fields = GGUFReader(path).fields
    found = {k: (f.contents(), f.types[0], f.types[-1]) for k, f in fields.items() if k.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in found:
        raise TqError(f"{path} has no vocabulary; give --vocab another GGUF")
    return found


def add_metadata(writer: GGUFWriter, shape: Shape, tokenizer: dict, title: str, file_type: LlamaFileType) -> None:
    writer.add_type("model")
    writer.add_name(title)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, (value, kind, item) in tokenizer.items():
        writer.add_key_value(key, value, kind, item)


def stored_bytes(tensor: Tensor, kind: GGMLQuantizationType) -> int:
    """Bytes in the file: norms are f32, all else is of type ``kind``."""
    return math.prod(quant_shape_to_byte_shape(tensor.shape, F32 if tensor.std is None else kind))


def write(shape: Shape, out: Path, vocab: Path, weight_type: str, seed: int, *, title: str, progress: bool) -> None:
    """Write the model, one tensor after another: the largest tensor is all that is ever in memory."""
    kind, file_type = WEIGHT_TYPES[weight_type]
    tokenizer = read_tokenizer(vocab)
    plan = list(tensors(shape, len(tokenizer["tokenizer.ggml.tokens"][0])))
    needed = sum(stored_bytes(t, kind) for t in plan)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise TqError(f"the weights take {needed / 1e9:.1f} GB, but {out.parent.parent} has {free / 1e9:.1f} GB free")
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(out, "qwen3")
    try:
        add_metadata(writer, shape, tokenizer, title, file_type)
        for t in plan:
            stored = F32 if t.std is None else kind
            writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), stored_bytes(t, kind), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for t in tqdm(plan, desc=out.name, unit="tensor", disable=not progress):
            n = int(np.prod(t.shape))
            writer.write_tensor_data(np.ones(n, np.float32) if t.std is None else random_weights(n, t.std, kind, rng))
    finally:
        writer.close()


def check_shape(shape: Shape, weight_type: str) -> None:
    """Raises TqError where llama.cpp would refuse the model, or a row would not fill whole blocks."""
    if min(shape.layers, shape.heads, shape.kv_heads, shape.head_size) < 1:
        raise TqError("layers, heads and head size must be at least 1")
    if shape.layers > MAX_LAYERS or shape.heads > MAX_HEADS or shape.head_size > MAX_HEAD_SIZE:
        raise TqError(
            f"{shape.layers} layers with {shape.heads} heads of {shape.head_size}: llama.cpp takes no more than "
            f"{MAX_LAYERS} layers, and this script {MAX_HEADS} heads of {MAX_HEAD_SIZE}"
        )
    if shape.heads % shape.kv_heads:
        raise TqError(f"{shape.heads} query heads cannot share {shape.kv_heads} KV heads evenly; choose a multiple")
    if shape.head_size % 2:
        raise TqError(f"head size {shape.head_size} is odd; rotary positions need pairs")
    if weight_type != "f16" and shape.heads * shape.head_size % BLOCK:
        raise TqError(
            f"heads times head size is {shape.heads * shape.head_size}, no multiple of the {BLOCK} values of a "
            f"{weight_type} block; take --type f16"
        )


def parse_heads(text: str) -> tuple[int, int]:
    try:
        heads, kv_heads = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not HEADS/KV, for example 16/8") from None
    return heads, kv_heads


def parse_seed(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="0.6B", help="the shape; tiny is for tests")
    parser.add_argument("--layers", type=int, default=argparse.SUPPRESS, help="fewer or more layers than the preset")
    parser.add_argument("--heads", type=parse_heads, metavar="H/KV", default=argparse.SUPPRESS, help="query/KV heads")
    parser.add_argument("--head-size", type=int, default=argparse.SUPPRESS, help="values per head")
    parser.add_argument("--type", choices=WEIGHT_TYPES, default="q4_0", help="type of the weights")
    parser.add_argument(
        "--vocab", metavar="MODEL", default=argparse.SUPPRESS, help="GGUF or model name whose tokenizer to take"
    )
    parser.add_argument("--seed", type=parse_seed, default=0, help="of the random weights")
    parser.add_argument("-o", "--output", type=Path, default=argparse.SUPPRESS, help="the file to make")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    return parser.parse_args(argv)


def choose_shape(arguments: argparse.Namespace) -> Shape:
    given = vars(arguments)
    changes = {name: given[name] for name in ("layers", "head_size", "vocab") if name in given}
    if "heads" in given:
        changes["heads"], changes["kv_heads"] = arguments.heads
    return dataclasses.replace(PRESETS[arguments.preset], **changes)


def run(arguments: argparse.Namespace) -> Path:
    shape = choose_shape(arguments)
    check_shape(shape, arguments.type)
    out = getattr(arguments, "output", None) or Path(f"qwen3-{arguments.preset}-random-{arguments.type}.gguf")
    if out.exists() and not arguments.force:
        raise TqError(f"{out} exists; add --force to replace it, or choose another name with -o")
    vocab = models.resolve_model(shape.vocab)
    # Under a name of its own until it is whole: an interrupted run leaves no half model.
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            half = Path(folder) / out.name
            title = f"Qwen3 {arguments.preset} shape, random weights"
            write(shape, half, vocab, arguments.type, arguments.seed, title=title, progress=True)
            os.replace(half, out)
    except OSError as problem:
        raise TqError(f"cannot write {out}: {problem.strerror or problem}") from None
    return out


def main(argv: list[str] | None = None) -> int:
    try:
        with streams.unwind_on_termination():
            out = run(parse_arguments(argv))
    except TqError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: this shape has a tensor larger than the memory; choose a smaller one", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    info = models.check_gguf(out)
    print(
        f"{info.n_layer} layers, width {info.n_embd}, {info.n_head}/{info.n_head_kv} heads of {info.head_size_k}, "
        f"{info.n_vocab} tokens, {info.size / 1e6:.0f} MB"
    )
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
