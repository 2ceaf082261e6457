"""The command line: its errors in this process, its results on real models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tq_ggml import cli, commands, library
from tq_ggml.cli import build_parser, main

COMPARE_KEYS = {"type_k", "type_v", "kv_mib", "ratio", "ppl", "ppl_err", "kld", "kld_err", "same_top"}
COMPARE_KEYS |= {"prefill_tps", "decode_tps", "depth"}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """The last error is kept in the cache folder; not in the user's, please."""
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking. " * 20, encoding="utf-8")
    return str(path)


def run_python(*words, **kwargs):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["compare", "-m", "none.gguf", "--types", "f16,foo"], "unknown cache type 'foo'; choose one of f32, f16"),
        (["compare", "-m", "none.gguf", "--types", "a/b/c"], "more than one '/'"),
        (["bench", "-m", "none.gguf"], "no model file 'none.gguf'"),
        (["bench"], "required: -m/--model"),
        (["compare", "-m", "none.gguf", "--ctx", "15"], "'15' is not a whole number from 16"),
        (["perplexity", "-m", "none.gguf", "--windows", "0"], "'0' is not a whole number from 1"),
        (["bench", "-m", "none.gguf", "-t", "513"], "'513' is not a whole number from 1 to 512"),
        (["bench", "-m", "none.gguf", "-d", "0,x"], "'x' is not a whole number from 0"),
        (["compare", "-m", "none.gguf", "--depth", "1,2"], "compare takes one --depth"),
        (["bench", "-m", "none.gguf", "--types", "f16", "--cache-type", "tq4"], "leave --cache-type out"),
        (["bench", "-m", "none.gguf", "-o", "xml"], "invalid choice: 'xml'"),
        (["chat", "-m", "none.gguf", "--cache-type", "tq5"], "unknown cache type 'tq5'"),
        (["chat", "-m", "none.gguf", "--temp", "nan"], "'nan' is not a number from 0 to 10"),
        (["models", "get", "gpt-9"], "no model is called 'gpt-9'"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(words, expected, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tq-ggml: error: ") and printed.err.count("\n") == 1
    assert expected in printed.err


def test_help_needs_neither_numpy_nor_the_engine():
    code = (
        "import sys; from tq_ggml.cli import build_parser; build_parser().format_help(); "
        "print([m for m in ('numpy', 'llama_cpp', 'tqdm') if m in sys.modules])"
    )
    assert run_python("-c", code).stdout == "[]\n"


def test_compare_perplexity_and_bench_share_their_options():
    words = ["-m", "x", "--types", "tq4,q8_0/tq3", "--text", "f", "--ctx", "64", "--windows", "2", "--depth", "32"]
    words += ["--threads", "2", "-o", "json", "-p", "16", "-n", "4", "-r", "1"]
    parsed = [vars(build_parser().parse_args([name, *words])) for name in ("compare", "perplexity", "bench")]
    for one in parsed:
        del one["command"], one["run"]
    assert parsed[0] == parsed[1] == parsed[2]
    assert [f"{k}/{v}" for k, v in parsed[0]["types"]] == ["tq4/tq4", "q8_0/tq3"]


def test_compare(smollm2_path, text_file, capsys):
    words = ["compare", "--model", str(smollm2_path), "--types", "f16,turbo4,q8_0/tq3,tq4", "--text", text_file]
    assert (
        main([*words, "--ctx", "64", "--windows", "2", "--depth", "40", "-n", "2", "-r", "1", "-t", "2", "-o", "json"])
        == 0
    )
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert [(row["type_k"], row["type_v"]) for row in rows] == [("f16", "f16"), ("tq4", "tq4"), ("q8_0", "tq3")]
    assert all(row.keys() >= COMPARE_KEYS for row in rows)
    f16, tq4, mixed = rows
    assert (f16["kld"], f16["same_top"], f16["ratio"], f16["depth"]) == (0, 1, 1, 40)
    assert f16["kv_mib"] / tq4["kv_mib"] == tq4["ratio"] == pytest.approx(32 / 9, rel=0.01)
    assert mixed["ratio"] == pytest.approx(64 / (17 + 7), rel=0.01)
    assert 0 < tq4["kld"] < 1 and 0.5 < tq4["same_top"] <= 1
    assert all(row["prefill_tps"] > 0 and row["decode_tps"] > 0 for row in rows)
    assert "62 tokens scored" in printed.err


def test_perplexity_as_a_table(smollm2_path, text_file, capsys):
    words = [
        "perplexity",
        "-m",
        str(smollm2_path),
        "--cache-type",
        "q8_0",
        "-f",
        text_file,
        "-c",
        "32",
        "--windows",
        "1",
    ]
    assert main([*words, "-t", "2"]) == 0
    header, _, f16, q8_0 = capsys.readouterr().out.splitlines()
    assert "KL divergence" in header and "t/s" not in header
    assert f16.startswith("| f16 ") and q8_0.startswith("| q8_0 ")


def test_a_text_too_short_is_found_before_measuring(smollm2_path, text_file, capsys):
    assert main(["compare", "-m", str(smollm2_path), "--text", text_file, "--ctx", "512", "--windows", "9"]) == 2
    assert "9 windows of 512 need 4608" in capsys.readouterr().err


def test_bench_rows_per_depth_and_a_warning_past_the_training_context(tiny_gguf, capsys):
    words = ["bench", "-m", str(tiny_gguf()), "--types", "f16,tq4", "-n", "4", "-r", "2", "-t", "1"]
    assert main([*words, "-d", "0,32", "-p", "16", "-o", "jsonl"]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [(row["type_k"], row["depth"], row["prompt_depth"]) for row in rows] == [
        ("f16", 0, 0),
        ("tq4", 0, 0),
        ("f16", 32, 32),
        ("tq4", 32, 32),
    ]
    assert all(row["prefill_tps"] > 0 and row["decode_tps"] > 0 and row["n_prompt"] == 16 for row in rows)
    assert rows[1]["ratio"] == pytest.approx(32 / 9, rel=1e-3)
    assert rows[0]["decode_vs_f16"] == 1 and rows[1]["decode_vs_f16"] > 0
    assert "warning" not in printed.err

    assert main([*words[:-2], "-t", "1", "-d", "4094", "-p", "0"]) == 0
    printed = capsys.readouterr()
    assert "warning: --depth means 4098 tokens, but the model was trained on 4096" in printed.err
    assert "tg4 @ d4094" in printed.out and "pp" not in printed.out


def test_bench_of_nothing(tiny_gguf, capsys):
    assert main(["bench", "-m", str(tiny_gguf()), "-d", "0", "-n", "0"]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_a_head_size_that_does_not_fit(tiny_gguf, capsys):
    assert main(["bench", "-m", str(tiny_gguf(head_size=80)), "-d", "8", "--types", "tq4"]) == 2
    assert "80" in capsys.readouterr().err


def test_a_model_without_a_cache(tiny_gguf, capsys):
    assert main(["bench", "-m", str(tiny_gguf(arch="llada")), "-d", "8", "--types", "f16,tq4"]) == 2
    assert "keeps no KV cache that tq-ggml can measure" in capsys.readouterr().err


def test_doctor(capsys):
    assert main(["doctor", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["types"]["tq3"], found["types"]["tq4"], found["types"]["q4_0"]) == (43, 44, 2)
    assert found["simd_level"]
    assert found["versions"]["llama_cpp"] == "0.3.36"
    for name in ("llama", "ggml", "ggml-base", "ggml-cpu", "tq"):
        path = Path(found["libraries"][name])
        assert path.is_file() and path.parent == library.lib_dir()
    assert 0.001 < found["round_trip_nmse"]["tq4"] < found["round_trip_nmse"]["tq3"] < 0.03
    assert found["problems"] == []


def test_doctor_survives_an_engine_that_does_not_load(tmp_path, monkeypatch):
    monkeypatch.setenv("TQ_GGML_LIB_PATH", str(tmp_path))
    done = run_python("-m", "tq_ggml", "doctor", "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["types"] is None and found["versions"]["python"]
    assert any("no libllama" in line for line in found["problems"])
    assert run_python("-m", "tq_ggml", "doctor").returncode == 1


def test_doctor_tells_the_last_error(capsys):
    main(["bench", "-m", "none.gguf"])
    main(["doctor"])
    assert "tq-ggml bench -m none.gguf: no model file" in capsys.readouterr().out


def test_models(capsys):
    assert main(["models", "-o", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"smollm2", "qwen2.5-coder-0.5b", "gemma3-270m"} <= rows.keys()
    assert rows["smollm2"]["path"] is None  # the cache folder of this test is empty
    assert main(["models"]) == 0
    assert "| smollm2 " in capsys.readouterr().out


def test_models_get_prints_the_path_last(smollm2_path, monkeypatch, capsys):
    monkeypatch.setenv("TQ_GGML_CACHE", str(smollm2_path.parent))
    assert main(["models", "get", "smollm2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(smollm2_path)


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "models", interrupted)
    assert main(["models"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "tq_ggml", "models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 141)


def test_default_types_are_types():
    assert len(cli._pairs(cli.DEFAULT_TYPES)) == 5
