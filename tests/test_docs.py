"""README.md and docs/: links point to something, messages are the code's, commands and examples run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest

from tq_ggml import cli
from tq_ggml.errors import TqError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
EACH_PAGE = pytest.mark.parametrize("page", TEXT)


# ---- links and messages --------------------------------------------------------------------------------------------


@EACH_PAGE
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        if anchor:
            heads = [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-")
                     for h in re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)]  # fmt: skip
            assert anchor in heads, target


def test_every_page_is_reached_from_the_readme():
    reached, new = {"README.md"}, ["README.md"]
    while new:
        page = new.pop()
        for target in re.findall(r"\]\(([^)#\s]+\.md)", TEXT[page]):
            path = os.path.normpath(os.path.join(os.path.dirname(page), target))
            if path in TEXT and path not in reached:
                reached.add(path)
                new.append(path)
    assert set(TEXT) - reached == set()


def test_quoted_messages_are_the_codes():
    sources = [
        *(ROOT / "tq_ggml").glob("*.py"),
        ROOT / "scripts" / "preflight.py",
        ROOT / "scripts" / "fetch_llama_cpp.py",
    ]
    code = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    code = re.sub(r"\"\s*\n\s*f?\"", "", code)  # one literal over several lines
    code = re.sub(r"(\{[^{}]*\})+", "…", code)
    quoted = re.findall(r"^\| `([^|]+?)` \|", TEXT["docs/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) > 20
    for message in quoted:
        assert message in code or re.sub(r"(; )?…$", "", message) in code, message


def test_the_api_reference_is_up_to_date(tmp_path):
    script = ROOT / "scripts" / "make_api_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changed = script.read_text(encoding="utf-8").replace("# API reference", "# API  reference")
    (tmp_path / "other.py").write_text(changed.replace("Path(__file__).resolve().parent.parent", repr(ROOT), 1)
                                       .replace(f"{ROOT!r} /", f"Path({str(ROOT)!r}) /"))  # fmt: skip
    assert subprocess.run([sys.executable, tmp_path / "other.py", "--check"], capture_output=True).returncode == 1


# ---- commands ------------------------------------------------------------------------------------------------------

OURS = ("tq-ggml", "make", "pip", "python", ".venv/bin/", "TQ_")
SMALL = {  # what is added to a command so that it takes seconds; the last of two equal options counts
    "compare": "--ctx 64 --windows 1 --depth 32 -n 2 -r 1 --types f16,tq4 -t 2",
    "perplexity": "--ctx 64 --windows 1 -t 2",
    "bench": "--depth 32 -n 2 -r 1 --types f16,tq4 -t 2",
    "chat": "--n-ctx 256 --max-tokens 4 -t 2",
    "serve": "--n-ctx 256 --port 0 -t 2",
    "calibrate": "--tokens 64 --force -t 2",
    "inspect": "--tokens 64 -t 2",
    "recommend": "--tokens 64 -t 2",
    "llama-server": "-c 256 -t 2",
    "llama-cli": "-c 256 -t 2 -n 4 -st -p Hello",
    "llama-bench": "-p 8 -n 0 -r 1 -t 2 -ctk f16,tq4 -ctv tq3",
    "llama-perplexity": "-c 64 --chunks 1 -t 2",
}
SERVERS = ("serve", "llama-server", "ggml-rpc-server")
WITHOUT_HEALTH = ("ggml-rpc-server", "llama_cpp.server")


def indented_lines() -> list[str]:
    """Lines of the indented blocks that are commands, of all pages, each once and without its comment."""
    found = []
    for text in TEXT.values():
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for line in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE):
            command = re.split(r"\s+#", line)[0].strip()
            # Indented, but no command: what a program prints, a formula, an environment variable with its meaning.
            if command.startswith(OURS) and not re.match(r"tq-ggml: |TQ_\w+=\w+ {2}", command):
                found.append(command)
    return list(dict.fromkeys(found))


def inline_commands() -> list[str]:
    """`tq-ggml ...` within sentences; in the first column of a table stand messages."""
    found = [
        c for text in TEXT.values() for c in re.findall(r"(?<!^\| )`(?:\.venv/bin/)?(tq-ggml [a-z][^`]*)`", text, re.M)
    ]
    return sorted(set(found))


def test_there_are_commands():
    assert len(indented_lines()) > 25 and len(inline_commands()) > 15


@pytest.fixture(scope="module")
def place(smollm2_path, calibrated_path, tmp_path_factory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder, and what stands for the documentation's placeholders in it."""
    folder = tmp_path_factory.mktemp("docs")
    text = folder / "text.txt"
    text.write_text(TEXT["docs/attention.md"], encoding="utf-8")
    names = {
        "MODEL-tq.gguf": calibrated_path,
        "Qwen3-4B.gguf": smollm2_path,
        "MODEL.gguf": smollm2_path,
        "NEW.gguf": folder / "new.gguf",
        "FILE.gguf": folder / "side.gguf",
        "FILE": text,
        "Persuasion": text,
    }
    yield folder, {name: str(path) for name, path in names.items()}


def words_of(command: str, names: dict[str, str]) -> list[str]:
    return [names.get(word, word) for word in shlex.split(command)]


