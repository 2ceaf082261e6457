#!/usr/bin/env python3
"""A cache lab: what any idea for a KV cache codec costs in KL divergence on a real model, without a kernel.

A recipe is a list of ``option=value``, joined by commas; each gets an f16 cache whose rows a numpy filter replaces by
what the codec would give back. All recipes run side by side over the same text:

    scripts/cache_lab.py -m qwen2.5-coder-0.5b k=tq4,v=tq4 k=tq4,v=tq4,mean=none k=q8_0,v=tq3

Options and their defaults:

    k, v         f16     codec of keys and of values: f16, q8_0, q4_0, tq4, tq3, trellis4, trellis3, noise:SIZE
    mean         8       key mean: none, const (what positions of the calibration share), slow (pairs that turn less
                         than a radian in the context), or the number of positions that share a mean
    scale        context key/query balance: none, tied (one scale per RoPE pair), free (as the calibration's positions
                         have it), context (as all positions of the context have it), matrix (d x d), slow_matrix (d x d
                         over the slow pairs)
    shrink       0.01    of scale: share of the mean that every channel gets; of a matrix: weight of its diagonal
    rotation     32      size of the WHT; 0 for none; signs=0 leaves its signs out
    v_rotation   32
    gain, v_gain 1       what decoded keys and values are multiplied by
    sink         0       1: the key at position 0 has a mean of its own, over this many starts of a text
    v_mean       0       1: the value mean is taken out
    v_scale      none    wo: values balanced against the columns of W_o
    first        0       first tokens that stay exact
    wide         0       layers at each end that keep q8_0
    tokens       512     of the calibration
    block        32      values per scale
    search       8       candidates for a block's scale, 0 for its norm
    fit          ls      ls: least-squares scale, unbiased: the one that keeps the inner product
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np

from tq_ggml import codebooks, evaluation, kernels, models, texts
from tq_ggml.calibration import SINKS, STARTS, cut_tokens, default_text
from tq_ggml.conditioning import Batch, Rope, Rows, filtering, layer_rope, squares_with_rope
from tq_ggml.engine import Context, Model
from tq_ggml.errors import TqError
from tq_ggml.reference import Hadamard


@dataclass(frozen=True)
class Recipe:
    """The options above, as they were written."""

    k: str = "f16"
    v: str = "f16"
    mean: str = "8"
    scale: str = "context"
    shrink: float = 0.01
    rotation: int = 32
    v_rotation: int = 32
    signs: int = 1
    gain: float = 1.0
    v_gain: float = 1.0
    sink: int = 0
    v_mean: int = 0
    v_scale: str = "none"
    first: int = 0
    wide: int = 0
    tokens: int = 512
    block: int = 32
    search: int = 8
    fit: str = "ls"

    ALLOWED: ClassVar[dict[str, str]] = {
        "mean": r"none|const|slow|[1-9][0-9]{0,5}",
        "scale": "none|tied|free|context|matrix|slow_matrix",
        "rotation": "0|1|2|4|8|16|32|64|128|256",
        "v_rotation": "0|1|2|4|8|16|32|64|128|256",
        "v_scale": "none|wo",
        "tokens": "[1-9][0-9]{1,4}",
        "block": "8|16|32|64|128",
        "search": "[0-9]{1,3}",
        "fit": "ls|unbiased",
    }

    @staticmethod
    def parse(text: str) -> Recipe:
        kinds = {f.name: type(f.default) for f in fields(Recipe)}
        values = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise TqError(f"recipe {text!r}: no option {name!r}; there are {', '.join(kinds)}")
            if not re.fullmatch(Recipe.ALLOWED.get(name, ".*"), value):
                raise TqError(f"recipe {text!r}: {name}={value!r} does not match {Recipe.ALLOWED[name]}")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise TqError(f"recipe {text!r}: {name}={value!r} is not a number") from None
        recipe = Recipe(**values)
        for codec in (recipe.k, recipe.v):
            codec_of(codec, recipe)
        return recipe


# ---- codecs: float32 (n, size) -> what comes back, size a multiple of 32 -------------------------------------------

Codec = Callable[[np.ndarray], np.ndarray]


def rotated(codec: Codec, size: int, signs: bool) -> Codec:
    """``codec`` between a rotation of ``size`` channels (the largest power of two in the head, at most) and back."""
    if size == 0:
        return codec

    def run(x: np.ndarray) -> np.ndarray:
        d = x.shape[-1]
        rotation = Hadamard(d, min(size, d & -d), signs)
        turned = rotation.forward(x).astype(np.float32)
        return rotation.inverse(codec(turned)).astype(np.float32)

    return run


def nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


def scalar_codec(levels: np.ndarray, recipe: Recipe) -> Codec:
    """Blocks of one scale and a level each; levels by magnitude."""
    levels = np.concatenate([-levels[::-1], levels]).astype(np.float32)
    ratios = np.linspace(0.75, 1.2, recipe.search) if recipe.search else np.ones(1)

    def run(x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(-1, recipe.block)
        rms = np.sqrt((blocks**2).mean(axis=1, keepdims=True))
        largest = np.abs(blocks).max(axis=1, keepdims=True) / levels[-1]
        best, best_error = np.zeros_like(blocks), np.full(len(blocks), np.inf)
        for ratio in ratios:
            start = np.maximum(ratio * largest if recipe.search else rms, 1e-30)
            y = nearest(levels, blocks / start)
            xy, yy, xx = ((a * b).sum(axis=1, keepdims=True) for a, b in ((blocks, y), (y, y), (blocks, blocks)))
            scale = start
            if recipe.search:
                scale = xy / yy if recipe.fit == "ls" else xx / np.maximum(xy, 1e-30)
            decoded = y * scale.astype(np.float16)
            error = ((blocks - decoded) ** 2).sum(axis=1)
            better = error < best_error
            best[better], best_error[better] = decoded[better], error[better]
        return best.reshape(x.shape)

    return run


class Trellis:
    """A trellis code (arXiv 2406.11235): a value's own bits and the last ones of the value before choose its level.

    The window is six bits: at b bits a value it overlaps by 6 - b, so 2^(6-b) states choose among 2^b levels each.
    """

    WINDOW = 6

    def __init__(self, bits: int) -> None:
        self.bits, self.states = bits, 1 << (self.WINDOW - bits)
        self.levels = self._train()

    def _train(self) -> np.ndarray:
        """Levels (states, 2^bits): Gaussian quantiles, each state every n-th, moved to the mean of what they code."""
        n = 1 << self.WINDOW
        rng = np.random.default_rng(1)
        sample = rng.standard_normal((4096, 32)).astype(np.float32)
        quantiles = np.sort(rng.standard_normal(1 << 18))[(2 * np.arange(n) + 1) * (1 << 18) // (2 * n)]
        levels = np.stack([1.1 * quantiles[state :: self.states] for state in range(self.states)]).astype(np.float32)
        for _ in range(30):
            path, _ = self.encode(sample, levels)
            sums = np.bincount(path.ravel(), weights=sample.ravel(), minlength=n)
            counts = np.bincount(path.ravel(), minlength=n)
            levels = np.where(counts > 0, sums / np.maximum(counts, 1), levels.ravel()).reshape(levels.shape)
            levels = levels.astype(np.float32)
        return levels

    def encode(self, x: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Viterbi over each row of x: the level indices (n, 32) of the least squared error, and that error (n,)."""
        n, steps = x.shape
        symbols = levels.shape[1]
        after = np.arange(symbols) % self.states  # the state that a symbol leaves
        cost = np.full((n, self.states), np.inf, dtype=np.float32)
        cost[:, 0] = 0.0
        came = np.empty((steps, n, self.states), dtype=np.int16)
        order = np.argsort(after, kind="stable").reshape(self.states, -1)  # symbols by the state they leave
        for t in range(steps):
            total = cost[:, :, None] + (x[:, t, None, None] - levels) ** 2
            into = total[:, :, order].transpose(0, 2, 1, 3).reshape(n, self.states, -1)
            pick = into.argmin(axis=2)
            cost = np.take_along_axis(into, pick[:, :, None], axis=2)[:, :, 0]
            state, slot = pick // order.shape[1], pick % order.shape[1]
            came[t] = state * symbols + order[np.arange(self.states), slot]
        end = cost.argmin(axis=1)
        error, path, rows = cost.min(axis=1), np.empty((n, steps), dtype=np.int64), np.arange(n)
        for t in reversed(range(steps)):
            path[:, t] = came[t, rows, end]
            end = path[:, t] // symbols
        return path, error

    def __call__(self, x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(-1, 32)
        rms = np.maximum(np.sqrt((blocks**2).mean(axis=1, keepdims=True)), 1e-30)
        best, best_error = np.zeros_like(blocks), np.full(len(blocks), np.inf)
        for ratio in (0.88, 0.96, 1.04, 1.12):
            path, _ = self.encode(blocks / (ratio * rms), self.levels)
            y = self.levels.ravel()[path]
            scale = ((blocks * y).sum(axis=1, keepdims=True) / (y * y).sum(axis=1, keepdims=True)).astype(np.float16)
            error = ((blocks - y * scale) ** 2).sum(axis=1)
            better = error < best_error
            best[better], best_error[better] = (y * scale)[better], error[better]
        return best.reshape(x.shape)


trellis = functools.cache(Trellis)


def native(name: str) -> Codec:
    """The package's own kernels, rotation included."""
    return lambda x: kernels.dequantize(kernels.quantize(x, name), name)


def legacy(kind: gguf.GGMLQuantizationType) -> Codec:
    return lambda x: gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)


