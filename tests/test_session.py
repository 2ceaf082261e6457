"""Sessions: a saved conversation goes on as if it had not stopped, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import json
import os
import struct

import pytest

from tq_ggml import session
from tq_ggml.chat import Chat, Turn
from tq_ggml.errors import TqError
from tq_ggml.llama import Llama

N_CTX = 512
FIRST, SECOND = "Tell me about the sea in one sentence. " * 6, "And about the sky?"


def open_llama(path, **options) -> Llama:
    return Llama(path, **{"cache_type": "tq4", "n_ctx": N_CTX, "n_threads": 1} | options)


@pytest.fixture(scope="module")
def llama(smollm2_path):
    with contextlib.closing(open_llama(smollm2_path)) as llama:
        yield llama


def new_chat(llama: Llama, **options) -> Chat:
    llama.reset()
    return Chat(llama, max_tokens=16, sampling={"temperature": 0}, **options)


@pytest.fixture
def saved(llama, tmp_path):
    """A session file, and the answer that comes next."""
    chat = new_chat(llama, system="You are terse.")
    "".join(chat.reply(FIRST))
    size = session.save(chat, tmp_path / "s.tq")
    assert size == os.path.getsize(tmp_path / "s.tq")
    return tmp_path / "s.tq", chat.turns[0], "".join(chat.reply(SECOND))


@pytest.mark.parametrize("cache_type", ["tq4", "tq3", "f16", "q8_0/tq4"])
def test_a_session_goes_on_as_if_it_had_not_stopped(smollm2_path, tmp_path, cache_type):
    with contextlib.closing(open_llama(smollm2_path, cache_type=cache_type)) as llama:
        chat = new_chat(llama, system="You are terse.")
        "".join(chat.reply(FIRST))
        session.save(chat, tmp_path / "s.tq")
        n_saved, first = llama.n_tokens, chat.turns[0]
        expected = "".join(chat.reply(SECOND))
    with contextlib.closing(open_llama(smollm2_path, cache_type=cache_type)) as llama:
        chat, evaluated = new_chat(llama), []
        session.load(chat, tmp_path / "s.tq")
        assert chat.turns == [first] and chat.system == "You are terse." and llama.n_tokens == n_saved
        evaluate = llama.eval
        llama.eval = lambda tokens: (evaluated.append(len(tokens)), evaluate(tokens))[1]
        assert "".join(chat.reply(SECOND)) == expected
    # The last sampled token was never evaluated, and a message's end and beginning are the template's.
    assert n_saved > 80 and evaluated[0] < 30


def test_a_tq4_session_is_3_5_times_smaller(smollm2_path, tmp_path):
    sizes = {}
    for cache_type in ("f16", "tq4"):
        with contextlib.closing(open_llama(smollm2_path, cache_type=cache_type)) as llama:
            chat = new_chat(llama)
            "".join(chat.reply("word " * 300))
            sizes[cache_type] = session.save(chat, tmp_path / cache_type)
    assert sizes["f16"] > 3.3 * sizes["tq4"]


def test_an_empty_conversation(llama, tmp_path):
    session.save(new_chat(llama), tmp_path / "s.tq")
    chat = new_chat(llama)
    session.load(chat, tmp_path / "s.tq")
    assert chat.turns == [] and llama.n_tokens == 0 and "".join(chat.reply("Hello."))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_type": "tq3"}, r"another type of keys \(tq4, here tq3\)"),
        ({"cache_type_v": "f16"}, r"another type of values \(tq4, here f16\)"),
        ({"n_ctx": 768}, r"another context length \(512, here 768\)"),
        ({"calibration": "off"}, "another calibration"),
    ],
)
def test_another_cache_is_refused_and_the_running_one_goes_on(smollm2_path, saved, options, words):
    with contextlib.closing(open_llama(smollm2_path, **options)) as llama:
        chat = new_chat(llama)
        "".join(chat.reply("Hello."))
        before = list(chat.turns), llama.n_tokens
        with pytest.raises(TqError, match=f"was saved with {words}; start chat as it was started then"):
            session.load(chat, saved[0])
        assert (chat.turns, llama.n_tokens) == before
        assert "".join(chat.reply("Again."))


def test_another_model_is_refused(tiny_gguf, saved, smollm2_path, monkeypatch):
    other = session.model_digest(tiny_gguf())
    with contextlib.closing(open_llama(smollm2_path)) as llama:
        monkeypatch.setattr(session, "model_digest", lambda path: other)
        with pytest.raises(TqError, match="was saved with another model; start"):
            session.load(new_chat(llama), saved[0])


def damaged(data: bytes):
    yield from (data[:n] for n in (0, 5, 16, 20, 24, 300, len(data) // 2, len(data) - 1))
    for at in (3, 17, 22, 24, 40, 2000, len(data) // 2, len(data) - 1):
        yield data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
    yield b"GGUF" + bytes(5000)
    yield session.MAGIC + struct.pack("<Q", 1 << 62) + data[24:]
    yield session.MAGIC + struct.pack("<Q", 2) + b"[]"


def test_damaged_files_are_refused_and_the_running_conversation_goes_on(llama, saved, tmp_path):
    path, _, expected = saved
    chat = new_chat(llama)
    session.load(chat, path)
    for data in damaged(path.read_bytes()):
        (tmp_path / "bad.tq").write_bytes(data)
        with pytest.raises(TqError) as refused:
            session.load(chat, tmp_path / "bad.tq")
        assert "bad.tq" in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(TqError, match="cannot read the session .*: No such file"):
        session.load(chat, tmp_path / "none.tq")
    assert "".join(chat.reply(SECOND)) == expected


def rewritten(path, target, change) -> None:
    """A session with another header, whose cache still has the right sum."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data, 16)
    header = json.loads(data[24 : 24 + length])
    change(header)
    text = json.dumps(header).encode()
    target.write_bytes(session.MAGIC + struct.pack("<Q", len(text)) + text + data[24 + length :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.update(version=2), "has version 2, and this tq-ggml reads 1"),
        (lambda h: h.update(tokens=h["tokens"][:-3]), "its cache holds .* tokens and not"),
        (lambda h: h.update(tokens=[10**9]), "its tokens are not the model's"),
        (lambda h: h.update(tokens=[1] * 5000), "its tokens are not the model's"),
        (lambda h: h.update(turns=[{"user": "x"}]), "its conversation is not whole"),
        (lambda h: h.update(identity=7), "its header is not whole"),
    ],
)
def test_headers_that_do_not_fit(llama, saved, tmp_path, change, words):
    rewritten(saved[0], tmp_path / "bad.tq", change)
    chat = new_chat(llama)
    with pytest.raises(TqError, match=words):
        session.load(chat, tmp_path / "bad.tq")
    assert chat.turns == [] and "".join(chat.reply("Hello."))


def test_the_context_that_a_session_needs(saved, tmp_path):
    assert session.context_of(saved[0]) == N_CTX
    rewritten(saved[0], tmp_path / "bad.tq", lambda h: h["identity"].update(n_ctx="much"))
    with pytest.raises(TqError, match="it names no context length"):
        session.context_of(tmp_path / "bad.tq")


def test_a_file_that_cannot_be_written_leaves_the_old_one(llama, saved, monkeypatch):
    path, turn, _ = saved
    before = path.read_bytes()
    monkeypatch.setattr(session, "_state", lambda llama: memoryview(b"x"))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    chat = new_chat(llama)
    chat.turns = [Turn("a", "b", 1), turn]
    with pytest.raises(TqError, match="cannot write .*No space left"):
        session.save(chat, path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
