"""Build and install tq-ggml into this Python environment, showing how far it is. `make` calls it.

    python scripts/build.py                      the package, editable; rebuilds only what changed
    python scripts/build.py --llama-cpp-python   llama-cpp-python without a llama.cpp of its own, if there is none yet
    python scripts/build.py --llama-tests        llama.cpp's own tests of our types, in the same build tree
    python scripts/build.py --bench              tq-attn-bench, in the same build tree; goes with --llama-tests
    python scripts/build.py --programs           llama.cpp's own programs, with links to them in this environment

The output goes to build/build.log as it comes; what matters of it is shown when something fails. With CI set, warnings
in our own C are errors.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from fetch_llama_cpp import PACKAGE, VERSION, FetchError, archive

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "build.log"
STEP = re.compile(r"\s*\[(\d+)/(\d+)\] (\S+)")
PIP = [sys.executable, "-m", "pip", "install", "--verbose", "--no-build-isolation"]
TESTS, BENCH, PROGRAMS = "tq-llama-tests", "tq-attn-bench", "tq-programs"


def environment() -> dict[str, str]:
    """What pip and CMake are to see. They run in other folders, so folders are made absolute here."""
    env = dict(os.environ)
    for name in ("TQ_LLAMA_CPP_SRC", "TQ_GGML_CACHE"):
        if env.get(name):
            env[name] = str(Path(env[name]).expanduser().absolute())
    if env.get("CI"):
        env.setdefault("TQ_WERROR", "ON")
    return env


def run(what: str, command: list[str]) -> int:
    """Run a command with its output in the log and its progress on one line of the terminal."""
    LOG.parent.mkdir(exist_ok=True)
    lines: list[str] = []
    shown = 0
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with (
        LOG.open("w", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(command, cwd=ROOT, env=environment(), **pipe) as process,
    ):
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            if step := STEP.match(line):
                shown = show(what, int(step[1]), int(step[2]), shown)
    if sys.stderr.isatty() and shown:
        print(file=sys.stderr)
    if process.returncode:
        reason = [i for i, line in enumerate(lines) if re.search(r"\berror\b|CMake Error|FAILED|tq-ggml:", line)]
        start = max(reason[0] - 2, 0) if reason else max(len(lines) - 30, 0)
        print("".join(lines[start : start + 30]), file=sys.stderr)
        print(f"{what}: failed. The whole output is in {LOG.relative_to(ROOT)}", file=sys.stderr)
    return process.returncode


def show(what: str, done: int, total: int, shown: int) -> int:
    """On a terminal every step on one line, elsewhere a line each tenth."""
    if sys.stderr.isatty():
        print(f"\r{what}: step {done} of {total}", end="", file=sys.stderr, flush=True)
        return done
    if done == total or done * 10 // total > shown * 10 // total:
        print(f"{what}: step {done} of {total}", file=sys.stderr, flush=True)
    return done


def llama_cpp_python() -> int:
    """llama-cpp-python without libraries; a version that is already there is left as it is."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return run(f"{PACKAGE} {VERSION}", [*PIP, "--config-settings=wheel.cmake=false", str(archive())])
    if found != VERSION:
        print(f"{PACKAGE} {found} is installed; tq-ggml needs {VERSION}. Use another environment.", file=sys.stderr)
        return 1
    return 0


def build_tree() -> Path | None:
    """The CMake build tree of the last editable build; None when there is none."""
    caches = sorted((ROOT / "build").glob("*-editable/CMakeCache.txt"), key=lambda cache: cache.stat().st_mtime)
    return caches[-1].parent if caches else None


def usable(tree: Path) -> bool:
    """Whether the programs it was configured with are still there. pip's isolated environments take theirs away."""
    cache = (tree / "CMakeCache.txt").read_text(encoding="utf-8")
    return all(Path(path).exists() for path in re.findall(r"^CMAKE_(?:COMMAND|MAKE_PROGRAM):\w+=(.+)$", cache, re.M))


def package() -> int:
    """The package, editable, in its build tree, with what `tq-ggml serve` needs."""
    tree = build_tree()
    if tree and not usable(tree):
        (tree / "CMakeCache.txt").unlink()
    return run("tq-ggml and llama.cpp", [*PIP, "--editable", f"{ROOT}[server]"])


def targets(names: list[str]) -> int:
    """What is built only when named, in the package's build tree; that comes first where it is missing or unusable."""
    tree = build_tree()
    if not (tree and usable(tree)) and (failed := package()):
        return failed
    return run(", ".join(names), [sys.executable, "-m", "cmake", "--build", str(build_tree()), "--target", *names])


def link_programs() -> None:
    """Put llama.cpp's programs next to `tq-ggml`: they find their libraries from where they really are."""
    from tq_ggml.doctor import PROGRAMS as names

    for name in names:
        link = Path(sysconfig.get_path("scripts")) / name
        link.unlink(missing_ok=True)
        link.symlink_to(build_tree() / "bin" / name)
        print(link)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--llama-cpp-python", action="store_true", help="install llama-cpp-python without libraries")
    add_target = functools.partial(parser.add_argument, dest="targets", action="append_const")
    add_target("--llama-tests", const=TESTS, help="build llama.cpp's own tests of our types")
    add_target("--bench", const=BENCH, help="build the program that times attention")
    add_target("--programs", const=PROGRAMS, help="build llama-server, llama-cli and others with the tq types")
    args = parser.parse_args()
    if args.llama_cpp_python and args.targets:
        parser.error("--llama-cpp-python is a step of its own")
    try:
        if args.llama_cpp_python:
            return llama_cpp_python()
        failed = targets(args.targets) if args.targets else package()
        if PROGRAMS in (args.targets or []) and not failed:
            link_programs()
        return failed
    except FetchError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
