"""Builds the C programs of the tests, with libtq's own sources and flags or with the built ggml; runs tq_codec_tool,
and says what must come out of it.

The oracle is `tq_ggml.reference`, not the installed kernels: it shares no line of C with what is tested here. Where
bytes and floats must be equal, they must be equal bit by bit; only NaN has no defined bits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from codec_rows import BLOCK_BYTES, BLOCKS, ROW, VALUES, extreme_blocks, queries_for_blocks, random_blocks

from tq_ggml import reference as ref

C_SRC = Path(__file__).parents[1] / "c_src"
QUERY_BLOCK = np.dtype([("d", "<f4"), ("qs", "i1", ref.BLOCK)])
NATIVE_COMPILER = shutil.which("gcc") or "cc"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
THREAD_SANITIZER = ("-fsanitize=thread", "-g")
ARM_COMPILER, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ARM_INSTALL = "apt-get install -y gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
EACH_TYPE = pytest.mark.parametrize("name", BLOCK_BYTES)
EACH_KIND = pytest.mark.parametrize("kind", [*VALUES, "blocks"])


def build(
    folder: Path,
    compiler: str,
    *flags: str,
    processor: str | None = None,
    link: tuple[str, ...] = (),
    optimise: str | None = None,
) -> Path:
    """A folder with both tools, made of the object files that the package's own CMake build makes of libtq.

    Args:
        compiler, flags: the C compiler, and more options for every file and for the tools' link.
        processor: CMake's name of the processor to cross-compile for.
        link: options of the tools' link alone.
        optimise: libtq's level of optimisation, instead of the package's own.
    """
    options = {"TQ_LLAMA": "OFF", "TQ_PYTHON": "OFF", "Python_EXECUTABLE": sys.executable}
    options |= {"CMAKE_C_COMPILER": compiler, "CMAKE_C_FLAGS": " ".join(flags), "CMAKE_MAKE_PROGRAM": program("ninja")}
    if processor:
        options |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": processor}
    if optimise:  # behind all other options, the only place where it counts
        options["CMAKE_C_COMPILE_OBJECT"] = (
            f"<CMAKE_C_COMPILER> <DEFINES> <INCLUDES> <FLAGS> {optimise} -o <OBJECT> -c <SOURCE>"
        )
    cmake = program("cmake")
    call([cmake, "-S", C_SRC, "-B", folder, "-G", "Ninja", *(f"-D{key}={value}" for key, value in options.items())])
    call([cmake, "--build", folder, "--target", "tq"])
    objects = sorted(folder.glob("CMakeFiles/tq*.dir/**/*.o"))
    for tool in ("tq_codec_tool", "tq_attn_tool"):
        source = Path(__file__).with_name(f"{tool}.c")
        include = f"-I{C_SRC / 'tq'}"
        call([compiler, "-std=gnu11", "-O2", include, *flags, *link, source, *objects, "-lm", "-o", folder / tool])
    return folder


def build_flash_attn_tool(tree: Path, target: Path, *flags: str) -> Path:
    """tests/tq_flash_attn_tool.c as `target`, linked with the patched ggml of a CMake build tree of the package."""
    source = Path(__file__).with_name("tq_flash_attn_tool.c")
    include = [f"-I{folder}" for folder in (tree / "llama.cpp-src" / "ggml" / "include", C_SRC / "ggml", C_SRC / "tq")]
    libraries = tree / "bin"
    link = (f"-L{libraries}", "-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{libraries},-rpath-link,{libraries}")
    call([NATIVE_COMPILER, "-std=gnu11", "-O2", *include, *flags, source, *link, "-o", target])
    return target


def build_with_thread_sanitizer(tree: Path) -> Path:
    """The same tool, with all of ggml-base, ggml-cpu and libtq instrumented; `tree` is kept, so only changes compile.

    ggml's own threads, since the sanitizer does not see into an OpenMP library.
    """
    flags = " ".join(THREAD_SANITIZER)
    options = {"TQ_PYTHON": "OFF", "GGML_OPENMP": "OFF", "Python_EXECUTABLE": sys.executable}
    options |= {"CMAKE_C_COMPILER": NATIVE_COMPILER, "CMAKE_MAKE_PROGRAM": program("ninja")}
    options |= {"CMAKE_C_FLAGS": flags, "CMAKE_CXX_FLAGS": flags}
    options |= {"CMAKE_C_FLAGS_RELEASE": "-O1", "CMAKE_CXX_FLAGS_RELEASE": "-O1"}
    cmake = program("cmake")
    # Fresh: another compiler than the last time would make CMake forget all other options.
    defined = [f"-D{key}={value}" for key, value in options.items()]
    call([cmake, "--fresh", "-S", C_SRC, "-B", tree, "-G", "Ninja", *defined])
    call([cmake, "--build", tree, "--target", "ggml-cpu"], timeout=1200)
    return build_flash_attn_tool(tree, tree / "bin" / "tq_flash_attn_tool", *THREAD_SANITIZER)


def missing_arm_tools() -> str | None:
    missing = [tool for tool in (ARM_COMPILER, QEMU) if shutil.which(tool) is None]
    return f"the Arm kernels are NOT tested: no {' and no '.join(missing)}; {ARM_INSTALL}" if missing else None


def program(name: str) -> str:
    """Of this environment first: `make` installs CMake and Ninja there."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    assert found, f"no {name}; `make test` installs it"
    return found


