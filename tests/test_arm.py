"""The NEON kernels, cross-compiled and run under qemu at both of their levels, against the numpy specification.

The oracle is `tq_ggml.reference`, not the native kernels: it shares no line of C with what is tested here, and it needs
no build. Where bytes and floats must be equal, they must be equal bit by bit; only NaN has no defined bits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tq_ggml import reference as ref

C_SRC = Path(__file__).parents[1] / "c_src"
COMPILER, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
INSTALL = "apt-get install -y gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"

ROW = 128
BLOCKS = ROW // ref.BLOCK
BLOCK_BYTES = {"tq3": 14, "tq4": 18}
QUERY_BLOCK = np.dtype([("d", "<f4"), ("qs", "i1", ref.BLOCK)])


class Run(NamedTuple):
    """A CPU for qemu, TQ_SIMD, and the level that must run there."""

    cpu: str
    forced: str
    level: str

    @property
    def suffix(self) -> str:
        return "ref" if self.level == "scalar" else self.level


RUNS = [
    Run("cortex-a72", "", "neon"),
    Run("cortex-a72", "scalar", "scalar"),
    Run("cortex-a72", "neon", "neon"),
    Run("cortex-a72", "dotprod", "neon"),  # it has none
    Run("neoverse-n1", "", "dotprod"),
    Run("neoverse-n1", "scalar", "scalar"),
    Run("neoverse-n1", "neon", "neon"),
    Run("neoverse-n1", "dotprod", "dotprod"),
    Run("max", "", "dotprod"),
]
EACH_RUN = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.cpu}-{run.forced or 'auto'}")
EACH_TYPE = pytest.mark.parametrize("name", BLOCK_BYTES)


# ---- the program ----


def cmake_flags(pattern: str) -> list[str]:
    """Flags as the build gives them, so that what is tested is what is shipped."""
    found = re.search(pattern, (C_SRC / "CMakeLists.txt").read_text())
    assert found, f"c_src/CMakeLists.txt has no {pattern}"
    return found[1].split()


def compile_tool(directory: Path) -> Path:
    flags = ["-std=gnu11", "-static", f"-I{C_SRC / 'tq'}"]
    flags += cmake_flags(r"target_compile_options\(tq_flags INTERFACE (.*?)\)")
    portable = [C_SRC / "tq/tq_dispatch.c", C_SRC / "tq/tq_ref.c", Path(__file__).with_name("tq_codec_tool.c")]
    objects = [(source, source.stem, []) for source in portable]
    for isa in ("neon", "dotprod"):
        objects.append((C_SRC / "tq/tq_neon.c", isa, cmake_flags(rf"tq_add_isa\({isa} tq_neon\.c ?(.*?)\)")))
    for source, stem, isa_flags in objects:
        call([COMPILER, *flags, *isa_flags, "-c", source, "-o", directory / f"{stem}.o"])
    tool = directory / "tq_codec_tool"
    call([COMPILER, "-static", *(directory / f"{stem}.o" for _, stem, _ in objects), "-lm", "-o", tool])
    return tool


def call(command: list, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, timeout=300, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stderr.decode()}"
    return done


def missing_tools() -> str | None:
    missing = [tool for tool in (COMPILER, QEMU) if shutil.which(tool) is None]
    return f"the Arm kernels are NOT tested: no {' and no '.join(missing)}; {INSTALL}" if missing else None


@pytest.fixture(scope="module")
def tool(tmp_path_factory) -> Path:
    if reason := missing_tools():
        must_run = os.environ.get("CI") or os.environ.get("TQ_REQUIRE_ARM")
        (pytest.fail if must_run else pytest.skip)(reason)
    return compile_tool(tmp_path_factory.mktemp("arm"))


def run_tool(tool: Path, run: Run, name: str, kind: str, keys: np.ndarray, queries: np.ndarray, *qemu_options):
    """Results as a record array with fields blocks, decoded, query and dot, a record a row; and stderr."""
    records = b"".join(k.tobytes() + q.tobytes() for k, q in zip(keys, queries, strict=True))
    environment = {**os.environ, "TQ_SIMD": run.forced}
    done = call([QEMU, "-cpu", run.cpu, *qemu_options, tool, name, kind], input=records, env=environment)
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


# ---- inputs: rows of keys, and rows of queries ----


def gaussian(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, ROW)).astype(np.float32)


def scaled(rows: int, low: float, high: float, seed: int) -> np.ndarray:
    """Every block of its own size, from 10^low to 10^high."""
    sizes = 10 ** np.random.default_rng(seed).uniform(low, high, (rows, BLOCKS))
    return (gaussian(rows, seed) * np.repeat(sizes, ref.BLOCK, axis=1)).astype(np.float32)


def heavy_tails() -> np.ndarray:
    return np.random.default_rng(1).standard_t(1.2, (64, ROW)).astype(np.float32)


def not_numbers() -> np.ndarray:
    """NaN of either sign, quiet and signalling, infinities and what fp16 cannot hold, among ordinary values."""
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF])
    rng = np.random.default_rng(2)
    x = gaussian(64, 2).view(np.uint32).copy()
    holes = rng.random(x.shape) < np.linspace(0, 1, len(x))[:, None] ** 2
    x[holes] = rng.choice(bits.astype(np.uint32), holes.sum())
    return x.view(np.float32)


def zero_blocks() -> np.ndarray:
    x = gaussian(32, 3).reshape(-1, ref.BLOCK)
    x[::2] = 0
    x[::3] = -0.0
    return x.reshape(-1, ROW)


def spikes() -> np.ndarray:
    """One value a block, and one rotated value a block."""
    one = np.tile(np.eye(ref.BLOCK, dtype=np.float32), (2, 1)) * np.float32(-3)
    return np.concatenate((one, ref.unrotate(one), one + 1e-3)).astype(np.float32).reshape(-1, ROW)


def equal_magnitudes() -> np.ndarray:
    """Before and after the rotation: the query's int8 are all +-127, and many scores of the scale search are equal."""
    signs = np.sign(gaussian(32, 4))
    small_integers = np.rint(gaussian(64, 5) * 2)
    return np.concatenate((signs, ref.unrotate(signs), np.ones((1, ROW)), small_integers)).astype(np.float32)


