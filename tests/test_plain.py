"""llama-cpp-python's own classes and server with tq types, after `tq_ggml.activate`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

PROGRAM = """
import contextlib, sys, tq_ggml
from tq_ggml.conditioning import conditioned_layers
tq_ggml.activate()
import llama_cpp
options = eval(sys.argv[2])
with contextlib.closing(llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, **options)) as llama:
    text = llama("The capital of France is", max_tokens=4, temperature=0)["choices"][0]["text"]
    print(vars(conditioned_layers(llama.ctx)), llama.context_params.flash_attn_type, text)
"""


def run(path, options: str, **environment: str) -> tuple[str, str]:
    command = [sys.executable, "-c", PROGRAM, str(path), options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "environment", "kind"),
    [
        ("dict(type_k=tq_ggml.TQ4, type_v=tq_ggml.TQ4)", {}, "positional"),
        ("dict(type_k=tq_ggml.TQ3, type_v=tq_ggml.TQ4, flash_attn=True)", {}, "positional"),
        ("dict(type_k=tq_ggml.TQ4, type_v=tq_ggml.TQ4)", {"TQ_GGML_CALIBRATION": "off"}, "plain"),
        ("dict(type_k=8, type_v=tq_ggml.TQ4)", {}, "plain"),
        ("dict()", {}, "plain"),
    ],
)
def test_a_plain_llama_has_flash_attention_and_the_calibration(smollm2_path, options, environment, kind):
    said, errors = run(smollm2_path, options, **environment)
    assert f"'{kind}': 30" in said and "Paris" in said and errors == ""
    assert ("} 1 " in said) == ("TQ" in options)  # LLAMA_FLASH_ATTN_TYPE_ENABLED


LANGCHAIN = """
import sys, tq_ggml
from tq_ggml.conditioning import conditioned_layers
tq_ggml.activate()
from langchain_community.llms import LlamaCpp
types = {"type_k": tq_ggml.TQ4, "type_v": tq_ggml.TQ3}
llm = LlamaCpp(model_path=sys.argv[1], n_ctx=256, max_tokens=4, temperature=0, verbose=False, model_kwargs=types)
print(llm.invoke("The capital of France is"), vars(conditioned_layers(llm.client.ctx)))
"""


def test_langchain(smollm2_path):
    command = [sys.executable, "-c", LANGCHAIN, str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "Paris" in done.stdout and "'positional': 30" in done.stdout, done.stderr


def test_a_calibration_that_cannot_be_used_is_said_and_left_out(smollm2_path, tmp_path):
    options = "dict(type_k=tq_ggml.TQ4, type_v=tq_ggml.TQ4)"
    said, errors = run(smollm2_path, options, TQ_GGML_CALIBRATION=str(tmp_path / "none"))
    assert "'plain': 30" in said and errors.count("\n") == 1 and "keys are not conditioned" in errors


def test_ours_decides_for_itself(smollm2_path):
    program = PROGRAM.replace("llama_cpp.Llama(", "tq_ggml.Llama(").replace("verbose=False, ", "")
    command = [sys.executable, "-c", program, str(smollm2_path), "dict(cache_type='tq4', calibration='off')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "'plain': 30" in done.stdout, done.stderr


def test_llama_cpp_pythons_server(smollm2_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    start = "import runpy, tq_ggml; tq_ggml.activate(); runpy.run_module('llama_cpp.server', run_name='__main__')"
    options = ["--model", str(smollm2_path), "--type_k", "44", "--type_v", "44", "--port", port, "--n_ctx", "256"]
    command = [sys.executable, "-c", start, *options, "--host", "127.0.0.1", "--n_threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        data = json.dumps({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", data, {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert "Paris" in json.load(answer)["choices"][0]["text"]
                    break
            except (ConnectionError, urllib.error.URLError):
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        server.kill()
        server.wait()