def call(command: list, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, **({"timeout": 300} | options))
    said = done.stdout[-2000:] + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{said.decode(errors='replace')}"
    return done


def run(command: list, forced: str, name: str, kind: str, keys: np.ndarray, queries: np.ndarray):
    """Results of the tool as a record array with fields blocks, decoded, query and dot, a record a row; and stderr.

    Args:
        command: the tool, with what runs it before.
        forced: TQ_SIMD; empty for the best level.
        kind: whether keys are "values" or "blocks".
    """
    records = b"".join(k.tobytes() + q.tobytes() for k, q in zip(keys, queries, strict=True))
    done = call([*command, name, kind], input=records, env={**os.environ, "TQ_SIMD": forced})
    result = np.dtype(
        [
            ("blocks", "u1", BLOCKS * BLOCK_BYTES[name]),
            ("decoded", "<f4", ROW),
            ("query", QUERY_BLOCK, BLOCKS),
            ("dot", "<f4"),
        ]
    )
    assert len(done.stdout) == len(keys) * result.itemsize
    return np.frombuffer(done.stdout, result), done.stderr.decode()


def check(command: list, forced: str, level: str, name: str, kind: str) -> None:
    """Run a level on one kind of rows (a key of ``VALUES``, or "blocks") and compare all that comes out."""
    if kind == "blocks":
        keys = blocks = np.concatenate((extreme_blocks(name), random_blocks(name, 200)))
        queries = queries_for_blocks(len(keys))
    else:
        keys = VALUES[kind]()
        blocks, queries = ref.quantize(keys, name), keys[::-1].copy()
    result, stderr = run(command, forced, name, "blocks" if kind == "blocks" else "values", keys, queries)
    assert stderr.endswith(f"level: {level}\n")
    assert_matches(result, name, blocks, queries)


# ---- what must come out ----


def expected_query(x: np.ndarray) -> np.ndarray:
    """The rotated query in int8, as tq_query_row documents it: QUERY_BLOCK (rows, BLOCKS)."""
    limited = np.clip(np.where(np.isnan(x), np.float32(0), x), -ref.MAX_INPUT, ref.MAX_INPUT)
    y = ref.rotate(limited).reshape(len(x), BLOCKS, ref.BLOCK)
    d = np.abs(y).max(axis=-1) * (np.float32(1) / np.float32(127))
    inverse = np.where(d >= np.float32(1e-30), 1 / np.maximum(d, np.float32(1e-30)), np.float32(0))
    out = np.empty(d.shape, QUERY_BLOCK)
    out["d"], out["qs"] = d, np.rint(y * inverse[..., None])
    return out


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    number = ~np.isnan(expected)
    assert np.array_equal(number, ~np.isnan(found))
    assert np.array_equal(found[number].view(np.uint32), expected[number].view(np.uint32))


def assert_dots_are_exact(result: np.ndarray) -> None:
    """Within 1e-5 of the float64 value; relative to the sum of magnitudes, since the terms may cancel."""
    keys = ref.rotate(result["decoded"]).astype(np.float64)
    query = result["query"]
    queries = query["qs"] * query["d"].astype(np.float64)[..., None]
    terms = keys * queries.reshape(keys.shape)
    error = np.abs(result["dot"] - terms.sum(axis=1))
    number = ~np.isnan(terms).any(axis=1)
    assert np.array_equal(number, ~np.isnan(result["dot"]))
    assert (error[number] <= 1e-5 * np.abs(terms[number]).sum(axis=1)).all()


def assert_matches(result: np.ndarray, name: str, blocks: np.ndarray, queries: np.ndarray) -> None:
    assert np.array_equal(result["blocks"], blocks)
    assert_same_bits(result["decoded"], ref.dequantize(blocks, name))
    assert result["query"].tobytes() == expected_query(queries).tobytes()
    assert_dots_are_exact(result)