@pytest.mark.parametrize("command", indented_lines())
def test_command(command, place, tmp_path):
    folder, names = place
    words = words_of(command, names)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] in ("make", "pip"):
        check_make_or_pip(words)
    elif words[:2] == ["python", "-c"]:
        command = [sys.executable, *words[1:], "--n_ctx", "256", "--host", "127.0.0.1"]
        serve(command, "llama_cpp.server", tmp_path)
    elif words[0] == "python":
        done = subprocess.run([sys.executable, ROOT / words[1], "--help"], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr
        options = [word for word in words[2:] if word.startswith("--")]
        assert all(option in done.stdout for option in options)
    else:
        run_program(words, tmp_path)


def check_make_or_pip(words: list[str]) -> None:
    """What `make test` itself runs, or what installs into the user's own environment."""
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        listed = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert targets and all(re.search(rf"^{target}:", listed, re.MULTILINE) for target in targets)
        return
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for word in words[2:]:
        if match := re.fullmatch(r"tq-ggml\[(\w+)\]", word):
            assert re.search(rf"^{match[1]} = \[", project, re.MULTILINE)
        elif "==" in word:
            assert f'engine = ["{word}"]' in project
        else:
            assert word == "." or word.startswith("--"), word


def run_program(words: list[str], tmp_path: Path) -> None:
    name, arguments = Path(words[0]).name, words[1:]
    what = arguments[0] if name == "tq-ggml" else name
    with contextlib.ExitStack() as stack:
        if "--rpc" in arguments:
            workers = [stack.enter_context(rpc_worker(tmp_path)) for _ in range(2)]
            arguments[arguments.index("--rpc") + 1] = ",".join(workers)
        command = [str(programs.program(name)), *arguments, *shlex.split(SMALL.get(what, ""))]
        if what in SERVERS or "--web" in arguments:
            serve(command, what, tmp_path)
            return
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, input="/exit\n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout or what == "chat"


@contextlib.contextmanager
def rpc_worker(folder: Path) -> Iterator[str]:
    port = programs.free_port()
    with programs.running(folder / f"{port}.log", "ggml-rpc-server", "-p", str(port), "-t", "1") as process:
        programs.wait_for_port(port, process)
        yield f"127.0.0.1:{port}"


def serve(command: list[str], what: str, folder: Path) -> None:
    """Start a server, ask whether it is well, end it."""
    port = programs.free_port()
    if what == "ggml-rpc-server":
        command[command.index("-p") + 1] = str(port)
        command[command.index("-H") + 1] = "127.0.0.1"
    elif "--web" not in command:
        command += ["--port", str(port)]
    log = folder / "log"
    # --web opens a browser: one that there is not.
    env = {**os.environ, "BROWSER": "true"}
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=env) as process:
        try:
            if "--web" in command:
                port = port_of(log, process)
            programs.wait_for_port(port, process)
            if what not in WITHOUT_HEALTH:
                programs.wait_for_health(f"http://127.0.0.1:{port}", process, log)
            if what != "ggml-rpc-server":
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
                    assert b"data" in answer.read()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def port_of(log: Path, process: subprocess.Popen) -> int:
    while True:
        if found := re.search(r"chat page at http://127.0.0.1:(\d+)/", log.read_text()):
            return int(found[1])
        assert process.poll() is None, log.read_text()


@pytest.mark.parametrize("command", inline_commands())
def test_command_in_a_sentence_is_one(command):
    words = [word for word in shlex.split(command) if word != "…"]
    whole = ["-m", "MODEL"] if words[1] in ("compare", "bench", "perplexity", "chat", "serve") else []
    whole = [] if {"-m", "--model"} & set(words) else whole
    if words[1] in ("calibrate", "inspect", "recommend", "fit") and (len(words) == 2 or words[2].startswith("-")):
        whole = ["MODEL"]
    try:
        cli.build_parser().parse_args([*words[1:], *whole])
    except TqError as problem:
        pytest.fail(f"{command}: {problem}")


# ---- Python --------------------------------------------------------------------------------------------------------


def python_blocks() -> list[tuple[str, str]]:
    return [
        (page, code) for page, text in TEXT.items() for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]


@pytest.mark.parametrize(("page", "code"), python_blocks())
def test_python_example(page, code, place, tmp_path):
    _, names = place
    code = code.replace('"model.gguf"', repr(names["MODEL.gguf"])).replace('"MODEL.gguf"', repr(names["MODEL.gguf"]))
    code = code.replace("8192", "256").replace("4096", "256").replace("max_tokens=64", "max_tokens=4")
    with contextlib.ExitStack() as stack:
        if "rpc.use_servers" in code:
            for name in ("worker1:50052", "worker2:50052"):
                code = code.replace(name, stack.enter_context(rpc_worker(tmp_path)))
        if "OpenAI(" in code:
            code = code.replace("127.0.0.1:8000", stack.enter_context(our_server(names["MODEL.gguf"], tmp_path)))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "print(" not in code or done.stdout.strip()


@contextlib.contextmanager
def our_server(model: str, folder: Path) -> Iterator[str]:
    port = programs.free_port()
    options = ["-m", model, "--cache-type", "tq4", "--port", str(port), *shlex.split(SMALL["chat"])[:2]]
    log = folder / "serve.log"
    with programs.running(log, "tq-ggml", "serve", *options) as process:
        programs.wait_for_health(f"http://127.0.0.1:{port}", process, log)
        yield f"127.0.0.1:{port}"
