"""Results as text: a markdown table for people; csv, json and jsonl for programs; a plot on request."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tq_ggml.errors import TqError

FORMATS = ("md", "csv", "json", "jsonl")
PLOT_FORMATS = (".png", ".svg", ".pdf")

Row = dict[str, Any]


class Column(NamedTuple):
    """A column of the markdown table: its header, the row's key, and how to print the number.

    Attributes:
        spec: a format spec; "" prints the value as it is and aligns left.
        error: key of the standard error or deviation printed after ±.
        scale: the number is multiplied by this first (100 for per cent).
    """

    header: str
    key: str
    spec: str = ""
    error: str | None = None
    scale: float = 1

    def cell(self, row: Row) -> str:
        """The row's value as text; empty where the row has none."""
        value = row.get(self.key)
        if value is None:
            return ""
        if not self.spec:
            return str(value).strip().replace("|", "\\|")
        text = format(value * self.scale, self.spec)
        deviation = row.get(self.error) if self.error else None
        return text if deviation is None else f"{text} ± {format(deviation * self.scale, self.spec)}"


_TYPES = (Column("type_k", "type_k"), Column("type_v", "type_v"))
_SIZE = (Column("KV MiB", "kv_mib", ".2f"), Column("vs f16", "ratio", ".2f"))
_QUALITY = (
    Column("PPL", "ppl", ".3f", "ppl_err"),
    Column("KL divergence", "kld", ".5f", "kld_err"),
    Column("same top %", "same_top", ".2f", scale=100),
)
_TAILS = (
    Column("median KLD", "kld_median", ".5f"),
    Column("99.9 % KLD", "kld_p999", ".4f"),
    Column("RMS Δp %", "rms_dp", ".3f", scale=100),
)
_SPEED = (
    Column("prefill t/s", "prefill_tps", ".1f", "prefill_sd"),
    Column("decode t/s", "decode_tps", ".1f", "decode_sd"),
)
COMPARE = (*_TYPES, *_SIZE, *_QUALITY, *_SPEED)
_BEHAVIOUR = (
    Column("same tokens", "prefix", ".1f", "prefix_err"),
    Column("same answer %", "identical", ".0f", scale=100),
)
PERPLEXITY = (*_TYPES, *_SIZE, *_QUALITY, *_TAILS)
BENCH = (
    Column("model", "model"),
    *_TYPES,
    Column("n_threads", "n_threads", "d"),
    Column("test", "test"),
    Column("t/s", "tps", ".2f", "sd"),
    Column("vs f16", "vs_f16", ".2f"),
)


def compare_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """``COMPARE``, and a column for each figure of behaviour that the rows have."""
    lengths = (key.removeprefix("passkey_") for key in rows[0] if key.startswith("passkey_"))
    passkeys = (Column(f"passkey {length} %", f"passkey_{length}", ".0f", scale=100) for length in lengths)
    return (*COMPARE, *passkeys, *(column for column in _BEHAVIOUR if column.key in rows[0]))


