"""``tq-ggml chat``: `tq_ggml.chat.Chat` in a terminal, or over a pipe, one message a line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tq_ggml.chat import Chat
from tq_ggml.errors import TqError

if TYPE_CHECKING:
    from tq_ggml.llama import Llama

HELP = """\
/help         this text
/regen        another answer to the last message
/clear        forget the conversation; the system prompt stays
/system TEXT  set the system prompt, without TEXT show it
/read FILE    put a text file before the next message
/save FILE    keep the conversation with its cache; /load FILE goes on with it, without reading it again
/cache        types and size of the KV cache, and how much of the context is used
/exit         leave (so does Ctrl-D)
Ctrl-C stops the reply. A line that ends with \\ goes on in the next; between two lines of \"\"\" stands a longer text.
When the context is full, the oldest turns are dropped."""

_MIB = 1 << 20
_AMBER, _RED, _PLAIN = "\033[33m", "\033[31m", "\033[0m"


def meter(chat: Chat) -> str:
    """Tokens in the cache, its size in MiB, and the decode rate of the last reply."""
    llama = chat.llama
    rate = f", {chat.rate:.1f} t/s" if chat.rate else ""
    size, f16 = (n / _MIB for n in (llama.kv_bytes_k + llama.kv_bytes_v, llama.kv_bytes_f16))
    return f"[{_used(llama)}; KV {size:.1f} MiB, f16 would be {f16:.1f} MiB{rate}]"


def _used(llama: Llama) -> str:
    used, total = llama.n_tokens, llama.n_ctx()
    return f"{used}/{total} tokens, {100 * used // total} %"


def _coloured(text: str, llama: Llama) -> str:
    """Amber from 80 % of the context on, red from 95; on a terminal that takes colours."""
    share = llama.n_tokens / llama.n_ctx()
    if share < 0.8 or not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"{_RED if share >= 0.95 else _AMBER}{text}{_PLAIN}"


def run(chat: Chat, prompt: str | None = None) -> None:
    """Answer ``prompt`` and return; without one, converse until the end of stdin or ``/exit``."""
    Terminal(chat).run(prompt)


class Terminal:
    """A conversation and what is typed at it.

    Attributes:
        chat: the conversation.
        attached: text of ``/read`` for the next message.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat, self.attached = chat, ""
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/clear": self._clear,
            "/regen": self._regen,
            "/system": self._system,
            "/read": self._read,
            "/save": self._save,
            "/load": self._load,
            "/cache": lambda _: chat.note(f"{chat.llama.kv_summary()}; {_used(chat.llama)}"),
        }

    def run(self, prompt: str | None) -> None:
        if prompt is not None:
            self._answer(prompt)
            return
        interactive = sys.stdin.isatty()
        if interactive:
            self.chat.note("/help lists the commands.")
        for text in _messages(_typed_lines() if interactive else sys.stdin):
            if text == "/exit":
                return
            if interactive:
                self._guarded(text)
            else:
                self._handle(text)

    def _guarded(self, text: str) -> None:
        try:
            self._handle(text)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except TqError as error:
            print(f"error: {error}", file=sys.stderr)

    def _handle(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name in self.commands:
            self.commands[name](rest.strip())
        elif text.startswith("/") and " " not in text and "\n" not in text:
            self.chat.note(f"there is no command {text}; /help lists them")
        elif text:
            self._answer(self.attached + text)
            self.attached = ""

    def _answer(self, text: str) -> None:
        reply = self.chat.reply(text)
        try:
            for piece in reply:
                print(piece, end="", flush=True)
        finally:
            reply.close()
        print()
        if self.chat.cut_at:
            self.chat.note(f"(stopped at {self.chat.cut_at})")
        if sys.stderr.isatty():
            print(_coloured(meter(self.chat), self.chat.llama), file=sys.stderr)

    # ---- commands ----

    def _clear(self, _rest: str) -> None:
        self.chat.clear()
        self.attached = ""
        self.chat.note("(conversation forgotten)")

    def _regen(self, _rest: str) -> None:
        if not self.chat.turns:
            raise _Refused("there is no answer yet")
        last = self.chat.turns.pop()
        try:
            self._answer(last.user)
        except BaseException:
            if not self.chat.turns or self.chat.turns[-1].user != last.user:
                self.chat.turns.append(last)  # nothing came in its place
            raise

    def _system(self, text: str) -> None:
        if text:
            self.chat.system = text
        self.chat.note(f"(system prompt: {self.chat.system or 'none'})")

    def _read(self, name: str) -> None:
        path = _path(name, "/read")
        limit = 16 * self.chat.llama.n_ctx()  # no text has longer tokens on average
        try:
            with path.open("rb") as file:
                text = file.read(limit + 1).decode("utf-8")
        except OSError as problem:
            raise _Refused(f"cannot read {path}: {problem.strerror or problem}") from None
        except UnicodeDecodeError:
            raise _Refused(f"{path} is not UTF-8 text, or far longer than the context") from None
        n_tokens = len(self.chat.llama.tokenize(text.encode(), add_bos=False))
        if n_tokens > self.chat.llama.n_ctx() * 3 // 4:
            room = self.chat.llama.n_ctx()
            raise _Refused(f"{path} has {n_tokens} tokens or more, too many for a context of {room}; raise --n-ctx")
        self.attached += f"{text.rstrip()}\n\n"
        self.chat.note(f"({n_tokens} tokens of {path} go before the next message)")

    def _save(self, name: str) -> None:
        from tq_ggml import session

        path = _path(name, "/save")
        size = session.save(self.chat, path)
        self.chat.note(f"(saved {self.chat.llama.n_tokens} tokens in {path}, {size / _MIB:.1f} MiB)")

    def _load(self, name: str) -> None:
        from tq_ggml import session

        path = _path(name, "/load")
        session.load(self.chat, path)
        self.chat.note(f"({len(self.chat.turns)} turns of {path}; {_used(self.chat.llama)})")


class _Refused(TqError):
    """A command that cannot be done."""


def _path(name: str, command: str) -> Path:
    if not name:
        raise _Refused(f"which file? {command} FILE")
    return Path(name).expanduser()


# ---- what is typed -------------------------------------------------------------------------------------------------


def _messages(lines: Iterator[str]) -> Iterator[str]:
    """Lines put together: those that end with a backslash, and those between two lines of three quotes."""
    block: list[str] | None = None
    begun = ""
    for line in lines:
        line = line.rstrip("\n")
        if block is not None:
            if line.strip() == '"""':
                yield "\n".join(block).strip()
                block = None
            else:
                block.append(line)
        elif line.strip() == '"""':
            block = []
        elif line.endswith("\\"):
            begun += line[:-1] + "\n"
        else:
            yield (begun + line).strip()
            begun = ""
    if rest := "\n".join(block or []).strip() or begun.strip():
        yield rest


def _typed_lines() -> Iterator[str]:
    import readline

    history = _history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    try:
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def _history_file() -> Path:
    import platformdirs

    return Path(os.environ.get("TQ_GGML_HISTORY") or platformdirs.user_data_path("tq-ggml") / "history")
