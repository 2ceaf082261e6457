"""Is it really on? What is loaded from where, at which SIMD level, and does a round trip through a tq type work."""

from __future__ import annotations

import contextlib
import platform
import re
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from tq_ggml import packages
from tq_ggml.cache_types import CACHE_TYPES
from tq_ggml.errors import CacheTypeError, TqError

CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "asimd", "asimddp", "i8mm")
# A healthy codec loses 0.0060 (tq4) and 0.0257 (tq3) of a Gaussian's energy; a broken one far more.
NMSE_LIMITS = {"tq4": 0.0066, "tq3": 0.0285}
VERSIONS = {"tq_ggml": "tq-ggml", "llama_cpp": "llama-cpp-python", "numpy": "numpy"}


PROGRAMS = ("llama-server", "llama-cli", "llama-bench", "llama-perplexity", "ggml-rpc-server")
"""llama.cpp's own programs that `make programs` builds with the tq types (c_src/llama.cmake has the same list)."""

LIBRARY = re.compile(r"lib(tq|llama|ggml[a-z-]*)\.(?:so|dylib)")


def last_error_path() -> Path:
    """The file in the cache folder that keeps the command line's last error."""
    return packages.cache_dir() / "last-error.txt"


def examine() -> dict[str, Any]:
    """Everything worth knowing in a bug report; ``problems`` is a list of lines, empty when all is well.

    A part that fails is None and leaves a line in ``problems``; nothing is raised.
    """
    problems: list[str] = []

    def attempt(part: Callable[[], Any]) -> Any:
        try:
            return part()
        # A broken installation can fail in any way, and this is the command that has to survive it.
        except Exception as error:  # noqa: BLE001
            kind = "" if isinstance(error, TqError) else f"{type(error).__name__}: "
            problems.append(f"{kind}{error}")
            return None

    report = {
        "versions": _versions(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": attempt(_cpu),
        "simd_level": attempt(_simd_level),
        "libraries": attempt(_libraries),
        "attention": attempt(_attention),
        "programs": attempt(_programs),
        "types": attempt(_types),
        "round_trip_nmse": attempt(_round_trip),
        "cache_folder": str(packages.cache_dir()),
        "last_error": attempt(_last_error),
        "problems": problems,
    }
    problems.extend(_suspicious(report))
    problems[:] = dict.fromkeys(problems)
    return report


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for key, distribution in VERSIONS.items():
        try:
            found[key] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[key] = None
    return found


def _cpu() -> dict[str, Any]:
    """Model name and those of ``CPU_FLAGS`` that the system reports; empty where it does not say."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    values = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    flags = (values.get("flags") or values.get("Features") or "").split()
    return {"name": values.get("model name", platform.processor()), "flags": [f for f in CPU_FLAGS if f in flags]}


def _simd_level() -> str:
    import tq_ggml

    return tq_ggml.simd_level()


def _libraries() -> dict[str, str]:
    from tq_ggml import library

    llama_cpp = library.activate()
    kernels = sys.modules.get("tq_ggml._kernels")
    return {
        **_loaded(library.lib_dir()),
        "llama_cpp": str(Path(llama_cpp.__file__).parent),
        "kernels": getattr(kernels, "__file__", None),
        "system_info": llama_cpp.llama_print_system_info().decode(),
    }


def _loaded(folder: Path) -> dict[str, str]:
    """Name → path of our libraries in this process (or paths, if loaded twice); without /proc, those in ``folder``."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else map(str, sorted(folder.iterdir()))
    found: dict[str, list[str]] = {}
    for path in dict.fromkeys(line[line.find("/") :] for line in lines if "/" in line):
        if match := LIBRARY.match(Path(path).name):
            found.setdefault(match[1], []).append(path)
    return {name: ", ".join(paths) for name, paths in sorted(found.items())}


def _attention() -> str:
    """Whose attention serves f16, q8_0, q4_0 and iq4_nl caches; tq3 and tq4 always have ours."""
    from tq_ggml import library

    stock = library.activate().llama_cpp._lib.tq_attention_uses_stock()
    return "llama.cpp's own, except for tq3 and tq4 (TQ_ATTENTION=stock)" if stock & 1 else "tq-ggml's"


def _programs() -> dict[str, str]:
    """Where llama.cpp's own programs are; elsewhere on the path may be others, which do not know our types."""
    paths = [Path(sysconfig.get_path("scripts")) / name for name in PROGRAMS]
    return {path.name: str(path) if path.exists() else "not built (`make programs`)" for path in paths}


def _types() -> dict[str, int]:
    """Name → id of the cache types whose name the loaded ggml confirms."""
    from tq_ggml import library

    lib = library.activate().llama_cpp._lib
    types = {}
    for cache_type in CACHE_TYPES:
        with contextlib.suppress(CacheTypeError):
            library.require_type(cache_type)
            types[library.type_name(lib, cache_type)] = cache_type.ggml_id
    return types


def _round_trip() -> dict[str, float]:
    """NMSE of Gaussian rows through quantize and dequantize, for each tq type."""
    import numpy as np

    import tq_ggml

    x = np.random.default_rng(0).standard_normal((256, 128), dtype=np.float32)
    return {
        name: float(np.sum((tq_ggml.dequantize(tq_ggml.quantize(x, name), name) - x) ** 2) / np.sum(x**2))
        for name in NMSE_LIMITS
    }


def _last_error() -> str | None:
    path = last_error_path()
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None


def _suspicious(report: dict[str, Any]) -> list[str]:
    from tq_ggml import library

    lines = []
    types = report["types"]
    wrong = [t.name for t in CACHE_TYPES if types is not None and types.get(t.name) != t.ggml_id]
    if wrong:
        lines.append(f"the loaded ggml does not know {', '.join(wrong)} by our ids; {library.REBUILD}")
    for name, nmse in (report["round_trip_nmse"] or {}).items():
        if not nmse <= NMSE_LIMITS[name]:
            loss = f"{name} lost {nmse:.4f} of a Gaussian's energy, more than {NMSE_LIMITS[name]}"
            lines.append(f"{loss}; {library.REBUILD}")
    return lines


def as_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """The report as rows of ``item`` and ``value``, one level of nesting spelled with a dot."""
    rows = []
    for item, value in report.items():
        if isinstance(value, dict) and item != "types":
            rows.extend({"item": f"{item}.{key}", "value": _text(inner)} for key, inner in value.items())
        else:
            rows.append({"item": item, "value": _text(value)})
    return rows


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:.5f}" if isinstance(value, float) else "" if value is None else str(value)