def ties() -> np.ndarray:
    """Rotated values that are odd multiples of max/254: an int8 query rounds them half to even."""
    rng = np.random.default_rng(13)
    odd = rng.integers(-127, 127, (256, ref.BLOCK)) * 2 + 1
    odd[:, 5] = 254
    unscaled = odd * rng.integers(1, 255, (256, 1))
    hadamard = np.rint(ref.unrotate(np.eye(ref.BLOCK, dtype=np.float32)) * np.sqrt(np.float32(32)))
    return (unscaled @ hadamard / 32).astype(np.float32).reshape(-1, ROW)  # exact, as every sum of the rotation


def smallest_blocks() -> np.ndarray:
    """Sums of squares within a few rounding errors of the limit: the order of summation decides what becomes zeros."""
    rng = np.random.default_rng(14)
    y = 0.04 * rng.standard_normal((1024, ref.BLOCK))
    y[:, 3] = 1  # most energy in one element: the scale is then not rounded to 0 anyway
    sums = np.float64(ref.MIN_SUMSQ) * (1 + 6e-8 * rng.uniform(-3, 3, (1024, 1)))
    sizes = np.sqrt(sums / np.sum(y * y, axis=1, keepdims=True))
    return ref.unrotate((y * sizes).astype(np.float32)).reshape(-1, ROW)


def huge() -> np.ndarray:
    """Up to the cap of the fp16 scale."""
    aligned = np.tile(ref.SIGNS, BLOCKS)[None] * np.float32(65504)
    return np.concatenate((aligned, -aligned, aligned * 0.5, scaled(32, 3, 38, 6)))


def denormals() -> np.ndarray:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 23, (8, ROW), dtype=np.uint32) | rng.integers(0, 2, (8, ROW), dtype=np.uint32) << 31
    return np.concatenate((bits.view(np.float32), scaled(32, -44, -30, 8)))


VALUES = {
    "gaussian": lambda: gaussian(256),
    "all sizes": lambda: scaled(256, -12, 6, 9),
    "subnormal scales": lambda: scaled(256, -9, -4, 10),  # and around the smallest sum of squares
    "heavy tails": heavy_tails,
    "not numbers": not_numbers,
    "zero blocks": zero_blocks,
    "spikes": spikes,
    "equal magnitudes": equal_magnitudes,
    "ties": ties,
    "smallest blocks": smallest_blocks,
    "huge": huge,
    "denormals": denormals,
}


