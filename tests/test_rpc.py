"""A model split over two ggml-rpc-servers on this machine, with a tq cache."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest

from tq_ggml.cli import main

PROMPT = "The capital of France is"
HELLO_SIZE = 28  # of the answer to a greeting


class Worker:
    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process, self.endpoint = process, f"127.0.0.1:{port}"


@contextlib.contextmanager
def worker(folder: Path) -> Iterator[Worker]:
    port = programs.free_port()
    log = folder / f"worker-{port}.log"
    with programs.running(log, "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1") as process:
        programs.wait_for_port(port, process)
        yield Worker(process, port)


@pytest.fixture
def workers(tmp_path) -> Iterator[list[Worker]]:
    with worker(tmp_path) as one, worker(tmp_path) as two:
        yield [one, two]


def joined(workers: list[Worker]) -> str:
    return ",".join(worker.endpoint for worker in workers)


GENERATE = """
import json, sys, tq_ggml
from tq_ggml import rpc
model, prompt, cache_type, servers = sys.argv[1:]
if servers:
    rpc.use_servers(servers)
llm = tq_ggml.Llama(model, cache_type=cache_type, n_ctx=512, n_threads=2, n_gpu_layers=-1 if servers else 0)
tokens = llm.tokenize(prompt.encode())
print(json.dumps([token for token, _ in zip(llm.generate(tokens, temp=0), range(24))]))
"""


def generate(model: Path, cache_type: str, servers: str) -> tuple[list[int], str]:
    command = [sys.executable, "-c", GENERATE, model, PROMPT * 8, cache_type, servers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("cache_type", ["tq4", "tq3", "q8_0/tq4"])
def test_the_tokens_of_one_process(smollm2_path, workers, cache_type):
    alone, said_alone = generate(smollm2_path, cache_type, "")
    split, said = generate(smollm2_path, cache_type, joined(workers))
    assert split == alone
    kv = [re.search(r"KV cache .*", text)[0] for text in (said_alone, said)]
    assert kv[0] == kv[1], "the same cache, conditioned in as many layers"


def test_llama_server_with_a_share_of_the_cache_on_each(calibrated_path, workers, tmp_path):
    types = ["-ctk", "tq4", "-ctv", "tq4"]
    with programs.server(tmp_path, calibrated_path, *types) as server:
        server.wait()
        alone = server.complete(PROMPT, 16)
    with programs.server(tmp_path, calibrated_path, *types, "--rpc", joined(workers)) as server:
        server.wait()
        assert server.complete(PROMPT, 16) == alone
    said = server.log.read_text()
    shares = dict(re.findall(r"RPC\d\[(\S+)\] KV buffer size = +([0-9.]+) MiB", said))
    assert set(shares) == {worker.endpoint for worker in workers} and all(float(size) > 0 for size in shares.values())


def test_the_context_may_shift(smollm2_path, workers):
    """Keys of a worker's layers are turned here, where their positions are known."""
    command = ["perplexity", "-m", str(smollm2_path), "--types", "tq4", "-c", "256", "--windows", "1"]
    assert main([*command, "--rpc", "127.0.0.1:1"]) == 2
    program = GENERATE.replace("n_ctx=512", "n_ctx=256").replace("range(24)", "range(300)")
    program = program.replace("llm.generate(tokens, temp=0)", "shifting(llm, tokens)")
    program = program.replace("import json", SHIFTING + "import json", 1)
    found = []
    for servers in ("", joined(workers)):
        command = [sys.executable, "-c", program, smollm2_path, PROMPT, "tq4", servers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] and len(found[0]) == 300


SHIFTING = """
def shifting(llm, tokens):
    import llama_cpp
    n, memory = 0, llama_cpp.llama_get_memory(llm.ctx)
    while True:
        if llm.n_tokens + len(tokens) > 250:
            llama_cpp.llama_memory_seq_rm(memory, 0, 4, 104)
            llama_cpp.llama_memory_seq_add(memory, 0, 104, -1, -100)
            llm.n_tokens -= 100
        llm.eval(tokens)
        tokens = [llm.sample(temp=0)]
        yield tokens[0]
"""


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Something that answers any greeting with these bytes and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(64)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


STOCK = struct.pack("<Q4B24x", HELLO_SIZE, 7, 0, 0, 0)  # llama.cpp's own of the same version


@pytest.mark.parametrize(
    ("answer", "why"),
    [(STOCK, "of build 0000"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no RPC server"), (b"", "no RPC server")],
)
def test_a_worker_that_does_not_fit(smollm2_path, capsys, answer, why):
    with answering(answer) as endpoint:
        assert main(["bench", "-m", str(smollm2_path), "--rpc", endpoint]) == 2
    said = capsys.readouterr().err
    assert why in said and endpoint in said and said.count("\n") == 1


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "nowhere", "127.0.0.1:0", ":50052", "no-such-host.invalid:5"])
def test_an_address_where_nothing_is(smollm2_path, capsys, endpoint):
    assert main(["bench", "-m", str(smollm2_path), "--rpc", endpoint]) == 2
    assert endpoint in capsys.readouterr().err


def test_llama_server_says_it_too(smollm2_path, tmp_path):
    with answering(STOCK) as endpoint:
        for address, why in ((endpoint, "of build 0000"), ("127.0.0.1:1", "Failed to connect to 127.0.0.1:1")):
            done = programs.run("llama-server", "-m", smollm2_path, "--rpc", address)
            assert done.returncode == 1 and why in done.stderr and "docs/rpc.md" in done.stderr


def test_a_worker_that_goes_away(smollm2_path, workers, tmp_path):
    program = GENERATE.replace("range(24)", "range(400)").replace("print(json", "print(file=sys.stderr);print(json")
    program = program.replace("tokens = llm", "print('ready', flush=True)\ntokens = llm")
    command = [sys.executable, "-c", program, smollm2_path, PROMPT, "tq4", joined(workers)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        workers[1].process.kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Remote RPC server crashed" in said and "docs/rpc.md" in said and "Traceback" not in said
