"""`make bench`: measure attention, writing into the cache and whole models, and write docs/speed.md with its plot.

    python scripts/bench.py                          everything; about an hour on two cores
    python scripts/bench.py --quick                  few repeats
    python scripts/bench.py --only decode,set_rows   these parts; the others keep their last results
    python scripts/bench.py --render                 write the document again from the results there are

Results are JSON, one file a part, in build/bench.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bench_end_to_end
import bench_report
import build
from tq_ggml import doctor, streams
from tq_ggml.errors import TqError

Row = dict[str, Any]


class Case(NamedTuple):
    """One layer's attention: the last ``n_q`` of ``n_kv`` tokens, ``n_head`` query heads on ``n_head_kv`` KV heads."""

    n_q: int
    n_kv: int
    head_size: int
    n_head: int
    n_head_kv: int


DECODE = (
    Case(1, 8192, 128, 32, 8),
    Case(1, 32768, 128, 32, 8),
    Case(1, 8192, 128, 16, 8),
    Case(1, 8192, 64, 14, 2),
    Case(1, 8192, 256, 4, 1),
    Case(1, 4096, 64, 8, 8),
)
PREFILL = (Case(256, 2048, 128, 32, 8), Case(512, 8192, 128, 16, 8), Case(256, 4096, 64, 14, 2))
DEPTHS = tuple(Case(1, 1024 << i, 128, 16, 8) for i in range(6))
AVX2 = (*DECODE[:2], *PREFILL[:2])
LAYOUTS = ((), ("by-token",))
ATTENDED = "f16@stock,q8_0@stock,q4_0@stock,f16,q8_0,q4_0,tq4,tq3"  # ratios are against the first
WRITTEN = "f16,q8_0,q4_0,tq4,tq3"
WRITTEN_SHAPE = (512, 128, 8)  # a batch of tokens into one layer of the 0.6B


class Effort(NamedTuple):
    """Threads, and repeats of a decode step, a prefill chunk and a whole prefill."""

    threads: int
    decode: int = 41
    prefill: int = 7
    whole: int = 3

    def repeats(self, case: Case) -> int:
        return self.decode if case.n_q == 1 else self.prefill


# ---- parts ---------------------------------------------------------------------------------------------------------


def tool(*arguments: object, simd: str | None = None) -> list[Row]:
    """What tq-attn-bench prints. ``simd`` forces the level of our kernels; llama.cpp's own code keeps its."""
    tree = build.build_tree()
    program = tree / "bin" / build.BENCH if tree else None
    if program is None or not program.is_file():
        raise TqError(f"{build.BENCH} is not built; run `make bench`, or `python scripts/build.py --bench`")
    env = os.environ | ({"TQ_SIMD": simd} if simd else {})
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, env=env)
    if done.returncode:
        raise TqError(f"{build.BENCH} {' '.join(map(str, arguments))} failed: {done.stderr.strip() or done.returncode}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if simd and rows[0]["simd"] != simd:
        raise TqError(f"this CPU cannot run {simd}; leave the part out with --only")
    return rows


def attention(cases: tuple[Case, ...], effort: Effort, layouts=LAYOUTS, simd: str | None = None) -> list[Row]:
    rows = []
    for case in cases:
        for layout in layouts:
            note("attention", *case, *layout)
            size = (*case, effort.threads, effort.repeats(case))
            rows += tool("attention", *size, ATTENDED, *layout, simd=simd)
    return rows


def set_rows(effort: Effort) -> list[Row]:
    note("set_rows", *WRITTEN_SHAPE)
    return tool("set_rows", *WRITTEN_SHAPE, effort.threads, 5 * effort.decode, WRITTEN)


PARTS: dict[str, Callable[[Effort, Path], list[Row]]] = {
    "decode": lambda effort, _: attention(DECODE, effort),
    "prefill": lambda effort, _: attention(PREFILL, effort),
    "avx2": lambda effort, _: attention(AVX2, effort, LAYOUTS[:1], "avx2"),
    "plot": lambda effort, _: attention(DEPTHS, effort, LAYOUTS[1:]),
    "set_rows": lambda effort, _: set_rows(effort),
    "end_to_end": lambda effort, folder: bench_end_to_end.measure_all(folder, effort.threads, effort.whole, note),
}


def note(*words: object) -> None:
    print("bench:", *words, file=sys.stderr, flush=True)


# ---- results -------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers belong to; nothing that names the machine itself."""
    found = doctor.examine()
    return {
        "cpu": found["cpu"]["name"],
        "cores": os.cpu_count(),
        "simd": found["simd_level"],
        "os": operating_system(),
        "compiler": compiler(),
        "llama_cpp_python": found["versions"]["llama_cpp"],
    }


def operating_system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = f"{platform.system()} {platform.release()}"
    return f"{name}, {platform.machine()}"


def compiler() -> str:
    """As CMake found it, for example GNU 12.2.0."""
    tree = build.build_tree()
    for source in tree.glob("CMakeFiles/*/CMakeCCompiler.cmake") if tree else ():
        text = source.read_text(encoding="utf-8")
        words = [re.search(rf'set\(CMAKE_C_COMPILER_{key} "(.*)"\)', text) for key in ("ID", "VERSION")]
        return " ".join(word[1] for word in words if word)
    return "unknown"


def measure(parts: list[str], effort: Effort, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "threads": effort.threads}
    for part in parts:
        result = about | {"date": datetime.date.today().isoformat(), "rows": PARTS[part](effort, folder)}
        (folder / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> dict[str, Row]:
    """Part → its last result, in the order of `PARTS`.

    Raises:
        TqError: there is none, or they are of different machines or numbers of threads.
    """
    paths = {part: folder / f"{part}.json" for part in PARTS}
    results = {part: json.loads(path.read_text(encoding="utf-8")) for part, path in paths.items() if path.is_file()}
    if not results:
        raise TqError(f"no results in {folder}; run scripts/bench.py without --render first")
    if len({json.dumps([result["machine"], result["threads"]]) for result in results.values()}) > 1:
        raise TqError(f"the results in {folder} are of different machines, builds or threads; measure all parts again")
    if missing := [part for part in PARTS if part not in results]:
        note("no results yet of", ", ".join(missing), "- the document leaves them out")
    return results


# ---- command line --------------------------------------------------------------------------------------------------


def parse_parts(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    return parts


def parse_threads(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    x86 = platform.machine() in ("x86_64", "AMD64")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", type=parse_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--threads", type=parse_threads, default=2, help="default 2")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=build.ROOT / "build" / "bench", help="folder of the JSON files")
    parser.add_argument("--output", type=Path, default=build.ROOT / "docs" / "speed.md", help="the document")
    arguments = parser.parse_args(argv)
    if arguments.render and (arguments.only or arguments.quick):
        parser.error("--render measures nothing; leave --only and --quick out")
    arguments.only = arguments.only or [part for part in PARTS if x86 or part != "avx2"]
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    few = {"decode": 7, "prefill": 1, "whole": 1} if arguments.quick else {}
    try:
        with streams.unwind_on_termination():
            if not arguments.render:
                measure(arguments.only, Effort(arguments.threads, **few), arguments.results)
            bench_report.write(load(arguments.results), arguments.output)
    except (TqError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    note("wrote", arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
