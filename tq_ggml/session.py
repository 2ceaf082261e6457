"""A chat that goes on another day: its turns, and the KV cache as it was, in one file.

The file: 16 bytes of `MAGIC`, the header's length (uint64, little endian), the header (JSON, UTF-8), the state of the
cache. A cache means something only to the same model, types, context and conditioning, so the header names them and a
file of anything else is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tq_ggml.chat import Chat, Turn
from tq_ggml.errors import TqError
from tq_ggml.library import LLAMA_CPP_PYTHON, activate
from tq_ggml.metadata import model_digest, replacing

if TYPE_CHECKING:
    from tq_ggml.llama import Llama

MAGIC = b"tq-ggml session\n"
VERSION = 1
_MAX_HEADER = 1 << 28
_NAMES = {
    "model": "another model",
    "cache_type_k": "another type of keys",
    "cache_type_v": "another type of values",
    "n_ctx": "another context length",
    "conditioning": "another calibration",
    "llama_cpp": "another llama.cpp",
}


def identity(llama: Llama) -> dict[str, Any]:
    """What a saved cache depends on."""
    return {
        "model": model_digest(llama.model_path),
        "cache_type_k": str(llama.cache_type_k),
        "cache_type_v": str(llama.cache_type_v),
        "n_ctx": llama.n_ctx(),
        "conditioning": llama.conditioning,
        "llama_cpp": LLAMA_CPP_PYTHON,
    }


def save(chat: Chat, path: Path) -> int:
    """Write a session; a file that exists is replaced, in one step.

    Returns:
        Its bytes.

    Raises:
        TqError: it cannot be written.
    """
    llama = chat.llama
    state = _state(llama)
    header = {
        "version": VERSION,
        "identity": identity(llama),
        "system": chat.system,
        "turns": [asdict(turn) for turn in chat.turns],
        "tokens": llama.input_ids[: llama.n_tokens].tolist(),
        "state_sha256": hashlib.sha256(state).hexdigest(),
    }
    text = json.dumps(header, ensure_ascii=False).encode("utf-8", "backslashreplace")
    with replacing(Path(os.path.expanduser(path))) as out:
        out.write(MAGIC + struct.pack("<Q", len(text)) + text)
        out.write(state)
    return len(MAGIC) + 8 + len(text) + len(state)


def load(chat: Chat, path: Path) -> None:
    """Go on with a saved session: turns, system prompt and cache become the file's.

    Raises:
        TqError: the file is missing, damaged or of another model, type, context or calibration; the conversation stays
            what it was.
    """
    header, state = _read(Path(os.path.expanduser(path)))
    _check_identity(header["identity"], identity(chat.llama), path)
    try:
        turns = [Turn(str(t["user"]), str(t["assistant"]), int(t["n_tokens"])) for t in header["turns"]]
        tokens = [int(token) for token in header["tokens"]]
        system = None if header["system"] is None else str(header["system"])
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, "its conversation is not whole") from None
    _restore(chat.llama, tokens, state, path)
    chat.turns, chat.system = turns, system


def context_of(path: Path) -> int:
    """The context length that a session needs.

    Raises:
        TqError: as `load`.
    """
    n_ctx = _read(Path(os.path.expanduser(path)))[0]["identity"].get("n_ctx")
    if not isinstance(n_ctx, int) or not 0 < n_ctx < 1 << 31:
        raise _damaged(path, "it names no context length")
    return n_ctx


# ---- the file ------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise TqError(f"cannot read the session {path}: {problem.strerror or problem}") from None
    if not data.startswith(MAGIC):
        raise TqError(f"{path} is no session of tq-ggml")
    start = len(MAGIC) + 8
    (length,) = struct.unpack("<Q", data[len(MAGIC) : start].ljust(8, b"\xff"))
    if length > min(len(data) - start, _MAX_HEADER):
        raise _damaged(path, "its header is cut short")
    try:
        header = json.loads(data[start : start + length])
        version, digest = header["version"], header["state_sha256"]
        if not isinstance(header["identity"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise _damaged(path, "its header is not whole") from None
    if version != VERSION:
        raise TqError(f"the session {path} has version {version!r}, and this tq-ggml reads {VERSION}")
    state = data[start + length :]
    if hashlib.sha256(state).hexdigest() != digest:
        raise _damaged(path, "its cache is not what was saved")
    return header, state


def _damaged(path: Path, why: str) -> TqError:
    return TqError(f"the session {path} is damaged: {why}")


def _check_identity(saved: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    for key, value in ours.items():
        if saved.get(key) != value:
            detail = "" if key in ("model", "conditioning") else f" ({saved.get(key)}, here {value})"
            raise TqError(f"the session {path} was saved with {_NAMES[key]}{detail}; start chat as it was started then")


# ---- the cache -----------------------------------------------------------------------------------------------------


def _state(llama: Llama) -> bytes:
    llama_cpp = activate()
    # The cells of tokens that the next turn would drop anyway.
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llama.ctx), 0, llama.n_tokens, -1)
    state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(llama.ctx, 0))()
    n_bytes = llama_cpp.llama_state_seq_get_data(llama.ctx, state, len(state), 0)
    return bytes(memoryview(state)[:n_bytes])


def _restore(llama: Llama, tokens: list[int], state: bytes, path: Path) -> None:
    llama_cpp = activate()
    if len(tokens) > llama.n_ctx() or any(not 0 <= token < llama.n_vocab() for token in tokens):
        raise _damaged(path, "its tokens are not the model's")
    before, n_before = _state(llama), llama.n_tokens
    if not _set_state(llama, state):
        _set_state(llama, before)
        llama.n_tokens = n_before
        raise _damaged(path, "llama.cpp does not take its cache")
    llama.input_ids[: len(tokens)] = tokens
    llama.n_tokens = len(tokens)
    llama._requires_eval = True  # there are no logits for the last token yet
    end = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llama.ctx), 0) + 1
    if end != len(tokens):
        llama.reset()
        raise _damaged(path, f"its cache holds {end} tokens and not {len(tokens)}")


def _set_state(llama: Llama, state: bytes) -> bool:
    llama_cpp = activate()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
    data = (ctypes.c_uint8 * max(len(state), 1)).from_buffer_copy(state.ljust(1, b"\0"))
    return llama_cpp.llama_state_seq_set_data(llama.ctx, data, len(state), 0) == len(state)
