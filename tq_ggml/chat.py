"""A conversation with a model that always fits its context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tq_ggml.errors import TqError
from tq_ggml.library import engine_log

if TYPE_CHECKING:
    from tq_ggml.llama import Llama

TEMPLATE_TOKENS = 8  # what a chat template adds around one message, on the safe side


@dataclass
class Turn:
    """One exchange, and about how many tokens of the context it takes."""

    user: str
    assistant: str
    n_tokens: int


class Chat:
    """A conversation that always fits its context: the oldest turns are dropped to make room.

    Room for a reply is ``max_tokens``, or a quarter of the context where that is less.

    Args:
        llama: the engine, a `tq_ggml.Llama`.
        system: system prompt, never dropped; None for the model's own.
        max_tokens: longest reply.
        sampling: more keywords of ``create_chat_completion`` (temperature, seed, ...).
        note: gets lines for the user.

    Attributes:
        turns: the exchanges that are still remembered, oldest first.
        rate: tokens per second of the last reply, None where it was too short to tell.
        cut_at: what ended the last reply before the model did, or None.
    """

    def __init__(
        self,
        llama: Llama,
        *,
        system: str | None = None,
        max_tokens: int = 512,
        sampling: dict[str, Any] | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.llama, self.system, self.max_tokens = llama, system, max_tokens
        self.sampling, self.note = sampling or {}, note
        self.turns: list[Turn] = []
        self.rate: float | None = None
        self.cut_at: str | None = None

    def clear(self) -> None:
        """Forget the turns; the system prompt stays."""
        self.turns.clear()

    def reply(self, text: str) -> Iterator[str]:
        """Answer in pieces as they are generated. Closing the iterator early keeps the turn as far as it got.

        Raises:
            TqError: the message alone does not fit in the context, the model's chat template refuses the conversation,
                or llama.cpp fails.
        """
        n_user = self._count(text)
        self._make_room(n_user)
        pieces: list[str] = []
        try:
            for piece in self._stream(text):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                answer = "".join(pieces)
                self.turns.append(Turn(text, answer, n_user + self._count(answer)))

    def _count(self, text: str) -> int:
        return len(self.llama.tokenize(text.encode(), add_bos=False)) + TEMPLATE_TOKENS

    def _make_room(self, n_user: int) -> None:
        n_ctx = self.llama.n_ctx()
        fixed = n_user + (self._count(self.system) if self.system else 0) + min(self.max_tokens, n_ctx // 4)
        spare = n_ctx - fixed
        keep = len(self.turns)
        while keep and sum(turn.n_tokens for turn in self.turns[-keep:]) > spare:
            keep -= 1
        self._drop(len(self.turns) - keep)

    def _drop(self, count: int) -> None:
        if count:
            del self.turns[:count]
            self.note(f"(context full: dropped the oldest {'turn' if count == 1 else f'{count} turns'})")

    def _messages(self, text: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        return [*messages, {"role": "user", "content": text}]

    def _stream(self, text: str) -> Iterator[str]:
        self.rate = self.cut_at = None
        while True:
            chunks = self._chunks(text)
            try:
                yield from self._pieces(chunks)
                return
            except ValueError as error:
                if "exceed context window" not in str(error):
                    raise TqError(f"llama-cpp-python refuses this message: {_one_line(error)}") from error
                self._drop_after_refusal()
            except RuntimeError as error:
                raise TqError(f"the reply failed: {_one_line(error)}{engine_log.reason()}") from error

    def _chunks(self, text: str) -> Iterator[dict[str, Any]]:
        engine_log.clear()
        try:
            return self.llama.create_chat_completion(
                self._messages(text), stream=True, max_tokens=self.max_tokens, **self.sampling
            )
        # Only the model's chat template has run so far, a program of somebody else's that can fail in any way.
        except Exception as error:
            hint = "; leave --system out, or put its text into your message" if self.system else ""
            raise TqError(f"the model's chat template refuses this conversation: {_one_line(error)}{hint}") from error

    def _drop_after_refusal(self) -> None:
        # Our count is only near: what a template adds is known to the template alone.
        if not self.turns:
            raise TqError(
                f"{'the system prompt and this message do' if self.system else 'this message does'} not fit in the "
                f"context of {self.llama.n_ctx()} tokens; shorten {'them' if self.system else 'it'} or raise --n-ctx"
            )
        self._drop(1)

    def _pieces(self, chunks: Iterator[dict[str, Any]]) -> Iterator[str]:
        start, n_start = None, 0
        for chunk in chunks:
            choice = chunk["choices"][0]
            if piece := choice["delta"].get("content"):
                if start is None:
                    start, n_start = time.perf_counter(), self.llama.n_tokens
                yield piece
                elapsed = time.perf_counter() - start
                self.rate = (self.llama.n_tokens - n_start) / elapsed if elapsed else None
            if choice["finish_reason"] == "length":
                full = self.llama.n_tokens >= self.llama.n_ctx() - 1
                self.cut_at = "the end of the context" if full else f"--max-tokens {self.max_tokens}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
