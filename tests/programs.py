"""llama.cpp's own programs with the tq types, as `make programs` puts them beside `tq-ggml`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


def program(name: str) -> Path:
    """Where a program is; without it the test is skipped, or fails in CI."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        reason = f"{name} is not built; run `make programs`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return path


def run(name: str, *arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """A program that ends by itself, whatever its exit status."""
    command = [program(name), *arguments]
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, stdin=subprocess.DEVNULL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def running(log: Path, name: str, *arguments: str | Path) -> Iterator[subprocess.Popen]:
    """A program that runs until the block ends, with its output in ``log``."""
    with log.open("w") as output:
        process = subprocess.Popen([program(name), *arguments], stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for_port(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)


def wait_for_health(url: str, process: subprocess.Popen, log: Path) -> None:
    """Until a server has loaded its model."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)


class Server:
    """A running llama-server."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process, self.log, self._url = process, log, f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        """Until the model is loaded."""
        wait_for_health(self._url, self.process, self.log)

    def complete(self, prompt: str, n_predict: int) -> list[int]:
        """Token ids of the likeliest continuation."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "return_tokens": True}
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["tokens"]


@contextlib.contextmanager
def server(folder: Path, model: Path, *arguments: str) -> Iterator[Server]:
    """llama-server on a free port, loading a model."""
    port, log = free_port(), folder / f"llama-server-{time.monotonic_ns()}.log"
    common = ["-m", model, "--host", "127.0.0.1", "--port", str(port), "-t", "2", "-np", "1", "-c", "512", "-lv", "4"]
    with running(log, "llama-server", *common, *arguments) as process:
        yield Server(process, port, log)