def random_blocks(name: str, rows: int) -> np.ndarray:
    """Any codes, with any finite scale."""
    blocks = np.random.default_rng(11).integers(0, 256, (rows * BLOCKS, BLOCK_BYTES[name]), dtype=np.uint8)
    blocks[:, 1] = np.where(blocks[:, 1] & 0x7C == 0x7C, blocks[:, 1] & 0xBB, blocks[:, 1])
    return blocks.reshape(rows, -1)


def extreme_blocks(name: str) -> np.ndarray:
    """All 0x00, all 0xff (a NaN scale), and with scale 1: all 0x00, all 0xff, each code's bit alone."""
    size = BLOCK_BYTES[name]
    single_bits = [[1 << bit] * size for bit in range(8)]
    blocks = np.array([[0x00] * size, [0xFF] * size, [0x00] * size, [0xFF] * size, *single_bits], np.uint8)
    blocks[2:, :2] = 0x00, 0x3C
    return np.repeat(blocks, BLOCKS, axis=0).reshape(len(blocks), -1)


# ---- what must come out ----


def expected_query(x: np.ndarray) -> np.ndarray:
    """The rotated query in int8, as tq_query_row documents it: QUERY_BLOCK (rows, BLOCKS)."""
    limited = np.clip(np.where(np.isnan(x), np.float32(0), x), -ref.F16_MAX, ref.F16_MAX)
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


# ---- the tests ----


@EACH_RUN
def test_the_level_that_runs(tool, run):
    """A level that the CPU lacks is refused aloud, and the best one runs."""
    _, stderr = run_tool(tool, run, "tq4", "values", gaussian(1), gaussian(1))
    expected = f"level: {run.level}\n"
    if run.forced not in ("", run.level):
        expected = f"tq-ggml: TQ_SIMD={run.forced} cannot run here; using neon. Levels here: neon scalar\n{expected}"
    assert stderr == expected


@EACH_TYPE
@EACH_RUN
def test_the_functions_that_run(tool, run, name, tmp_path):
    """Not only the level's name: qemu writes down which functions it translated."""
    log = tmp_path / "log"
    run_tool(tool, run, name, "values", gaussian(1), gaussian(1), "-d", "in_asm", "-D", log)
    executed = set(re.findall(r"^IN: (tq\w*_(?:ref|neon|dotprod))$", log.read_text(), re.MULTILINE))
    rows = (f"{name}_quantize_row", f"{name}_dequantize_row", f"{name}_vec_dot", "tq_query_row")
    assert executed == {f"{row}_{run.suffix}" for row in rows}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # signalling NaN in numpy
@pytest.mark.parametrize("kind", VALUES)
@EACH_TYPE
@EACH_RUN
def test_values(tool, run, name, kind):
    keys = VALUES[kind]()
    queries = keys[::-1].copy()
    result, stderr = run_tool(tool, run, name, "values", keys, queries)
    assert stderr.endswith(f"level: {run.level}\n")
    assert_matches(result, name, ref.quantize(keys, name), queries)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@EACH_TYPE
@EACH_RUN
def test_blocks(tool, run, name):
    blocks = np.concatenate((extreme_blocks(name), random_blocks(name, 200)))
    queries = gaussian(len(blocks), 12)
    queries[::2] = ref.unrotate(np.sign(queries[::2]))  # all int8 +-127
    queries[1] = queries[3] = ref.unrotate(np.ones(ROW, np.float32))  # every product the largest there is
    result, stderr = run_tool(tool, run, name, "blocks", blocks, queries)
    assert stderr.endswith(f"level: {run.level}\n")
    assert_matches(result, name, blocks, queries)


def test_instructions(tool):
    """What a CPU without them would meet: sdot is in the dotprod kernels only, and fused additions in no encoder."""
    objdump = shutil.which("aarch64-linux-gnu-objdump")
    assert objdump, f"binutils belong to the compiler; {INSTALL}"
    listing = call([objdump, "-d", "--no-show-raw-insn", tool]).stdout.decode()
    functions = dict(re.findall(r"^[0-9a-f]+ <(tq\w+)>:\n((?:.+\n)+)", listing, re.MULTILINE))
    with_sdot = {function for function, body in functions.items() if "\tsdot\t" in body}
    fused = {function for function, body in functions.items() if re.search(r"\tf(madd|mla|msub|mls|nmadd)\t", body)}
    assert with_sdot == {"tq3_vec_dot_dotprod", "tq4_vec_dot_dotprod"}
    assert fused == {f"{name}_vec_dot_{isa}" for name in BLOCK_BYTES for isa in ("neon", "dotprod")}
