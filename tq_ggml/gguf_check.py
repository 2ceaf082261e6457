"""A look at a GGUF file's header before llama.cpp gets it: is it whole, and what shape has the model?

llama.cpp answers a broken file with a null pointer and pages of log; here the user gets one line. The header is
walked in place (format: ``gguf.h`` of ggml), and no count in it is believed before the file has room for it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from tq_ggml.cache_types import CACHE_TYPES
from tq_ggml.errors import TqError

_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16  # metadata entries, and tensors; real models have a few thousand
_MAX_ITEMS = 1 << 21  # looked at one by one in all arrays together; the largest vocabularies have half a million
_MAX_DIMS = 4
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS; above them llama.cpp aborts
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # any other aborts, too
_ARRAY_SHOWN = _MAX_LAYERS  # longer arrays (scores, token types, calibration) are only measured
_STRING_SHOWN = 1 << 12  # and of longer strings (chat templates) only the start is decoded
_WINDOW, _ONE_BY_ONE = 1 << 16, 1 << 10  # bytes, strings: an array of strings is looked at by so many

# gguf value type id -> struct format; the two that have a length, strings (8) and arrays (9), are handled apart.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# ggml type id -> (values per block, bytes per block)
_BLOCKS = {int(t): size for t, size in GGML_QUANT_SIZES.items()}
_BLOCKS.update((t.ggml_id, (t.block_size, t.type_size)) for t in CACHE_TYPES)


@dataclass(frozen=True)
class GgufInfo:
    """The shape of a model as its GGUF metadata tells it.

    Attributes:
        path: the file.
        size: its bytes.
        arch: llama.cpp's name of the architecture.
        n_layer, n_embd: blocks and model width.
        n_head: query heads, the largest number where it differs by layer.
        n_head_kv: key/value heads: one int, or a tuple with one per layer where the file lists them.
        head_size_k, head_size_v: values per key and per value head; ``n_embd / n_head`` unless the file says otherwise.
        n_ctx_train: context length of the training.
        n_vocab: tokens in the vocabulary, 0 if the file has none.
    """

    path: Path
    size: int
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int | tuple[int, ...]
    head_size_k: int
    head_size_v: int
    n_ctx_train: int
    n_vocab: int


@dataclass(frozen=True)
class Entry:
    """Where a key and its value stand in a file: offsets in bytes.

    Attributes:
        start: of the key.
        value: of the value, which begins with its type id.
        end: behind both.
    """

    start: int
    value: int
    end: int


@dataclass(frozen=True)
class Tensor:
    """A row of the tensor table.

    Attributes:
        name: of the tensor.
        shape: as GGUF has it, the fastest axis first.
        kind: ggml type id.
        offset: of its bytes in the data section.
        n_bytes: 0 for a type that we do not know.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """A header that was found to fit its file.

    Attributes:
        values: by key; of long strings only the start, of arrays of strings and of long arrays only the length.
        entries: by key, in the file's order.
        tensors: in the file's order.
        table: offset of the tensor table, in bytes.
        end: offset behind the tensor table.
        data: offset of the tensors' data; no more than ``end`` is there if the file has no tensors.
        alignment: of every tensor's data.
    """

    values: dict
    entries: dict[str, Entry]
    tensors: list[Tensor]
    table: int
    end: int
    data: int
    alignment: int


class Broken(Exception):
    """The bytes cannot be a whole GGUF; the message ends the sentence 'FILE is ...'."""


def check_gguf(path: str | Path) -> GgufInfo:
    """The shape of a model file, once its header and its size are found to be sound.

    Raises:
        TqError: missing, a folder, not readable, not a GGUF, a version llama.cpp does not load, truncated, damaged, or
            not a language model.
    """
    with open_gguf(path) as (data, header):
        return _info(Path(os.path.expanduser(path)), len(data), header.values)


