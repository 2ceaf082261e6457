#!/usr/bin/env python3
"""Draw docs/why.svg, the README's picture: memory and quality of each cache type, from docs/quality.md."""

from __future__ import annotations

import re
from pathlib import Path

from tq_ggml.cache_types import parse_pair

DOCS = Path(__file__).resolve().parent.parent / "docs"
TYPES = {"q8_0": "q8_0", "q4_0": "q4_0", "iq4_nl": "iq4_nl", "tq4": "**tq4**", "tq3": "**tq3**"}
"""What is drawn, and the row of the page that has it."""


def figures(page: str) -> tuple[list[str], dict[str, list[float]]]:
    """The page's models, and by type the KL divergence on each."""
    table = page.split("<!-- scripts/quality.py: begin -->\n")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    by_name = {row[0]: [float(re.match(r"[0-9.]+", cell)[0]) for cell in row[1:]] for row in rows[2:]}
    return rows[0][1:], {name: by_name[row] for name, row in TYPES.items()}


def draw(models: list[str], klds: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tq-ggml"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(models), figsize=(9, 3.4), sharey=True, layout="constrained")
    for i, (axis, model) in enumerate(zip(axes, models, strict=True)):
        for name, values in klds.items():
            bits, ours = parse_pair(name)[0].bits_per_value, name.startswith("tq")
            axis.semilogy(bits, values[i], "o" if ours else "s", color="C3" if ours else "0.5", markersize=8)
            side = (
                {"ha": "right", "xytext": (-8, -3)} if name in ("iq4_nl", "tq3") else {"ha": "left", "xytext": (8, -3)}
            )
            weight = "bold" if ours else "normal"
            axis.annotate(name, (bits, values[i]), textcoords="offset points", weight=weight, **side)
        axis.set(title=model, xlabel="bits a value (f16: 16)", xlim=(2, 10.5), xticks=[3.5, 4.5, 8.5])
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="KL divergence from f16\n(lower is better)")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(*figures((DOCS / "quality.md").read_text(encoding="utf-8")), DOCS / "why.svg")
