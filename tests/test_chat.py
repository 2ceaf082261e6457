"""Conversations with a real model; the terminal is a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import time

import pytest

from tq_ggml.chat import Chat
from tq_ggml.cli import main
from tq_ggml.errors import TqError
from tq_ggml.llama import Llama
from tq_ggml.terminal import meter

from llama_cpp import llama_chat_format  # isort: skip  after tq_ggml.llama, which loads the libraries

N_CTX = 256
# Asked less plainly, the model answers in something like French, whatever the cache type.
CAPITAL = "Which city is the capital of France? Answer in English."
LONG_ANSWER = "Count from one to one thousand, writing every number as a word."


@pytest.fixture(scope="module")
def llama(smollm2_path):
    with contextlib.closing(Llama(smollm2_path, cache_type="tq4", n_ctx=N_CTX, n_threads=1)) as llama:
        yield llama


def make_chat(llama, **options):
    notes = []
    return Chat(llama, sampling={"temperature": 0}, note=notes.append, **options), notes


def test_the_conversation_is_remembered_until_cleared(llama):
    chat, notes = make_chat(llama, max_tokens=24)
    assert "Paris" in "".join(chat.reply(CAPITAL))
    assert [turn.user for turn in chat.turns] == [CAPITAL]
    assert "Paris" in "".join(chat.reply("Repeat your last answer."))
    chat.clear()
    assert chat.turns == [] and notes == []


def test_the_meter_reads_the_engine(llama):
    chat, _ = make_chat(llama, max_tokens=8)
    "".join(chat.reply("Say hello."))
    assert meter(chat).startswith(f"[{llama.n_tokens}/256 tokens, ")
    assert "KV 1.6 MiB, f16 would be 5.6 MiB" in meter(chat)  # 30 layers, 3 KV heads of 64, keys and values
    assert "t/s]" in meter(chat)


def test_a_full_context_drops_the_oldest_turns_and_says_so(llama):
    chat, notes = make_chat(llama, max_tokens=8, system="You are terse.")
    for number in range(4):
        assert "".join(chat.reply(f"Question {number}: " + "tell me about the sea and the sky, please. " * 6))
    assert any("dropped the oldest" in note for note in notes)
    assert chat.turns[-1].user.startswith("Question 3") and len(chat.turns) < 4
    assert chat._messages("x")[0] == {"role": "system", "content": "You are terse."}
    assert llama.n_tokens <= N_CTX


def test_turns_are_dropped_too_when_only_the_template_knows_that_it_is_full(llama, monkeypatch):
    chat, notes = make_chat(llama, max_tokens=4)
    "".join(chat.reply("One two three four. " * 20))
    monkeypatch.setattr(chat, "_count", lambda text: 1)
    assert "".join(chat.reply("Five six seven eight. " * 25))
    assert notes == ["(context full: dropped the oldest turn)"]


def test_a_message_larger_than_the_context(llama):
    chat, _ = make_chat(llama)
    with pytest.raises(TqError, match="does not fit in the context of 256 tokens; shorten it or raise --n-ctx"):
        "".join(chat.reply("word " * 400))
    assert chat.turns == []


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ messages.nothing.at_all }}", "has no attribute"),
    ],
)
def test_a_template_that_refuses_is_one_line(llama, monkeypatch, template, reason):
    handler = llama_chat_format.Jinja2ChatFormatter(template, eos_token="", bos_token="").to_chat_handler()
    monkeypatch.setattr(llama, "chat_handler", handler)
    for system, hint in (("You are terse.", "; leave --system out"), (None, "")):
        chat, _ = make_chat(llama, system=system)
        with pytest.raises(TqError, match=f"chat template refuses this conversation: .*{reason}.*{hint}") as refused:
            "".join(chat.reply("Hello."))
        assert "\n" not in str(refused.value) and ("--system" in str(refused.value)) == bool(system)
        assert chat.turns == []


def with_template(path, target, template):
    """A copy of a model with another chat template, of the same length in bytes."""
    data = path.read_bytes()
    at = data.index(b"{% for message in messages %}")
    (length,) = struct.unpack_from("<Q", data, at - 8)
    target.write_bytes(data[:at] + template.encode().ljust(length) + data[at + length :])
    return str(target)


def test_broken_and_refusing_templates_from_the_command_line(smollm2_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    for template, message in (
        ("{% for %}", "chat template in m.gguf is broken"),
        ("{{ raise_exception('no system role') }}", "no system role; leave --system out"),
    ):
        model = with_template(smollm2_path, tmp_path / "m.gguf", template)
        assert main(["chat", "-m", model, "--system", "Be brief.", "--prompt", "Hello.", "-c", "256"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("tq-ggml: error: ") and message in error


def test_the_limit_that_cut_a_reply_is_named(llama):
    chat, _ = make_chat(llama, max_tokens=5)
    "".join(chat.reply(LONG_ANSWER))
    assert chat.cut_at == "--max-tokens 5"
    chat, _ = make_chat(llama, max_tokens=1000)
    chat.sampling["logit_bias"] = {llama.token_eos(): -100.0}  # so that the model does not end by itself
    "".join(chat.reply("one two three four five six seven eight nine ten " * 20))
    assert chat.cut_at == "the end of the context"


def test_a_reply_closed_early_is_kept_as_far_as_it_got(llama):
    chat, _ = make_chat(llama, max_tokens=16)
    reply = chat.reply(LONG_ANSWER)
    first = next(reply)
    reply.close()
    assert [turn.assistant for turn in chat.turns] == [first]
    assert "Paris" in "".join(chat.reply(CAPITAL))


def chat_command(path, *words):
    return [sys.executable, "-m", "tq_ggml", "chat", "-m", str(path), "-t", "1", "--temp", "0", *words]


def test_over_a_pipe_only_replies_are_on_stdout(smollm2_path):
    lines = f"{CAPITAL}\n\n/nonsense\n/clear\n/exit\nnot read\n"
    command = chat_command(smollm2_path, "--cache-type", "tq4", "--max-tokens", "16", "-c", "256")
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1 and "Paris" in done.stdout
    assert "no command /nonsense" in done.stderr and "K (tq4)" in done.stderr


def test_one_shot(smollm2_path):
    command = chat_command(smollm2_path, "-ctk", "q8_0", "-ctv", "tq4", "--prompt", CAPITAL, "--max-tokens", "16")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "Paris" in done.stdout
    assert "K (q8_0)" in done.stderr and "V (tq4)" in done.stderr


class Terminal:
    """A process on a pseudo-terminal, typed at and read from."""

    def __init__(self, command):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.seen = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, text, timeout=90):
        """What came before ``text``; fails if it does not come."""
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            self._read(deadline, f"{text!r} did not come")
        before, self.seen = self.seen.split(text, 1)
        return before

    def wait_for_length(self, length, timeout=90):
        """Until that many characters came that nothing has waited for yet."""
        deadline = time.monotonic() + timeout
        while len(self.seen) < length:
            self._read(deadline, f"less than {length} characters came")

    def interrupt_until(self, text):
        """Press Ctrl-C again if need be: one that comes just before readline waits is only seen at the next key."""
        for _ in range(9):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, timeout=10)
        raise AssertionError(f"{text!r} did not come; seen: {self.seen!r}")

    def _read(self, deadline, complaint):
        ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"{complaint}; seen: {self.seen!r}"
        self.seen += os.read(self.master, 4096).decode("utf-8", "replace")


def test_in_a_terminal_ctrl_c_stops_the_reply_and_ctrl_d_leaves(smollm2_path):
    terminal = Terminal(chat_command(smollm2_path, "--cache-type", "tq4", "-c", "1024", "--max-tokens", "900"))
    try:
        terminal.wait_for("> ")
        terminal.type("/help\n")
        terminal.wait_for("Ctrl-C stops the reply")
        terminal.wait_for("> ")
        terminal.type(LONG_ANSWER + "\n")
        terminal.wait_for("\n")  # the echo of what was typed
        terminal.wait_for_length(20)
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("(stopped)")
        terminal.wait_for("> ")
        terminal.interrupt_until("Ctrl-D or /exit leaves")  # at the prompt it only explains itself
        terminal.wait_for("> ")
        terminal.type(CAPITAL + "\n")
        terminal.wait_for("/1024 tokens, ")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
