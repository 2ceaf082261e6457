"""The patched llama.cpp libraries under llama-cpp-python: loading them, their log, the size of a KV cache.

llama-cpp-python brings the ctypes declarations, this package brings the libraries; `activate` joins the two.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import tq_ggml
from tq_ggml import plain
from tq_ggml.cache_types import CacheType, resolve
from tq_ggml.errors import CacheTypeError, EngineError

LLAMA_CPP_PYTHON = "0.3.36"
"""The llama-cpp-python whose ctypes declarations match our libraries; any other may read structs wrongly."""

_INSTALL = f"pip install --config-settings=wheel.cmake=false llama-cpp-python=={LLAMA_CPP_PYTHON}"
REBUILD = "build it with `make dev` or `pip install --force-reinstall --no-deps .` in the tq-ggml source"
_LIBLLAMA = ("libllama.so", "libllama.dylib", "llama.dll")
_LOG_ERROR, _LOG_CONTINUED = 4, 5  # enum ggml_log_level


def lib_dir() -> Path:
    """The folder that holds our libllama: ``tq_ggml/lib``, or ``TQ_GGML_LIB_PATH`` where a developer set it.

    Raises:
        EngineError: there is no libllama in it.
    """
    override = os.environ.get("TQ_GGML_LIB_PATH")
    # An editable install has two package folders: the sources and the built files.
    folders = [Path(override)] if override else [Path(p) / "lib" for p in tq_ggml.__path__]
    for folder in folders:
        if any((folder / name).exists() for name in _LIBLLAMA):
            return folder.resolve()
    where = f"{folders[0]} (TQ_GGML_LIB_PATH)" if override else str(folders[0])
    raise EngineError(f"no libllama in {where}; {REBUILD}")


@functools.cache
def activate() -> ModuleType:
    """Import llama_cpp with our libraries, once.

    Returns:
        The module ``llama_cpp``; its log is quiet until something asks for ``verbose=True``.

    Raises:
        EngineError: llama_cpp is missing, is not version 0.3.36, or was imported before with other libraries; our
            libraries are missing or were built without the tq types.
    """
    folder = lib_dir()
    _check_version(_installed_version())
    if "llama_cpp.llama_cpp" not in sys.modules:
        _import_llama_cpp(folder)
    llama_cpp = sys.modules["llama_cpp"]
    _check_version(llama_cpp.__version__)
    base_path = Path(llama_cpp.llama_cpp._base_path).resolve()
    if base_path != folder:
        raise EngineError(
            f"llama_cpp was imported before tq_ggml and uses the libraries in {base_path}; "
            "call tq_ggml.activate() before the first `import llama_cpp`"
        )
    if not _has_tq_types(llama_cpp) and not os.environ.get("TQ_GGML_LIB_PATH"):
        raise EngineError(f"the libraries in {folder} were built without the tq types; {REBUILD}")
    importlib.import_module("llama_cpp._logger").set_verbose(False)
    # Its way to keep quiet points descriptors 1 and 2 elsewhere, which two threads at once do not undo; our log is
    # quiet without.
    for module in ("llama_cpp.llama", "llama_cpp._internals"):
        importlib.import_module(module).suppress_stdout_stderr = _streams_untouched
    plain.extend(llama_cpp, importlib.import_module("llama_cpp._internals"))
    with uninterrupted():
        llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
    return llama_cpp


@contextmanager
def _streams_untouched(disable: bool = True) -> Iterator[None]:
    yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends.

    While llama.cpp loads a model it calls our log callback all the time. The KeyboardInterrupt would be raised in
    there, and ctypes drops what a callback raises.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(signal.SIGINT, None)


def _installed_version() -> str | None:
    """The version on disk, read without loading a library; None for a copy without package metadata."""
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        if "llama_cpp" in sys.modules or importlib.util.find_spec("llama_cpp"):
            return None
    raise EngineError(f"llama-cpp-python is not installed; run: {_INSTALL}")


def _check_version(found: str | None) -> None:
    if found not in (None, LLAMA_CPP_PYTHON):
        raise EngineError(
            f"llama-cpp-python {found} is installed, but these libraries belong to {LLAMA_CPP_PYTHON}; run: {_INSTALL}"
        )


def _import_llama_cpp(folder: Path) -> None:
    before = os.environ.get("LLAMA_CPP_LIB_PATH")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    try:
        importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as exc:
        raise EngineError(f"llama_cpp does not load with the libraries in {folder}: {exc}") from exc
    finally:
        # Read once, at import: left behind it would surprise programs that this process starts.
        if before is None:
            del os.environ["LLAMA_CPP_LIB_PATH"]
        else:
            os.environ["LLAMA_CPP_LIB_PATH"] = before


def _has_tq_types(llama_cpp: ModuleType) -> bool:
    # ggml_type_name reads past its table for ids it does not know, so ask only a library that carries our symbol.
    lib = llama_cpp.llama_cpp._lib
    return hasattr(lib, "tq_kv_cache_bytes") and all(type_name(lib, resolve(t)) == t for t in ("tq3", "tq4"))


def type_name(lib: ctypes.CDLL, cache_type: CacheType) -> str:
    """What a loaded ggml (``llama_cpp.llama_cpp._lib``) calls the type's id; not to be asked of ids it may not have."""
    ggml_type_name = lib.ggml_type_name
    ggml_type_name.argtypes, ggml_type_name.restype = [ctypes.c_int], ctypes.c_char_p
    return (ggml_type_name(cache_type.ggml_id) or b"").decode()


