"""What lies between clients and the routes of `llama_cpp.server`: one request at a time, limits, and errors.

The modules that this one imports come with ``pip install 'tq-ggml[server]'``; `tq_ggml.server` says so.
"""

from __future__ import annotations

import contextvars
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from tq_ggml.openai_requests import adapt

_ADAPTED = ("/v1/chat/completions", "/v1/completions")
_READ_SECONDS = 60  # in which a client must take what it is sent; one that does not has gone to sleep
_TOO_LONG = re.compile(r"Requested tokens \((\d+)\) exceed (?:context window|batch size) of (\d+)")


class Stopped(Exception):
    """An answer that must not go on."""


@dataclass(eq=False)
class Call:
    """One request, from the line to its last byte.

    Attributes:
        wants_usage: asked for a chunk with the usage at the end of a stream.
        stop: why it must not go on: the client has hung up, or the server shuts down.
        refused: status and error of a stream that failed before its first chunk.
        hung_up: set when the routes are to take the client for gone.
        n_prompt, n_completion: tokens so far.
    """

    wants_usage: bool = False
    stop: str | None = None
    refused: tuple[int, dict[str, Any]] | None = None
    hung_up: anyio.Event = field(default_factory=anyio.Event)
    n_prompt: int = 0
    n_completion: int = 0

    def check(self) -> None:
        """Raises `Stopped` where the call must not go on; the engine asks between its steps."""
        if self.stop:
            raise Stopped(self.stop)

    def hang_up(self) -> None:
        self.stop = "the client closed the request"
        self.hung_up.set()


_current: contextvars.ContextVar[Call] = contextvars.ContextVar("call")


def current_call() -> Call:
    """The call that this thread or task works for; a new one outside of any."""
    return _current.get(None) or Call()


@dataclass
class Line:
    """Requests in the server: one runs, ``queue`` may wait.

    Attributes:
        calls: those inside.
        draining: no more come in.
    """

    queue: int
    calls: set[Call] = field(default_factory=set)
    draining: bool = False

    def refusal(self) -> str | None:
        """Why nobody may come in now; None if one may."""
        if self.draining:
            return "the server is shutting down"
        return "another request is running; try again, or --queue more" if len(self.calls) > self.queue else None

    def report(self) -> dict[str, Any]:
        status = "draining" if self.draining else "busy" if self.calls else "ok"
        return {"status": status, "waiting": max(0, len(self.calls) - 1)}

    def stop(self) -> None:
        """Let running answers end with an error, at their next token."""
        for call in self.calls:
            call.stop = call.stop or "the server is shutting down"

    def cut_off(self) -> None:
        """As if all clients had hung up."""
        for call in self.calls:
            call.hang_up()


class Gate:
    """ASGI middleware before the routes that use the engine: a line for requests; those without a place get a 503.

    It reads a request's body, up to ``max_body`` bytes, before it lets the request through, so that it can watch for a
    client that hangs up. Until its body is there a request takes no place.
    """

    def __init__(self, app: Any, *, line: Line, max_body: int) -> None:
        self.app, self.line, self.max_body = app, line, max_body

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        refuse = self._refusal()
        if refuse is None:
            try:
                body = await self._body(receive)
                call, body = _read(scope["path"], body)
            except ClientDisconnect:
                return
            except _Refused as problem:
                refuse = problem.response
            else:
                refuse = self._refusal()
        if refuse is None:
            await self._run(call, body, scope, receive, send)
        else:
            await refuse(scope, receive, send)

    def _refusal(self) -> JSONResponse | None:
        why = self.line.refusal()
        return JSONResponse({"error": error(why, "busy")}, 503, headers={"Retry-After": "5"}) if why else None

    async def _body(self, receive: Any) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self.max_body:
                why = f"the request is larger than {self.max_body} bytes; raise --max-body"
                raise _Refused(413, error(why, "request_too_large"))
            if not message.get("more_body"):
                return bytes(body)

    async def _run(self, call: Call, body: bytes, scope: dict, receive: Any, send: Any) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def watched_receive() -> dict:
            if messages:
                return messages.pop()
            if not call.hung_up.is_set():  # Request.is_disconnected cancels what it would have to wait for
                await call.hung_up.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            call.hang_up()
            # Who waits leaves the line; who runs in a thread is waited for, which ends at the engine's next step.
            tasks.cancel_scope.cancel()

        _current.set(call)
        self.line.calls.add(call)
        answer = _Answer(call, send, leave=lambda: self.line.calls.discard(call))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await self.app(scope, watched_receive, answer)
                tasks.cancel_scope.cancel()
        finally:
            self.line.calls.discard(call)