def noise(relative: float) -> Codec:
    rng = np.random.default_rng(0)

    def run(x: np.ndarray) -> np.ndarray:
        size = np.sqrt((x.reshape(-1, 32) ** 2).mean(axis=1)).repeat(32).reshape(x.shape)
        return x + relative * size * rng.standard_normal(x.shape, dtype=np.float32)

    return run


def codec_of(name: str, recipe: Recipe, rotation: int | None = None) -> Codec:
    """The codec of a recipe's keys or values between its rotation."""
    rotation = recipe.rotation if rotation is None else rotation
    plain = (recipe.signs, recipe.block, recipe.search, recipe.fit) == (1, 32, 8, "ls")
    if name == "f16":
        return lambda x: x
    if re.fullmatch(r"noise:[0-9]*\.?[0-9]+", name):
        return noise(float(name[6:]))
    if name in ("tq3", "tq4") and rotation == 32 and plain:
        return native(name)
    if name in ("tq3", "tq4"):
        return rotated(scalar_codec(codebooks.lloyd_max(int(name[2])), recipe), rotation, bool(recipe.signs))
    if name in ("trellis3", "trellis4"):
        return rotated(trellis(int(name[-1])), rotation, True)
    if name in ("q8_0", "q4_0"):
        return rotated(legacy(gguf.GGMLQuantizationType[name.upper()]), rotation, bool(recipe.signs))
    raise TqError(f"no codec {name!r}; there are f16, q8_0, q4_0, tq4, tq3, trellis4, trellis3 and noise:SIZE")