@contextmanager
def open_gguf(path: str | Path) -> Iterator[tuple[mmap.mmap, Header]]:
    """A GGUF file's bytes and its header. The block may raise `Broken` for what else it finds wrong in them.

    Raises:
        TqError: as `check_gguf`, except that the file need not be a language model.
    """
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        raise TqError(f"{path} is a folder; give the path of a GGUF file in it")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise Broken(f"not a GGUF file: it has only {size} bytes; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data, _walk(_Reader(data))
    except FileNotFoundError:
        raise TqError(f"there is no file {path}") from None
    except OSError as problem:
        raise TqError(f"cannot read {path}: {problem.strerror or problem}") from None
    except Broken as problem:
        raise TqError(f"{path} is {problem}") from None


class _Reader:
    """A position in the file's bytes; every read is checked against the end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.size, self.at = data, len(data), 0
        self.items_left = _MAX_ITEMS

    def room_for(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.size - self.at:
            raise Broken(
                f"truncated or damaged: {what} needs {n_bytes} bytes at {self.at}, but the file has {self.size} bytes; "
                "download it again"
            )

    def scalar(self, code: str, what: str):
        self.room_for(struct.calcsize("<" + code), what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def count(self, what: str, limit: int) -> int:
        n = self.scalar("Q", what)
        if n > limit:
            raise Broken(f"damaged: its header claims {n} {what}; download it again")
        return n

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        self.room_for(length, what)
        start, self.at = self.at, self.at + length
        return self.data[start : start + min(length, _STRING_SHOWN)].decode("utf-8", "replace")

    def spend(self, n: int, what: str) -> None:
        self.items_left -= n
        if self.items_left < 0:
            raise Broken(f"damaged: {what} claims {n} values; download it again")

    def skip_strings(self, n: int, what: str) -> None:
        self.room_for(8 * n, what)
        self.spend(n, what)
        while n:
            passed, length = _leading_strings(self.data[self.at : self.at + _WINDOW], n)
            self.at += length
            n -= passed
            if passed < _ONE_BY_ONE:
                n -= self.skip_one_by_one(min(n, _ONE_BY_ONE), what)

    def skip_one_by_one(self, n: int, what: str) -> int:
        """For the strings that are empty, very long or unusual, and the last of each piece."""
        data, at, last = self.data, self.at, self.size - 8
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(n):
            if at > last:
                break
            at += 8 + unpack(data, at)[0]
        if at > self.size:
            raise Broken(f"truncated or damaged inside {what}; download it again")
        self.at = at
        return n

    def array(self, key: str):
        """A short array of numbers as a tuple; of any other, only the length: an int."""
        item = self.scalar("I", key)
        n = self.scalar("Q", key)
        if item == _STRING:
            self.skip_strings(n, key)
            return n
        if item not in SCALARS:
            raise Broken(f"damaged: {key} is an array of the unknown type {item}; download it again")
        width = struct.calcsize("<" + SCALARS[item])
        self.room_for(width * n, key)
        start, self.at = self.at, self.at + width * n
        if n > _ARRAY_SHOWN:
            return n
        self.spend(n, key)
        return struct.unpack_from(f"<{n}{SCALARS[item]}", self.data, start)

    def value(self, key: str):
        kind = self.scalar("I", key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise Broken(f"damaged: {key} has the unknown type {kind}; download it again")
        return self.scalar(SCALARS[kind], key)


def _leading_strings(data: bytes, most: int) -> tuple[int, int]:
    """How many strings ``data``, a piece of an array of them, surely begins with, up to ``most``; and their bytes.

    Vocabularies have hundreds of thousands, too many for a loop at every start. A string's text is looked for where six
    zeros end, the upper bytes of its length, and is believed as far as each length leads to the next text.
    """
    window = np.frombuffer(data, dtype=np.uint8)
    if window.size < 16:
        return 0, 0
    zero = window == 0
    two = zero[:-1] & zero[1:]
    six = two[:-5] & two[2:-3] & two[4:-1]
    begins = np.flatnonzero(six & ~zero[6:]) + 6
    begins = begins[begins >= 8]
    if begins.size == 0 or begins[0] != 8:
        return 0, 0
    lengths = window[begins - 8] + 256 * window[begins - 7].astype(np.int64)
    wrong = np.flatnonzero(begins[:-1] + lengths[:-1] + 8 != begins[1:])
    n = min(int(wrong[0]) if wrong.size else begins.size - 1, most)
    return n, int(begins[n]) - 8


def _walk(reader: _Reader) -> Header:
    """The header; raises when it or the tensors do not fit the file."""
    _check_version(reader)
    n_tensors = reader.count("tensors", _MAX_ENTRIES)
    n_entries = reader.count("metadata entries", _MAX_ENTRIES)
    values, entries = {}, {}
    for i in range(n_entries):
        start = reader.at
        key = reader.string(f"metadata entry {i}")
        value_at = reader.at
        if key in entries:  # llama.cpp does not load it either
            raise Broken(f"damaged: it has the key {_printable(key)} twice; download it again")
        values[key] = reader.value(_printable(key))
        entries[key] = Entry(start, value_at, reader.at)
    table = reader.at
    tensors = [_tensor(reader, i) for i in range(n_tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise Broken(f"damaged: its alignment is {alignment!r}, not a power of two; download it again")
    # Only tensors need the padding between the header and them.
    data = -(-reader.at // alignment) * alignment if tensors else reader.at
    needed = data + max((t.offset + t.n_bytes for t in tensors), default=0)
    if needed > reader.size:
        raise Broken(f"truncated: its tensors need {needed} bytes, but the file has {reader.size}; download it again")
    return Header(values, entries, tensors, table, reader.at, data, alignment)


def _check_version(reader: _Reader) -> None:
    magic = reader.data[:4]
    if magic != b"GGUF":
        raise Broken(f"not a GGUF file: it starts with {magic!r}; convert the model to GGUF first")
    reader.at = 4
    version = reader.scalar("I", "the version")
    if version in _VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise Broken("a big-endian GGUF; this machine's llama.cpp needs a little-endian one")
    raise Broken(f"a GGUF of version {version}; llama.cpp loads versions 2 and 3, so convert the model again")


def _tensor(reader: _Reader, index: int) -> Tensor:
    full_name = reader.string(f"tensor {index}")
    name = _printable(full_name)
    n_dims = reader.scalar("I", name)
    if n_dims > _MAX_DIMS:
        raise Broken(f"damaged: tensor {name} has {n_dims} dimensions; download it again")
    shape = tuple(reader.scalar("Q", name) for _ in range(n_dims))
    kind = reader.scalar("I", name)
    offset = reader.scalar("Q", name)
    # A type newer than our tables counts as empty: llama.cpp itself decides whether it knows it.
    per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
    return Tensor(full_name, shape, kind, offset, math.prod(shape) // per_block * block_bytes)


def _printable(name: str) -> str:
    """A name from the file, made safe and short for a message."""
    return ascii(name[:64])[1:-1]


def _info(path: Path, size: int, metadata: dict) -> GgufInfo:
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise Broken("no language model: it has no general.architecture; is it an adapter or an imatrix?")
    arch = _printable(arch)

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        largest = max(value, default=0) if isinstance(value, tuple) else value
        if not isinstance(largest, int) or largest <= 0:
            raise Broken(f"not a language model with attention: its {arch}.{key} is {value!r}")
        return largest

    n_layer = number("block_count")
    if n_layer > _MAX_LAYERS:
        raise Broken(f"damaged: its {arch}.block_count is {n_layer}, and llama.cpp has room for {_MAX_LAYERS} layers")
    _check_counts(metadata, arch, n_layer)
    n_embd, n_head = number("embedding_length"), number("attention.head_count")
    n_head_kv = number("attention.head_count_kv", n_head)
    by_layer = metadata.get(f"{arch}.attention.head_count_kv")
    tokens = metadata.get("tokenizer.ggml.tokens", metadata.get(f"{arch}.vocab_size", 0))
    return GgufInfo(
        path=path,
        size=size,
        arch=arch,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=by_layer if isinstance(by_layer, tuple) else n_head_kv,
        head_size_k=number("attention.key_length", n_embd // n_head),
        head_size_v=number("attention.value_length", n_embd // n_head),
        n_ctx_train=number("context_length"),
        n_vocab=tokens if isinstance(tokens, int) else 0,
    )


def _check_counts(metadata: dict, arch: str, n_layer: int) -> None:
    """Refuse what llama.cpp asserts while it reads the metadata: a failed assertion ends the process.

    Values of a wrong type are left to llama.cpp, which refuses those properly.
    """

    def at_most(key: str, highest: int, what: str) -> int:
        value = metadata.get(f"{arch}.{key}", 0)
        largest = max(value, default=0) if isinstance(value, tuple) else value
        if isinstance(largest, int) and largest > highest:
            raise Broken(f"damaged: its {arch}.{key} is {largest}, more than {what}; download it again")
        return largest if isinstance(largest, int) else 0

    def refuse(key: str) -> NoReturn:
        raise Broken(f"damaged: its {arch}.{key} is {metadata.get(f'{arch}.{key}')!r}; download it again")

    at_most("nextn_predict_layers", n_layer, f"its {n_layer} layers")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "linear")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        refuse("rope.scaling.type")
    n_expert = at_most("expert_count", _MAX_EXPERTS, f"llama.cpp's {_MAX_EXPERTS}")
    if arch.startswith("hunyuan") and n_expert <= 1:
        return  # llama.cpp takes such a model for one without experts
    n_used = at_most("expert_used_count", n_expert, f"its {n_expert} experts")
    n_groups = at_most("expert_group_count", max(n_expert - 1, 0), f"its {n_expert} experts allow")
    if n_expert and not n_used:
        refuse("expert_used_count")
    if n_groups > 1 and n_expert % n_groups:
        refuse("expert_group_count")
    if n_groups > 1 and not at_most("expert_group_used_count", n_groups - 1, f"its {n_groups} groups allow"):
        refuse("expert_group_used_count")
