"""`make bench`: the program that times attention, the runs of whole models, and the document made of their results."""

from __future__ import annotations

import copy
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench  # noqa: E402
import bench_end_to_end  # noqa: E402
import bench_report  # noqa: E402
import build  # noqa: E402

# Over an f32 cache of Gaussian keys and values; about twice what was measured.
MAX_NMSE = {"f16": 1e-4, "q8_0": 2e-4, "q4_0": 3e-2, "tq4": 2.5e-2, "tq3": 0.1}


@pytest.fixture(scope="module")
def tool():
    """Runs tq-attn-bench: exit status, rows, stderr."""
    tree = build.build_tree()
    program = tree / "bin" / build.BENCH if tree else None
    if program is None or not program.is_file():
        reason = f"{build.BENCH} is not built; run `make test`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)

    def run(line: str) -> tuple[int, list[dict], str]:
        done = subprocess.run([program, *line.split()], capture_output=True, text=True, timeout=300)
        return done.returncode, [json.loads(row) for row in done.stdout.splitlines()], done.stderr

    return run


# ---- the program ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["", "by-token"])
@pytest.mark.parametrize("shape", ["1 300 128 8 2", "40 200 64 4 4"])
def test_attention(tool, shape, layout):
    status, rows, stderr = tool(f"attention {shape} 1 3 {bench.ATTENDED} {layout}")
    assert status == 0, stderr
    assert ",".join(r["type"] + "@stock" * (r["path"] == "stock") for r in rows) == bench.ATTENDED
    for row in rows:
        keys = ("n_q", "n_kv", "head_size", "n_head", "n_head_kv")
        assert " ".join(str(row[key]) for key in keys) == shape
        assert (row["threads"], row["repeats"], row["layout"]) == (1, 3, layout or "by-head")
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert 0 < row["nmse"] < MAX_NMSE[row["type"]], row


def test_stock_is_another_attention(tool):
    _, rows, _ = tool("attention 1 300 128 8 2 1 1 q8_0@stock,q8_0,q8_0@stock")
    first, ours, again = (row["nmse"] for row in rows)
    assert first == again != ours


def test_set_rows(tool):
    status, rows, stderr = tool(f"set_rows 3 64 2 1 2 {bench.WRITTEN}")
    assert status == 0, stderr
    assert ",".join(row["type"] for row in rows) == bench.WRITTEN
    for row in rows:
        assert row["ns_per_value"] == pytest.approx(row["median_ms"] * 1e6 / (3 * 64 * 2), rel=1e-2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "usage: tq-attn-bench attention"),
        ("attend 1 2 64 4 2 1 1 f16", "usage:"),
        ("attention 1 2 64 4 2 1 1", "usage:"),
        ("attention 1 2 64 4 2 1 1 f16 by-row", "usage:"),
        ("attention 1x 2 64 4 2 1 1 f16", "N_Q is '1x'; give a whole number from 1"),
        ("attention 1 2 64 4 2 0 1 f16", "THREADS is '0'"),
        ("attention 1 99999999999999999999 64 4 2 1 1 f16", "N_KV is '99999999999999999999'"),
        ("set_rows 0 64 2 1 1 f16", "N_TOKENS is '0'"),
        ("attention 4 2 64 4 2 1 1 f16", "4 queries, but only 2 keys"),
        ("attention 1 2 64 4 3 1 1 f16", "4 heads cannot share 3 KV heads"),
        ("attention 1 2 48 4 2 1 1 f16,tq4", "head size 48 is no multiple of the 32 values of a block of tq4"),
        ("attention 1 2 64 4 2 1 1 f16,q9", "unknown type 'q9'; choose f16"),
        ("attention 1 2 64 4 2 1 1 f16@ours", "unknown type 'f16@ours'"),
        ("attention 1 2 64 4 2 1 1 tq4@stock", "leave @stock out"),
        ("attention 1 2 64 4 2 1 1 ,", "no type given"),
        ("attention 1 16777216 64 4 2 1 1 f16", "choose fewer tokens"),
    ],
)
def test_refusals(tool, line, words):
    status, rows, stderr = tool(line)
    assert (status, rows) == (2, [])
    assert words in stderr


# ---- the parts -----------------------------------------------------------------------------------------------------