def render(rows: Sequence[Row], fmt: str, columns: Sequence[Column]) -> str:
    """The rows in one of ``FORMATS``, ending in a newline.

    ``columns`` shape the markdown table; the other formats carry every key. Not-a-number and None become null in
    json and jsonl and an empty field in csv.
    """
    if fmt == "md":
        return markdown(rows, columns)
    rows = [{key: _plain(value) for key, value in row.items()} for row in rows]
    if fmt == "json":
        return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    if fmt == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, list, dict)) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A padded markdown table; numbers are aligned right. A last column of text is left ragged, it may be long."""
    cells = [[column.header for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    if not columns[-1].spec:
        widths[-1] = len(columns[-1].header)
    rule = ["-" * width if not c.spec else "-" * (width - 1) + ":" for c, width in zip(columns, widths, strict=True)]
    lines = [cells[0], rule, *cells[1:]]
    return "".join(_line(line, widths, columns) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    padded = (
        cell.rjust(width) if column.spec else cell.ljust(width)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    )
    return f"| {' | '.join(padded)} |\n"


def bench_tests(rows: Sequence[Row]) -> list[Row]:
    """One row per test as llama-bench prints them (``pp512 @ d4096``, ``tg32 @ d4096``) from one row per type."""
    tests = []
    for part, letters in (("prefill", "pp"), ("decode", "tg")):
        for row in rows:
            if row[f"{part}_tps"] is not None:
                keys = {"tps": f"{part}_tps", "sd": f"{part}_sd", "vs_f16": f"{part}_vs_f16"}
                tests.append({**row, "test": _test_name(row, letters), **{k: row[v] for k, v in keys.items()}})
    return tests


def _test_name(row: Row, letters: str) -> str:
    count = row["n_prompt"] if letters == "pp" else row["n_gen"]
    after = row["prompt_depth"] if letters == "pp" else row["depth"]
    return f"{letters}{count} @ d{after}" if after else f"{letters}{count}"


def check_plot(path: Path) -> None:
    """Find out before a long run whether :func:`plot` can work.

    Raises:
        TqError: matplotlib is missing, the folder does not exist or the ending is not one of ``PLOT_FORMATS``.
    """
    if find_spec("matplotlib") is None:
        raise TqError("--plot needs matplotlib: pip install 'tq-ggml[plot]'")
    if path.suffix.lower() not in PLOT_FORMATS:
        raise TqError(f"--plot {path}: the name must end in one of {', '.join(PLOT_FORMATS)}")
    if not path.parent.is_dir():
        raise TqError(f"--plot {path}: there is no folder {path.parent}; make it first")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw one bar per row for each figure the rows have: KV size, KL divergence, prefill and decode rates.

    Raises:
        TqError: see :func:`check_plot`, or the file cannot be written.
    """
    pyplot = _pyplot(path)
    panels = [column for column in compare_columns(rows) if column.spec and column.key not in ("ratio", "same_top")]
    panels = [column for column in panels if any(row.get(column.key) is not None for row in rows)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3 * len(panels), 1.2 + 0.4 * len(rows)), sharey=True)
    for axis, column in zip([axes] if len(panels) == 1 else axes, panels, strict=True):
        axis.barh(range(len(rows)), [row.get(column.key) or 0 for row in rows], xerr=_errors(rows, column))
        axis.set_title(column.header)
        axis.set_yticks(range(len(rows)), [_label(row) for row in rows])
    figure.axes[0].invert_yaxis()
    _save(figure, path, title)


def plot_layers(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw what `tq_ggml.inspection` finds, by layer: logit errors of each type, and what makes them.

    Raises:
        TqError: see :func:`check_plot`, or the file cannot be written.
    """
    pyplot = _pyplot(path)
    figure, (errors, causes) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    layers = [row["layer"] for row in rows]
    for index, name in enumerate(inspected_types(rows)):
        plain = [row[f"logit_error_plain_{name}"] for row in rows]
        conditioned = [row[f"logit_error_{name}"] for row in rows]
        errors.plot(layers, plain, color=f"C{index}", linestyle=":", label=name)
        if conditioned != plain:
            errors.plot(layers, conditioned, color=f"C{index}", label=f"{name} conditioned")
    errors.set(yscale="log", ylabel="logit error (standard deviation)")
    causes.plot(layers, [row["key_peak"] for row in rows], label="largest key channel / average")
    causes.plot(layers, [row["key_kurtosis"] for row in rows], label="key kurtosis after rotation")
    causes.plot(layers, [100 * row["key_mean_share"] for row in rows], label="share of the key mean, %")
    causes.set(yscale="log", xlabel="layer")
    for axis in (errors, causes):
        axis.legend(fontsize="small")
    _save(figure, path, title)


def inspected_types(rows: Sequence[Row]) -> list[str]:
    """The cache types that inspection's rows have logit errors of."""
    return [key.removeprefix("logit_error_plain_") for key in rows[0] if key.startswith("logit_error_plain_")]


def _pyplot(path: Path) -> Any:
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise TqError(f"--plot {path}: {error.strerror or error}") from None
    finally:
        _pyplot(path).close(figure)


def _errors(rows: Sequence[Row], column: Column) -> list[float] | None:
    return [row.get(column.error) or 0 for row in rows] if column.error else None


def _label(row: Row) -> str:
    name = row["type_k"] if row["type_k"] == row["type_v"] else f"{row['type_k']}/{row['type_v']}"
    return f"{name} @ {row['depth']}" if row.get("depth") else name