def require_type(cache_type: CacheType) -> None:
    """Refuse a tq type when a developer's libraries (``TQ_GGML_LIB_PATH``) do not have it.

    Raises:
        CacheTypeError: the loaded libraries know no such type.
    """
    if cache_type.name in ("tq3", "tq4") and not _has_tq_types(activate()):
        raise CacheTypeError(f"the libraries in {lib_dir()} (TQ_GGML_LIB_PATH) were built without {cache_type}")


def require_vocabulary(vocab: int, path: str | os.PathLike[str]) -> None:
    """Refuse to cut text for a model without a vocabulary, where llama.cpp would abort the process.

    Raises:
        EngineError: ``vocab``, a ``llama_vocab *``, is of no type.
    """
    llama_cpp = activate()
    if llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        raise EngineError(f"{Path(path).name} has no vocabulary, so it can only take token ids")


class _EngineLog:
    """Keeps llama.cpp's error lines for our messages, and prints everything while llama_cpp is verbose."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=8)
        self._level = 0

    def __call__(self, level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode("utf-8", "replace")
        if level != _LOG_CONTINUED:
            self._level = level
        if self._level == _LOG_ERROR:
            if level == _LOG_CONTINUED and self.errors:
                self.errors[-1] += line
            else:
                self.errors.append(line)
        if logging.getLogger("llama-cpp-python").level <= logging.DEBUG:
            print(line, end="", flush=True, file=sys.stderr)

    def clear(self) -> None:
        self.errors.clear()

    def reason(self) -> str:
        """What llama.cpp said since `clear`, as `` (llama.cpp: ...)`` or nothing."""
        # The last line is often only "failed to load model"; the one before it says why.
        lines = "; ".join(" ".join(line.split()) for line in list(self.errors)[-2:])
        return f" (llama.cpp: {lines})" if lines else ""


engine_log = _EngineLog()


@functools.cache  # llama.cpp keeps the pointer, so the callback object has to live as long as the process
def _log_callback(llama_cpp: ModuleType) -> Any:
    return llama_cpp.llama_log_callback(engine_log)


def kv_cache_bytes(ctx: int) -> tuple[int, int]:
    """Bytes of keys and of values in the KV cache of a ``llama_context *``, as the engine allocated them.

    Sums over all caches of the context (sliding-window models have two). ``(0, 0)`` for a model without one, and
    for a kind of memory that tq_kv_cache_bytes does not know.

    Raises:
        EngineError: the loaded libraries are not ours and do not export ``tq_kv_cache_bytes``.
    """
    lib = activate().llama_cpp._lib
    if not hasattr(lib, "tq_kv_cache_bytes"):
        raise EngineError(f"the libraries in {lib_dir()} do not export tq_kv_cache_bytes; build tq-ggml's own")
    k_bytes, v_bytes = ctypes.c_uint64(0), ctypes.c_uint64(0)
    lib.tq_kv_cache_bytes.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)]
    if lib.tq_kv_cache_bytes(ctx, ctypes.byref(k_bytes), ctypes.byref(v_bytes)) != 0:
        return 0, 0
    return k_bytes.value, v_bytes.value
