"""Every output format, from the same rows."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tq_ggml import report
from tq_ggml.errors import TqError
from tq_ggml.report import Column, bench_tests, check_plot, markdown, plot, render

ROWS = [
    {"type_k": "f16", "type_v": "f16", "kv_mib": 45.0, "kld": 0.0, "kld_err": 0.0, "decode_tps": 50.5, "depth": 512},
    {
        "type_k": "q8_0",
        "type_v": "tq4",
        "kv_mib": 18.28,
        "kld": float("nan"),
        "kld_err": None,
        "decode_tps": None,
        "depth": 512,
    },
]
COLUMNS = (Column("type_k", "type_k"), Column("KLD", "kld", ".3f", "kld_err"), Column("t/s", "decode_tps", ".1f"))


def test_markdown():
    assert markdown(ROWS, COLUMNS).splitlines() == [
        "| type_k |           KLD |  t/s |",
        "| ------ | ------------: | ---: |",
        "| f16    | 0.000 ± 0.000 | 50.5 |",
        "| q8_0   |           nan |      |",
    ]


def test_markdown_keeps_a_bar_inside_its_cell():
    assert markdown([{"item": "A | B "}], [Column("item", "item")]).splitlines()[2] == r"| A \| B |"


def test_per_cent_scales_the_error_too():
    assert Column("%", "x", ".1f", "e", scale=100).cell({"x": 0.5, "e": 0.01}) == "50.0 ± 1.0"


@pytest.mark.parametrize("fmt", ["json", "jsonl"])
def test_json_is_strict_and_complete(fmt):
    text = render(ROWS, fmt, COLUMNS)
    lines = [text] if fmt == "json" else text.splitlines()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    parsed = [json.loads(line, parse_constant=refuse) for line in lines]
    first, second = parsed[0] if fmt == "json" else parsed
    assert first == ROWS[0]
    assert second == {**ROWS[1], "kld": None}


def test_csv():
    first, second = csv.DictReader(io.StringIO(render(ROWS, "csv", COLUMNS)))
    assert list(first) == list(ROWS[0])
    assert (first["kv_mib"], second["kld"], second["decode_tps"]) == ("45.0", "", "")


def test_bench_tests_are_named_as_llama_bench_does():
    row = {"type_k": "f16", "depth": 128, "n_prompt": 64, "prompt_depth": 128, "n_gen": 8}
    row |= {"prefill_tps": 10.0, "prefill_sd": 1.0, "prefill_vs_f16": None}
    row |= {"decode_tps": 2.0, "decode_sd": None, "decode_vs_f16": 0.5}
    own_prefill = row | {"depth": 64, "prompt_depth": 0, "decode_tps": None}
    tests = bench_tests([row, own_prefill])
    assert [(t["test"], t["tps"], t["sd"], t["vs_f16"]) for t in tests] == [
        ("pp64 @ d128", 10.0, 1.0, None),
        ("pp64", 10.0, 1.0, None),
        ("tg8 @ d128", 2.0, None, 0.5),
    ]


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(TqError, match=r"pip install 'tq-ggml\[plot\]'"):
        check_plot(Path("out.png"))


def test_plot_draws_a_file(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the extra 'plot'")
    for name in ("out.png", "out.svg"):
        plot(ROWS, tmp_path / name, "title")
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(TqError, match="must end in one of .png"):
        check_plot(tmp_path / "out.txt")
    with pytest.raises(TqError, match="no folder"):
        check_plot(tmp_path / "nowhere" / "out.png")
