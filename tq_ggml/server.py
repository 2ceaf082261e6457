"""``tq-ggml serve``: llama-cpp-python's own OpenAI-compatible server with a tq cache inside.

Routes, request types and streaming are `llama_cpp.server`'s. Added here: the engine (`ServedLlama`), `/health` and
`/v1/kv`, a line for requests (`Gate`), and a shutdown that lets answers finish. docs/server.md is for users.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import hashlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tq_ggml.errors import TqError
from tq_ggml.library import activate
from tq_ggml.llama import Llama

try:
    activate()
    import anyio
    import llama_cpp.server.app as app_module
    import llama_cpp.server.model as model_module
    import uvicorn
    from fastapi import Depends, FastAPI, HTTPException
    from fastapi.exceptions import RequestValidationError
    from llama_cpp.server.errors import RouteErrorHandler
    from llama_cpp.server.settings import ModelSettings, ServerSettings
    from sse_starlette.sse import AppStatus
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse
except ImportError as problem:
    raise TqError(f"the server needs more packages ({problem.name}); pip install 'tq-ggml[server]'") from None

_MIB = 1 << 20
_GONE = 499  # nginx's status for a client that closed the request; nobody reads it


@dataclass
class Call:
    """One request, from the line to its last byte.

    Attributes:
        wants_usage: asked for a chunk with the usage at the end of a stream.
        gone: the client has hung up.
        n_prompt, n_completion: tokens so far.
    """

    wants_usage: bool = False
    gone: bool = False
    n_prompt: int = 0
    n_completion: int = 0


_call: contextvars.ContextVar[Call] = contextvars.ContextVar("call")


class ServedLlama(Llama):
    """A `Llama` that stops when its client hangs up, and reports its cache with each answer.

    Attributes:
        alias: the model's name in answers, which would be its path.
        prefill_rate, decode_rate: tokens per second of the last request, None before the first.
    """

    alias = "model"
    prefill_rate: float | None = None
    decode_rate: float | None = None

    def kv_report(self) -> dict[str, Any]:
        """What ``/v1/kv`` answers."""
        used = self.kv_bytes_k + self.kv_bytes_v
        return {
            "cache_type_k": str(self.cache_type_k),
            "cache_type_v": str(self.cache_type_v),
            "mib": round(used / _MIB, 2),
            "mib_f16": round(self.kv_bytes_f16 / _MIB, 2),
            "n_ctx": self.n_ctx(),
            "tokens_used": self.n_tokens,
            "tokens_left": self.n_ctx() - self.n_tokens,
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_tokens_per_second": self.decode_rate,
            "conditioning": str(self.conditioned_layers),
        }

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Iterator[int]:
        call, tokens = _call.get(Call()), list(tokens)
        n_new = len(tokens) - _common_prefix(tokens, self.eval_tokens)
        call.n_prompt += len(tokens)
        started = first = time.perf_counter()
        for n, token in enumerate(super().generate(tokens, *args, **kwargs)):
            now = time.perf_counter()
            if n == 0:
                first = now
                if n_new > 16:  # fewer take no time that is worth a rate
                    self.prefill_rate = round(n_new / (now - started), 2)
            else:
                self.decode_rate = round(n / (now - first), 2)
            call.n_completion += 1
            yield token
            if call.gone:
                raise HTTPException(_GONE, "the client closed the request")

    def eval(self, tokens: Sequence[int]) -> None:
        call = _call.get(Call())
        for start in range(0, len(tokens), self.n_batch):
            if call.gone:
                raise HTTPException(_GONE, "the client closed the request")
            super().eval(tokens[start : start + self.n_batch])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(super().__call__, args, kwargs)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(super().create_chat_completion, args, kwargs)

    def _answer(self, make: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        kwargs["model"] = self.alias
        if kwargs.get("stream"):
            return self._stream(make, args, kwargs)
        answer = make(*args, **kwargs)
        answer["usage"]["kv"] = self.kv_report()
        return answer

    def _stream(self, make: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        call, last = _call.get(Call()), {}
        try:
            for last in make(*args, **kwargs):
                yield last
        except (ValueError, RuntimeError, TqError) as problem:
            # The status has been sent: clients find the error in the stream, as OpenAI's.
            yield _error(" ".join(str(problem).split()), "failed")
            return
        if call.wants_usage:
            usage = {
                "prompt_tokens": call.n_prompt,
                "completion_tokens": call.n_completion,
                "total_tokens": call.n_prompt + call.n_completion,
                "kv": self.kv_report(),
            }
            yield {**last, "choices": [], "usage": usage}


def _common_prefix(a: Iterable[int], b: Iterable[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Gate:
    """ASGI middleware before the routes that use the engine: one request runs, ``queue`` may wait, others get a 503.

    It reads a request's body, up to ``max_body`` bytes, before it lets the request through, so that it can watch for a
    client that hangs up.
    """

    def __init__(self, app: Any, *, queue: int, max_body: int) -> None:
        self.app, self.queue, self.max_body = app, queue, max_body

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if _state.draining or _state.n_inside > self.queue:
            await _refuse(scope, receive, send)
            return
        leave = self._enter()

        async def send_and_leave(message: dict) -> None:
            # Before the last byte is out: whoever has read it may ask again at once.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                leave()
            await send(message)

        try:
            await self._run(scope, receive, send_and_leave)
        finally:
            leave()

    def _enter(self) -> Callable[[], None]:
        """Count a request; the function that is returned counts it out, once."""
        inside = [True]
        _state.n_inside += 1

        def leave() -> None:
            if inside:
                inside.pop()
                _state.n_inside -= 1

        return leave

    async def _run(self, scope: dict, receive: Any, send: Any) -> None:
        body = await self._body(receive)
        if body is None:
            error = _error(f"the request is larger than {self.max_body} bytes; raise --max-body", "request_too_large")
            await JSONResponse(error, 413)(scope, receive, send)
            return
        try:
            call = Call(wants_usage=_wants_usage(json.loads(body or b"{}")))
        except ValueError as problem:
            await JSONResponse(_error(f"the request is not JSON: {problem}", "invalid_json"), 400)(scope, receive, send)
            return
        _call.set(call)
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        hung_up = anyio.Event()

        async def watched_receive() -> dict:
            if messages:
                return messages.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            call.gone = True
            hung_up.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await self.app(scope, watched_receive, send)
            tasks.cancel_scope.cancel()

    async def _body(self, receive: Any) -> bytes | None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.max_body:
                return None
            if not message.get("more_body"):
                return body


def _wants_usage(request: Any) -> bool:
    options = request.get("stream_options") if isinstance(request, dict) else None
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


async def _refuse(scope: dict, receive: Any, send: Any) -> None:
    why = "the server is shutting down" if _state.draining else "another request is running; try again, or --queue more"
    await JSONResponse(_error(why, "busy"), 503, headers={"Retry-After": "5"})(scope, receive, send)


@dataclass
class _State:
    n_inside: int = 0
    draining: bool = False


_state = _State()


_explain = RouteErrorHandler.error_message_wrapper


def _explain_wrong_fields(handler: RouteErrorHandler, error: Exception, body: Any = None) -> tuple[int, Any]:
    """Upstream answers them with a 500 and a traceback in the log."""
    if isinstance(error, RequestValidationError):
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()[:3])
        return 422, _error(wrong, "invalid_request")["error"]
    return _explain(handler, error=error, body=body)


# ---- the application -----------------------------------------------------------------------------------------------


def make_app(
    llama: ServedLlama,
    alias: str,
    *,
    api_key: str | None,
    queue: int,
    max_body: int,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> FastAPI:
    """llama-cpp-python's application around one engine.

    Args:
        llama: the engine.
        alias: the model's name for clients; any other name in a request means it too.
        api_key: what clients must send as a bearer token; None for no key.
        queue: requests that may wait.
        max_body: bytes of a request.
        origins: web pages of other origins that may call the server, as ``https://example.org``.
        hosts: names by which it may be called, any where there are none. A web page can make its own name one of this
            machine's addresses, and would then be no other origin.
    """
    llama.alias = alias
    os.environ.pop("CONFIG_FILE", None)  # of llama_cpp.server; our options are on the command line
    llama_cpp = activate()
    # The one place where ours goes in: the proxy loads a model with this function, and the routes call the class's
    # methods by this name.
    model_module.LlamaProxy.load_llama_from_model_settings = staticmethod(lambda settings: llama)
    llama_cpp.Llama = ServedLlama
    RouteErrorHandler.error_message_wrapper = _explain_wrong_fields
    for route in app_module.router.routes:
        if route.path in ("/v1/completions", "/v1/chat/completions"):
            route.response_model = None  # it would drop what it does not know: usage.kv
    app = app_module.create_app(
        server_settings=ServerSettings(api_key=api_key, interrupt_requests=False),
        model_settings=[ModelSettings(model=llama.model_path, model_alias=alias)],
    )
    app.title = "tq-ggml"
    # Upstream lets every web page in the browser call the server.
    app.user_middleware = [m for m in app.user_middleware if m.cls is not CORSMiddleware]
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Gate, queue=queue, max_body=max_body)
    if hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    page, policy = _page()

    @app.get("/", include_in_schema=False)
    def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    @app.get("/health", tags=["tq-ggml"])
    def health() -> dict[str, Any]:
        """Needs no key."""
        waiting = max(0, _state.n_inside - 1)
        status = "draining" if _state.draining else "busy" if _state.n_inside else "ok"
        return {"status": status, "model": alias, "waiting": waiting}

    @app.get("/v1/kv", tags=["tq-ggml"], dependencies=[Depends(app_module.authenticate)])
    def kv() -> dict[str, Any]:
        """The KV cache: types, MiB now and in f16, tokens used and left, tokens per second of the last request."""
        return llama.kv_report()

    return app


def _page() -> tuple[str, str]:
    """The chat page, and a policy under which nothing runs in it but its own script."""
    text = (Path(__file__).parent / "web" / "index.html").read_text(encoding="utf-8")

    def own(tag: str) -> str:
        content = text.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    return text, (
        f"default-src 'none'; script-src 'sha256-{own('script')}'; style-src 'sha256-{own('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def embedding_options(wanted: bool) -> dict[str, Any]:
    """For `ServedLlama`: one embedding for a text, the mean over its tokens, where a chat model has one for each."""
    return {"embedding": True, "pooling_type": activate().LLAMA_POOLING_TYPE_MEAN} if wanted else {}


class _Server(uvicorn.Server):
    """Ends with 0 after SIGTERM and SIGINT, when what was running has finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._drain) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _drain(self, number: int, _frame: Any) -> None:
        self.force_exit = _state.draining and number == signal.SIGINT  # the second Ctrl-C
        self.should_exit = _state.draining = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        TqError: the address is taken or is not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as problem:
        raise TqError(f"cannot listen on {host}:{port}: {problem.strerror or problem}; give another --port") from None


def run(app: FastAPI, sock: socket.socket, *, drain: int) -> None:
    """Serve until SIGTERM or SIGINT; running answers then have ``drain`` seconds to finish."""
    # sse-starlette would cut streams off as soon as the signal comes.
    AppStatus.disable_automatic_graceful_drain()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=drain, timeout_keep_alive=30
    )
    _Server(config).run(sockets=[sock])


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def warn_if_open(host: str, api_key: str | None) -> None:
    """A line on stderr where others can reach a server that asks for no key."""
    if host not in ("127.0.0.1", "::1", "localhost") and not api_key:
        print("tq-ggml: warning: anybody who reaches this address can use the model; give --api-key", file=sys.stderr)
