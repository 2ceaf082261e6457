"""Make the llama.cpp source tree that we build: the pinned release with our patches applied.

    python scripts/fetch_llama_cpp.py DIR

The source is the tree inside the llama-cpp-python source distribution, taken by name and version with pip, checked
against its sha256 and unpacked once in the cache folder (TQ_GGML_CACHE, or the user's). TQ_LLAMA_CPP_SRC=FOLDER takes a
local llama.cpp tree instead, which is only read. Either way DIR becomes the source with the patches applied, and a file
that is already right keeps its time, so a build in DIR stays incremental. Needs nothing but Python and pip: a fresh
machine may have neither git nor patch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
PATCHES = Path(__file__).resolve().parent.parent / "c_src" / "patches"
# What a build reads: the whole tree is three times as large.
WANTED = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "common",
    "ggml",
    "include",
    "licenses",
    "scripts",
    "src",
    "tests",
    "tools",
    "vendor",
)
# In every tree made here. Files are deleted in such a folder, so it must not be any other.
MARK = ".made-by-tq-ggml"


class FetchError(Exception):
    """What is wrong and what to do, for the person at the keyboard."""


def cache_folder() -> Path:
    """Where sources are kept between builds: on Linux the folder of tq_ggml.packages, which is not importable yet."""
    if chosen := os.environ.get("TQ_GGML_CACHE"):
        return Path(chosen).expanduser().absolute() / "src"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "tq-ggml" / "src"


@contextmanager
def workshop() -> Iterator[Path]:
    """An empty folder in the cache folder, for one process at a time.

    What is made there is moved to its place when it is whole, and what a killed run left is removed first.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        part = folder / ".part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(exist_ok=True)
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(folder: Path) -> None:
    """The source distribution into `folder`, by pip, from whatever index the user has configured."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"{sys.executable} has no pip, which fetches {PACKAGE}; run `{sys.executable} -m ensurepip`")
    # pip runs the package's build backend for its metadata. Only this package may come as source: with ":all:" an
    # isolated backend would have CMake itself compiled.
    options = ["--no-deps", "--no-binary", PACKAGE, "--quiet"]
    if importlib.util.find_spec("scikit_build_core"):
        options.append("--no-build-isolation")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
        # pip's first error says why; the later ones only repeat that.
        reason = [line for line in lines if line.startswith("ERROR:")][:1] or lines[-1:]
        raise FetchError(
            f"pip could not download {PACKAGE}=={VERSION} ({' '.join(reason)}). Check the network (or PIP_INDEX_URL), "
            f"or put {ARCHIVE} into {cache_folder()}"
        )


def archive() -> Path:
    """The checked source distribution, from the cache or freshly downloaded."""
    kept = cache_folder() / ARCHIVE
    with workshop() as folder:
        if kept.is_file() and sha256_of(kept) == SHA256:
            return kept
        print(f"fetching {PACKAGE} {VERSION} (73 MB) ...", file=sys.stderr)
        download(folder)
        fresh = folder / ARCHIVE
        if not fresh.is_file() or sha256_of(fresh) != SHA256:
            raise FetchError(
                f"the downloaded {ARCHIVE} is not the one this version was made for (sha256 {SHA256[:12]}...). "
                "If the pin is to move: update VERSION and SHA256 here and regenerate c_src/patches (docs/building.md)."
            )
        os.replace(fresh, kept)
    return kept


def pinned_source() -> Path:
    """The wanted part of the archive's llama.cpp, unpacked in the cache folder, complete or not at all."""
    key = hashlib.sha256(repr((SHA256, WANTED)).encode()).hexdigest()[:8]
    kept = cache_folder() / f"llama.cpp-{VERSION}-{key}"
    if kept.is_dir():
        return kept
    inside = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
    source = archive()
    with workshop() as folder, tarfile.open(source) as tar:
        members = [m for m in tar if m.name.startswith(inside) and m.name[len(inside) :].split("/")[0] in WANTED]
        tar.extractall(folder, members, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        if not kept.is_dir():  # another process may have been first
            os.replace(folder / inside, kept)
    return kept


def local_source(chosen: str) -> Path:
    """The user's own tree, TQ_LLAMA_CPP_SRC."""
    source = Path(chosen).expanduser().absolute()
    if not (source / "ggml" / "include" / "ggml.h").is_file():
        raise FetchError(f"TQ_LLAMA_CPP_SRC={source} is not a llama.cpp source tree (no ggml/include/ggml.h)")
    return source


def hunks(patch: str) -> dict[str, list[tuple[int, list[str]]]]:
    """A git-style patch as {path: [(first line, body lines)]}."""
    files: dict[str, list[tuple[int, list[str]]]] = {}
    current: list[tuple[int, list[str]]] = []
    for line in patch.splitlines(keepends=True):
        if line.startswith("+++ b/"):
            current = files.setdefault(line[6:].strip(), [])
        elif line.startswith("@@ -"):
            current.append((int(line[4:].split(",")[0].split(" ")[0]) - 1, []))
        elif current and line[0] in " +-" and not line.startswith("--- a/"):
            current[-1][1].append(line)
    return files


def find(lines: list[str], old: list[str], start: int) -> int | None:
    """Where `old` stands: at `start`, or else in the one place it occurs."""
    if lines[start : start + len(old)] == old:
        return start
    places = [i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]
    return places[0] if len(places) == 1 else None


def apply_hunks(name: str, text: str, body: list[tuple[int, list[str]]]) -> str:
    """`text` with the hunks of one file applied."""
    lines = text.splitlines(keepends=True)
    shift = 0
    for start, changes in body:
        old = [line[1:] for line in changes if line[0] != "+"]
        new = [line[1:] for line in changes if line[0] != "-"]
        place = find(lines, old, start + shift)
        if place is None:
            raise FetchError(
                f"c_src/patches does not fit {name} near line {start + 1}: the llama.cpp source has changed. Build "
                f"with {PACKAGE} {VERSION}, or regenerate the patches as docs/building.md says."
            )
        lines[place : place + len(old)] = new
        shift += len(new) - len(old)
    return "".join(lines)


def patched_files(source: Path) -> dict[str, bytes]:
    """The content of every file that our patches change, by its path in the tree."""
    texts: dict[str, str] = {}
    for patch in sorted(PATCHES.glob("*.patch")):
        for name, body in hunks(patch.read_text(encoding="utf-8")).items():
            if name not in texts:
                if not (source / name).is_file():
                    raise FetchError(f"{patch.name} changes {name}, which this llama.cpp source does not have")
                texts[name] = (source / name).read_text(encoding="utf-8")
            texts[name] = apply_hunks(name, texts[name], body)
    return {name: text.encode() for name, text in texts.items()}


def source_files(source: Path) -> Iterator[Path]:
    """The wanted files, relative to `source`."""
    for name in WANTED:
        for path in [source / name] if (source / name).is_file() else (source / name).rglob("*"):
            if path.is_file() and "node_modules" not in path.parts:
                yield path.relative_to(source)


def make_tree(source: Path, target: Path) -> None:
    """Make `target` the wanted files of `source` with our patches, writing and deleting only what differs."""
    mark = target / MARK
    if target.exists() and any(target.iterdir()) and not mark.is_file():
        raise FetchError(f"{target} exists and was not made by this program; name another folder")
    patched = patched_files(source)
    if not mark.is_file():
        target.mkdir(parents=True, exist_ok=True)
        mark.touch()
    wanted = {str(name) for name in source_files(source)}
    for path in target.rglob("*"):
        name = str(path.relative_to(target))
        if not path.is_dir() and name not in wanted and name != MARK:
            path.unlink()
    for name in wanted:
        content = patched[name] if name in patched else (source / name).read_bytes()
        copy = target / name
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dir", type=Path, help="the tree to make or bring up to date")
    target = parser.parse_args(argv).dir.resolve()
    chosen = os.environ.get("TQ_LLAMA_CPP_SRC")
    try:
        make_tree(local_source(chosen) if chosen else pinned_source(), target)
    except (FetchError, OSError) as error:
        print(f"fetch_llama_cpp: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
