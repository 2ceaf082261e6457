"""docs/speed.md and its plot, from the results of scripts/bench.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tq_ggml.errors import TqError
from tq_ggml.report import Column, markdown

Row = dict[str, Any]

HEAD = """\
# Speed

Written by `make bench` (`scripts/bench.py`).

- {cpu}, {cores} cores; threads: {threads}; SIMD level: {simd}
- {os}, {compiler}, compiled for this machine; llama-cpp-python {llama_cpp_python}

How to read it: numbers are times as fast as llama.cpp's own attention over an f16 cache, "f16 stock", in the same run:
2.00 takes half its time. "Stock" is llama.cpp's own attention, all other columns are ours. The types take turns in one
process, and the medians of their times are compared.
"""

LAYOUTS = """\

Layout "head": the keys of a head lie together. "token": the heads of a token lie together, as in the cache that
llama.cpp makes; a head's keys are then a row apart.
"""

ERROR = """\

Error (NMSE) against attention over an f32 cache of the same keys and values. With a quantised cache most of it is what
the cache has lost.

"""

WRITING = """\

## Writing into the cache

SET_ROWS of {n_kv} tokens with {n_head_kv} heads of {head_size}: the time of {threads} threads together, the search for
the scales included. Median of {repeats}, {date}.
"""

SHARE = """\
The share is that of all layers in the prefill of {depth} tokens with the shape of Qwen3-{preset}, below.
"""

MODELS = """\

## Whole models

Qwen3's shapes with random Q4_0 weights, which cost what real ones do. Prefill: an empty cache filled up to the depth;
decode: one token at a time from there; {date}. Memory is the peak of a process of its own after one batch of 512
tokens, with the whole cache allocated; "saved" is against f16.
"""

SECTIONS = {
    "decode": ("Attention: one token", "One query, one layer; heads are query heads / KV heads."),
    "prefill": ("Attention: a prefill chunk", "The last of the keys' tokens are the queries, with a causal mask."),
    "avx2": (
        "Attention without AVX-512",
        "The same with our kernels held to AVX2 (`TQ_SIMD=avx2`). llama.cpp's own code keeps all that this CPU has.",
    ),
    "plot": (
        "Decode speed against depth",
        "One query, one layer of Qwen3-0.6B (16 / 8 heads of 128), in llama.cpp's layout.",
    ),
}

ATTENDED = ("q8_0 stock", "q4_0 stock", "f16", "q8_0", "q4_0", "tq4", "tq3")
SHAPE = (
    Column("queries", "n_q", "d"),
    Column("keys", "n_kv", "d"),
    Column("head size", "head_size", "d"),
    Column("heads", "heads"),
    Column("layout", "layout"),
)
RATIOS = tuple(Column(name, name, ".2f") for name in ATTENDED)
ERRORS = tuple(Column(name, name, ".1e") for name in ("f16 stock", *ATTENDED))
WRITTEN = (Column("type", "type"), Column("ns per value", "ns_per_value", ".2f"))
SHARES = (*WRITTEN, Column("% of prefill", "share", ".2f"))
SPEED = (
    Column("type", "name"),
    Column("prefill", "prefill_vs_f16", ".2f"),
    Column("prefills", "rounds", "d"),
    Column("decode", "decode_vs_f16", ".2f"),
)
MEMORY = (
    Column("type", "type"),
    Column("KV MiB", "kv_mib", ".1f"),
    Column("saved", "kv_saved", ".1f"),
    Column("peak MiB", "peak_mib", ".1f"),
    Column("saved", "peak_saved", ".1f"),
)


def write(results: dict[str, Row], output: Path) -> None:
    """The document, and speed.svg beside it where the depths were measured."""
    output.write_text(document(results), encoding="utf-8")
    if "plot" in results:
        plot(by_case(results["plot"]["rows"]), output.with_name("speed.svg"))


def document(results: dict[str, Row]) -> str:
    """Markdown; sections without results are left out."""
    first = next(iter(results.values()))
    text = HEAD.format(**first["machine"], threads=first["threads"])
    text += LAYOUTS if any(part in SECTIONS for part in results) else ""
    for part, (title, words) in SECTIONS.items():
        if part in results:
            text += attention_section(title, words, results[part], part == "plot")
    model = results.get("end_to_end")
    if "set_rows" in results:
        text += set_rows_section(results["set_rows"], model)
    return text + (end_to_end_section(model) if model else "")


# ---- attention -----------------------------------------------------------------------------------------------------


def by_case(rows: list[Row]) -> list[Row]:
    """A row per case: its shape, and under each type's name its speed against f16 stock, under "errors" its NMSE.

    Raises:
        TqError: a case without f16 stock.
    """
    cases: dict[tuple, Row] = {}
    for row in rows:
        shape = {key: row[key] for key in ("n_q", "n_kv", "head_size", "n_head", "n_head_kv", "layout")}
        case = cases.setdefault(tuple(shape.values()), shape | {"times": {}, "errors": {}})
        case["times"][name_of(row)] = row["median_ms"]
        case["errors"][name_of(row)] = row["nmse"]
    for case in cases.values():
        if "f16 stock" not in case["times"]:
            raise TqError(f"the results have no f16 stock for {case['n_q']} queries on {case['n_kv']} keys")
        case.update({name: case["times"]["f16 stock"] / ms for name, ms in case["times"].items()})
        case["heads"] = f"{case['n_head']}/{case['n_head_kv']}"
        case["layout"] = case["layout"].removeprefix("by-")
    return list(cases.values())


def name_of(row: Row) -> str:
    return row["type"] + (" stock" if row["path"] == "stock" else "")


def attention_section(title: str, words: str, result: Row, has_plot: bool) -> str:
    cases = by_case(result["rows"])
    repeats = {row["repeats"] for row in result["rows"]}
    text = f"\n## {title}\n\n{words} Median of {span(repeats)}, {result['date']}.\n\n"
    text += "![decode speed against depth](speed.svg)\n\n" if has_plot else ""
    text += markdown(cases, SHAPE + RATIOS)
    if not has_plot:
        text += ERROR
        text += markdown([case | case["errors"] for case in cases[:1]], SHAPE[:2] + ERRORS)
    return text


def span(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def plot(cases: list[Row], path: Path) -> None:
    """Speed against f16 stock over the number of keys, a line per type: ours solid, llama.cpp's dashed."""
    try:
        import matplotlib
    except ImportError:
        raise TqError("the plot needs matplotlib; run `make bench`, which installs it") from None
    # The same results give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none"})
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    colours = {"f16": "C7", "q8_0": "C0", "q4_0": "C2", "tq4": "C3", "tq3": "C1"}
    cases = sorted(cases, key=lambda case: case["n_kv"])
    for name in ("f16 stock", *ATTENDED):
        style = {"linestyle": "--", "marker": "x"} if name.endswith(" stock") else {"marker": "o"}
        colour = colours[name.removesuffix(" stock")]
        axis.plot([c["n_kv"] for c in cases], [c.get(name) for c in cases], color=colour, label=name, **style)
    axis.set_xscale("log", base=2)
    depths = [case["n_kv"] for case in cases]
    axis.set_xticks(depths, [f"{depth // 1024}k" for depth in depths])
    axis.set_ylim(bottom=0)
    axis.set(xlabel="tokens in the cache", ylabel="decode speed of attention, f16 stock = 1")
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


