"""What `tq_ggml.activate` adds to llama-cpp-python's own classes, for code that uses them and not `tq_ggml.Llama`.

A context with tq types made by ``llama_cpp.Llama(type_k=tq_ggml.TQ4, ...)``, by llama_cpp.server or by a library that
passes ``type_k`` on, gets flash attention, without which llama.cpp cannot read such values, and the calibration.
``TQ_GGML_CALIBRATION`` is ``auto`` (the default), ``off`` or a file.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from tq_ggml.errors import TqError


def extend(llama_cpp: ModuleType, internals: ModuleType) -> None:
    """Let ``internals.LlamaContext`` prepare contexts with tq types."""
    make = internals.LlamaContext.__init__

    @functools.wraps(make)
    def init(self: Any, *, model: Any, params: Any, **kwargs: Any) -> None:
        from tq_ggml.cache_types import CACHE_TYPES

        ours = {t.ggml_id: t for t in CACHE_TYPES if t.name.startswith("tq")}
        if params.type_k in ours or params.type_v in ours:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        with _calibrated(model.path_model, ours.get(params.type_k)):
            make(self, model=model, params=params, **kwargs)

    internals.LlamaContext.__init__ = init


def _calibrated(path: str, type_k: Any) -> AbstractContextManager[None]:
    from tq_ggml import calibration, conditioning
    from tq_ggml.gguf_check import check_gguf

    if type_k is None or conditioning.is_decided():
        return nullcontext()
    try:
        chosen = calibration.choose(os.environ.get("TQ_GGML_CALIBRATION", "auto"), check_gguf(path), [type_k])
    except TqError as problem:
        # Whoever called expects llama_cpp's errors, and the context works without.
        print(f"tq-ggml: {problem}: keys are not conditioned", file=sys.stderr)
        return conditioning.conditioned(None)
    return conditioning.conditioned(chosen and chosen.constants_for(type_k))
