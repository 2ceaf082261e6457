"""The commands of `tq-ggml chat`, over a pipe in the process, and what a terminal adds."""

from __future__ import annotations

import contextlib
import sys

import pytest

from tq_ggml import terminal
from tq_ggml.chat import Chat
from tq_ggml.errors import TqError
from tq_ggml.llama import Llama


@pytest.fixture(scope="module")
def llama(smollm2_path):
    with contextlib.closing(Llama(smollm2_path, cache_type="tq4", n_ctx=512, n_threads=1)) as llama:
        yield llama


@pytest.fixture
def typed(llama, capsys):
    """Types lines, and returns the chat, what was answered and what was noted."""

    def run(*lines: str):
        llama.reset()
        notes: list[str] = []
        chat = Chat(llama, max_tokens=8, sampling={"temperature": 0}, note=notes.append)
        talk = terminal.Terminal(chat)
        for text in terminal._messages(iter(f"{line}\n" for line in lines)):
            talk._handle(text)
        return chat, capsys.readouterr().out, notes

    return run


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "", "  two "], ["one", "", "two"]),
        (["a \\", "b\\", "c", "d"], ["a \nb\nc", "d"]),
        (['"""', "x = 1", "", "  y", '"""', "z"], ["x = 1\n\n  y", "z"]),
        (['"""', "no end"], ["no end"]),
        (["no end\\"], ["no end"]),
        (['say """ here'], ['say """ here']),
    ],
)
def test_lines_become_messages(lines, messages):
    assert list(terminal._messages(iter(f"{line}\n" for line in lines))) == messages


def test_regen_answers_the_last_message_again(typed):
    chat, out, _ = typed("Say hello.", "/regen")
    first, second = out.splitlines()[0], out.splitlines()[-1]
    assert first == second and [turn.user for turn in chat.turns] == ["Say hello."]
    with pytest.raises(TqError, match="there is no answer yet"):
        typed("/regen")


def test_the_system_prompt(typed):
    chat, _, notes = typed("/system", "/system You are terse.", "Hello.", "/system")
    assert notes[0] == "(system prompt: none)" and notes[-1] == "(system prompt: You are terse.)"
    assert chat._messages("x")[0] == {"role": "system", "content": "You are terse."}


def test_read_puts_a_file_before_the_next_message(typed, tmp_path):
    file = tmp_path / "a text.txt"
    file.write_text("The sea is blue.\n", encoding="utf-8")
    chat, _, notes = typed(f"/read {file}", "What is blue?", "And now?")
    assert [turn.user for turn in chat.turns] == ["The sea is blue.\n\nWhat is blue?", "And now?"]
    assert notes[0] == f"(6 tokens of {file} go before the next message)"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe", "is not UTF-8"), (b"word " * 500, "has 50. tokens or more, too many for a context of 512")],
)
def test_files_that_cannot_be_read_in(typed, tmp_path, content, words):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(TqError, match=words):
        typed(f"/read {tmp_path / 'x'}")
    with pytest.raises(TqError, match="No such file"):
        typed(f"/read {tmp_path / 'none'}")
    with pytest.raises(TqError, match="which file. /read FILE"):
        typed("/read")


def test_save_and_load(typed, tmp_path):
    file = tmp_path / "s.tq"
    chat, _, notes = typed("My name is Bo.", f"/save {file}")
    assert notes[-1].startswith(f"(saved {chat.llama.n_tokens} tokens in {file}, ")
    again, _, notes = typed("Something else.", f"/load {file}")
    assert again.turns == chat.turns and notes[-1].startswith(f"(1 turns of {file}; ")
    for command in ("/save", "/load"):
        with pytest.raises(TqError, match=f"which file. {command} FILE"):
            typed(command)


def test_cache_and_help_and_what_is_no_command(typed):
    _, out, notes = typed("/help", "/cache", "/clear", "/nonsense")
    assert all(command in out for command in ("/regen", "/save FILE", "/read FILE", "/system TEXT", "Ctrl-C"))
    assert "K (tq4): 1.58 MiB" in notes[0] and "f16 would be 11.25 MiB" in notes[0] and "0/512 tokens, 0 %" in notes[0]
    assert notes[1:] == ["(conversation forgotten)", "there is no command /nonsense; /help lists them"]


@pytest.mark.parametrize(
    ("used", "colour"), [(0, ""), (409, ""), (410, "\033[33m"), (486, "\033[33m"), (487, "\033[31m"), (512, "\033[31m")]
)
def test_the_meter_turns_amber_and_red(llama, monkeypatch, used, colour):
    """At 80 and 95 % of 512 tokens."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(llama, "n_tokens", used)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert terminal._coloured("x", llama) == (f"{colour}x\033[0m" if colour else "x")
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal._coloured("x", llama) == "x"
