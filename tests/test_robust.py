"""The engine under misuse: odd sizes, interrupts, threads, a closed model, misspelt names, damaged counts."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading

import gguf
import numpy as np
import pytest

from tq_ggml import library
from tq_ggml.cache_types import resolve
from tq_ggml.engine import Model
from tq_ggml.errors import EngineError, TqError
from tq_ggml.gguf_check import check_gguf
from tq_ggml.llama import Llama


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQ_GGML_QUIET", "1")


@pytest.fixture
def load(tiny_gguf):
    """A loader of a model of random weights; what it loads is freed at the end of the test."""
    path = tiny_gguf()
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Llama(path, n_threads=1, **options)))


@pytest.mark.parametrize("logits_all", [False, True])
def test_a_context_between_two_multiples_of_256_can_be_filled(load, logits_all):
    llama = load(n_ctx=300, cache_type="tq4", logits_all=logits_all)
    llama.eval([number % 32 for number in range(512)])
    assert llama.n_ctx() == 512 and len(llama.eval_tokens) == 512
    copy = load(n_ctx=300, cache_type="tq4", logits_all=logits_all)
    copy.load_state(llama.save_state())
    assert copy.eval_tokens == llama.eval_tokens


def test_the_training_context_is_rounded_too(load):
    llama = load(n_ctx=0, kv_overrides={"llama.context_length": 300})
    assert llama.n_ctx() == len(llama.input_ids) == 512


@pytest.mark.parametrize("n_ctx", [None, "512", 512.0, -1, 1 << 31])
def test_a_context_that_is_no_number_of_tokens(load, n_ctx):
    with pytest.raises(EngineError, match=r"n_ctx must be a whole number from 0 \(the model's own\)"):
        load(n_ctx=n_ctx)


def test_numbers_of_numpy(tiny_gguf, load):
    assert resolve(np.int64(44)).name == "tq4"
    assert load(cache_type=np.int64(44), n_ctx=np.int64(300)).n_ctx() == 512
    with Model(tiny_gguf()) as model, model.context(np.int32(43), n_ctx=np.int64(256), n_threads=1) as context:
        assert context.type_k.name == "tq3"


@pytest.mark.parametrize(("name", "hint"), [("cachetype", "cache_type"), ("n_thread", "n_threads"), ("zzzz", None)])
def test_a_misspelt_argument(load, name, hint):
    with pytest.raises(TypeError) as refused:
        load(**{name: "tq4"})
    assert str(refused.value) == f"Llama has no argument {name!r}" + (f"; did you mean {hint!r}?" if hint else "")


@pytest.mark.parametrize(
    "use",
    [
        lambda llama: llama.tokenize(b"text"),
        lambda llama: llama.detokenize([1]),
        lambda llama: llama.eval([1]),
        lambda llama: llama.sample(),
        lambda llama: llama([1, 2], max_tokens=1),
        lambda llama: llama.save_state(),
        lambda llama: llama.n_vocab(),
        lambda llama: llama.ctx,
    ],
)
def test_use_after_close(load, use):
    llama = load(n_ctx=256)
    llama.eval([1, 2])
    llama.close()
    llama.close()
    with pytest.raises(EngineError, match="this Llama is closed"):
        use(llama)


def test_ctrl_c_is_kept_until_the_block_ends():
    reached = False
    with pytest.raises(KeyboardInterrupt), library.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_log_callback_while_a_model_loads(load, tiny_gguf, monkeypatch):
    pressed = []

    def press(*_args):
        if not pressed:  # llama.cpp also logs while it frees what was made
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    path = tiny_gguf()
    monkeypatch.setattr(library._EngineLog, "__call__", press)
    for make in (lambda: Model(path), lambda: load(n_ctx=256)):
        pressed.clear()
        with pytest.raises(KeyboardInterrupt):
            make()
        assert pressed
    monkeypatch.undo()
    with Model(path) as model:
        pressed.clear()
        monkeypatch.setattr(library._EngineLog, "__call__", press)
        with pytest.raises(KeyboardInterrupt):
            model.context("tq4", n_ctx=256, n_threads=1)
        monkeypatch.undo()


def test_another_thread_needs_no_handler():
    done = []

    def work():
        with library.uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


THREADS = """
import sys, threading
from tq_ggml import Llama
path = sys.argv[1]
def work():
    for _ in range(8):
        Llama(path, n_ctx=256, n_threads=1).close()
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print("still there", flush=True)
"""


def test_stdout_survives_models_made_in_threads(tiny_gguf):
    command = [sys.executable, "-c", THREADS, str(tiny_gguf())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still there\n", "")


def damage(path, key: str, value: int):
    """Set a uint32 of the metadata."""
    data, name = bytearray(path.read_bytes()), key.encode()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    assert data[at : at + 4] == struct.pack("<I", 4)
    data[at + 4 : at + 8] = struct.pack("<I", value)
    path.write_bytes(data)


def test_more_layers_than_llama_cpp_has_room_for(tiny_gguf):
    path = tiny_gguf()
    damage(path, "llama.block_count", 513)
    with pytest.raises(TqError, match=r"its llama.block_count is 513, and llama.cpp has room for 512 layers"):
        Model(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3, more than its 2 layers"),
        ({"expert_count": 1025, "expert_used_count": 1}, "expert_count is 1025, more than llama.cpp's 1024"),
        ({"expert_count": 4}, "expert_used_count is None"),
        ({"expert_used_count": 1}, "expert_used_count is 1, more than its 0 experts"),
        ({"expert_count": 4, "expert_used_count": 5}, "expert_used_count is 5, more than its 4 experts"),
        ({"expert_count": 4, "expert_used_count": 1, "expert_group_count": 3}, "expert_group_count is 3"),
        ({"expert_count": 4, "expert_used_count": 1, "expert_group_count": 2}, "expert_group_used_count is None"),
        ({"rope.scaling.type": "yarm"}, "rope.scaling.type is 'yarm'"),
    ],
)
def test_counts_that_fail_an_assertion_of_llama_cpp(tmp_path, entries, message):
    path = tmp_path / "counts.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_head_count(2)
    for key, value in entries.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TqError) as refused:
        check_gguf(path)
    assert message in str(refused.value)


def test_a_path_that_is_not_utf8(tiny_gguf, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf")
    os.rename(tiny_gguf(), path)
    with Model(path) as model:
        assert model.n_vocab == 32
    with pytest.raises(EngineError, match=r"udcff.gguf' is not UTF-8, which llama-cpp-python needs"):
        Llama(path)