def test_a_part_is_measured_loaded_and_rendered(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "DECODE", (bench.Case(1, 64, 64, 2, 1),))
    output = tmp_path / "speed.md"
    places = ["--results", str(tmp_path / "results"), "--output", str(output)]
    assert bench.main([*places, "--quick", "--threads", "1", "--only", "decode,set_rows"]) == 0
    first = output.read_text(encoding="utf-8")
    assert "## Attention: one token" in first and "## Writing into the cache" in first
    assert "## Whole models" not in first
    output.unlink()
    assert bench.main([*places, "--render"]) == 0
    assert output.read_text(encoding="utf-8") == first


def test_the_level_is_forced(tool):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"this CPU cannot run avx2: it is {platform.machine()}")
    rows = bench.tool("attention", 1, 64, 64, 2, 1, 1, 1, "f16@stock,tq4", simd="avx2")
    assert {row["simd"] for row in rows} == {"avx2"}


def test_whole_models(tmp_path, tiny_gguf):
    caches = [bench_end_to_end.Cache(*c) for c in (("f16", True), ("q8_0", True), ("f16",), ("tq4",))]
    rows = bench_end_to_end.measure(tiny_gguf(head_size=64), 100, 1, 2, lambda *words: None, caches)
    assert [(r["type"], r["path"], r["rounds"]) for r in rows] == [
        ("f16", "stock", 2),
        ("q8_0", "stock", 1),
        ("f16", "ours", 2),
        ("tq4", "ours", 2),
    ]
    assert rows[0]["prefill_vs_f16"] == rows[0]["decode_vs_f16"] == 1
    assert all(row["prefill_tps"] > 0 and row["decode_tps"] > 0 for row in rows)
    assert {row["values_per_token"] for row in rows} == {2 * 2 * 64}  # keys and values of two layers with one head


def test_memory(tiny_gguf):
    path = tiny_gguf(head_size=64, n_head_kv=2)
    f16, tq4 = (bench_end_to_end.memory_of(path, name, 65536, 1) for name in ("f16", "tq4"))
    assert f16["kv_mib"] == 2 * 2 * 2 * 64 * 65536 * 2 / 2**20
    assert f16["kv_mib"] / tq4["kv_mib"] == pytest.approx(32 / 9)
    saved = f16["kv_mib"] - tq4["kv_mib"]
    assert f16["peak_mib"] - tq4["peak_mib"] == pytest.approx(saved, rel=0.1)


# ---- the document --------------------------------------------------------------------------------------------------

MACHINE = {"cpu": "A CPU", "cores": 4, "simd": "neon", "os": "An OS", "compiler": "GNU 12", "llama_cpp_python": "1.2"}
ABOUT = {"machine": MACHINE, "threads": 2, "date": "2026-01-02"}


def attended(n_kv: int, times: dict[str, float]) -> list[dict]:
    shape = {"n_q": 1, "n_kv": n_kv, "head_size": 64, "n_head": 4, "n_head_kv": 2, "layout": "by-token", "repeats": 5}
    paths = {name: ("stock" if name.endswith(" stock") else "ours") for name in times}
    return [
        shape | {"type": name.split()[0], "path": paths[name], "median_ms": ms, "nmse": ms * 1e-6}
        for name, ms in times.items()
    ]


def whole(name: str, path: str, prefill: float, decode: float) -> dict:
    about = {"part": "speed", "preset": "0.6B", "layers": 7, "of_layers": 28, "depth": 4096, "values_per_token": 1000}
    rates = {"prefill_tps": 100 * prefill, "prefill_vs_f16": prefill, "decode_vs_f16": decode}
    return about | rates | {"type": name, "path": path, "rounds": 3}


def memory(name: str, kv: float, peak: float) -> dict:
    return {"part": "memory", "preset": "0.6B", "type": name, "kv_mib": kv, "peak_mib": peak}


@pytest.fixture
def results() -> dict:
    rows = attended(2048, {"f16 stock": 6.0, "q8_0 stock": 12.0, "tq4": 1.5})
    rows += attended(1024, {"f16 stock": 3.0, "q8_0 stock": 4.0, "tq4": 1.0})
    written = {"n_kv": 512, "n_head_kv": 2, "head_size": 64, "threads": 2, "repeats": 9}
    models = [whole("f16", "stock", 1, 1), whole("f16", "ours", 1.5, 2), whole("tq4", "ours", 2, 2.5)]
    models += [memory("f16", 100, 900), memory("tq4", 28.125, 830)]
    return {
        "decode": {**ABOUT, "rows": rows},
        "plot": {**ABOUT, "rows": copy.deepcopy(rows)},
        "set_rows": {**ABOUT, "rows": [written | {"type": "tq4", "ns_per_value": 1.5}]},
        "end_to_end": {**ABOUT, "rows": models},
    }


