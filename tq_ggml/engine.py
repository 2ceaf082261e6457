"""A model and its contexts on llama.cpp with the tq cache types.

What perplexity, comparison and benchmark need: explicit positions in one sequence, logits as numpy views, KV bytes as
the engine counts them. `Llama`, for everything else, is in `tq_ggml.llama`.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tq_ggml.cache_types import CacheType, resolve
from tq_ggml.conditioning import ConditionedLayers, conditioned, conditioned_layers
from tq_ggml.errors import EngineError
from tq_ggml.library import activate, engine_log, kv_cache_bytes, require_vocabulary, uninterrupted
from tq_ggml.limits import check_cache
from tq_ggml.models import check_gguf

if TYPE_CHECKING:
    from tq_ggml.calibration import Calibration


class Model:
    """The weights and the vocabulary of one GGUF file, shared by any number of contexts.

    Attributes:
        path: the file.
        info: what its header says (`tq_ggml.models.GgufInfo`).
        description: llama.cpp's own, for example ``llama 135M Q4_1``.
        n_params, n_vocab, n_ctx_train: parameters, vocabulary entries, training context in tokens.
        bos: id of the token that starts a text, or None where the model adds none.
        head_size_k, head_size_v: values per head in a key and in a value.
        calibration: constants for contexts that are made from now on (`tq_ggml.calibration.choose`); None at first.

    Raises:
        TqError: missing file, not a GGUF, truncated GGUF.
        EngineError: llama.cpp refuses the model; its own reason is quoted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._llama_cpp = llama_cpp = activate()
        self.info = check_gguf(path)
        self.path = self.info.path
        engine_log.clear()
        with uninterrupted():
            self._model = llama_cpp.llama_model_load_from_file(
                os.fsencode(self.path), llama_cpp.llama_model_default_params()
            )
            if not self._model:
                raise EngineError(f"llama.cpp cannot load {self.path}{engine_log.reason()}")
            self._free = weakref.finalize(self, llama_cpp.llama_model_free, self._model)
        self.calibration: Calibration | None = None
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._vocab = vocab = llama_cpp.llama_model_get_vocab(self._model)
        text = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self._model, text, len(text))
        self.description = text.value.decode("utf-8", "replace")
        self.n_params: int = llama_cpp.llama_model_n_params(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(self._model)
        self.bos: int | None = llama_cpp.llama_vocab_bos(vocab) if llama_cpp.llama_vocab_get_add_bos(vocab) else None
        self.head_size_k: int = self.info.head_size_k
        self.head_size_v: int = self.info.head_size_v

    @property
    def has_vocabulary(self) -> bool:
        """Whether it can tokenize."""
        return self._llama_cpp.llama_vocab_type(self._open_vocab()) != self._llama_cpp.LLAMA_VOCAB_TYPE_NONE

    def tokenize(self, text: str, add_bos: bool = False, special: bool = False) -> np.ndarray:
        """Token ids, int32 of shape (n,).

        Args:
            add_bos: put the model's own start (and end) tokens around it, where it has such.
            special: read ``<|im_start|>`` and the like as control tokens, not as text.

        Raises:
            EngineError: the model has no vocabulary, or llama.cpp cannot cut the text.
        """
        require_vocabulary(self._open_vocab(), self.path)
        data = text.encode("utf-8")
        n_max = len(data) + 2  # a token covers at least one byte; plus BOS and EOS, though some models add more
        while True:
            tokens = np.empty(n_max, dtype=np.int32)
            n = self._llama_cpp.llama_tokenize(
                self._open_vocab(), data, len(data), _pointer(tokens, ctypes.c_int32), n_max, add_bos, special
            )
            if n >= 0:
                return tokens[:n].copy()
            if -n <= n_max:
                raise EngineError(f"llama.cpp cannot tokenize this text of {len(data)} bytes (code {n})")
            n_max = -n

    def detokenize(self, tokens: Sequence[int] | np.ndarray, special: bool = False) -> str:
        """The text of token ids; ``special`` also spells out control tokens. Broken UTF-8 becomes U+FFFD."""
        require_vocabulary(self._open_vocab(), self.path)
        ids = self._token_ids(tokens)
        size = 16 * ids.size + 16
        while True:
            text = ctypes.create_string_buffer(size)
            n = self._llama_cpp.llama_detokenize(
                self._open_vocab(), _pointer(ids, ctypes.c_int32), ids.size, text, size, False, special
            )
            if n >= 0:
                return text.raw[:n].decode("utf-8", "replace")
            size = -n

    def context(
        self,
        type_k: str | int | CacheType = "f16",
        type_v: str | int | CacheType | None = None,
        *,
        n_ctx: int,
        n_batch: int = 512,
        n_ubatch: int | None = None,
        n_threads: int | None = None,
    ) -> Context:
        """A new context of its own KV cache; several may be alive at once.

        Args:
            type_k, type_v: cache types; values are kept like keys unless told otherwise.
            n_ctx: tokens the cache holds, 0 for the model's training context; llama.cpp rounds up to 256.
            n_batch: tokens of one call of llama_decode; n_ubatch: of one graph, default min(n_batch, 512).
            n_threads: default all processors.

        Raises:
            CacheTypeError: unknown type, or its block does not divide the model's head size.
            EngineError: the KV cache is larger than the memory, the model has none, or llama.cpp refuses (its reason is
                quoted).
        """
        key = resolve(type_k)
        context = Context(
            self,
            key,
            key if type_v is None else resolve(type_v),
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(n_batch, 512) if n_ubatch is None else n_ubatch,
            n_threads=n_threads or os.cpu_count() or 1,
        )
        self._contexts.add(context)
        return context

    def close(self) -> None:
        """Free the weights, and every context made from them first."""
        for context in list(self._contexts):
            context.close()
        self._free()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _token_ids(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Contiguous int32 ids, refused where llama.cpp would read past its tables."""
        ids = np.asarray(tokens)
        if ids.size == 0:
            return ids.astype(np.int32)
        if ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < self.n_vocab:
            raise EngineError(f"token ids must be integers between 0 and {self.n_vocab - 1}")
        return np.ascontiguousarray(ids, dtype=np.int32)

    def _open_vocab(self) -> Any:
        if not self._free.alive:
            raise EngineError(f"the model {self.path} is closed")
        return self._vocab


class Context:
    """One KV cache with the buffers to run its model over one sequence. Made by `Model.context`.

    Flash attention is on for every cache type, also where f16 would not need it: llama.cpp needs it for quantised
    values, and types are only comparable on the same path. Sliding-window layers keep every token, as in `Llama`
    (``swa_full``, the default of llama.cpp's API).

    Attributes:
        type_k, type_v: `CacheType` of keys and values.
        n_ctx, n_batch: tokens, as the engine rounded them.
        kv_bytes_k, kv_bytes_v: bytes of keys and values as the engine allocated them.
        layers: how many of them condition their keys, and how.
    """

    def __init__(
        self,
        model: Model,
        type_k: CacheType,
        type_v: CacheType,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
    ) -> None:
        self.model, self.type_k, self.type_v = model, type_k, type_v
        model._open_vocab()
        check_cache(model.info, type_k, type_v, n_ctx)
        if min(n_batch, n_ubatch, n_threads) < 1:
            raise EngineError(f"n_batch {n_batch}, n_ubatch {n_ubatch} and n_threads {n_threads} must be at least 1")
        self._llama_cpp = llama_cpp = model._llama_cpp
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = int(n_ctx), n_batch, n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k, params.type_v = type_k.ggml_id, type_v.ggml_id
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        engine_log.clear()
        constants = model.calibration and model.calibration.constants_for(type_k)
        with uninterrupted(), conditioned(constants):
            self._ctx = llama_cpp.llama_init_from_model(model._model, params)
            if not self._ctx:
                raise EngineError(f"llama.cpp cannot create a context of {n_ctx} tokens{engine_log.reason()}")
            self._free = weakref.finalize(self, llama_cpp.llama_free, self._ctx)
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self.n_ctx: int = llama_cpp.llama_n_ctx(self._ctx)
        self.n_batch: int = llama_cpp.llama_n_batch(self._ctx)
        self.kv_bytes_k, self.kv_bytes_v = kv_cache_bytes(self._ctx)
        self.layers: ConditionedLayers = conditioned_layers(self._ctx)
        if self.kv_bytes == 0:
            self.close()
            raise EngineError(f"{model.path.name} ({model.info.arch}) keeps no KV cache that tq-ggml can measure")

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV cache."""
        return self.kv_bytes_k + self.kv_bytes_v

    @property
    def kv_bytes_f16(self) -> int:
        """Bytes of the same cache in f16."""
        return self.type_k.f16_bytes(self.kv_bytes_k) + self.type_v.f16_bytes(self.kv_bytes_v)

    @property
    def handle(self) -> int:
        """The ``llama_context *``, for the functions of `tq_ggml.conditioning`."""
        self._require_open()
        return self._ctx

    def clear(self) -> None:
        """Forget every token and zero the cache."""
        self._require_open()
        self._llama_cpp.llama_memory_clear(self._memory, True)

    def decode(self, tokens: Sequence[int] | np.ndarray, pos: int, *, logits: str = "none") -> np.ndarray | None:
        """Run ``tokens`` at positions ``pos``, ``pos + 1``, ...; what the cache held from ``pos`` on is replaced.

        Args:
            tokens: ids, shape (n,), n >= 1.
            pos: position of the first; at most one past the last one decoded.
            logits: rows wanted: ``"none"``, ``"last"`` or ``"all"`` (then n is limited to ``n_batch``).

        Returns:
            None, or float32 of shape (1, n_vocab) or (n, n_vocab): a view of the engine's buffer, valid until the
            next decode or close.

        Raises:
            EngineError: past ``n_ctx``, a gap before ``pos``, an id outside the vocabulary, or a failure in llama.cpp.
        """
        self._require_open()
        ids = self.model._token_ids(tokens)
        self._check_request(ids, pos, logits)
        self._rewind(pos)
        for start in range(0, ids.size, self.n_batch):
            chunk = ids[start : start + self.n_batch]
            wanted = np.full(chunk.size, logits == "all", dtype=np.int8)
            wanted[-1] |= logits == "last" and start + chunk.size == ids.size
            self._submit(chunk, pos + start, wanted)
        if logits == "none":
            return None
        rows = ids.size if logits == "all" else 1
        return np.ctypeslib.as_array(self._llama_cpp.llama_get_logits(self._ctx), shape=(rows, self.model.n_vocab))

    def close(self) -> None:
        """Free the cache; a second call does nothing."""
        self._free()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._free.alive:
            raise EngineError("this context is closed")

    def _check_request(self, ids: np.ndarray, pos: int, logits: str) -> None:
        if logits not in ("none", "last", "all"):
            raise EngineError(f"logits={logits!r}: choose 'none', 'last' or 'all'")
        if ids.ndim != 1 or ids.size == 0:
            raise EngineError(f"decode takes a list of at least one token id, not shape {ids.shape}")
        if logits == "all" and ids.size > self.n_batch:
            raise EngineError(
                f"logits='all' for {ids.size} tokens, but n_batch is {self.n_batch}; decode fewer at a time"
            )
        if pos < 0 or pos + ids.size > self.n_ctx:
            raise EngineError(f"positions {pos} to {pos + ids.size - 1} do not fit in n_ctx={self.n_ctx}")

    def _rewind(self, pos: int) -> None:
        llama_cpp = self._llama_cpp
        end = llama_cpp.llama_memory_seq_pos_max(self._memory, 0) + 1
        if pos > end:
            raise EngineError(f"position {pos} leaves a gap: the cache holds {end} tokens")
        if pos == end:
            return
        # A sliding window has already dropped what position `pos` would attend to.
        window = llama_cpp.llama_model_n_swa(self.model._model)
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, 0)
        if pos and window and first > max(0, pos - window):
            raise EngineError(f"this sliding-window model cannot go back to position {pos}; clear() and start at 0")
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, pos, -1):
            raise EngineError(f"this model cannot go back to position {pos}; clear() and start at 0")

    def _submit(self, ids: np.ndarray, pos: int, wanted: np.ndarray) -> None:
        positions = np.arange(pos, pos + ids.size, dtype=np.int32)
        batch = self._llama_cpp.llama_batch(
            n_tokens=ids.size,
            token=_pointer(ids, ctypes.c_int32),
            pos=_pointer(positions, ctypes.c_int32),
            logits=_pointer(wanted, ctypes.c_int8),
        )  # n_seq_id and seq_id stay NULL: every token is of sequence 0
        engine_log.clear()
        code = self._llama_cpp.llama_decode(self._ctx, batch)
        if code != 0:
            raise EngineError(f"llama.cpp failed at positions {pos} to {pos + ids.size - 1}{engine_log.reason()}")


def _pointer(array: np.ndarray, ctype: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctype))
