#!/usr/bin/env python3
"""Write the numbers and the picture of docs/walkthrough.md: one block of 32 values through every step of tq3.

``--check`` writes nothing and fails where the page's numbers are not these.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from pages import markdown, put_in
from tq_ggml import codebooks
from tq_ggml import reference as ref
from tq_ggml.codebooks import block_table
from tq_ggml.reference.rotations import walsh_hadamard

PAGE = Path(__file__).resolve().parent.parent / "docs" / "walkthrough.md"

# SmolLM2-135M, layer 12, KV head 1: channels 32 to 63 of the key of token 30 and of a query of token 31, and channels 0
# to 31 of the values of tokens 27 to 30, rounded to two decimals.
KEY = """
0.13 0.23 -4.04 -0.44 -0.04 -0.14 -0.92 1.52 0.01 -0.14 -0.29 -0.34 -0.34 -1.17 -2.15 -1.57 2.60 12.73 0.74 -0.63
-0.97 -1.65 0.20 0.19 0.35 1.52 -2.31 -1.32 1.35 -1.92 2.54 0.88
"""
QUERY = """
-0.74 -1.72 -0.76 -3.36 -0.42 -0.16 -0.04 -0.31 -0.61 0.32 0.04 -0.21 -0.32 -0.08 0.91 -0.20 -12.79 -2.54 -1.40
-0.77 -1.30 0.46 0.21 -0.09 -0.72 0.71 -0.17 -0.49 -0.55 -2.85 0.75 1.13
"""
VALUES = """
-1.18 1.23 -0.43 0.01 0.96 -0.21 -0.04 -0.24 -0.09 0.04 -0.25 -0.93 0.67 0.21 -0.29 0.04 0.01 -0.88 0.36 -0.41
-0.21 -0.30 -0.10 0.28 1.08 1.46 0.02 1.17 0.43 -0.31 -0.29 -0.12
-0.60 -0.30 -0.03 -0.38 0.37 0.03 0.20 -0.52 0.14 0.39 -0.26 -0.05 0.43 0.22 0.25 -0.20 0.13 -0.96 -0.25 -0.62
-0.82 0.26 0.39 0.79 0.34 0.94 -0.15 0.99 0.38 0.01 -0.44 -0.04
0.49 0.19 0.29 -0.40 -1.01 0.09 0.22 -0.09 -0.23 -0.26 -0.83 -1.35 0.73 0.13 0.60 -0.38 -0.54 -0.84 0.52 0.34
-0.51 0.26 0.48 -0.20 0.37 -0.21 -0.38 1.56 -0.53 -0.61 -0.06 -0.49
0.41 0.36 -0.86 0.10 -1.18 0.02 0.10 0.47 0.16 -0.07 -0.03 0.09 -0.21 0.72 -1.08 -0.09 -0.70 -0.72 0.36 -0.09
-0.51 0.04 0.73 -0.03 0.69 -0.21 0.17 1.57 -0.66 -0.46 -0.41 -0.18
"""
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4])


def numbers(text: str) -> np.ndarray:
    return np.array(text.split(), np.float32).reshape(-1, 32)


KEY_ROW, QUERY_ROW, VALUE_ROWS = numbers(KEY), numbers(QUERY), numbers(VALUES)


def grid(x: np.ndarray, form: str = "{:.2f}") -> str:
    """32 numbers in four rows of eight, by index."""
    rows = [[f"**{8 * i} …**", *(form.format(value) for value in x.ravel()[8 * i : 8 * i + 8])] for i in range(4)]
    return markdown(["", *(f"+{i}" for i in range(8))], rows)


class Block:
    """Every number of a block that the page shows."""

    def __init__(self, name: str, x: np.ndarray) -> None:
        self.name, self.table = name, block_table(int(name[2]))
        self.data = ref.quantize(x, name)
        self.codes = ref.unpack(self.data, name)
        self.rotated = ref.rotate(x)[0].astype(np.float64)
        self.decoded_rotated = ref.rotated_values(self.codes, name)[0].astype(np.float64)
        self.decoded = ref.dequantize(self.data, name)[0]
        self.nmse = ref.nmse(x[0], self.decoded)
        self.levels = self.table.levels.astype(np.float64)
        self.candidates = [self._candidate(ratio) for ratio in self.table.ratios]
        self.norm_scale = float(np.sqrt(np.mean(self.rotated**2))) * 32 / self.table.multiplier

    def nearest(self, scale: float) -> np.ndarray:
        ends = (self.levels[1:] + self.levels[:-1]) / 2 * scale / 32
        return np.searchsorted(ends, np.abs(self.rotated))

    def error(self, scale: float) -> float:
        decoded = np.sign(self.rotated) * self.levels[self.nearest(scale)] * scale / 32
        return float(np.sum((decoded - self.rotated) ** 2) / np.sum(self.rotated**2))

    def _candidate(self, ratio: float) -> tuple[float, float, float, bool]:
        """Ratio, scale, error, and whether the encoder took it: its codes are those that are stored."""
        scale = 32 * ratio * float(np.abs(self.rotated).max()) / self.levels[-1]
        return ratio, scale, self.error(scale), bool((self.nearest(scale) == self.codes.index[0]).all())


def transform_stages() -> str:
    x, rows = (KEY_ROW * ref.SIGNS)[0].astype(np.float64), []
    for stage in range(6):
        turned = walsh_hadamard(x.reshape(-1, 2**stage)).ravel() / 2 ** (stage / 2)
        share = np.max(turned**2) / np.sum(turned**2)
        rows.append([f"{stage}", f"{2**stage}", f"{np.abs(turned).max():.2f}", f"{100 * share:.0f} %"])
    return markdown(["stages", "values mixed", "largest", "its share of the energy"], rows)


def level_table(block: Block) -> str:
    exact, ends = codebooks.lloyd_max(int(block.name[2])), (block.levels[1:] + block.levels[:-1]) / 2
    rows = [
        [f"{i}", f"±{exact[i]:.4f} σ", f"±{int(level)}", f"up to {ends[i]:g}" if i < len(ends) else "beyond"]
        for i, level in enumerate(block.levels)
    ]
    return markdown(["index", "Lloyd-Max level", "stored as", "cell, in these units"], rows)


def candidates(block: Block) -> str:
    rows = [
        [f"**{ratio:.2f}**" if taken else f"{ratio:.2f}", f"{scale:.3f}", f"{error:.4f}"]
        for ratio, scale, error, taken in block.candidates
    ]
    rows.append(["norm as scale (seed)", f"{block.norm_scale:.3f}", f"{block.error(block.norm_scale):.4f}"])
    return markdown(["of the largest", "scale", "error / energy"], rows)


def correction(block: Block) -> str:
    magnitudes, level = np.abs(block.rotated), block.levels[block.codes.index[0]]
    fitted = 32 * np.sum(magnitudes * level) / np.sum(level * level)
    taken = next(c for c in block.candidates if c[3])
    rows = [
        ["the candidate's scale", f"{taken[1]:.4f}", f"{taken[2]:.5f}"],
        ["(y·L)/(L·L)", f"{fitted:.4f}", ""],
        ["as the encoder fits it, in fp16", f"{block.codes.scale[0]:.4f}", f"{block.nmse:.5f}"],
    ]
    return markdown(["", "scale", "error / energy"], rows)


def whole_block(block: Block) -> str:
    c, rows = block.codes, []
    for i in range(32):
        sign = "-" if c.negative[0, i] else "+"
        level = f"{sign}{int(block.levels[c.index[0, i]])}"
        numbers_ = KEY_ROW[0, i], block.rotated[i], block.decoded_rotated[i], block.decoded[i]
        x, y, y_hat, x_hat = (f"{value:.2f}" for value in numbers_)
        rows.append([f"{i}", x, "+" if ref.SIGNS[i] > 0 else "-", y, sign, f"{c.index[0, i]}", level, y_hat, x_hat])
    names = ["i", "value", "sign flip", "rotated", "sign", "index", "level", "decoded, rotated", "decoded"]
    return markdown(names, rows)


def bytes_of(block: Block) -> str:
    data = block.data[0]
    rows = [["scale (fp16)", data[:2].tobytes().hex(" "), f"{block.codes.scale[0]:g}"]]
    if block.name == "tq3":
        rows.append(["magnitudes, 2 bits each", data[2:10].tobytes().hex(" "), "byte j: elements j, j+8, j+16, j+24"])
        rows.append(["signs, 1 bit each", data[10:].tobytes().hex(" "), "bit j of byte m: element 4j + m"])
    else:
        rows.append(["codes, 4 bits each", data[2:].tobytes().hex(" "), "byte j: element j low, j+16 high"])
    return markdown([f"{len(data)} bytes", "hex", ""], rows)


def errors(blocks: tuple[Block, ...]) -> str:
    rows = []
    for block in blocks:
        bits = int(block.name[2])
        known = codebooks.distortion(codebooks.lloyd_max(bits))
        seed = ref.nmse(KEY_ROW, ref.dequantize(ref.quantize(KEY_ROW, block.name, "norm"), block.name))
        rows.append([block.name, f"{block.nmse:.4f}", f"{seed:.4f}", f"{known:.4f}", f"{4.0**-bits:.4f}"])
    return markdown(["", "this block", "norm as scale", "D_mse of the levels", "limit 4⁻ᵇ"], rows)


def key_path(block: Block) -> str:
    turned = ref.rotate(QUERY_ROW)[0].astype(np.float64)
    step = np.abs(turned).max() / 127
    rounded = np.rint(turned / step)
    levels = np.where(block.codes.negative[0], -1, 1) * block.levels[block.codes.index[0]]
    scale = float(block.codes.scale[0])
    rows = [
        ["q·k, exact", f"{float(QUERY_ROW[0].astype(float) @ KEY_ROW[0]):.3f}"],
        ["Πq·Πk: the same, rotated", f"{turned @ block.rotated:.3f}"],
        ["q·k̂, key decoded", f"{float(QUERY_ROW[0].astype(float) @ block.decoded):.3f}"],
        ["Πq·levels·scale/32: no key rotated back", f"{turned @ levels * scale / 32:.3f}"],
        [f"the query in int8, steps of {step:.4f}: {int(rounded @ levels)}·{step:.4f}·{scale:g}/32", ""],
    ]
    rows[-1][1] = f"{rounded @ levels * step * scale / 32:.3f}"
    return markdown(["inner product", ""], rows)


def value_path() -> str:
    data = ref.quantize(VALUE_ROWS, "tq3")
    one_by_one = WEIGHTS @ ref.dequantize(data, "tq3").astype(np.float64)
    summed = WEIGHTS @ ref.rotated_values(ref.unpack(data, "tq3"), "tq3").astype(np.float64)
    once, exact = ref.unrotate(summed.astype(np.float32)[None])[0], WEIGHTS @ VALUE_ROWS.astype(np.float64)
    rows = [[f"{i}", *(f"{x[i]:.4f}" for x in (exact, one_by_one, once))] for i in range(4)]
    error = [f"{ref.nmse(exact, x):.4f}" for x in (one_by_one, once)]
    rows.append(["error / energy, all 32", "", *error])
    return markdown(["channel", "exact", "four inverses", "one inverse"], rows)


def bias(block: Block) -> str:
    energy = np.sum(block.rotated**2)
    share = np.sum(block.rotated * block.decoded_rotated) / energy
    exact = float(QUERY_ROW[0].astype(float) @ KEY_ROW[0])
    found: dict[str, list[float]] = {"TurboQuant-MSE, 3 bits": [], "TurboQuant-prod, 2 + 1 bits": []}
    for seed in range(200):
        methods = ref.TurboQuantMSE(32, 3, seed=seed), ref.turbo_quant_prod(32, 3, seed=seed)
        for name, method in zip(found, methods, strict=True):
            found[name].append(method.inner_product(QUERY_ROW, method.compress(KEY_ROW))[0, 0])
    rows = [["y·ŷ / y·y of this block", f"{share:.4f}", ""]]
    rows += [
        [f"q·k by {name}", f"{np.mean(x):.2f} (exact {exact:.2f})", f"{np.std(x):.2f}"] for name, x in found.items()
    ]
    return markdown(["", "mean of 200 rotations", "standard deviation"], rows)


def parts() -> dict[str, str]:
    tq3, tq4 = Block("tq3", KEY_ROW), Block("tq4", KEY_ROW)
    return {
        "values": grid(KEY_ROW),
        "signed": grid(KEY_ROW * ref.SIGNS),
        "stages": transform_stages(),
        "rotated": grid(tq3.rotated),
        "levels": level_table(tq3),
        "candidates": candidates(tq3),
        "correction": correction(tq3),
        "block": whole_block(tq3),
        "bytes": bytes_of(tq3),
        "bytes-tq4": bytes_of(tq4),
        "errors": errors((tq3, tq4)),
        "keys": key_path(tq3),
        "value-sums": value_path(),
        "bias": bias(tq3),
    }


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tq-ggml"
    from matplotlib import pyplot

    block, channels = Block("tq3", KEY_ROW), np.arange(32)
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    before, after, back = axes
    before.bar(channels, KEY_ROW[0])
    before.set(title="the key's 32 values", xlabel="channel")
    for level in block.levels * float(block.codes.scale[0]) / 32:
        for sign in (-1, 1):
            after.axhline(sign * level, color="0.8", zorder=0)
    after.plot(channels, block.rotated, "o", label="rotated")
    after.plot(channels, block.decoded_rotated, "x", label="level")
    after.set(title="rotated, and the levels of 3 bits", xlabel="channel")
    after.legend(loc="upper right", fontsize="small")
    back.bar(channels, KEY_ROW[0], label="value")
    back.plot(channels, block.decoded, "k_", markersize=9, label="decoded")
    back.set(title="decoded", xlabel="channel")
    back.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    before = text = PAGE.read_text(encoding="utf-8")
    for name, content in parts().items():
        text = put_in(text, name, content)
    if args.check:
        if text != before:
            print("docs/walkthrough.md has other numbers; run scripts/walkthrough.py", file=sys.stderr)
        return int(text != before)
    PAGE.write_text(text, encoding="utf-8")
    draw(PAGE.with_name("walkthrough-block.svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
