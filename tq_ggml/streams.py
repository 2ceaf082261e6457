"""The process around the command line: standard streams that cannot fail, and signals that let clean-up run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


def prepare() -> None:
    """Make the standard streams take and give any text; a closed one becomes the null device.

    What cannot be decoded or encoded becomes a replacement character, instead of ending the program half-way.
    """
    # In this order: each takes the lowest free number, so no model file becomes descriptor 1 or 2.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="replace"))  # noqa: SIM115
        elif name != "stderr" and hasattr(stream, "reconfigure"):  # stderr writes escapes already
            stream.reconfigure(errors="replace")


def discard_output() -> None:
    """Send what stdout still holds nowhere: the interpreter flushes it once more at exit, which must not fail again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def unwind_on_termination() -> Iterator[None]:
    """Let SIGTERM and a lost terminal unwind the stack, for a block with temporary folders or child processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
