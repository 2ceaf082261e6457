"""The engine inside the server: a `Llama` that stops when told, refuses what would end the process, and reports."""

from __future__ import annotations

import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

from tq_ggml.errors import TqError
from tq_ggml.gate import current_call, error, explain
from tq_ggml.llama import Llama, llama_cpp

from llama_cpp import llama_chat_format  # isort: skip  after tq_ggml.llama, which loads the libraries

_MIB = 1 << 20
# llama.cpp parses a grammar and looks for left recursion on the stack.
_MAX_GRAMMAR, _MAX_NESTING = 256 << 10, 256
_NO_GROUPS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*')


class ServedLlama(Llama):
    """A `Llama` that stops when its client hangs up, and reports its cache with each answer.

    Raises:
        TqError: as `Llama`; also for a ``chat_format`` that llama-cpp-python does not have.

    Attributes:
        alias: the model's name in answers, which would be its path.
        prefill_rate, decode_rate: tokens per second of the last request, None before the first.
    """

    alias = "model"
    prefill_rate: float | None = None
    decode_rate: float | None = None

    def __init__(self, model_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        _check_chat_format(kwargs.get("chat_format"))
        super().__init__(model_path, *args, **kwargs)

    def kv_report(self) -> dict[str, Any]:
        """What ``/v1/kv`` answers."""
        used = self.kv_bytes_k + self.kv_bytes_v
        return {
            "cache_type_k": str(self.cache_type_k),
            "cache_type_v": str(self.cache_type_v),
            "bytes": used,
            "bytes_f16": self.kv_bytes_f16,
            "mib": round(used / _MIB, 2),
            "mib_f16": round(self.kv_bytes_f16 / _MIB, 2),
            "n_ctx": self.n_ctx(),
            "tokens_used": self.n_tokens,
            "tokens_left": self.n_ctx() - self.n_tokens,
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_tokens_per_second": self.decode_rate,
            "conditioning": str(self.conditioned_layers),
        }

    # ---- answers ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(super().__call__, args, kwargs)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(super().create_chat_completion, args, kwargs)

    def create_embedding(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().create_embedding(*args, **kwargs)
        answer["usage"]["kv"] = self.kv_report()
        return answer

    def _answer(self, make: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        kwargs["model"] = self.alias
        if kwargs.get("stream"):
            return self._stream(make, args, kwargs)
        self._check_bias(kwargs.get("logit_bias"))
        answer = make(*args, **kwargs)
        answer["usage"]["kv"] = self.kv_report()
        return answer

    def _stream(self, make: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        call, last = current_call(), None
        try:
            self._check_bias(kwargs.get("logit_bias"))
            for last in make(*args, **kwargs):
                yield last
        except Exception as problem:
            failure = _explain_or_log(problem)
            if last is None:
                call.refused = failure
            # Where the status has been sent, clients find the error in the stream, as OpenAI's.
            yield {"error": failure[1]}
            return
        if call.wants_usage:
            usage = {
                "prompt_tokens": call.n_prompt,
                "completion_tokens": call.n_completion,
                "total_tokens": call.n_prompt + call.n_completion,
                "kv": self.kv_report(),
            }
            yield {**(last or {}), "choices": [], "usage": usage}

    # ---- the engine ----

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Iterator[int]:
        call, tokens = current_call(), list(tokens)
        if not tokens:
            raise ValueError("the prompt is empty")
        n_new = len(tokens) - _common_prefix(tokens, self.eval_tokens)
        call.n_prompt += len(tokens)
        started = first = perf_counter()
        for n, token in enumerate(super().generate(tokens, *args, **kwargs)):
            now = perf_counter()
            if n == 0:
                first = now
                if n_new > 16:  # fewer take no time that is worth a rate
                    self.prefill_rate = round(n_new / (now - started), 2)
            else:
                self.decode_rate = round(n / (now - first), 2)
            call.n_completion += 1
            yield token
            call.check()

    def eval(self, tokens: Sequence[int]) -> None:
        call = current_call()
        for start in range(0, len(tokens), self.n_batch):
            call.check()
            super().eval(tokens[start : start + self.n_batch])

    def embed(
        self,
        input: str | list[str],  # noqa: A002 - the parent's name
        normalize: bool = False,
        truncate: bool = False,
        return_count: bool = False,
    ) -> Any:
        """The parent's, a text at a time, so that it can stop between them; a text that is too long is refused."""
        if not self.context_params.embeddings:
            raise ValueError("this server makes no embeddings; start it with --embedding")
        texts = [input] if isinstance(input, str) else input
        if not texts or not all(texts):
            raise ValueError("the input is empty, or has an empty text")
        call, found, count = current_call(), [], 0
        for text in texts:
            call.check()
            embedding, n_tokens = super().embed(text, normalize, truncate, return_count=True)
            found.append(embedding)
            count += n_tokens
        result = found[0] if isinstance(input, str) else found
        return (result, count) if return_count else result

    # ---- what would end the process, or fail where no error can be raised ----

    def detokenize(self, tokens: list[int], *args: Any, **kwargs: Any) -> bytes:
        if tokens:
            self._check_token(min(tokens))
            self._check_token(max(tokens))
        return super().detokenize(tokens, *args, **kwargs)

    def _check_bias(self, bias: dict[str, float] | None) -> None:
        for token in bias or ():
            self._check_token(int(token))

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.n_vocab():
            raise ValueError(f"no token {token}: this model's are 0 to {self.n_vocab() - 1}")

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        # Grammars of requests, JSON schemas and tools all pass here. The parent uses llama.cpp's null for a wrong one.
        if kwargs.get("grammar") is not None:
            self._check_grammar(kwargs["grammar"]._grammar, kwargs["grammar"]._root)
        return super()._init_sampler(*args, **kwargs)

    def _check_grammar(self, grammar: str, root: str) -> None:
        if len(grammar) > _MAX_GRAMMAR or _nesting(grammar) > _MAX_NESTING:
            raise ValueError(
                f"the grammar is too large: at most {_MAX_GRAMMAR} characters, {_MAX_NESTING} parentheses deep"
            )
        sampler = llama_cpp.llama_sampler_init_grammar(self._model.vocab, grammar.encode(), root.encode())
        if not sampler:
            raise ValueError("the grammar, or what was made of the JSON schema, is not valid for llama.cpp")
        llama_cpp.llama_sampler_free(sampler)


def _explain_or_log(problem: Exception) -> tuple[int, dict[str, Any]]:
    if known := explain(problem):
        return known
    traceback.print_exception(problem, file=sys.stderr)
    return 500, error(" ".join(str(problem).split()), "failed", "server_error")


def _common_prefix(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _nesting(grammar: str) -> int:
    """How deep parentheses are at most, without those in literals, character classes and comments."""
    steps = ({"(": 1, ")": -1}.get(c, 0) for c in _NO_GROUPS.sub("", grammar))
    return max(itertools.accumulate(steps), default=0)


def _check_chat_format(name: str | None) -> None:
    # A model's own templates are known when it is loaded.
    if name is None or name.startswith("chat_template."):
        return
    try:
        llama_chat_format.get_chat_completion_handler(name)
    except llama_chat_format.LlamaChatCompletionHandlerNotFoundException:
        known = ", ".join(sorted(llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers))
        raise TqError(f"--chat-format {name}: llama-cpp-python has {known}") from None
