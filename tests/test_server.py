"""`tq-ggml serve` with the openai package, against a real process on the loopback address."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import anyio
import openai
import pytest

from tq_ggml.gate import Call, Gate, Line, current_call
from tq_ggml.openai_requests import adapt

KEY = "secret-of-the-test"
HELLO = [{"role": "user", "content": "Say hello."}]
ENDLESS = {"max_tokens": 400, "logit_bias": {"2": -100}}  # 2 ends an answer
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
LONG = [{"role": "user", "content": "Count from one to a thousand."}]


class Served:
    """A server process: its address, and what it has said on stderr."""

    def __init__(self, model: Path, *options: str, key: str | None = KEY, **variables: str) -> None:
        command = [sys.executable, "-m", "tq_ggml", "serve", "-m", str(model), "--port", "0", "-t", "1", "-c", "512"]
        environment = {**os.environ, **variables, **({"TQ_GGML_API_KEY": key} if key else {})}
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"API at (http://\S+)/v1$", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.said))
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key=key or "none", max_retries=0, timeout=120)

    def health(self) -> str:
        return self.get("/health", key=None)["status"]

    def get(self, path: str, key: str | None = KEY) -> dict:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def chat(self, messages=HELLO, **options):
        return self.client.chat.completions.create(
            model="any", messages=messages, **{"max_tokens": 8, "temperature": 0} | options
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def serving(model: Path, *options: str, key: str | None = KEY, **variables: str) -> Iterator[Served]:
    server = Served(model, *options, key=key, **variables)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server(smollm2_path) -> Iterator[Served]:
    with serving(smollm2_path, "--cache-type", "tq4/tq3", "--alias", "small", "--queue", "1") as server:
        yield server


def test_chat_and_the_report_in_its_usage(server):
    answer = server.chat()
    assert answer.choices[0].message.content and answer.model == "small"
    usage = answer.usage.model_dump()
    assert usage["completion_tokens"] == 8 and usage["total_tokens"] == usage["prompt_tokens"] + 8
    report = server.get("/v1/kv")
    assert usage["kv"] == report
    # 30 layers of 3 heads of 64: 18 bytes for 32 values of tq4, 14 of tq3, 64 of f16.
    values = 512 * 30 * 192
    assert (report["bytes"], report["bytes_f16"]) == (values // 32 * (18 + 14), values * 4)
    assert report["mib"] == pytest.approx(values / 32 * (18 + 14) / 2**20, abs=0.01)
    assert report["mib_f16"] == pytest.approx(values * 4 / 2**20, abs=0.01)
    assert (report["cache_type_k"], report["cache_type_v"], report["n_ctx"]) == ("tq4", "tq3", 512)
    assert report["tokens_used"] + report["tokens_left"] == 512
    assert usage["total_tokens"] - 1 <= report["tokens_used"] <= usage["total_tokens"]
    assert report["prefill_tokens_per_second"] > 0 and report["decode_tokens_per_second"] > 0
    assert report["conditioning"] == "keys conditioned in 30 of 30 layers"


def test_streaming_with_and_without_usage(server):
    whole = server.chat().choices[0].message.content
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = list(server.chat(stream=True, **options))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
        usages = [c.usage for c in chunks if c.usage]
        assert len(usages) == len(options)
        if usages:
            assert chunks[-1].choices == [] and usages[0].completion_tokens == 8
            assert usages[0].model_dump()["kv"] == server.get("/v1/kv")


def test_text_completion(server):
    answer = server.client.completions.create(model="any", prompt="The capital of France is", max_tokens=4)
    assert answer.choices[0].text and answer.usage.completion_tokens == 4 and answer.usage.model_dump()["kv"]
    chunks = list(server.client.completions.create(model="any", prompt="One two three", max_tokens=4, stream=True))
    assert all(chunk.choices for chunk in chunks)


def test_json_mode(server):
    answer = server.chat(response_format={"type": "json_object"}, max_tokens=40, seed=1)
    text = answer.choices[0].message.content
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_tools(server):
    for choice in ({"type": "function", "function": {"name": "weather"}}, "required"):
        question = [{"role": "user", "content": "Weather in Paris?"}]
        answer = server.chat(question, tools=[WEATHER], tool_choice=choice, max_tokens=40)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather" and list(json.loads(call.function.arguments)) == ["city"]


def test_the_key_is_asked_for_and_not_in_the_log(server):
    for key in ("wrong", None):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.get("/v1/kv", key=key)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()
    assert [model.id for model in server.client.models.list()] == ["small"]
    assert server.get("/health", key=None) == {"status": "ok", "model": "small", "waiting": 0}
    assert KEY not in "".join(server.said) and "wrong" not in "".join(server.said)


def test_no_web_page_of_another_origin_may_call(server):
    request = urllib.request.Request(server.url + "/health", headers={"Origin": "https://example.org"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "access-control-allow-origin" not in {name.lower() for name in answer.headers}


def post(server: Served, data: bytes, path: str = "/v1/chat/completions") -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_bad_requests_are_refused_with_a_reason_and_the_server_goes_on(server):
    for nonsense in (b"{nonsense", b"[1]", b"[" * 100_000, b'{"a": "\xff"}'):
        assert post(server, nonsense)[0] == 422
    status, said = post(server, b'{"stream_options": 7, "messages": 3}')
    assert status == 422 and said["error"]["message"].startswith("messages: ")
    status, said = post(server, b" " * (4 << 20) + b"{}")
    assert status == 413 and "--max-body" in said["error"]["message"]
    assert server.chat().choices
    assert "Traceback" not in "".join(server.said)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_with_its_length(server, stream):
    with pytest.raises(openai.BadRequestError, match=r"length is 512 tokens here, and the text has 20\d\d") as refused:
        server.chat([{"role": "user", "content": "word " * 2000}], stream=stream)
    assert refused.value.code == "context_length_exceeded"


NOT_THERE = {"type": "function", "function": {"name": "not there"}}
# The first two and the last ended the process.
WRONG = {
    "grammar": ("/v1/chat/completions", {"messages": HELLO, "grammar": "root ::= (("}, "grammar"),
    "schema": (
        "/v1/chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_object", "schema": {"enum": []}}},
        "schema",
    ),
    "deep grammar": (
        "/v1/chat/completions",
        {"messages": HELLO, "grammar": 'root ::= ")" ' + "(" * 100_000},
        "256 parentheses deep",
    ),
    "bias": ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"99999999": 1}}, "no token 99999999"),
    "logprobs": ("/v1/completions", {"prompt": "One", "logprobs": 2}, "logits_all"),
    "no prompt": ("/v1/completions", {"prompt": ""}, "empty"),
    "two prompts": ("/v1/completions", {"prompt": ["One", "Two"]}, "one at a time"),
    "tool": ("/v1/chat/completions", {"messages": HELLO, "tools": [], "tool_choice": NOT_THERE}, "not found in tools"),
    "embedding": ("/v1/embeddings", {"input": "One"}, "start it with --embedding"),
    "negative token": ("/extras/detokenize", {"tokens": [7, -4, 8]}, "no token -4"),
    "token": ("/extras/detokenize", {"tokens": [7, 99999999, 8]}, "no token 99999999"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_what_the_engine_cannot_do_is_a_400(server, name, stream):
    path, request, reason = WRONG[name]
    status, said = post(server, json.dumps({**request, "stream": stream}).encode(), path)
    assert status == 400 and reason in said["error"]["message"], said
    assert server.process.poll() is None and "Traceback" not in "".join(server.said)


def test_a_conversation_with_a_tool_as_clients_send_it_back(server):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    answer = server.chat(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Paris?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        tools=[WEATHER],
    )
    assert answer.choices[0].message.content


def test_a_json_schema_and_a_limit_in_new_words(server):
    schema = WEATHER["function"]["parameters"]
    answer = server.client.chat.completions.create(
        model="any",
        messages=HELLO,
        max_completion_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    assert list(json.loads(answer.choices[0].message.content)) == ["city"]
    answer = server.client.chat.completions.create(model="any", messages=LONG, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_requests_in_the_words_of_the_server():
    before = {
        "messages": [{"role": "developer", "content": "a", "name": None}, {"role": "assistant"}, 7],
        "max_completion_tokens": 5,
        "max_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}},
        "tool_choice": "required",
        "tools": [WEATHER],
        "other": 1,
    }
    copy = json.loads(json.dumps(before))
    assert adapt(before) == {
        "messages": [{"role": "system", "content": "a"}, {"role": "assistant", "content": ""}, 7],
        "max_tokens": 5,
        "response_format": {"type": "json_object", "schema": {"type": "string"}},
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "tools": [WEATHER],
        "other": 1,
    }
    assert before == copy
    for strange in ({"messages": 3}, {"response_format": {"type": "json_schema"}}, {"messages": [{"content": [1]}]}):
        assert adapt(strange) == strange
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for impossible, reason in (
        ({"messages": [image]}, "text only.*image_url"),
        ({"tool_choice": "required", "tools": [WEATHER, WEATHER]}, "exactly one tool"),
        ({"tool_choice": "required"}, "exactly one tool"),
    ):
        with pytest.raises(ValueError, match=reason):
            adapt(impossible)


def test_a_request_takes_no_place_before_it_is_there(server):
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection((host, int(port)))).sendall(head)
        assert server.chat(max_tokens=2).choices and server.health() == "ok"


def test_a_client_that_does_not_read_is_taken_for_gone(monkeypatch):
    monkeypatch.setattr("tq_ggml.gate._READ_SECONDS", 0.01)
    calls: list[Call] = []

    async def route(scope, receive, send) -> None:
        calls.append(current_call())
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    async def ask() -> None:
        line, bodies = Line(queue=0), [{"type": "http.request", "body": b"{}"}]

        async def receive() -> dict:
            return bodies.pop() if bodies else await anyio.sleep_forever()

        async def send(_message: dict) -> None:
            await anyio.sleep_forever()

        with anyio.fail_after(30):
            await Gate(route, line=line, max_body=99)({"type": "http", "method": "POST", "path": "/"}, receive, send)
        assert not line.calls

    anyio.run(ask)
    assert calls[0].stop == "the client closed the request"


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def hang_up_in_a_stream(server: Served) -> None:
    with server.chat(LONG, **ENDLESS, stream=True) as stream:  # without `with` the connection stays open
        next(iter(stream))


def hang_up_while_it_answers(server: Served) -> None:
    body = json.dumps({"messages": LONG, **ENDLESS}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        while server.health() == "ok":
            pass


@pytest.mark.parametrize("hang_up", [hang_up_in_a_stream, hang_up_while_it_answers])
def test_a_client_that_hangs_up_frees_the_engine(server, hang_up):
    hang_up(server)
    while server.health() != "ok":
        pass
    assert server.get("/v1/kv")["tokens_used"] < 300  # more than 400 if the answer had gone on
    assert server.chat(max_tokens=2).choices
    assert "Traceback" not in "".join(server.said)


@pytest.mark.parametrize("streams", [False, True])
def test_a_waiting_client_that_hangs_up_leaves_the_line(server, streams):
    with server.chat(LONG, **ENDLESS, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            server.client.with_options(timeout=0.5).chat.completions.create(model="any", messages=HELLO, stream=streams)
        while server.get("/health")["waiting"]:
            pass
        assert server.get("/v1/kv")["tokens_used"] < 400  # more when the first answer has ended
    while server.health() != "ok":
        pass


def test_one_waits_and_the_next_is_refused(server):
    whole = server.chat(LONG, max_tokens=60).choices[0].message.content
    stream = iter(server.chat(LONG, max_tokens=60, stream=True))
    next(stream)
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(server.chat(max_tokens=2)))
    thread.start()
    while server.get("/health") != {"status": "busy", "model": "small", "waiting": 1}:
        pass
    with pytest.raises(openai.InternalServerError, match="another request is running") as refused:
        server.chat()
    assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"] == "5"
    assert text_of(stream) == whole  # nobody interrupted it
    thread.join(timeout=60)
    assert waiting[0].choices


def test_sigterm_lets_answers_finish_and_refuses_new_ones(smollm2_path):
    # Variables that upstream's settings would read, and fail on.
    with serving(smollm2_path, "--cache-type", "tq4", "--queue", "0", key=None, CACHE="/x", PORT="tcp://x") as server:
        assert server.get("/v1/kv", key=None)["cache_type_k"] == "tq4"
        whole = server.chat(LONG, max_tokens=120).choices[0].message.content
        stream = iter(server.chat(LONG, max_tokens=120, stream=True))
        next(stream)
        with pytest.raises(openai.InternalServerError, match="another request is running"):
            server.chat()  # --queue 0
        server.process.send_signal(signal.SIGTERM)
        while server.health() != "draining":
            pass
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            server.chat()
        assert refused.value.status_code == 503
        assert len(whole) > 50 and text_of(stream) == whole
        assert server.process.wait(timeout=60) == 0


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_longer_than_the_drain_is_stopped(smollm2_path, streams):
    endless = {**ENDLESS, "max_tokens": 2000, "stream": streams}
    with serving(smollm2_path, "--cache-type", "tq4", "--drain", "1", "-c", "2048") as server:
        failed = []

        def ask() -> None:
            try:
                answer = server.chat(LONG, **endless)
                failed.append(text_of(answer) if streams else answer)
            except openai.APIError as problem:
                failed.append(problem)

        thread = threading.Thread(target=ask)
        thread.start()
        while server.health() != "busy":
            pass
        assert server.stop() == 0  # a crash when the engine is freed while it runs
        thread.join(timeout=60)
        assert "shutting down" in str(failed[0])
        assert "Traceback" not in "".join(server.said)


def test_embeddings(smollm2_path):
    with serving(smollm2_path, "--embedding", "--cache-type", "tq4") as server:
        before = server.chat().choices[0].message.content
        answer = server.client.embeddings.create(model="any", input=["one", "two words"], encoding_format="float")
        assert len(answer.data) == 2 and len(answer.data[0].embedding) == 576
        assert answer.data[0].embedding != answer.data[1].embedding
        assert answer.usage.prompt_tokens == 3 and answer.usage.model_dump()["kv"] == server.get("/v1/kv")
        assert server.chat().choices[0].message.content == before
        for wrong, reason in (("word " * 2000, "length is 512 tokens"), ("", "empty"), ([], "empty")):
            with pytest.raises(openai.BadRequestError, match=reason):
                server.client.embeddings.create(model="any", input=wrong)
        with pytest.raises(openai.APITimeoutError):  # hangs up
            server.client.with_options(timeout=0.5).embeddings.create(model="any", input=["word " * 400] * 1000)
        assert server.client.embeddings.create(model="any", input="one").data
        assert server.stop(signal.SIGINT) == 0


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tq_ggml", *arguments], capture_output=True, text=True, timeout=120)


def test_what_cannot_be_served_is_one_line(smollm2_path, server, tmp_path):
    taken = server.url.rsplit(":", 1)[1]
    done = run("serve", "-m", str(smollm2_path), "--port", taken)
    assert (
        done.returncode == 2 and f"cannot listen on 127.0.0.1:{taken}" in done.stderr and "Traceback" not in done.stderr
    )
    done = run("serve", "-m", str(tmp_path / "no.gguf"), "--port", "0")
    assert done.returncode == 2 and "no model file" in done.stderr
    assert run("serve", "-m", str(smollm2_path), "--port", "99999").returncode == 2
    done = run("serve", "-m", str(smollm2_path), "--port", "0", "--chat-format", "nonsense")
    assert done.returncode == 2 and "--chat-format nonsense: llama-cpp-python has alpaca" in done.stderr


@pytest.mark.parametrize("option", [["--api-key", KEY], [f"--api-key={KEY}"], ["--apikey", KEY]])
def test_a_key_on_the_command_line_is_not_remembered(tmp_path, monkeypatch, option):
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path))
    done = run("serve", "-m", str(tmp_path / "no.gguf"), *option)
    assert done.returncode == 2 and KEY not in done.stderr
    kept = (tmp_path / "last-error.txt").read_text()
    assert "***" in kept and KEY not in kept


def test_a_key_that_no_client_could_send_is_refused(tmp_path, monkeypatch):
    for key in ("", "two words", "caf\xe9"):
        done = run("serve", "-m", str(tmp_path / "no.gguf"), "--api-key", key)
        assert done.returncode == 2 and "a key (also TQ_GGML_API_KEY) is ASCII" in done.stderr
    monkeypatch.setenv("TQ_GGML_API_KEY", "")
    assert "no model file" in run("serve", "-m", str(tmp_path / "no.gguf")).stderr


def test_missing_packages_are_named(smollm2_path, tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ImportError('gone', name='fastapi')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tq_ggml", "serve", "-m", str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    command = f"{sys.executable} -m pip install 'tq-ggml[server]'"
    assert done.stderr == f"tq-ggml: error: the server needs more packages (fastapi); run: {command}\n"