def cells(text: str, title: str) -> list[list[list[str]]]:
    """The tables of a section, as rows of cells; their rule lines left out."""
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    tables: list[list[list[str]]] = [[]]
    for line in section.splitlines():
        if line.startswith("|") and not line.startswith(("| -", "|-")):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif not line.startswith("|") and tables[-1]:
            tables.append([])
    return [table for table in tables if table]


def test_the_document(results):
    text = bench_report.document(results)
    assert "A CPU, 4 cores; threads: 2; SIMD level: neon" in text
    speeds, errors = cells(text, "Attention: one token")
    head, first, second = (dict(zip(speeds[0], row, strict=True)) for row in speeds)
    assert list(head)[-len(bench_report.ATTENDED) :] == list(bench_report.ATTENDED)
    assert (first["keys"], first["heads"], first["layout"]) == ("2048", "4/2", "token")
    assert (first["q8_0 stock"], first["tq4"], first["tq3"]) == ("0.50", "4.00", "")
    assert (second["q8_0 stock"], second["tq4"]) == ("0.75", "3.00")
    assert dict(zip(*errors, strict=True))["tq4"] == "1.5e-06"
    # 1.5 ns * 1000 values a token, of the 5 ms that a token takes at 200 tokens per second
    assert cells(text, "Writing into the cache")[0][1] == ["tq4", "1.50", "0.03"]
    speed, peaks = cells(text, "Whole models")
    assert speed[1:] == [
        ["f16 stock", "1.00", "3", "1.00"],
        ["f16", "1.50", "3", "2.00"],
        ["tq4", "2.00", "3", "2.50"],
    ]
    assert peaks[2] == ["tq4", "28.1", "71.9", "830.0", "70.0"]
    assert "### Qwen3-0.6B, 7 of 28 layers, depth 4096" in text


def test_parts_without_results_are_left_out(results):
    text = bench_report.document({"set_rows": results["set_rows"]})
    assert cells(text, "Writing into the cache") == [[["type", "ns per value"], ["tq4", "1.50"]]]
    assert text.count("\n## ") == 1 and "Layout" not in text


def test_the_plot(results, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the group 'bench'")
    bench_report.write(results, tmp_path / "speed.md")
    assert "](speed.svg)" in (tmp_path / "speed.md").read_text(encoding="utf-8")
    svg = (tmp_path / "speed.svg").read_bytes()
    for word in (b"f16 stock", b"tq4", b"1k", b"2k", b"tokens in the cache"):
        assert word in svg
    bench_report.write(results, tmp_path / "speed.md")
    assert (tmp_path / "speed.svg").read_bytes() == svg


def save(results: dict, folder: Path) -> list[str]:
    for part, result in results.items():
        (folder / f"{part}.json").write_text(json.dumps(result), encoding="utf-8")
    return ["--render", "--results", str(folder), "--output", str(folder / "speed.md")]


def test_render_needs_results_of_one_machine(results, tmp_path, capsys):
    options = ["--render", "--results", str(tmp_path), "--output", str(tmp_path / "speed.md")]
    assert bench.main(options) == 2
    assert "no results in" in capsys.readouterr().err
    results["set_rows"] = {**results["set_rows"], "machine": MACHINE | {"cpu": "Another"}}
    assert bench.main(save(results, tmp_path)) == 2
    assert "different machines" in capsys.readouterr().err
    assert not (tmp_path / "speed.md").exists()


def test_ratios_need_stock_f16(results, tmp_path, capsys):
    results["decode"]["rows"] = results["decode"]["rows"][1:3]
    assert bench.main(save({"decode": results["decode"]}, tmp_path)) == 2
    assert "no f16 stock for 1 queries on 2048 keys" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "decode,speed"], "'speed' is none of decode, prefill"),
        (["--threads", "0"], "'0' is not a number of threads"),
        (["--render", "--quick"], "--render measures nothing"),
    ],
)
def test_wrong_options(options, words, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