class _Answer:
    """What the routes send, on its way to the client.

    The status waits for the first piece of the body: a stream that fails before it gets the status of its error.
    """

    def __init__(self, call: Call, send: Any, *, leave: Callable[[], None]) -> None:
        self.call, self.send, self.leave = call, send, leave
        self.start: dict | None = None
        self.over = False

    async def __call__(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        if self.start is not None:
            start, self.start = self.start, None
            if self.call.refused:
                start, message = _messages(start, *self.call.refused)
            await self._send(start)
        last = not message.get("more_body")
        if last:
            self.leave()  # before the last byte is out: whoever has read it may ask again at once
        await self._send(message)
        self.over = self.over or last

    async def _send(self, message: dict) -> None:
        if self.over:
            return
        with anyio.move_on_after(_READ_SECONDS) as patience:
            await self.send(message)
        if patience.cancelled_caught:
            self.over = True
            self.call.hang_up()


class _Refused(Exception):
    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(problem["message"])
        self.response = JSONResponse({"error": problem}, status)


def _read(path: str, body: bytes) -> tuple[Call, bytes]:
    try:
        request = json.loads(body or b"{}")
    except (ValueError, RecursionError) as problem:
        raise _Refused(422, error(f"the request is not JSON: {problem}", "invalid_json")) from None
    if not isinstance(request, dict):
        return Call(), body
    options = request.get("stream_options")
    call = Call(wants_usage=isinstance(options, dict) and bool(options.get("include_usage")))
    try:
        request = adapt(request) if path in _ADAPTED else request
    except ValueError as problem:
        raise _Refused(400, error(str(problem), "unsupported")) from None
    return call, json.dumps(request).encode()


def _messages(start: dict, status: int, problem: dict[str, Any]) -> tuple[dict, dict]:
    """The two ASGI messages of a JSON answer in place of a stream."""
    body = json.dumps({"error": problem}).encode()
    headers = [(name, value) for name, value in start["headers"] if not name.lower().startswith(b"content-")]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return {**start, "status": status, "headers": headers}, {"type": "http.response.body", "body": body}


# ---- errors --------------------------------------------------------------------------------------------------------


def error(message: str, code: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The inside of an OpenAI error."""
    kind = "server_error" if code == "busy" else kind
    return {"message": message, "type": kind, "param": None, "code": code}


def explain(problem: BaseException) -> tuple[int, dict[str, Any]] | None:
    """Status and error for what a request may be blamed for; None for a fault of the server's."""
    text = " ".join(str(problem).split())
    if isinstance(problem, RequestValidationError):
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in problem.errors()[:3])
        return 422, error(wrong, "invalid_request")
    if isinstance(problem, Stopped):
        return 503, error(text, "busy")
    if found := _TOO_LONG.search(text):
        # "maximum context length" and the code are what client libraries look for.
        text = f"the maximum context length is {found[2]} tokens here, and the text has {found[1]}; shorten it"
        return 400, error(text, "context_length_exceeded")
    if isinstance(problem, TemplateError):
        return 400, error(f"the model's chat template refuses this conversation: {text}", "refused_by_template")
    # llama-cpp-python's way to refuse an argument.
    return (400, error(text, "invalid_request")) if isinstance(problem, ValueError) else None