# ---- writing and whole models --------------------------------------------------------------------------------------


def set_rows_section(result: Row, model: Row | None) -> str:
    text = WRITING.format(**result["rows"][0], date=result["date"])
    if not model:
        return text + "\n" + markdown(result["rows"], WRITTEN)
    prefills = setups(model["rows"])[0]["speed"]
    return text + SHARE.format(**prefills[0]) + "\n" + markdown(with_share(result["rows"], prefills), SHARES)


def with_share(rows: list[Row], prefills: list[Row]) -> list[Row]:
    """Per cent of the prefill over the same type, with our attention, that goes into writing its keys and values."""
    seconds_per_token = {row["type"]: 1 / row["prefill_tps"] for row in prefills if row["path"] == "ours"}
    per_token = prefills[0]["values_per_token"]
    return [
        row | {"share": 100 * row["ns_per_value"] * 1e-9 * per_token / seconds_per_token[row["type"]]} for row in rows
    ]


def end_to_end_section(result: Row) -> str:
    text = MODELS.format(date=result["date"])
    for setup in setups(result["rows"]):
        first = setup["speed"][0]
        thin = "" if first["layers"] == first["of_layers"] else f", {first['layers']} of {first['of_layers']} layers"
        text += f"\n### Qwen3-{first['preset']}{thin}, depth {first['depth']}\n\n"
        text += markdown([row | {"name": name_of(row)} for row in setup["speed"]], SPEED) + "\n"
        text += markdown(list(with_savings(setup["memory"])), MEMORY)
    return text


def setups(rows: list[Row]) -> list[dict[str, list[Row]]]:
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["preset"], {"speed": [], "memory": []})[row["part"]].append(row)
    return list(found.values())


def with_savings(rows: list[Row]) -> Iterator[Row]:
    f16 = next(row for row in rows if row["type"] == "f16")
    for row in rows:
        yield row | {f"{key}_saved": f16[f"{key}_mib"] - row[f"{key}_mib"] for key in ("kv", "peak")}