# ---- what calibration keeps, whole ---------------------------------------------------------------------------------


@dataclass
class Sample:
    """Rows of one layer over the calibration tokens, float32 (n_tokens, n_head, head_size); `keys` is before RoPE."""

    rope: Rope
    positions: np.ndarray
    rows: dict[Rows, np.ndarray]
    starts: list[np.ndarray]  # keys at position 0, for several first tokens

    @property
    def keys(self) -> np.ndarray:
        return self.rope.turn_back(self.rows[Rows.K], self.positions)


def take_samples(model: Model, tokens: np.ndarray, n_threads: int) -> dict[int, Sample]:
    found: dict[int, Sample] = {}

    def observe(batch: Batch) -> None:
        il = batch.layer
        if len(batch.rows) > 1:
            if il not in found:
                found[il] = Sample(layer_rope(context.handle, il), batch.positions[SINKS:].copy(), {}, [])
            found[il].rows[batch.kind] = batch.rows[SINKS:].copy()
        elif batch.kind == Rows.K:
            found[il].starts.append(batch.rows[0].copy())

    n = len(tokens)
    starts = tokens[:1] if model.bos is not None else tokens[:: -(-n // STARTS)]
    with (
        filtering(observe) as check,
        model.context("f16", n_ctx=n, n_batch=n, n_ubatch=n, n_threads=n_threads) as context,
    ):
        context.decode(tokens, 0)
        for token in starts:
            context.clear()
            context.decode([token], 0)
        check()
    return found


# ---- a layer's filter ----------------------------------------------------------------------------------------------


class LayerFilter:
    """What a recipe makes of one layer's keys and values."""

    def __init__(self, recipe: Recipe, sample: Sample, n_ctx: int, wo: np.ndarray | None, wide: bool) -> None:
        self.recipe, self.sample, self.n_ctx = recipe, sample, n_ctx
        self.k_codec = codec_of("q8_0" if wide else recipe.k, recipe)
        self.v_codec = codec_of("q8_0" if wide else recipe.v, recipe, recipe.v_rotation)
        self.mean, self.block = self._key_mean()
        self.forward, self.backward = self._transform()
        values = sample.rows[Rows.V]
        self.v_mean = values.mean(axis=0) if recipe.v_mean else np.zeros(values.shape[1:], np.float32)
        self.v_scale = self._value_scale(values - self.v_mean, wo)

    def _key_mean(self) -> tuple[np.ndarray, int]:
        """The mean before RoPE with each pair damped to what a block shares, and the positions of a block."""
        rope, mean = self.sample.rope, self.sample.keys.mean(axis=0)
        if self.recipe.mean == "none":
            return np.zeros_like(mean), 1
        block = int(self.recipe.mean) if self.recipe.mean.isdecimal() else self.n_ctx
        if self.recipe.mean == "const":
            block = len(self.sample.positions) + SINKS
        with np.errstate(invalid="ignore"):
            share = np.sin(block * rope.angle / 2) / (block * np.sin(rope.angle / 2))
        if self.recipe.mean == "slow":
            share[rope.angle * block > 1] = 0
        for channels in rope.pairs:
            mean[:, channels] *= share.astype(np.float32)
        return mean, block

    def mean_at(self, positions: np.ndarray) -> np.ndarray:
        middle = positions // self.block * self.block + (self.block - 1) / 2
        if self.recipe.mean in ("const", "slow"):
            middle = np.full(len(positions), (self.block - 1) / 2)
        mean = self.sample.rope.turn_back(np.broadcast_to(self.mean, (len(positions), *self.mean.shape)), -middle)
        if self.recipe.sink:
            mean[positions == 0] = np.mean(self.sample.starts, axis=0)
        return mean

    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Second moments (n_head_kv, d, d) of what is left of the keys, and of the queries, as they are attended."""
        keys = self.sample.rows[Rows.K] - self.mean_at(self.sample.positions)
        queries = self.sample.rows[Rows.Q]
        n, n_head_kv, d = keys.shape
        grouped = queries.reshape(n, n_head_kv, -1, d).transpose(1, 0, 2, 3).reshape(n_head_kv, -1, d)
        keys = keys.transpose(1, 0, 2)
        return (np.einsum("hni,hnj->hij", x, x) / x.shape[1] for x in (keys, grouped))

    def _transform(self) -> tuple[np.ndarray, np.ndarray]:
        """Matrices (n_head_kv, d, d): rows are multiplied by the first before the codec, by the second after it."""
        k, q = self._moments()
        d = k.shape[-1]
        if self.recipe.scale == "none":
            eye = np.broadcast_to(np.eye(d, dtype=np.float32), k.shape)
            return eye, eye
        if self.recipe.scale == "matrix":
            return balance(k, q, self.recipe.shrink)
        if self.recipe.scale == "slow_matrix":
            return balance(*(self._slow_only(m) for m in (k, q)), self.recipe.shrink)
        diagonals = [np.diagonal(m, axis1=1, axis2=2).copy() for m in (k, q)]
        if self.recipe.scale == "context":
            diagonals = self._over_the_context()
        for x in diagonals:
            if self.recipe.scale == "tied":
                pairs = self.sample.rope.pairs
                x[:, pairs] = x[:, pairs].mean(axis=1, keepdims=True)
            x += self.recipe.shrink * x.mean(axis=1, keepdims=True)
        scale = (diagonals[0] / diagonals[1]) ** 0.25
        scale /= np.exp(np.log(scale).mean(axis=1, keepdims=True))
        return tuple(np.einsum("hi,ij->hij", s, np.eye(d)).astype(np.float32) for s in (1 / scale, scale))

    def _over_the_context(self) -> list[np.ndarray]:
        """The diagonals of `_moments`, of all positions there are."""
        rope, keys = self.sample.rope, self.sample.keys - self.mean
        queries = rope.turn_back(self.sample.rows[Rows.Q], self.sample.positions)
        found = []
        for rows in (keys, queries):
            per_head = rows.reshape(*keys.shape[:2], -1, keys.shape[2]).astype(np.float64)
            squares, products = ((per_head * x).mean(axis=(0, 2)) for x in (per_head, rope.partners(per_head)))
            found.append(squares_with_rope(squares, products, rope, self.n_ctx))
        return found

    def _slow_only(self, m: np.ndarray) -> np.ndarray:
        """The diagonal, tied in pairs, and what slow pairs have in common."""
        slow = np.ones(m.shape[-1], dtype=bool)
        slow[self.sample.rope.pairs[:, self.sample.rope.angle * 512 > 1]] = False
        diagonal = np.einsum("hii->hi", m).copy()
        pairs = self.sample.rope.pairs
        diagonal[:, pairs] = diagonal[:, pairs].mean(axis=1, keepdims=True)
        out = m * (slow[:, None] & slow)
        out[:, ~slow, ~slow] = diagonal[:, ~slow]
        return out

    def _value_scale(self, values: np.ndarray, wo: np.ndarray | None) -> np.ndarray:
        if self.recipe.v_scale == "none":
            return np.ones(values.shape[1:], np.float32)
        columns = (wo**2).sum(axis=0).reshape(values.shape[1], -1, values.shape[2]).sum(axis=1)
        variance = (values**2).mean(axis=0)
        for x in (columns, variance):
            x += self.recipe.shrink * x.mean(axis=1, keepdims=True)
        return (variance / columns) ** 0.25

    def __call__(self, batch: Batch) -> None:
        if batch.kind == Rows.Q:
            return
        positions, rows = batch.positions, batch.rows
        kept = rows[positions < self.recipe.first].copy()
        rows[:] = self.keys(rows, positions) if batch.kind == Rows.K else self.values(rows)
        rows[positions < self.recipe.first] = kept

    def keys(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        mean = self.mean_at(positions)
        stored = np.einsum("hij,nhj->nhi", self.forward, rows - mean)
        decoded = self.recipe.gain * self.k_codec(np.ascontiguousarray(stored, dtype=np.float32))
        return np.einsum("hij,nhj->nhi", self.backward, decoded) + mean

    def values(self, rows: np.ndarray) -> np.ndarray:
        stored = np.ascontiguousarray((rows - self.v_mean) / self.v_scale, dtype=np.float32)
        return self.recipe.v_gain * self.v_codec(stored) * self.v_scale + self.v_mean


def balance(k: np.ndarray, q: np.ndarray, shrink: float) -> tuple[np.ndarray, np.ndarray]:
    """A and its inverse with AᵀA the geometric mean of q and k⁻¹: A k Aᵀ is then A⁻ᵀ q A⁻¹, keys and queries alike."""
    forward, backward = [], []
    for kh, qh in zip(k, q, strict=True):
        kh, qh = (
            (1 - shrink) * m + shrink * np.diag(np.diag(m)) for m in (kh.astype(np.float64), qh.astype(np.float64))
        )
        root, inverse_root = power(kh, 0.5), power(kh, -0.5)
        mean = inverse_root @ power(root @ qh @ root, 0.5) @ inverse_root  # k⁻¹ # q
        forward.append(power(mean, 0.5))
        backward.append(power(mean, -0.5))
    return np.array(forward, np.float32), np.array(backward, np.float32)


def power(m: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(m)
    return vectors * np.maximum(values, 1e-9 * values.max()) ** exponent @ vectors.T


# ---- the run -------------------------------------------------------------------------------------------------------


def output_matrices(path: Path) -> dict[int, np.ndarray]:
    """W_o of each layer, float32 (n_embd, n_head * head_size)."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    found = {}
    for il in range(len(tensors)):
        tensor = tensors.get(f"blk.{il}.attn_output.weight")
        if tensor is not None:
            found[il] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return found


def filtered_context(
    stack: ExitStack, model: Model, layers: dict[int, LayerFilter], n_ctx: int, threads: int
) -> Context:
    check = stack.enter_context(filtering(lambda batch: layers[batch.layer](batch) if batch.layer in layers else None))
    ubatch = evaluation.rows_per_chunk(model.n_vocab)
    context = stack.enter_context(model.context("f16", n_ctx=n_ctx, n_ubatch=ubatch, n_threads=threads))
    stack.callback(check)
    return context


def run(args: argparse.Namespace) -> None:
    recipes = {text: Recipe.parse(text) for text in args.recipes}
    if args.ctx < 16 or args.windows < 1:
        raise TqError("there are no tokens to score: --ctx is 16 or more, --windows 1 or more")
    path = models.resolve_model(args.model)
    with Model(path) as model, ExitStack() as stack:
        text = default_text() if args.calibration is None else texts.named_text(args.calibration)
        lengths = {recipe.tokens for recipe in recipes.values()}
        samples = {n: take_samples(model, cut_tokens(model, text, n), args.threads) for n in lengths}
        wo = output_matrices(path) if any(r.v_scale != "none" for r in recipes.values()) else {}
        windows = evaluation.cut_windows(
            model.tokenize(texts.named_text(args.text), add_bos=True), args.ctx, args.windows, model.bos
        )
        contexts = {"f16": filtered_context(stack, model, {}, args.ctx, args.threads)}
        for name, recipe in recipes.items():
            taken = samples[recipe.tokens]
            last = max(taken) - recipe.wide
            layers = {
                il: LayerFilter(recipe, sample, args.ctx, wo.get(il), wide=il < recipe.wide or il > last)
                for il, sample in taken.items()
            }
            contexts[name] = filtered_context(stack, model, layers, args.ctx, args.threads)
        scores = evaluation.score(contexts, "f16", windows)
    for name in ("f16", *recipes):
        s = evaluation.summarise(scores[name])
        print(
            f"KLD {s['kld']:.5f} ± {s['kld_err']:.5f}  same top {s['same_top']:.4f}  PPL {s['ppl']:.3f}  {name}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="GGUF file, or a name that `tq-ggml models` lists")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-f", "--text", default="Persuasion", help="text to measure on: a file, or a novel's title")
    parser.add_argument("--calibration", metavar="TEXT", help="text to calibrate on (default: the one we ship)")
    parser.add_argument("-c", "--ctx", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    try:
        run(parser.parse_args())
    except TqError as error:
        print(f"cache_lab: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
