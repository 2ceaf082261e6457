"""`Llama`: llama_cpp.Llama with the KV cache types of this package, by name.

Importing this module loads the libraries (`tq_ggml.library.activate`); `tq_ggml.Llama` does it on first use.
"""

from __future__ import annotations

import ctypes
import difflib
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from tq_ggml.cache_types import CacheType, parse_pair, resolve
from tq_ggml.calibration import choose
from tq_ggml.conditioning import ConditionedLayers, conditioned, conditioned_layers
from tq_ggml.errors import CacheTypeError, EngineError
from tq_ggml.library import activate, engine_log, kv_cache_bytes, require_vocabulary, uninterrupted
from tq_ggml.limits import check_cache, rounded
from tq_ggml.models import GgufInfo, check_gguf

llama_cpp = activate()

Spec = str | int | CacheType
_MIB = 1 << 20
_F16 = resolve("f16")


class Llama(llama_cpp.Llama):
    """llama_cpp.Llama whose KV cache may be tq4 or tq3; every other argument is the parent's.

    Args:
        model_path: a GGUF file.
        cache_type: for keys and values, ``"tq4"`` or ``"q8_0/tq4"`` (keys/values): a name, an alias or a ggml id.
        cache_type_k, cache_type_v: one side; wins over ``cache_type``.
        type_k, type_v: the parent's spelling of the same two, names allowed. Where nothing is given, the environment's
            ``LLAMA_ARG_CACHE_TYPE_K`` / ``_V`` decide, as in llama.cpp's own programs, then f16.
        flash_attn: switched on by default when values are quantised or a tq type is used.
        calibration: where the constants that condition the keys come from. ``"auto"``: tq types take the model's own or
            those of an earlier run, and where there are none they are made now, in a run over 512 tokens, and kept;
            ``"on"``: so do q8_0, q4_0 and the other quantised types; ``"off"``; or a file of `tq-ggml calibrate`.
        n_ctx: tokens the cache holds, 0 for the model's training context; rounded up to 256, as llama.cpp does it.
        verbose: llama.cpp's log on stderr; False by default.

    One line on stderr tells the size of the cache, unless ``TQ_GGML_QUIET=1`` is set.

    Attributes:
        cache_type_k, cache_type_v: `CacheType` of keys and values.
        kv_bytes_k, kv_bytes_v: bytes of keys and values as the engine allocated them.
        conditioned_layers: how many layers condition their keys, and how.
        conditioning: checksum of the constants that do it, "" for none.
        kv_bytes_f16: bytes that the same cache would take in f16.

    Raises:
        TypeError: an argument that neither this class nor its parent has.
        CacheTypeError: unknown type, contradictory arguments, a block that does not divide the head size, or quantised
            values with ``flash_attn=False``.
        TqError: the file is missing, no GGUF, or truncated; so may be a calibration, which may also be another model's.
        EngineError: the cache is larger than the memory, or llama.cpp refuses (its own reason is quoted); any use after
            `close`.
    """

    cache_type_k: CacheType
    cache_type_v: CacheType
    kv_bytes_k: int
    kv_bytes_v: int
    conditioned_layers: ConditionedLayers
    conditioning: str

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *args: Any,
        cache_type: Spec | None = None,
        cache_type_k: Spec | None = None,
        cache_type_v: Spec | None = None,
        type_k: Spec | None = None,
        type_v: Spec | None = None,
        calibration: str | os.PathLike[str] = "auto",
        flash_attn: bool | None = None,
        n_ctx: int = 512,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_names(kwargs)
        both = (None, None) if cache_type is None else parse_pair(cache_type)
        self.cache_type_k = _Side("k", cache_type_k, type_k, both[0]).choose()
        self.cache_type_v = _Side("v", cache_type_v, type_v, both[1]).choose()
        flash_attn = _flash_attention(flash_attn, self.cache_type_k, self.cache_type_v)
        info = check_gguf(model_path)
        check_cache(info, self.cache_type_k, self.cache_type_v, n_ctx, weights=info.size)
        threads = kwargs.get("n_threads_batch") or kwargs.get("n_threads")
        chosen = choose(calibration, info, [self.cache_type_k], n_threads=threads)
        engine_log.clear()
        try:
            with uninterrupted(), conditioned(chosen and chosen.constants_for(self.cache_type_k)):
                super().__init__(
                    _utf8(info.path),
                    *args,
                    type_k=self.cache_type_k.ggml_id,
                    type_v=self.cache_type_v.ggml_id,
                    flash_attn=flash_attn,
                    n_ctx=_whole_context(info, n_ctx, kwargs.get("kv_overrides")),
                    verbose=verbose,
                    **kwargs,
                )
        except TemplateError as exc:
            raise EngineError(f"the chat template in {info.path.name} is broken: {exc}; give chat_format=") from exc
        except (ValueError, RuntimeError) as exc:
            if not engine_log.errors:
                raise  # the parent's own complaint about an argument
            raise EngineError(f"{exc}{engine_log.reason()}") from exc
        self.kv_bytes_k, self.kv_bytes_v = kv_cache_bytes(self.ctx)
        self.conditioned_layers = conditioned_layers(self.ctx)
        self.conditioning = chosen.checksum if chosen and chosen.constants_for(self.cache_type_k) else ""
        if os.environ.get("TQ_GGML_QUIET") != "1":
            print(f"tq-ggml: {self.kv_summary()}", file=sys.stderr)

    @property
    def kv_bytes_f16(self) -> int:
        """Bytes of the same cache in f16: exact, because whole blocks were allocated."""
        return self.cache_type_k.f16_bytes(self.kv_bytes_k) + self.cache_type_v.f16_bytes(self.kv_bytes_v)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The parent's; an EngineError for a model without a vocabulary."""
        require_vocabulary(self._model.vocab, self.model_path)
        return super().tokenize(text, add_bos, special)

    def kv_summary(self) -> str:
        """The cache in one line: MiB of keys and values, what f16 would take and how many times more that is."""
        total = self.kv_bytes_k + self.kv_bytes_v
        if total == 0:
            return "llama.cpp reports no size of a KV cache for this model"
        flash = self.context_params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return (
            f"KV cache K ({self.cache_type_k}): {self.kv_bytes_k / _MIB:.2f} MiB, "
            f"V ({self.cache_type_v}): {self.kv_bytes_v / _MIB:.2f} MiB; "
            f"f16 would be {self.kv_bytes_f16 / _MIB:.2f} MiB ({self.kv_bytes_f16 / total:.2f}x); "
            f"flash attention {'on' if flash else 'off'}; {self.conditioned_layers}"
        )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """The parent's: go on where `save_state` was called.

        Raises:
            EngineError: the state is of another model, cache type, rotation, context or calibration, and nothing has
                changed; or it is damaged, and the cache is empty now.
        """
        if state.input_ids.shape != self.input_ids.shape:
            raise EngineError(f"the state was saved with n_ctx={state.input_ids.size}, and here it is {self.n_ctx()}")
        if state.scores.shape != self.scores[: state.n_tokens].shape:
            raise EngineError("the state was saved with another n_batch, logits_all or vocabulary")
        # First, because the parent sets its own fields before it knows whether llama.cpp takes the cache.
        data = (ctypes.c_uint8 * max(len(state.llama_state), 1)).from_buffer_copy(state.llama_state or b"\0")
        engine_log.clear()
        if llama_cpp.llama_state_set_data(self.ctx, data, len(data)) != len(data):
            if llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(self.ctx), 0) < 0:
                self.reset()
            raise EngineError(f"the state is refused{engine_log.reason()}")
        super().load_state(state)

    def close(self) -> None:
        """Free model and cache; also safe after a constructor that failed before the parent's."""
        if hasattr(self, "_stack"):
            super().close()
        # The parent would go on with null pointers, and llama.cpp reads those.
        self._model = self._ctx = self._batch = self.tokenizer_ = _Closed()


