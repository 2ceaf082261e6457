"""tq-ggml: a KV cache for llama.cpp at 3.5 and 4.5 bits a value.

    from tq_ggml import Llama
    llm = Llama("model.gguf", n_ctx=8192, cache_type="tq4")

`Llama` is llama_cpp.Llama with a cache type; `activate` loads the engine for code that uses llama_cpp itself;
`quantize`, `dequantize` and `dot` are the codec on numpy arrays.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tq_ggml.kernels import dequantize, dot, quantize, simd_level, type_info
    from tq_ggml.library import activate
    from tq_ggml.llama import Llama

__version__ = "0.1.0"

#: The cache types' ggml ids, for `llama_cpp.Llama(type_k=tq_ggml.TQ4, ...)`.
TQ3 = 43
TQ4 = 44

_HOME = {
    "Llama": "llama",
    "activate": "library",
    "dequantize": "kernels",
    "dot": "kernels",
    "quantize": "kernels",
    "simd_level": "kernels",
    "type_info": "kernels",
}

__all__ = ["TQ3", "TQ4", "Llama", "__version__", "activate", "dequantize", "dot", "quantize", "simd_level", "type_info"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line's --help and the build's own scripts need neither numpy nor the engine.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tq_ggml.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
