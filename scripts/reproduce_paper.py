#!/usr/bin/env python3
"""Measure what the TurboQuant paper, the tutorial and the article claim, and write docs/paper.md's tables and plots.

Without options it takes about a minute on one core. ``--quick`` uses less data, prints, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from pages import markdown, put_in
from paper_experiments import EXPERIMENTS, RECALL_AT, Table
from tq_ggml import codebooks
from tq_ggml.errors import TqError

DOCS = Path(__file__).resolve().parent.parent / "docs"
FULL = 4


# ---- plots ---------------------------------------------------------------------------------------------------------


def plot_distortion(tables: dict[str, Table], axes) -> None:
    rows = tables["distortion"].rows
    bits = [row[0] for row in rows]
    left, right = axes
    for column, style, label in ((1, "o-", "measured"), (4, ":", "lower bound"), (5, "--", "upper bound")):
        left.semilogy(bits, [row[column] for row in rows], style, label=label)
    for column, style, label in ((6, "o-", "measured"), (7, "x", "π/2·D_mse(b-1)"), (9, "--", "upper bound")):
        right.semilogy(bits, [row[column] for row in rows], style, label=label)
    left.set(title="squared error, D_mse", xlabel="bits a value", xticks=bits)
    right.set(title="inner product, d·D_prod", xlabel="bits a value", xticks=bits)
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)


def plot_density(_tables: dict[str, Table], axes) -> None:
    x = np.linspace(-4, 4, 801)
    whole, tail = axes
    for d in (8, 32, 64, 128, None):
        label = "Gaussian" if d is None else f"d = {d}"
        whole.plot(x, codebooks.density(x, d), "k:" if d is None else "-", label=label)
        tail.semilogy(x[x > 2], np.maximum(codebooks.density(x[x > 2], d), 1e-9), "k:" if d is None else "-")
    for level in codebooks.lloyd_max(3):
        for sign in (-1, 1):
            whole.axvline(sign * level, color="0.8", zorder=0)
    whole.set(title="a coordinate, and the 3-bit levels", xlabel="σ")
    tail.set(title="its tail", xlabel="σ", ylim=(1e-6, 0.1))
    whole.legend()


def plot_recall(tables: dict[str, Table], axes) -> None:
    for axis, bits in zip(axes, (2, 4), strict=True):
        for row in tables["recall"].rows:
            if row[0] == bits:
                axis.plot(RECALL_AT, row[2:], "o-", label=row[1])
        axis.set(title=f"recall@1@k, {bits} bits", xlabel="k", xscale="log", xticks=RECALL_AT, xticklabels=RECALL_AT)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()


PLOTS = {"distortion": plot_distortion, "density": plot_density, "recall": plot_recall}


def draw(tables: dict[str, Table], folder: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tq-ggml"
    from matplotlib import pyplot

    for name, plot in PLOTS.items():
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        plot(tables, axes)
        figure.savefig(folder / f"paper-{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


# ---- the command ---------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    wanted = args.only.split(",") if args.only else list(EXPERIMENTS)
    if unknown := [name for name in wanted if name not in EXPERIMENTS]:
        raise TqError(f"no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}")
    tables = {}
    for name in wanted:
        print(f"{name} ...", file=sys.stderr)
        tables[name] = EXPERIMENTS[name](1 if args.quick else FULL)
        if not args.json:
            print(f"\n{name}\n\n{markdown(*tables[name])}")
    if args.json:
        print(json.dumps({name: table._asdict() for name, table in tables.items()}, ensure_ascii=False))
    if not args.quick:
        page = DOCS / "paper.md"
        text = page.read_text(encoding="utf-8")
        for name, table in tables.items():
            text = put_in(text, name, markdown(*table))
        page.write_text(text, encoding="utf-8")
        if not args.only:
            draw(tables, DOCS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less data; write nothing")
    parser.add_argument("--only", metavar="NAME,...", help=f"some of {', '.join(EXPERIMENTS)}; no plots")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    try:
        run(parser.parse_args())
    except TqError as error:
        print(f"reproduce_paper: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