class _Closed:
    """In the place of everything that `Llama.close` has freed."""

    def __getattr__(self, _name: str) -> NoReturn:
        raise EngineError("this Llama is closed; make a new one")


@dataclass(frozen=True)
class _Side:
    """The ways a user can name the type of keys (``k``) or values (``v``)."""

    name: str
    cache_type: Spec | None
    parent_type: Spec | None
    both: CacheType | None

    def choose(self) -> CacheType:
        ours = self.both if self.cache_type is None else self.cache_type
        if ours is not None and self.parent_type is not None:
            other = "cache_type" if self.cache_type is None else f"cache_type_{self.name}"
            raise CacheTypeError(f"{other} and type_{self.name} are both given; give one of them")
        given = self.parent_type if ours is None else ours
        return self._from_environment() if given is None else resolve(given)

    def _from_environment(self) -> CacheType:
        variable = f"LLAMA_ARG_CACHE_TYPE_{self.name.upper()}"
        try:
            return resolve(os.environ.get(variable) or _F16)
        except CacheTypeError as exc:
            raise CacheTypeError(f"environment variable {variable}: {exc}") from None


def _check_names(kwargs: dict[str, Any]) -> None:
    """The parent takes any keyword and ignores what it does not know, misspelt ones too."""
    known = [
        name
        for owner in (Llama, llama_cpp.Llama)
        for name, parameter in inspect.signature(owner.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"Llama has no argument {name!r}{hint}")


def _utf8(path: Path) -> str:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise EngineError(
            f"the path {ascii(str(path))} is not UTF-8, which llama-cpp-python needs; rename it"
        ) from None
    return str(path)


def _whole_context(info: GgufInfo, n_ctx: int, overrides: dict[str, Any] | None) -> int:
    """What llama.cpp will make of ``n_ctx``: the parent sizes its buffers by the number it is given."""
    return rounded(int(n_ctx) or (overrides or {}).get(f"{info.arch}.context_length", info.n_ctx_train))


def _flash_attention(asked: bool | None, type_k: CacheType, type_v: CacheType) -> bool:
    if asked is None:
        return type_v.is_quantized or type_k.name.startswith("tq")
    if not asked and type_v.is_quantized:
        raise CacheTypeError(
            f"flash_attn=False does not go with {type_v} values: llama.cpp reads quantised values only in flash "
            "attention; leave flash_attn out, or use f16 values"
        )
    return asked
