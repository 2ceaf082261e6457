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

import openai
import pytest

KEY = "secret-of-the-test"
HELLO = [{"role": "user", "content": "Say hello."}]
LONG = [{"role": "user", "content": "Count from one to a thousand."}]


class Served:
    """A server process: its address, and what it has said on stderr."""

    def __init__(self, model: Path, *options: str, key: str | None = KEY) -> None:
        command = [sys.executable, "-m", "tq_ggml", "serve", "-m", str(model), "--port", "0", "-t", "1", "-c", "512"]
        environment = {**os.environ, **({"TQ_GGML_API_KEY": key} if key else {})}
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
def serving(model: Path, *options: str, key: str | None = KEY) -> Iterator[Served]:
    server = Served(model, *options, key=key)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server(smollm2_path) -> Iterator[Served]:
    with serving(smollm2_path, "-ctk", "tq4", "-ctv", "tq3", "--alias", "small", "--queue", "1") as server:
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
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = server.chat([{"role": "user", "content": "Weather in Paris?"}], tools=[tool], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and call.function.arguments.lstrip().startswith("{")


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


def post(server: Served, data: bytes) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_bad_requests_are_refused_with_a_reason_and_the_server_goes_on(server):
    assert post(server, b"{nonsense")[0] == 400
    status, said = post(server, b'{"stream_options": 7, "messages": 3}')
    assert status == 422 and said["error"]["message"].startswith("messages: ")
    assert post(server, b"[1]")[0] == 422
    status, said = post(server, json.dumps({"messages": [{"role": "user", "content": "word " * 2000}]}).encode())
    assert status == 400 and re.search(r"maximum context length is 512 tokens.*20\d\d in the messages", str(said))
    status, said = post(server, b" " * (4 << 20) + b"{}")
    assert status == 413 and "--max-body" in said["error"]["message"]
    assert server.chat().choices
    assert "Traceback" not in "".join(server.said)


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def hang_up_in_a_stream(server: Served) -> None:
    for _ in server.chat(LONG, max_tokens=400, stream=True):
        break  # the client closes the connection


def hang_up_while_it_answers(server: Served) -> None:
    body = json.dumps({"messages": LONG, "max_tokens": 400}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        while server.get("/health")["status"] == "ok":
            pass


@pytest.mark.parametrize("hang_up", [hang_up_in_a_stream, hang_up_while_it_answers])
def test_a_client_that_hangs_up_frees_the_engine(server, hang_up):
    hang_up(server)
    answer = server.chat(max_tokens=2)
    assert answer.choices
    # 400 tokens more would be in the cache if the first answer had gone on.
    used = server.get("/v1/kv")["tokens_used"]
    assert used < 100


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


def test_sigterm_lets_answers_finish(smollm2_path):
    with serving(smollm2_path, "--cache-type", "tq4", "--queue", "0", key=None) as server:
        assert server.get("/v1/kv", key=None)["cache_type_k"] == "tq4"
        whole = server.chat(LONG, max_tokens=60).choices[0].message.content
        stream = iter(server.chat(LONG, max_tokens=60, stream=True))
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert len(whole) > 50 and text_of(stream) == whole
        assert server.process.wait(timeout=60) == 0


def test_embeddings(smollm2_path):
    with serving(smollm2_path, "--embedding", "--cache-type", "tq4") as server:
        answer = server.client.embeddings.create(model="any", input=["one", "two words"], encoding_format="float")
        assert len(answer.data) == 2 and len(answer.data[0].embedding) == 576
        assert answer.data[0].embedding != answer.data[1].embedding
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


def test_missing_packages_are_named(smollm2_path, tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ImportError('gone', name='fastapi')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tq_ggml", "serve", "-m", str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "tq-ggml: error: the server needs more packages (fastapi); pip install 'tq-ggml[server]'\n"
