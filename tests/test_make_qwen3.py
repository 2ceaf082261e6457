"""Qwen3-shaped models: the right shapes and sizes, weights of the right spread, and llama.cpp runs them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tq_ggml import models
from tq_ggml.engine import Model
from tq_ggml.errors import TqError

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_qwen3_gguf.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_qwen3_gguf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def four_b(script, smollm2_path, tmp_path_factory) -> Path:
    """One layer of Qwen3-4B; with the smaller vocabulary, because the cache has nothing to do with it."""
    out = tmp_path_factory.mktemp("qwen3") / "4b.gguf"
    return make(script, out, "--preset", "4B", "--layers", "1", "--vocab", str(smollm2_path))


def make(script, out: Path, *options: str) -> Path:
    return script.run(script.parse_arguments([*options, "-o", str(out)]))


@pytest.mark.parametrize(
    "preset, published, kv_values",
    [("0.6B", 0.596e9, 28 * 8 * 128), ("1.7B", 1.721e9, 28 * 8 * 128), ("4B", 4.022e9, 36 * 8 * 128)],
)
def test_presets_have_the_published_number_of_parameters(script, preset, published, kv_values):
    shape = script.PRESETS[preset]
    n_params = sum(int(np.prod(t.shape)) for t in script.tensors(shape, 151936))
    assert n_params == pytest.approx(published, rel=0.001)
    assert shape.layers * shape.kv_heads * shape.head_size == kv_values


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_spread_of_random_weights(script, kind):
    kind, _ = script.WEIGHT_TYPES[kind]
    n = script.SLAB + 64 * 32
    stored = script.random_weights(n, 0.02, kind, np.random.default_rng(1))
    values = gguf.dequantize(stored, kind)
    assert values.size == n
    assert values.std() == pytest.approx(0.02, rel=0.01)
    assert abs(values.mean()) < 6 * 0.02 / (n / 32) ** 0.5
    assert values.reshape(-1, 32).mean(1).std() < 0.02 / 32**0.5 * 1.2


@pytest.mark.parametrize(
    "options, heads, head_size",
    [
        (["--type", "q4_0"], (4, 2), 128),
        (["--type", "q8_0", "--head-size", "96", "--heads", "6/3"], (6, 3), 96),
        (["--type", "f16", "--head-size", "80", "--heads", "2/1", "--layers", "3"], (2, 1), 80),
    ],
)
def test_llama_cpp_runs_it(script, smollm2_path, tmp_path, options, heads, head_size):
    path = make(script, tmp_path / "tiny.gguf", "--preset", "tiny", *options)
    info = models.check_gguf(path)
    assert (info.arch, info.n_ctx_train, info.n_vocab) == ("qwen3", 40960, 49152)
    assert ((info.n_head, info.n_head_kv), info.head_size_k, info.head_size_v) == (heads, head_size, head_size)
    with Model(path) as model, Model(smollm2_path) as source:
        text = "A tokenizer of somebody else's."
        tokens = model.tokenize(text)
        assert np.array_equal(tokens, source.tokenize(text))
        with model.context("f16", n_ctx=256) as context:
            logits = np.array(context.decode(tokens, 0, logits="all"))
    assert logits.shape == (len(tokens), 49152)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2


@pytest.mark.parametrize(("name", "ratio"), [("tq4", 32 / 9), ("tq3", 32 / 7)])
def test_kv_bytes_in_the_shape_of_qwen3_4b(script, four_b, name, ratio):
    info = models.check_gguf(four_b)
    assert (info.n_embd, info.n_head, info.n_head_kv, info.head_size_k, info.head_size_v) == (2560, 32, 8, 128, 128)
    with Model(four_b) as model, model.context("f16", n_ctx=4096) as f16, model.context(name, n_ctx=4096) as tq:
        assert f16.kv_bytes == 2 * 2 * 8 * 128 * 4096  # keys and values, of the one layer here
        assert f16.kv_bytes / tq.kv_bytes == pytest.approx(ratio, rel=1e-9)
        assert np.isfinite(tq.decode(model.tokenize("A cache of this shape."), 0, logits="last")).all()


def test_the_seed_decides(script, smollm2_path, tmp_path):
    first, again, other = (
        make(script, tmp_path / f"{i}.gguf", "--preset", "tiny", "--seed", seed).read_bytes()
        for i, seed in enumerate(["0", "0", "1"])
    )
    assert first == again
    assert len(first) == len(other) and first != other


def test_qwen_vocabulary(script, tmp_path):
    row = next(row for row in models.MODELS if row.name == "qwen2.5-coder-0.5b")
    if not row.installed:
        pytest.skip("qwen2.5-coder-0.5b is not in the cache folder: `tq-ggml models get qwen2.5-coder-0.5b`")
    path = make(script, tmp_path / "thin.gguf", "--preset", "0.6B", "--layers", "1")
    info = models.check_gguf(path)
    assert (info.n_layer, info.n_embd, info.n_head, info.n_head_kv, info.n_vocab) == (1, 1024, 16, 8, 151936)
    with Model(path) as model, model.context("q8_0", n_ctx=256) as context:
        tokens = model.tokenize("def add(a, b):")
        logits = context.decode(tokens, 0, logits="last")
        assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--heads", "6/4"], "6 query heads cannot share 4 KV heads"),
        (["--layers", "0"], "at least 1"),
        (["--head-size", "63"], "63 is odd"),
        (["--head-size", "10", "--heads", "2/1"], "is 20, no multiple of the 32 values of a q4_0 block"),
        (["--vocab", "nowhere.gguf"], "no model file 'nowhere.gguf'"),
        (["--vocab", str(SCRIPT)], "not a GGUF"),
    ],
)
def test_refusals(script, tmp_path, options, words):
    with pytest.raises(TqError, match=words):
        make(script, tmp_path / "m.gguf", "--preset", "tiny", *options)
    assert list(tmp_path.iterdir()) == []


def test_from_the_command_line(smollm2_path, tmp_path):
    out = tmp_path / "tiny.gguf"

    def run(*options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(SCRIPT), "--preset", "tiny", "-o", str(out), *options]
        return subprocess.run(command, capture_output=True, text=True)

    first = run()
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == str(out)
    second = run()
    assert second.returncode == 2
    assert second.stderr.startswith("error: ") and "add --force" in second.stderr and second.stderr.count("\n") == 1
    assert run("--force").returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]
    assert "'6' is not HEADS/KV" in run("--heads", "6").stderr
