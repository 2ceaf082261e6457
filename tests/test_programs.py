"""llama-server, llama-cli, llama-bench and llama-perplexity from the patched tree, with tq caches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest

from tq_ggml import doctor
from tq_ggml.cache_types import CACHE_TYPES
from tq_ggml.cli import main

PROMPT = "The capital of France is"
OURS = [(name, t.name) for t in CACHE_TYPES if t.name.startswith("tq") for name in (t.name, *t.aliases)]


def test_doctor_says_where_they_are():
    programs.program("llama-server")
    found = doctor.examine()["programs"]
    assert set(found) == set(doctor.PROGRAMS)
    for path in found.values():
        done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60)
        assert "usage" in (done.stdout + done.stderr).lower()


def test_bench_takes_every_name_and_says_the_type(smollm2_path):
    names = ",".join(name for name, _ in OURS)
    options = ["-p", "8", "-n", "0", "-r", "1", "-t", "2", "-fa", "1", "-o", "json"]
    done = programs.run("llama-bench", "-m", smollm2_path, "-ctk", names, "-ctv", "tq3", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert sorted(row["type_k"] for row in found) == sorted(canonical for _, canonical in OURS)
    assert {row["type_v"] for row in found} == {"tq3"}


@pytest.mark.parametrize("name", ["tq5", "TQ4", ""])
def test_a_type_that_is_none_is_refused(smollm2_path, name):
    done = programs.run("llama-perplexity", "-m", smollm2_path, "-ctk", name)
    assert done.returncode != 0 and "cache type" in done.stderr.lower() + done.stdout.lower()


def test_perplexity_with_and_without_the_models_constants(smollm2_path, calibrated_path, tmp_path):
    """llama-perplexity's KL divergence: conditioning must be on by itself where the model carries its constants."""
    text, base = tmp_path / "text.txt", tmp_path / "base"
    text.write_text((Path(__file__).parent.parent / "docs" / "attention.md").read_text() * 2)
    options = ["-f", text, "-c", "512", "--chunks", "2", "-t", "2", "-lv", "4"]
    done = programs.run("llama-perplexity", "-m", smollm2_path, *options, "--kl-divergence-base", base)
    assert done.returncode == 0, done.stderr[-2000:]

    def divergence(model: Path, **environment: str) -> tuple[float, str]:
        types = ["--kl-divergence-base", base, "--kl-divergence", "-ctk", "tq4", "-ctv", "tq4"]
        found = programs.run("llama-perplexity", "-m", model, *options, *types, environment=environment)
        said = found.stdout + found.stderr
        assert found.returncode == 0, said[-2000:]
        return float(re.search(r"Mean\s+KLD:\s+([0-9.]+)", said)[1]), said

    conditioned, said = divergence(calibrated_path)
    assert "constants for the keys of 30 layers" in said
    plain, said = divergence(smollm2_path)
    assert "carries no calibration" in said
    assert 0 < conditioned < 0.6 * plain
    assert divergence(calibrated_path, TQ_GGML_CALIBRATION="off")[0] == pytest.approx(plain, rel=0.01)
    assert divergence(smollm2_path, TQ_GGML_CALIBRATION=str(calibrated_path))[0] == pytest.approx(conditioned, rel=0.01)


def test_constants_that_cannot_be_used_are_an_error(smollm2_path, tmp_path):
    for content, why in ((b"", "cannot be read"), (b"GGUF" + b"\xff" * 60, "cannot be read")):
        path = tmp_path / "side.gguf"
        path.write_bytes(content)
        done = programs.run("llama-bench", "-m", smollm2_path, "-p", "8", "-n", "0", "-ctk", "tq4", "-ctv", "tq4", "-v",
                            environment={"TQ_GGML_CALIBRATION": str(path)})  # fmt: skip
        assert done.returncode == 1 and why in done.stdout + done.stderr


def test_llama_cli_answers_as_our_chat_does(calibrated_path, capsys):
    asked = "What is the capital of France?"
    common = ["-m", str(calibrated_path), "--temp", "0", "-c", "512", "-t", "2"]
    assert main(["chat", *common, "--cache-type", "tq4/tq3", "--max-tokens", "8", "--prompt", asked]) == 0
    reply = capsys.readouterr().out.strip()
    done = programs.run("llama-cli", *common, "-ctk", "turbo4", "-ctv", "tq3", "-n", "8", "-st", "-p", asked)
    assert done.returncode == 0 and reply and reply in done.stdout, done.stdout + done.stderr[-2000:]


SAME = """
import sys, tq_ggml
llm = tq_ggml.Llama(sys.argv[1], cache_type="tq4/tq3", n_ctx=512, n_threads=2)
tokens = llm.tokenize(sys.argv[2].encode())
print([token for token, _ in zip(llm.generate(tokens, temp=0), range(16))])
"""


def test_llama_server_gives_the_tokens_that_ours_does(calibrated_path, tmp_path):
    command = [sys.executable, "-c", SAME, calibrated_path, PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    with programs.server(tmp_path, calibrated_path, "-ctk", "tq4", "-ctv", "tq3") as server:
        server.wait()
        assert server.complete(PROMPT, 16) == json.loads(done.stdout), done.stderr
    said = server.log.read_text()
    assert re.search(r"K \(tq4\).*V \(tq3\)", said) and "constants for the keys of 30 layers" in said
