"""``tq-ggml serve``: llama-cpp-python's own OpenAI-compatible server with a tq cache inside.

Routes, request types and streaming are `llama_cpp.server`'s. Added: the engine (`tq_ggml.served`), a line for requests
(`tq_ggml.gate`), `/health` and `/v1/kv`, and a shutdown that lets answers finish. docs/server.md is for users.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tq_ggml.errors import TqError
from tq_ggml.library import activate

try:
    activate()
    import llama_cpp.server.app as app_module
    import llama_cpp.server.model as model_module
    import uvicorn
    from fastapi import Depends, FastAPI
    from llama_cpp.server.errors import RouteErrorHandler
    from llama_cpp.server.settings import ModelSettings, ServerSettings
    from sse_starlette.sse import AppStatus
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse

    from tq_ggml.gate import Gate, Line, explain
    from tq_ggml.served import ServedLlama
except ImportError as problem:
    raise TqError(
        f"the server needs more packages ({problem.name}); run: {sys.executable} -m pip install 'tq-ggml[server]'"
    ) from None

_ANSWER_SECONDS = 5  # for an engine that has been told to stop, before connections are cut
_upstream_explains = RouteErrorHandler.error_message_wrapper


def _explain(handler: RouteErrorHandler, error: Exception, body: Any = None) -> tuple[int, Any]:
    """Upstream answers whatever is wrong in a request with a 500, and a traceback in the log."""
    return explain(error) or _upstream_explains(handler, error=error, body=body)


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
    llama.alias, line = alias, Line(queue)
    os.environ.pop("CONFIG_FILE", None)  # of llama_cpp.server; our options are on the command line
    llama_cpp = activate()
    # The one place where ours goes in: the proxy loads a model with this function, and the routes call the class's
    # methods by this name.
    model_module.LlamaProxy.load_llama_from_model_settings = staticmethod(lambda settings: llama)
    llama_cpp.Llama = ServedLlama
    RouteErrorHandler.error_message_wrapper = _explain
    for route in app_module.router.routes:
        if route.path in ("/v1/completions", "/v1/chat/completions"):
            route.response_model = None  # it would drop what it does not know: usage.kv
    # Constructed like this, settings do not read the environment, where CACHE or PORT are often somebody else's.
    app = app_module.create_app(
        server_settings=ServerSettings.model_construct(api_key=api_key, interrupt_requests=False),
        model_settings=[ModelSettings.model_construct(model=llama.model_path, model_alias=alias)],
    )
    app.title, app.state.line = "tq-ggml", line
    # Upstream lets every web page in the browser call the server.
    app.user_middleware = [m for m in app.user_middleware if m.cls is not CORSMiddleware]
    app.add_middleware(Gate, line=line, max_body=max_body)
    if origins:  # around the gate: pages may read its refusals too
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    if hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    page, policy = _page()

    @app.get("/", include_in_schema=False)
    def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    @app.get("/health", tags=["tq-ggml"])
    def health() -> dict[str, Any]:
        """Needs no key."""
        return {"model": alias, **line.report()}

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
    """Ends with 0 after SIGTERM and SIGINT, when what was running has finished.

    Until then it goes on listening, to say 503. Answers that take longer than ``drain`` seconds are stopped: the engine
    must not be freed under them.
    """

    def __init__(self, config: uvicorn.Config, line: Line, drain: float) -> None:
        super().__init__(config)
        self.line, self.drain, self.deadline = line, drain, 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._drain) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _drain(self, number: int, _frame: Any) -> None:
        if not self.line.draining:
            self.line.draining, self.deadline = True, time.monotonic() + self.drain
        elif number == signal.SIGINT:  # the second Ctrl-C waits no longer, the third ends the process
            self.deadline = time.monotonic()
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    async def on_tick(self, counter: int) -> bool:
        if self.line.draining:
            late = time.monotonic() - self.deadline
            if late >= 0:
                self.line.stop()
            if late >= _ANSWER_SECONDS:
                self.line.cut_off()
            self.should_exit = not self.line.calls
        return await super().on_tick(counter)


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
    """Serve an application of `make_app` until SIGTERM or SIGINT; answers then have ``drain`` seconds to finish."""
    # sse-starlette would cut streams off as soon as the signal comes.
    AppStatus.disable_automatic_graceful_drain()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_ANSWER_SECONDS, timeout_keep_alive=30
    )
    _Server(config, app.state.line, drain).run(sockets=[sock])


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def warn_if_open(host: str, api_key: str | None) -> None:
    """A line on stderr where others can reach a server that asks for no key."""
    if host not in ("127.0.0.1", "::1", "localhost") and not api_key:
        print("tq-ggml: warning: anybody who reaches this address can use the model; give --api-key", file=sys.stderr)
