"""GGUF metadata that is ours: reading it, a side file of it, and copies of a model with keys added, changed or removed.

Headers are parsed by `gguf_check.open_gguf`. What is not changed is copied byte for byte, so that a vocabulary of any
size costs nothing, and neither do tensors of any type.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGUF_MAGIC, GGUF_VERSION, GGUFValueType, Keys

from tq_ggml.errors import TqError
from tq_ggml.gguf_check import SCALARS, Broken, Header, open_gguf

PREFIX = "tq_ggml."
"""What our keys start with."""

SIDE_FILE_ARCHITECTURE = "tq_ggml"
"""``general.architecture`` of a side file: no model's, so llama.cpp refuses to load one."""

_SAMPLE, _SAMPLED = 2 << 10, 4 << 20  # bytes of a digest: from each end of a tensor, and at most in all
_MAX_HEADER = 256 << 20  # bytes taken into memory; the largest vocabularies have 20 MiB
_MAX_KEY = (1 << 16) - 1  # bytes, as the GGUF specification has it
_CHUNK = 4 << 20
_INTEGERS = (GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.UINT64, GGUFValueType.INT64)


def model_digest(path: str | Path) -> str:
    """A hex SHA-256 that tells a model's weights from any other's; the same whatever the metadata.

    Of all tensors the name, shape, type and the first and last 2 KiB: a fine-tune moves nearly every weight, and a
    whole model would take seconds to read.

    Raises:
        TqError: as `open_gguf`; the file has no tensors.
    """
    with open_gguf(path) as (data, header):
        return digest(data, header)


def digest(data: mmap, header: Header) -> str:
    """`model_digest` of a file that `open_gguf` has open."""
    if not header.tensors:
        raise Broken("no model: it has no tensors; give the model's own GGUF file")
    sample = min(_SAMPLE, _SAMPLED // (2 * len(header.tensors)))
    out = hashlib.sha256()
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.name):
        out.update(repr((tensor.name, tensor.shape, tensor.kind)).encode())
        start = header.data + tensor.offset
        end = start + (tensor.n_bytes or sample)  # of an unknown type there is only a start
        out.update(data[start : min(start + sample, end)])
        out.update(data[max(start, end - sample) : end])
    return out.hexdigest()


def read_metadata(path: str | Path, prefix: str = PREFIX) -> dict[str, Any]:
    """The keys that start with ``prefix`` and their values, in the file's order.

    Returns:
        By key an int, float, bool or str; for an array of strings a list of str; for any other array a numpy array of
        shape (n,) and the file's own type, float32 for our constants.

    Raises:
        TqError: as `open_gguf`; a header of more than 256 MiB.
    """
    with open_gguf(path) as (data, header):
        return {key: decode(value) for key, value in encoded(data, header, prefix).items()}


def encoded(data: mmap, header: Header, prefix: str = PREFIX) -> dict[str, bytes]:
    """Keys and values as they stand in a file that `open_gguf` has open: type ids and little-endian bytes."""
    _check_size(header)
    return {key: data[entry.value : entry.end] for key, entry in header.entries.items() if key.startswith(prefix)}


def _check_size(header: Header) -> None:
    if header.end > _MAX_HEADER:
        raise Broken(f"damaged: its header has {header.end} bytes; download it again")


def value_type(value: bytes) -> tuple[GGUFValueType, int | None]:
    """The type of an encoded value, for an array that of its items; and an array's length, None for a single value."""
    (kind,) = struct.unpack_from("<I", value)
    if kind != GGUFValueType.ARRAY:
        return GGUFValueType(kind), None
    item, n = struct.unpack_from("<IQ", value, 4)
    return GGUFValueType(item), n


def decode(value: bytes, most: int | None = None) -> Any:
    """An encoded value as `read_metadata` gives it; of an array only the first ``most`` items."""
    kind, n = value_type(value)
    start = 4 if n is None else 16
    count = 1 if n is None else n if most is None else min(n, most)
    decode_items = _strings if kind == GGUFValueType.STRING else _numbers
    items = decode_items(value, start, count)
    if n is not None:
        return items
    return items[0] if isinstance(items, list) else items[0].item()


def _numbers(value: bytes, at: int, count: int) -> np.ndarray:
    code = SCALARS[value_type(value)[0]]
    if code == "?":  # in a damaged file any byte, of which numpy's bool must not know
        return np.frombuffer(value, np.uint8, count, at).astype(bool)
    return np.frombuffer(value, f"<{code}", count, at).astype(code)


def _strings(value: bytes, at: int, count: int) -> list[str]:
    out = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", value, at)
        out.append(value[at + 8 : at + 8 + length].decode("utf-8", "replace"))
        at += 8 + length
    return out


def encode(value: Any, kind: GGUFValueType | None = None) -> bytes:
    """A value as it stands in a GGUF.

    Args:
        value: int, float, bool or str, or a list or numpy array of them, of shape (n,).
        kind: its type, or that of its items. Without one floats are float32, and integers the first of uint32, int32,
            uint64 and int64 that holds them all.

    Raises:
        TqError: the type does not hold the value.
        TypeError: a value of any other kind.
    """
    single = not isinstance(value, (list, tuple, np.ndarray))
    items = [value] if single else value
    if len(items) and isinstance(items[0], str):
        kind, body = _encode_texts(items, kind)
    else:
        kind, body = _encode_numbers(np.asarray(items), kind)
    types = struct.pack("<I", kind) if single else struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(items))
    return types + body


def _encode_texts(items: Sequence[str], kind: GGUFValueType | None) -> tuple[GGUFValueType, bytes]:
    if kind not in (None, GGUFValueType.STRING):
        raise TqError(f"{items[0]!r} is no {kind.name.lower()}")
    return GGUFValueType.STRING, b"".join(_encode_text(item) for item in items)


