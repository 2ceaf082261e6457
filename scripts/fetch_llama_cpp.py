"""Make the llama.cpp source tree that we build: the pinned release with our patches applied.

    python scripts/fetch_llama_cpp.py DIR

The source is the tree inside the llama-cpp-python source distribution, taken by name and version with pip and checked
against its sha256; the archive is kept in the cache folder (TQ_GGML_CACHE, or the user's). TQ_LLAMA_CPP_SRC=FOLDER
takes a local llama.cpp tree instead, which is copied and never changed. Running it again only writes what differs, so a
build in DIR stays incremental. Needs nothing but Python and pip: a fresh machine may have neither git nor patch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
TREE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
PATCHES = Path(__file__).resolve().parent.parent / "c_src" / "patches"
# Only what the build reads: the whole tree is three times as large.
WANTED = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "common",
    "ggml",
    "include",
    "licenses",
    "src",
    "tests",
    "tools",
    "vendor",
)


class FetchError(Exception):
    """What is wrong and what to do, for the person at the keyboard."""


def cache_folder() -> Path:
    """Where archives are kept between builds; the same rule as tq_ggml.packages, which is not importable yet."""
    if folder := os.environ.get("TQ_GGML_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tq-ggml"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _sha256_310(file)


def _sha256_310(file) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def download(folder: Path) -> None:
    """The source distribution into `folder`, by pip, whatever index the user has configured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--quiet", "--dest"]
    result = subprocess.run([*command, str(folder), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise FetchError(
            f"pip could not download {PACKAGE}=={VERSION} ({' '.join(last)}). Check the network, or set "
            "TQ_LLAMA_CPP_SRC to the vendor/llama.cpp folder of an unpacked source distribution."
        )


def archive() -> Path:
    """The checked source distribution, from the cache or freshly downloaded."""
    kept = cache_folder() / "src" / ARCHIVE
    if kept.is_file() and sha256_of(kept) == SHA256:
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {PACKAGE} {VERSION} (73 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        download(Path(folder))
        fresh = Path(folder) / ARCHIVE
        if not fresh.is_file() or sha256_of(fresh) != SHA256:
            raise FetchError(
                f"the downloaded {ARCHIVE} is not the one this version was made for (sha256 {SHA256[:12]}...). "
                "If the pin is to move: update VERSION and SHA256 here and regenerate c_src/patches (docs/building.md)."
            )
        os.replace(fresh, kept)
    return kept


def unpack(target: Path) -> None:
    """The wanted part of the archive's llama.cpp into `target`, complete or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        with tarfile.open(archive()) as tar:
            members = [m for m in tar if m.name.startswith(TREE) and m.name[len(TREE) :].split("/")[0] in WANTED]
            tar.extractall(folder, members, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        os.replace(Path(folder) / TREE, target)


def copy_local(source: Path, target: Path) -> None:
    """A user's own tree into `target`; files that did not change keep their times."""
    if not (source / "ggml" / "include" / "ggml.h").is_file():
        raise FetchError(f"TQ_LLAMA_CPP_SRC={source} is not a llama.cpp source tree (no ggml/include/ggml.h)")
    for name in WANTED:
        for file in [source / name] if (source / name).is_file() else sorted((source / name).rglob("*")):
            copy = target / file.relative_to(source)
            if file.is_file() and not (copy.is_file() and copy.stat().st_mtime >= file.stat().st_mtime):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copy)


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


def patch_tree(tree: Path) -> None:
    """Bring every patched file to original + patches, whatever patches an earlier run applied.

    The original is kept beside the file, so this is the same however often it runs.
    """
    wanted: dict[str, str] = {}
    for original in tree.rglob("*.tq-orig"):
        wanted[str(original.relative_to(tree))[: -len(".tq-orig")]] = original.read_text(encoding="utf-8")
    for patch in sorted(PATCHES.glob("*.patch")):
        for name, body in hunks(patch.read_text(encoding="utf-8")).items():
            if name not in wanted:
                if not (tree / name).is_file():
                    raise FetchError(f"{patch.name} changes {name}, which this llama.cpp source does not have")
                shutil.copy2(tree / name, tree / (name + ".tq-orig"))
                wanted[name] = (tree / name).read_text(encoding="utf-8")
            wanted[name] = apply_hunks(name, wanted[name], body)
    for name, text in wanted.items():
        if (tree / name).read_text(encoding="utf-8") != text:
            (tree / name).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dir", type=Path, help="the tree to make or bring up to date")
    target = parser.parse_args(argv).dir.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if local := os.environ.get("TQ_LLAMA_CPP_SRC"):
            copy_local(Path(local), target)
        elif not target.exists():
            unpack(target)
        patch_tree(target)
    except (FetchError, OSError) as error:
        print(f"fetch_llama_cpp: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
