"""`tq-ggml fit` against the engine's own figures, and the memory that it is told."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import conftest
import gguf
import pytest

import build
from tq_ggml import fit, limits, models
from tq_ggml.cache_types import parse_pair
from tq_ggml.cli import main
from tq_ggml.engine import Model
from tq_ggml.errors import TqError

MIB = 1 << 20


@pytest.fixture(params=["smollm2", "gemma3-270m", "tiny"])
def any_model(request, smollm2_path, tiny_gguf):
    """A plain transformer, one with sliding windows, and heads of 96."""
    if request.param == "smollm2":
        return smollm2_path
    if request.param == "tiny":
        return tiny_gguf(head_size=96)
    try:
        return models.get("gemma3-270m", progress=False)
    except TqError as problem:
        pytest.skip(f"gemma3-270m: {problem}")


def test_bytes_are_the_engines(any_model):
    info = models.check_gguf(any_model)
    table = {row["cache_type"]: row for row in fit.rows(info, 8 << 30, [512, 2048])}
    assert set(table) == set(fit.TYPES)
    with Model(any_model) as model:
        for name, row in table.items():
            for n_ctx in (512, 2048):
                with model.context(*(t.name for t in parse_pair(name)), n_ctx=n_ctx) as context:
                    assert row[f"kv_mib_{n_ctx}"] * MIB == context.kv_bytes, (name, n_ctx)
                    assert row[f"total_mib_{n_ctx}"] * MIB == context.kv_bytes + info.size


def written_by_llama_cpp(arch: str, folder: Path) -> Path:
    """A tiny model of an architecture, from llama.cpp's own test-llama-archs."""
    program = build.build_tree() / "bin" / "test-llama-archs"
    if not program.is_file():
        reason = "test-llama-archs is not built; run `make test`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    subprocess.run([program, "-a", f"^{arch}$", "-o", folder], check=True, capture_output=True, timeout=120)
    return next(folder.glob(f"{arch}-*.gguf"))


def shared_kv(folder: Path) -> Path:
    """A tiny Gemma 4, whose last two layers attend the keys of the first two: one windowed, one not."""
    n_embd, n_ff, n_vocab, head, n_layer = 128, 64, 32, 64, 4
    path = folder / "shared.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_context_length(4096)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_key_length_swa(head)
    writer.add_value_length_swa(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(64)
    writer.add_sliding_window_pattern([True, False] * 2)
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_vocab_size(n_vocab)
    conftest.add_tokenizer(writer, None, n_vocab)
    shapes = {"token_embd": (n_vocab, n_embd), "output_norm": (n_embd,), "rope_freqs": (head // 2,)}
    for i in range(n_layer):
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        layer = {name: (n_embd,) for name in norms} | {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        layer |= {"attn_q": (2 * head, n_embd), "attn_k": (head, n_embd), "attn_v": (head, n_embd)}
        layer |= {"attn_output": (n_embd, 2 * head), "ffn_down": (n_embd, n_ff)}
        layer |= {"ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", conftest.weights(f"{name}.weight", shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["deepseek2", "jamba", "granitehybrid", "lfm2", "shared"])
def test_latent_hybrid_and_shared_layers_count_as_in_the_engine(kind, tmp_path):
    path = shared_kv(tmp_path) if kind == "shared" else written_by_llama_cpp(kind, tmp_path)
    info = models.check_gguf(path)
    table = {row["cache_type"]: row for row in fit.rows(info, 8 << 30, [512, 2048])}
    # llama.cpp keeps a latent (MLA) cache in one type.
    assert set(table) == set(fit.TYPES) - ({"tq4/tq3"} if kind == "deepseek2" else set())
    with Model(path) as model:
        for name, row in table.items():
            for n_ctx in (512, 2048):
                with model.context(*(t.name for t in parse_pair(name)), n_ctx=n_ctx) as context:
                    assert row[f"kv_mib_{n_ctx}"] * MIB == context.kv_bytes, (name, n_ctx)
    if kind == "shared":
        assert table["f16"]["kv_mib_512"] * MIB == 2 * 2 * 64 * 512 * 2  # of two layers, not four


def test_the_longest_context_is_the_last_that_fits(smollm2_path):
    info = models.check_gguf(smollm2_path)
    memory = info.size + 30 * MIB
    for row in fit.rows(info, memory, [256]):
        pair, longest = parse_pair(row["cache_type"]), row["longest"]
        assert 0 < longest < info.n_ctx_train and longest % 256 == 0
        for n_ctx, fits in ((longest, True), (longest + 256, False)):
            assert (sum(limits.planned_kv_bytes(info.path, *pair, n_ctx)) + info.size <= memory) == fits


def test_more_memory_than_needed_and_too_little(smollm2_path, capsys):
    for memory, words in (
        ("8G", "f16 takes the whole context of 8192 tokens"),
        ("180M", "tq4 takes 8192 tokens, f16 3840; `tq-ggml recommend`"),
        ("1M", "take smaller weights"),
    ):
        assert main(["fit", str(smollm2_path), "--memory", memory]) == 0
        out, err = capsys.readouterr()
        assert words in err and "94 MiB of weights" in err
        assert out.splitlines()[0].split("|")[1:3] == [" cache type ", " MiB at 4096 "]


def test_json_and_contexts(smollm2_path, capsys):
    assert main(["fit", str(smollm2_path), "--memory", "1G", "--ctx", "1000,300000", "-o", "json"]) == 0
    rows = {row["cache_type"]: row for row in json.loads(capsys.readouterr().out)}
    # 30 layers, 3 heads of 64, keys and values; contexts in whole 256.
    assert rows["f16"]["kv_mib_1000"] * MIB == 1024 * 30 * 3 * 64 * 2 * 2
    assert rows["tq4"]["kv_mib_300000"] * MIB == 300032 * 30 * 3 * 64 * 2 * 18 / 32


def test_heads_that_no_block_divides(tiny_gguf):
    assert [row["cache_type"] for row in fit.rows(models.check_gguf(tiny_gguf(head_size=80)), 8 << 30, [256])] == [
        "f16"
    ]


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("8G", 8 << 30), ("512m", 512 << 20), ("7.5GiB", 15 << 29), ("1024", 1024), ("2 kb", 2048), ("1T", 1 << 40)],
)
def test_amounts_of_memory(text, n_bytes):
    assert fit.parse_memory(text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "8X", "1e9", "nan", "8G8"])
def test_what_is_no_amount_of_memory(text, capsys):
    assert main(["fit", "smollm2", f"--memory={text}"]) == 2
    assert "is not an amount of memory, such as 8G or 512M" in capsys.readouterr().err


def test_a_file_that_is_no_model(tmp_path, capsys):
    (tmp_path / "x.gguf").write_bytes(b"nothing of the kind, but long enough")
    assert main(["fit", str(tmp_path / "x.gguf")]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err