def _encode_numbers(items: np.ndarray, kind: GGUFValueType | None) -> tuple[GGUFValueType, bytes]:
    if items.dtype == object and all(isinstance(item, int) for item in items.flat):
        raise TqError(f"{items.flat[0]} does not fit 64 bits")
    if items.ndim != 1 or items.dtype.kind not in "biuf" or kind == GGUFValueType.STRING:
        raise TypeError(f"GGUF metadata cannot hold {items!r} as {kind!r}")
    kind = _fitting_type(items) if kind is None else kind
    with np.errstate(over="ignore", invalid="ignore"):
        out = items.astype(f"<{SCALARS[kind]}")
    lost = np.isinf(out) & ~np.isinf(items) if out.dtype.kind == "f" else out != items
    if lost.any():
        raise TqError(f"{items[lost][0]!s} does not fit {kind.name.lower()}")
    return kind, out.tobytes()


def _fitting_type(items: np.ndarray) -> GGUFValueType:
    if items.dtype.kind not in "iu":
        return GGUFValueType.BOOL if items.dtype == bool else GGUFValueType.FLOAT32
    limits = {kind: np.iinfo(SCALARS[kind]) for kind in _INTEGERS}
    low, high = int(items.min(initial=0)), int(items.max(initial=0))
    return next(kind for kind, limit in limits.items() if limit.min <= low and high <= limit.max)


def _encode_text(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise TqError(f"{ascii(text)[:80]} is not Unicode text, which GGUF metadata must be") from None
    return struct.pack("<Q", len(data)) + data


def _encode_entry(key: str, value: Any) -> bytes:
    name = _encode_text(key)
    if not 8 < len(name) <= 8 + _MAX_KEY:
        raise TqError(f"a metadata key has 1 to {_MAX_KEY} bytes, not {len(name) - 8}")
    return name + (value if isinstance(value, bytes) else encode(value))


def write_side_file(path: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write a GGUF of metadata alone; one that exists is replaced, in one step.

    Args:
        metadata: of any keys but ``general.architecture``; values as `encode` takes them, or encoded ones as bytes.

    Raises:
        TqError: the file cannot be written; a value does not fit.
    """
    values = {Keys.General.ARCHITECTURE: SIDE_FILE_ARCHITECTURE, **metadata}
    entries = [_encode_entry(key, value) for key, value in values.items()]
    with replacing(Path(os.path.expanduser(path))) as out:
        out.write(struct.pack("<IIQQ", GGUF_MAGIC, GGUF_VERSION, 0, len(entries)))
        out.writelines(entries)


def write_patched_copy(
    source: str | Path,
    target: str | Path,
    changes: Mapping[str, Any],
    removals: Iterable[str] = (),
    *,
    force: bool = False,
    dry_run: bool = False,
) -> None:
    """Copy a GGUF and change its metadata. The tensors' bytes and their alignment stay.

    Args:
        changes: new and changed keys; values as `encode` takes them, or encoded ones as bytes.
        removals: keys to leave out, if they are there.
        force: replace ``target`` if it exists.
        dry_run: check everything, but write nothing.

    Raises:
        TqError: as `read_metadata` for ``source``; ``target`` is ``source``, exists, or cannot be written; a change of
            ``general.alignment``; a value does not fit.
    """
    source, target = (Path(os.path.expanduser(path)) for path in (source, target))
    removals = set(removals)
    if Keys.General.ALIGNMENT in removals | changes.keys():
        raise TqError(f"{Keys.General.ALIGNMENT} cannot be changed: it says where the tensors are")
    _check_target(source, target, force)
    with open_gguf(source) as (data, header):
        new_header = _patched_header(data, header, changes, removals)
        if dry_run:
            return
        with replacing(target) as out:
            out.write(new_header)
            if header.tensors:
                _copy_tensors(source, header.data, len(data) - header.data, out)


def _check_target(source: Path, target: Path, force: bool) -> None:
    if os.path.exists(target) and os.path.exists(source) and os.path.samefile(target, source):
        raise TqError(f"{target} is the file to copy; a GGUF is never changed in place, so choose another name")
    if os.path.lexists(target) and not force:
        raise TqError(f"{target} exists; add --force to replace it, or choose another name")


def _patched_header(data: mmap, header: Header, changes: Mapping[str, Any], removals: set[str]) -> bytes:
    """Everything before the tensors' data, with its padding. A changed key keeps its place, new ones go last."""
    _check_size(header)
    entries = {key: data[entry.start : entry.end] for key, entry in header.entries.items() if key not in removals}
    entries.update((key, _encode_entry(key, value)) for key, value in changes.items())
    counts = struct.pack("<QQ", len(header.tensors), len(entries))
    out = b"".join([data[:8], counts, *entries.values(), data[header.table : header.end]])
    return out + bytes(-len(out) % header.alignment) if header.tensors else out


def _copy_tensors(source: Path, start: int, size: int, out: BinaryIO) -> None:
    with source.open("rb") as file:
        file.seek(start)
        before = out.tell()
        shutil.copyfileobj(file, out, _CHUNK)
        if out.tell() - before != size:
            raise TqError(f"{source} changed while it was copied; try again when nothing writes to it")


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes ``target`` once it is whole; until then nothing of it is to be seen there."""
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            raise TqError(f"{target} is not a regular file; choose another name")
        with tempfile.TemporaryDirectory(prefix=".tq-ggml.", dir=target.parent) as folder:
            half = Path(folder) / "half.gguf"
            with half.open("wb") as out:
                yield out
            os.replace(half, target)
    except OSError as problem:
        raise TqError(f"cannot write {target}: {problem.strerror or problem}") from None
