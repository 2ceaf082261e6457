"""Run every piece of daily use on real models and write what they print into docs/recorded-runs.md.

python scripts/record_runs.py        (after `make demo` and `make programs`; a few minutes)
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tq_ggml import models

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recorded-runs.md"
SCRIPTS = Path(sysconfig.get_path("scripts"))
MODELS = ("smollm2", "qwen2.5-coder-0.5b")
QUESTION = "What is the capital of France? Answer in one short sentence."
SHOWN = 24  # lines of an output

COMMANDS = [
    "tq-ggml chat -m {path} --cache-type tq4 --temp 0 --max-tokens 32 --prompt {question}",
    "tq-ggml chat -m {path} --cache-type q8_0/tq4 --temp 0 --max-tokens 32 --prompt {question}",
    "tq-ggml fit {path} --memory 4G",
    "tq-ggml recommend {path}",
    "tq-ggml perplexity -m {path} --cache-type tq4 --ctx 512 --windows 2",
    "tq-ggml bench -m {path} --types f16,tq4 --depth 0 -p 128 -n 16 -r 3",
    "tq-ggml calibrate {path} -o {folder}/tq.gguf",
    "llama-cli -m {folder}/tq.gguf -ctk tq4 -ctv tq3 --temp 0 -n 24 -c 512 -st -p {question}",
    "llama-bench -m {path} -ctk f16,tq4 -ctv f16,tq4 -fa 1 -p 64 -n 8 -r 1",
    "llama-perplexity -m {folder}/tq.gguf -f {text} -c 512 --chunks 2 -ctk tq4 -ctv tq4",
    "python -c {plain}",
]
PLAIN = """import tq_ggml; tq_ggml.activate(); import llama_cpp
llm = llama_cpp.Llama({path!r}, n_ctx=512, type_k=tq_ggml.TQ4, type_v=tq_ggml.TQ4, verbose=False)
print(llm('The capital of France is', max_tokens=6, temperature=0)['choices'][0]['text'])"""
SERVERS = [
    "tq-ggml serve -m {path} --cache-type tq4 --port {port} -c 2048",
    "llama-server -m {folder}/tq.gguf -ctk tq4 -ctv tq4 --port {port} -c 2048 -np 1",
]
WORKER = "ggml-rpc-server -p {port}"
SPLIT = "tq-ggml chat -m {path} --cache-type tq4 --temp 0 --max-tokens 32 --prompt {question} --rpc {workers}"


def arguments(command: str, values: dict[str, str]) -> list[str]:
    name, *rest = (word.format(**values) for word in shlex.split(command))
    return [sys.executable if name == "python" else str(SCRIPTS / name), *rest]


def record(command: str, values: dict[str, str]) -> str:
    print(command, file=sys.stderr, flush=True)
    done = subprocess.run(
        arguments(command, values), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )
    said = (done.stdout if command.startswith("llama-") else done.stderr + done.stdout) or done.stderr
    return section(command, values, said + (f"\n(exit status {done.returncode})" if done.returncode else ""))


def section(command: str, values: dict[str, str], said: str) -> str:
    """What a person would have typed, and the end of what they would have seen."""
    shown = {**values, "path": Path(values["path"]).name, "folder": ".", "text": "FILE", "plain": '"' + PLAIN + '"'}
    typed = command.format(
        **{**shown, "question": f'"{QUESTION}"', "plain": shown["plain"].replace("{path!r}", "MODEL")}
    )
    lines = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]|.\x08", "", line.split("\r")[-1]) for line in said.strip().splitlines()]
    lines = [line.replace(values["folder"], ".").replace(str(Path(values["path"]).parent), "...") for line in lines]
    return "```\n$ " + typed + "\n" + "\n".join(lines[-SHOWN:]) + "\n```\n\n"


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@contextlib.contextmanager
def running(command: str, values: dict[str, str]) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(arguments(command, values), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(port: str) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
            return
        time.sleep(0.2)
    sys.exit(f"nothing listens on port {port}")


def ask(port: str) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 32}
    url, kind = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    for _ in range(600):  # llama-server answers 503 while it loads
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), kind)) as answer:
                found = json.load(answer)
            return json.dumps({"content": found["choices"][0]["message"]["content"], "usage": found["usage"]}, indent=1)
        except urllib.error.HTTPError as refused:
            if refused.code != 503:
                raise
            time.sleep(0.2)
    sys.exit(f"no answer from port {port}")


def serve(command: str, values: dict[str, str]) -> str:
    print(command, file=sys.stderr, flush=True)
    with running(command, values):
        wait_for(values["port"])
        return section(command + "\n$ curl .../v1/chat/completions -d ...", values, ask(values["port"]))


def split(values: dict[str, str]) -> str:
    ports = (free_port(), free_port())
    with contextlib.ExitStack() as workers:
        for port in ports:
            workers.enter_context(running(WORKER, {**values, "port": port}))
            wait_for(port)
        return record(SPLIT, {**values, "workers": ",".join(f"127.0.0.1:{port}" for port in ports)})


def runs(name: str, folder: str) -> str:
    path = models.get(name, progress=False)
    text = Path(folder) / "text.txt"
    text.write_text(Path(__file__).with_name("cache_lab.py").read_text() * 2)
    values = {"path": str(path), "folder": folder, "text": str(text), "question": QUESTION, "port": free_port()}
    values["plain"] = PLAIN.format(path=str(path))
    parts = [record(command, values) for command in COMMANDS]
    parts += [serve(command, {**values, "port": free_port()}) for command in SERVERS]
    return f"## {path.name}\n\n{''.join(parts)}{split(values)}"


def main() -> None:
    page = (
        "# Recorded runs\n\n`scripts/record_runs.py` wrote this: every piece of daily use on two models, as it "
        f"answered, the\nlast {SHOWN} lines of each. Speeds are of a shared two-core machine.\n\n"
    )
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            page += runs(name, folder)
    PAGE.write_text(page.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
