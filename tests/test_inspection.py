"""Inspection against figures worked out apart, the commands calibrate, inspect and recommend, and the cache lab."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from scipy import linalg

import cache_lab
from tq_ggml import inspection, metadata, reference
from tq_ggml.calibration import Layer, cut_tokens, default_text, gather, parse
from tq_ggml.cli import main
from tq_ggml.conditioning import Rope, Rows
from tq_ggml.engine import Model
from tq_ggml.inspection import decoded, hadamard, inspect, predict, predict_pairs, recommend
from tq_ggml.models import check_gguf

HEAD, N_HEAD_KV, GROUP, N = 64, 2, 3, 200
LETTERS = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
LAB = Path(__file__).parents[1] / "scripts" / "cache_lab.py"


def make_layer(rope: Rope, *, mean: float = 0.0, variance: np.ndarray | float = 1.0) -> Layer:
    """A layer of Gaussian rows: keys about a mean in every channel, values and queries of variance 1."""
    rng = np.random.default_rng(0)
    layer, positions = Layer(rope, 0.125), np.arange(N, dtype=np.int32)
    keys = mean + np.sqrt(variance) * rng.normal(size=(N, N_HEAD_KV, HEAD))
    keys = rope.turn_back(keys.astype(np.float32), -positions)
    values, queries = (rng.normal(size=(N, n, HEAD)).astype(np.float32) for n in (N_HEAD_KV, N_HEAD_KV * GROUP))
    for kind, rows in ((Rows.K, keys), (Rows.V, values), (Rows.Q, queries)):
        layer.add(kind, positions, rows)
    layer.add(Rows.K, positions[:1], keys[:1])
    return layer


@pytest.fixture
def rope() -> Rope:
    half = np.arange(HEAD // 2)
    return Rope(np.stack([half, half + half.size]), 10000.0 ** (-half / half.size))


@pytest.fixture
def still() -> Rope:
    return Rope(np.zeros((2, 0), int), np.zeros(0))


# ---- codecs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 32, 64])
def test_hadamard_is_scipys(size):
    rows = np.random.default_rng(0).normal(size=(5, 3, 64)).astype(np.float32)
    expected = (rows.reshape(-1, size) @ linalg.hadamard(size) / np.sqrt(size)).reshape(rows.shape)
    np.testing.assert_allclose(hadamard(rows, size), expected, atol=1e-5)
    np.testing.assert_allclose(hadamard(hadamard(rows, size), size), rows, atol=1e-5)


def test_codecs_in_order_of_their_bits():
    rows = np.random.default_rng(0).normal(size=(50, 2, 64)).astype(np.float32)
    error = {name: reference.nmse(rows, decoded(rows, name, 64)) for name in inspection.CODECS}
    assert 0 < error["q8_0"] < error["tq4"] < error["q4_0"] < error["tq3"] < 0.05


# ---- a layer -------------------------------------------------------------------------------------------------------


def test_what_a_layers_rows_are_like(rope):
    variance = np.where(np.arange(HEAD) == 5, 64, 1)  # its partner in the pair is channel 37
    (report,) = inspect({4: make_layer(rope, variance=variance)})
    assert report.layer == 4
    assert report.key_variance == pytest.approx((63 + 64) / 64, rel=0.1)
    assert report.value_variance == pytest.approx(1, rel=0.05)
    assert report.key_mean_share < 0.03 and report.value_mean_share < 0.03
    assert report.key_peak == pytest.approx(64 / ((63 + 64) / 64), rel=0.2)
    assert report.key_kurtosis > 3.2


def test_a_mean_has_its_share_of_the_energy(rope):
    (report,) = inspect({0: make_layer(rope, mean=3.0)})
    assert report.key_mean_share == pytest.approx(0.9, abs=0.01)
    assert report.key_variance == pytest.approx(1, rel=0.05)


def test_the_logit_error_is_that_of_the_logits(still):
    """Without RoPE the sampled keys are all there is: quantise them, and look at the change of each logit."""
    layer = make_layer(still)
    (report,) = inspect({0: layer})
    keys, values, queries = (np.concatenate(layer.sample[kind]) for kind in Rows)
    for name in inspection.CODECS:
        error = decoded(keys, name, HEAD) - keys
        spread = []
        for head in range(N_HEAD_KV * GROUP):
            logits = 0.125 * queries[:, head] @ error[:, head // GROUP].T
            spread.append(logits.var(axis=1))
        assert report.logit_error_plain[name] == pytest.approx(np.sqrt(np.mean(spread)), rel=1e-4)
        assert report.value_error[name] == pytest.approx(reference.nmse(values, decoded(values, name, HEAD)), rel=1e-4)


@pytest.mark.parametrize("name", ["rope", "still"])
def test_conditioning_helps_where_there_is_a_mean(name, request):
    (report,) = inspect({0: make_layer(request.getfixturevalue(name), mean=5.0)})
    for cache_type in inspection.CONDITIONED:
        assert 0 < report.logit_error[cache_type] < 0.6 * report.logit_error_plain[cache_type]
    for cache_type in ("q8_0", "q4_0"):
        assert report.logit_error[cache_type] == report.logit_error_plain[cache_type]


def test_a_row_for_reports(rope):
    (report,) = inspect({3: make_layer(rope)})
    row = report.row()
    assert row["layer"] == 3 and row["logit_error_plain_tq4"] == report.logit_error_plain["tq4"]
    assert row["logit_error_tq3"] == report.logit_error["tq3"] and row["value_error_q8_0"] == report.value_error["q8_0"]
    json.dumps(row)


# ---- prediction ----------------------------------------------------------------------------------------------------


def test_predictions_add_up_over_layers(rope):
    (one,) = inspect({0: make_layer(rope)})
    assert predict([one, one, one], "tq4", "tq3") == pytest.approx(3 * predict([one], "tq4", "tq3"))
    assert predict([one], "tq4", "tq4") < predict([one], "tq4", "tq3") < predict([one], "tq3", "tq3")
    worse = dataclasses.replace(one, logit_error={name: 2 * e for name, e in one.logit_error.items()})
    only_keys = [predict([r], "tq3", "q8_0") - predict([r], "q8_0", "q8_0") for r in (one, worse)]
    assert 3.9 < only_keys[1] / only_keys[0] < 4.1
    hopeless = dataclasses.replace(one, logit_error={"tq4": 100.0})
    assert np.isfinite(predict([hopeless], "tq4", "tq4"))
    assert predict([one], "tq4", "tq4", conditioned=False) == pytest.approx(
        predict([dataclasses.replace(one, logit_error=one.logit_error_plain)], "tq4", "tq4")
    )


def test_the_smallest_that_is_good_enough():
    klds = {"tq3": 0.06, "tq4/tq3": 0.03, "tq4": 0.015, "q8_0/tq4": 0.005, "q8_0": 0.0002}
    for most, expected in ((1, "tq3"), (0.06, "tq3"), (0.03, "tq4/tq3"), (0.02, "tq4"), (0.001, "q8_0"), (1e-5, "f16")):
        assert recommend(klds, most) == expected


def test_a_real_model(smollm2_path):
    with Model(smollm2_path) as model:
        reports = inspect(gather(model, cut_tokens(model, default_text(), 64)))
    assert [report.layer for report in reports] == list(range(30))
    for report in reports:
        assert all(np.isfinite(value) and value >= 0 for value in report.row().values())
    klds = list(predict_pairs(reports).values())
    assert klds == sorted(klds, reverse=True) and 0 < klds[-1] < 0.002 < klds[2] < 0.05


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tiny_gguf) -> Path:
    return tiny_gguf(tokens=LETTERS)


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "folder of mine" / "fox.txt"
    path.parent.mkdir()
    path.write_text("the quick brown fox jumps over the lazy dog " * 40, encoding="utf-8")
    return str(path)


@pytest.fixture
def run(tiny, text):
    """A command on the tiny model and the text."""

    def run(command: str, *words: str) -> int:
        return main([command, str(tiny), "-f", text, "--tokens", "32", "-t", "1", *map(str, words)])

    return run


def error(capsys) -> str:
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("tq-ggml: error: ") and printed.err.count("\n") == 1
    return printed.err


def is_calibration_of(path: Path, model: Path) -> bool:
    found = parse(metadata.read_metadata(path), metadata.model_digest(model), check_gguf(model), path)
    return (found.n_tokens, found.text, sorted(found.layers)) == (32, "fox.txt", [0, 1])


def test_calibrate_into_the_cache_folder(run, tiny, cache_folder, capsys):
    assert run("calibrate") == 0
    printed = capsys.readouterr()
    (path,) = printed.out.splitlines()
    assert Path(path).is_relative_to(cache_folder) and is_calibration_of(Path(path), tiny)
    assert printed.err.splitlines()[0] == "2 layers, 32 tokens of fox.txt"
    assert "predicted KL divergence: tq3 0." in printed.err and "; recommended: tq3" in printed.err
    assert run("calibrate") == 0  # a new run replaces what the cache folder has


def test_calibrate_into_files(run, tiny, tmp_path, cache_folder, capsys):
    side, copy = tmp_path / "new" / "side.gguf", tmp_path / "copy.gguf"
    assert run("calibrate", "--side-file", side) == 0
    assert run("calibrate", "-o", copy) == 0
    assert capsys.readouterr().out.splitlines() == [str(side), str(copy)]
    assert is_calibration_of(side, tiny) and is_calibration_of(copy, tiny) and is_calibration_of(copy, copy)
    assert side.stat().st_size < tiny.stat().st_size < copy.stat().st_size
    assert {t.name for t in gguf.GGUFReader(copy).tensors} == {t.name for t in gguf.GGUFReader(tiny).tensors}
    assert not cache_folder.exists()


@pytest.mark.parametrize("option", ["-o", "--side-file"])
def test_calibrate_replaces_only_by_force(run, tiny, tmp_path, capsys, option):
    target = tmp_path / "target.gguf"
    target.write_bytes(b"something dear")
    assert run("calibrate", option, target) == 2
    assert f"{target} exists; give another name, or --force to replace it" in error(capsys)
    assert target.read_bytes() == b"something dear"
    assert run("calibrate", option, target, "--force") == 0
    assert is_calibration_of(target, tiny)


@pytest.mark.parametrize("option", ["-o", "--side-file"])
@pytest.mark.parametrize("name", ["the model", "a link"])
def test_calibrate_never_replaces_the_model(run, tiny, tmp_path, capsys, option, name):
    target = tiny if name == "the model" else tmp_path / "link.gguf"
    if target != tiny:
        target.symlink_to(tiny)
    before = tiny.read_bytes()
    for more in ([], ["--force"], ["--dry-run"]):
        assert run("calibrate", option, target, *more) == 2
        assert f"{target} is the model itself" in error(capsys)
    assert tiny.read_bytes() == before


@pytest.mark.parametrize("option", [None, "-o", "--side-file"])
def test_a_dry_run_writes_nothing(run, tmp_path, capsys, option):
    before = sorted(tmp_path.rglob("*"))
    assert run("calibrate", "--dry-run", *([option, tmp_path / "new.gguf"] if option else [])) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("would write ") and printed.out.endswith(".gguf\n")
    assert "predicted KL divergence" in printed.err
    assert sorted(tmp_path.rglob("*")) == before


def test_inspect(run, capsys, tmp_path):
    assert run("inspect") == 0
    table = capsys.readouterr().out.splitlines()
    assert "K variance" in table[0] and "tq4 conditioned" in table[0] and len(table) == 2 + 2
    plot = tmp_path / "plot.svg"
    assert run("inspect", "-o", "json", "--plot", plot) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(0 < row["logit_error_tq4"] < row["logit_error_tq3"] for row in rows)
    assert plot.read_text(encoding="utf-8").count("tq4 conditioned") >= 1


def test_recommend(run, capsys):
    assert run("recommend") == 0
    printed = capsys.readouterr()
    assert printed.out.count("recommended") == 1 and len(printed.out.splitlines()) == 2 + 5
    assert printed.err.startswith("tq3: the smallest with a predicted KL divergence of at most 0.03. ")
    assert run("recommend", "--max-kld", "1e-7", "-o", "json") == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert [(row["type"], row["bits"]) for row in rows] == [
        ("tq3", 3.5),
        ("tq4/tq3", 4.0),
        ("tq4", 4.5),
        ("q8_0/tq4", 6.5),
        ("q8_0", 8.5),
    ]
    assert all(row["kld"] > 0 and row["note"] == "" for row in rows)
    assert printed.err.startswith("f16: ")


@pytest.mark.parametrize("command", ["calibrate", "inspect", "recommend"])
def test_a_wrong_request_is_one_line_and_exit_code_2(command, tiny_gguf, text, tmp_path, capsys):
    tiny, empty = str(tiny_gguf(tokens=LETTERS)), tmp_path / "empty.txt"
    empty.write_text("")
    for words, said in (
        (["none.gguf"], "no model file 'none.gguf'"),
        ([text], "is not a GGUF file"),
        ([tiny, "-f", "none.txt"], "there is no text file none.txt"),
        ([tiny, "-f", str(empty)], "empty.txt is empty"),
        ([tiny, "-f", text, "--tokens", "4096"], "fewer than 4096; give a longer --text or fewer --tokens"),
        ([tiny, "--tokens", "15"], "'15' is not a whole number from 16"),
        ([tiny, "-t", "0"], "'0' is not a whole number from 1"),
        ([str(tiny_gguf(n_layer=1)), "-f", text], "has no vocabulary"),
        ([str(tiny_gguf(n_layer=3, arch="llada", tokens=LETTERS)), "-f", text, "--tokens", "16"], "keeps no KV cache"),
    ):
        assert main([command, *words]) == 2
        assert said in error(capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recommend", "--max-kld", "0"], "'0' is not a number between 0 and 100"),
        (["recommend", "--max-kld", "nan"], "'nan' is not a number between 0 and 100"),
        (["inspect", "-o", "xml"], "invalid choice: 'xml'"),
        (["inspect", "--plot", "plot.bmp"], "the name must end in one of .png, .svg, .pdf"),
        (["calibrate", "-o", "a.gguf", "--side-file", "b.gguf"], "not allowed with argument"),
        (["chat", "-m", "MODEL", "--cache-type", "tq4", "--calibration", "none.gguf"], "there is no file none.gguf"),
        (["bench", "-m", "MODEL", "--types", "tq4", "-d", "8", "--calibration", "MODEL"], "holds no calibration"),
    ],
)
def test_wrong_options(words, said, tiny, capsys):
    words = [str(tiny) if word == "MODEL" else word for word in words]
    assert main(words if "-m" in words else [*words, str(tiny)]) == 2
    assert said in error(capsys)


# ---- the cache lab -------------------------------------------------------------------------------------------------


def lab(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, LAB, *words], capture_output=True, text=True, timeout=120)


def test_cache_lab(smollm2_path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(default_text()[4000:], encoding="utf-8")
    words = ["-m", str(smollm2_path), "-t", "1", "-f", str(text), "--ctx", "128", "--windows", "1"]
    done = lab(*words, "k=tq4,tokens=64")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[-1] for row in rows] == ["f16", "k=tq4,tokens=64"]
    assert float(rows[0][1]) == 0 < float(rows[1][1]) < 0.05


def test_every_option_of_the_lab(tiny, text, monkeypatch, capsys):
    codecs = ("f16", "q8_0", "q4_0", "tq4", "tq3", "noise:0.1")
    recipes = [f"k={codec},v={codec}" for codec in codecs]
    recipes += [f"k=tq4,mean={mean}" for mean in ("none", "const", "slow", "1", "64")]
    recipes += [f"k=tq4,scale={scale}" for scale in ("none", "tied", "free", "context", "matrix", "slow_matrix")]
    recipes += ["k=tq4,rotation=64,search=0,fit=unbiased", "k=q8_0,v=tq3,rotation=0,v_rotation=16,signs=0,block=16"]
    recipes += ["v=tq4,v_mean=1,v_scale=wo,v_gain=1.01", "k=tq3,sink=1,first=4,wide=1,gain=0.99,shrink=0.1"]
    recipes = [f"{recipe},tokens=40" for recipe in recipes]
    words = ["-m", str(tiny), "-t", "1", "-f", text, "--calibration", text, "--ctx", "32", "--windows", "1"]
    monkeypatch.setattr(sys, "argv", ["cache_lab.py", *words, *recipes])
    assert cache_lab.main() == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in rows] == ["f16", *recipes]
    assert all(float(row.split()[1]) < 0.1 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["k=tq9"], "no codec 'tq9'; there are f16, q8_0"),
        (["k=noise:loud"], "no codec 'noise:loud'"),
        (["k"], "no codec ''"),
        (["key=tq4"], "recipe 'key=tq4': no option 'key'; there are k, v, mean"),
        ([""], "no option ''"),
        (["k=tq4,rotation=five"], "rotation='five' does not match 0|1|2|4"),
        (["k=tq4,rotation=5"], "rotation='5' does not match 0|1|2|4"),
        (["k=tq4,scale=loose"], "scale='loose' does not match none|tied"),
        (["k=tq4,mean=0"], "mean='0' does not match none|const"),
        (["k=tq4,gain=much"], "gain='much' is not a number"),
        (["k=tq4", "-m", "none.gguf"], "no model file 'none.gguf'"),
        (["k=tq4", "--windows", "0"], "there are no tokens to score"),
        (["k=tq4", "--ctx", "1"], "there are no tokens to score"),
        (["k=tq4", "-f", "none.txt"], "there is no text file none.txt"),
        (["k=tq4,tokens=9999"], "fewer than 4096; give a longer --text"),
    ],
)
def test_a_bad_recipe_is_one_line(words, said, tiny, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cache_lab.py", "-m", str(tiny), "-f", text, "--calibration", text, *words])
    assert cache_lab.main() == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("cache_lab: error: ") and printed.err.count("\n") == 1
    assert said in printed.err


def test_a_bad_recipe_ends_the_script_with_2():
    done = lab("-m", "none.gguf", "k=tq9")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
