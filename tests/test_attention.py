"""The attention core at every SIMD level, emulated Arm included, against softmax attention in float64.

The oracle attends the same decoded keys and values with the exact query. Where keys are multiplied in int8, the query's
rounding to int8 is most of what is left: each problem is also run with queries that lose nothing in it, which shows
the rest by itself under a limit that is far tighter. Those limits are about four times what was measured.
"""

from __future__ import annotations

import functools
import os
import platform
from typing import NamedTuple

import numpy as np
import pytest
from cache_rows import TYPES, attention, decode, encode, int8_queries, nmse
from codec_tool import QEMU, call
from key_mean import Mean

from tq_ggml import kernels

MAX_NMSE = 1e-4  # with any query, over keys that may be multiplied in int8
MAX_NMSE_INT8_QUERY = 4e-8
LEVELS = {"x86_64": ("avx2", "avx512bw", "avx512"), "aarch64": ("neon", "dotprod"), "arm64": ("neon", "dotprod")}
EACH_LEVEL = pytest.mark.parametrize("level", ("scalar", *LEVELS.get(platform.machine(), ())))


class Problem(NamedTuple):
    type_k: str
    type_v: str
    head_k: int = 64
    head_v: int = 64
    n_rows: int = 4
    n_keys: int = 100
    twist: str = ""
    softcap: float = 0.0
    mean: Mean | None = None

    def __str__(self) -> str:
        parts = (f"{self.type_k}/{self.type_v}", f"{self.head_k}/{self.head_v}", self.n_rows, self.n_keys)
        return "-".join(map(str, (*parts, *filter(None, (self.twist, self.softcap, self.mean)))))


class Data(NamedTuple):
    queries: np.ndarray  # float32 (n_rows, head_k)
    keys: np.ndarray  # uint8 (n_keys, bytes)
    values: np.ndarray
    mask: np.ndarray  # float16 (n_rows, n_keys)
    slope: np.ndarray  # float32 (n_rows,)
    scale: float
    mean: np.ndarray  # float32 (3, head_k): mean, crossed, start
    positions: np.ndarray  # int32 (n_keys,)


def make(problem: Problem, exact: bool) -> Data:
    """Random rows with the problem's twist. Exact: with queries that int8 holds."""
    rng = np.random.default_rng(problem.n_keys * 1000 + problem.head_k)
    n_rows, n_keys = problem.n_rows, problem.n_keys
    if exact:
        queries = int8_queries(rng, n_rows, problem.head_k, problem.type_k.startswith("tq"))
    else:
        queries = rng.standard_normal((n_rows, problem.head_k)).astype(np.float32)
    keys = rng.standard_normal((n_keys, problem.head_k)).astype(np.float32)
    values = rng.standard_normal((n_keys, problem.head_v)).astype(np.float32)
    mask, slope = make_mask(problem, rng)
    scale = problem.head_k**-0.5
    odd = n_keys // 2
    if problem.twist == "sink":
        # One direction that all queries share lifts the logit of one key to 15, and its value is next to nothing.
        direction = np.float32(rng.choice((-1, 1), problem.head_k))
        queries = (queries * 0.05 + direction).astype(np.float32) if not exact else queries[:1].repeat(n_rows, axis=0)
        shared = queries.mean(axis=0)
        keys[odd] = shared * (15 / scale / (shared @ shared))
        values[odd] *= 1e-4
        mask[:, odd] = 0
        mask[-1] = -np.inf if n_rows > 1 else 0
    elif problem.twist == "large key":
        keys[odd] *= 1000
        scale /= 1000
    elif problem.twist == "large value":
        values[odd] *= 1000
    elif problem.twist == "small value":
        values[odd] /= 1000
    elif problem.twist == "large blocks":
        keys[:, :32] *= 1000
        values[:, -32:] *= 1000
        scale /= 1000
    elif problem.twist == "equal logits":
        queries[:] = 0
    elif problem.twist == "zeros":
        keys[: odd + 1] = 0
        values[odd:] = 0
    elif problem.twist == "steep":
        scale *= 20
    mean = rng.standard_normal((3, problem.head_k)).astype(np.float32)
    positions = problem.mean.positions(n_keys, rng) if problem.mean else np.zeros(n_keys, np.int32)
    stored = encode(keys, problem.type_k), encode(values, problem.type_v)
    return Data(queries, *stored, mask, slope, scale, mean, positions)


def make_mask(problem: Problem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Most masks hide a third of the keys, and all of them in the last of several rows. Slopes are 1 but for ALiBi."""
    shape = n_rows, n_keys = problem.n_rows, problem.n_keys
    slope = np.ones(n_rows, np.float32)
    distance = np.arange(n_keys)[None] - (n_keys - n_rows + np.arange(n_rows)[:, None])
    if problem.twist == "no mask":
        return np.zeros(shape, np.float16), slope
    if problem.twist == "window":
        mask = np.where((distance <= 0) & (distance > -40), 0, -np.inf)
    elif problem.twist == "alibi":
        mask = np.where(distance <= 0, distance, -np.inf)
        slope = np.exp2(-np.arange(1, n_rows + 1) * 8 / n_rows).astype(np.float32)
    else:
        mask = np.where(rng.random(shape) < 1 / 3, -np.inf, 0)
        mask[:, 0] = 0
        if problem.twist == "finite mask":
            mask += rng.uniform(-3, 3, shape)
    if n_rows > 1:
        mask[-1] = -np.inf
    return mask.astype(np.float16), slope


SAME = [Problem(name, name) for name in TYPES]
MIXED = [
    Problem(*pair, head_k=128, head_v=64, n_rows=7, n_keys=333)
    for names in (("tq4", "tq3"), ("q8_0", "tq4"), ("tq4", "f16"), ("f16", "tq3"), ("q4_0", "iq4_nl"))
    for pair in (names, names[::-1])
]
HEADS = [
    Problem(type_k, type_v, *heads, n_rows=5, n_keys=70)
    for (type_k, type_v), heads in zip(
        [(k, v) for k, v in zip(TYPES * 8, (*TYPES[1:], TYPES[0]) * 8, strict=True)][:32],
        [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)] * 4,
        strict=True,
    )
]
ROWS = [Problem(TYPES[n % 6], TYPES[n // 2 % 6], n_rows=n, n_keys=65) for n in (*range(1, 10), 16, 128)]
KEYS = [Problem(name, name, n_rows=3, n_keys=n) for n in (1, 31, 32, 33, 64, 65, 100, 333) for name in TYPES]
TWISTS = [
    Problem(name, name, 128, 128, n_rows=9, n_keys=150, twist=twist)
    for twist in (
        *("sink", "large key", "large value", "small value", "large blocks", "equal logits", "zeros", "steep"),
        *("no mask", "window", "alibi", "finite mask"),
    )
    for name in TYPES
]
CAPPED = [
    Problem(name, name, 96, 96, n_rows=6, softcap=cap) for name, cap in zip(TYPES, (30, 1, 5, 50, 2, 10), strict=True)
]
LARGEST = [
    Problem(*pair, 576, 512, n_rows=128, n_keys=65) for pair in (("q8_0", "tq4"), ("tq3", "q4_0"), ("f16", "f16"))
]
MEANS = [
    Problem("tq4", "tq3", head, 64, n_rows=n_rows, n_keys=n_keys, softcap=cap, mean=Mean(n_rot, neox, log2, order))
    for head, n_rows, n_keys, cap, n_rot, neox, log2, order in (
        (64, 4, 256, 0, 64, True, 3, "ordered"),
        (64, 7, 333, 0, 64, False, 3, "later"),
        (96, 1, 200, 0, 20, True, 3, "shuffled"),
        (128, 9, 150, 5, 128, False, 0, "ordered"),
        (64, 5, 100, 0, 64, True, 2, "sequences"),
        (64, 3, 128, 0, 32, False, 3, "far"),
        (64, 4, 128, 0, 16, True, 3, "very far"),
        (96, 6, 165, 0, 96, False, 3, "around 0"),
        (64, 2, 64, 0, 0, False, 3, "ordered"),
        (64, 3, 31, 0, 64, True, 1, "later"),
        (64, 1, 1, 0, 64, True, 3, "ordered"),
        (576, 128, 130, 0, 64, False, 1, "ordered"),
    )
]
MEANS += [
    Problem(name, "f16", 128, 32, n_rows=n_rows, n_keys=192, twist=twist, mean=Mean(100, True, 3, "ordered"))
    for name, n_rows, twist in (
        *(("tq3", 3, ""), ("tq4", 2, "alibi"), ("q4_0", 1, "no mask"), ("iq4_nl", 6, "finite mask"), ("q8_0", 7, "")),
        *(("f16", 8, "alibi"), ("f16", 9, "")),
    )
]
# Pairs that all turn block by block, or all window by window; and positions that leave the table.
MEANS += [
    Problem("tq3", "tq4", n_rows=5, n_keys=140, mean=mean)
    for mean in (
        Mean(48, True, 2, "later", angles=(1, 0.1)),
        Mean(48, False, 3, "later", angles=(1e-3, 1e-5)),
        Mean(48, True, 1, "ordered", n_used=16),
        Mean(48, False, 1, "around 0", n_used=32, n_unused=0),
    )
]
PROBLEMS = list(dict.fromkeys(SAME + MIXED + HEADS + ROWS + KEYS + TWISTS + CAPPED + LARGEST + MEANS))
# Where a run is slow: every type on either side, every tail of a tile, every twist, every number of rows in a pass.
SELECTED = SAME + MIXED[:5] + ROWS[:4] + KEYS[::5] + TWISTS[::5] + CAPPED[::5] + MEANS


@functools.lru_cache(maxsize=2)
def make_with_expected(problem: Problem, exact: bool) -> tuple[Data, np.ndarray]:
    data = make(problem, exact)
    keys, values = decode(data.keys, problem.type_k), decode(data.values, problem.type_v)
    if problem.mean:
        keys = keys + problem.mean.at(data.positions, *data.mean)
    rest = {"scale": data.scale, "softcap": problem.softcap, "slope": data.slope}
    return data, attention(data.queries, keys, values, data.mask, **rest)


def strided(rows: np.ndarray, gap: int) -> bytes:
    """Rows with other heads' bytes between them, which are no numbers, and nothing after the last."""
    wide = np.pad(rows, ((0, 0), (0, gap)), constant_values=0xFF)
    return wide.tobytes()[: wide.size - gap]


def attend(command: list, problem: Problem, data: Data, level: str) -> np.ndarray:
    gaps = [0, 3 * 34] if problem.n_keys % 2 else [2 * 14, 0]
    strides = [data.keys.shape[1] + gaps[0], data.values.shape[1] + gaps[1]]
    types = [TYPES.index(problem.type_k), TYPES.index(problem.type_v)]
    mean, table = problem.mean, problem.mean.table() if problem.mean else np.empty(0, np.float32)
    shape = (*mean.parameters[:3], mean.block_log2, mean.n_blocks) if mean else (0,) * 5
    sizes = [*types, problem.head_k, problem.head_v, problem.n_rows, problem.n_keys, *strides, *shape, table.nbytes]
    has_mask = (data.mask != 0).any(axis=1)
    parts = (
        np.array(sizes, "<i4"),
        np.array([data.scale, problem.softcap], "<f4"),
        data.slope,
        has_mask.astype("<i4"),
        data.queries,
        strided(data.keys, gaps[0]),
        strided(data.values, gaps[1]),
        *((table, data.mean, data.positions) if mean else ()),
        data.mask[has_mask],
    )
    sent = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    done = call(command, input=sent, env={**os.environ, "TQ_SIMD": level})
    assert done.stderr.decode().splitlines()[-1] == level, "another level ran"
    return np.frombuffer(done.stdout, "<f4").reshape(problem.n_rows, problem.head_v)


def check(command: list, problem: Problem, level: str) -> None:
    # Logits that differ by 20 and more leave one key or two: which ones, a query's rounding decides.
    for exact in (True,) if problem.twist == "steep" else (False, True):
        data, want = make_with_expected(problem, exact)
        found = attend(command, problem, data, level)
        limit = MAX_NMSE_INT8_QUERY if exact or problem.type_k == "f16" else MAX_NMSE
        assert nmse(found, want) <= limit, "with a query that int8 holds" if exact else "with any query"
        unseen = np.isinf(data.mask).all(axis=1)
        assert not found[unseen].any(), "a row that sees no key must give zeros"


@pytest.fixture
def native_level(level) -> str:
    if level not in kernels.simd_levels():
        pytest.skip(f"this CPU cannot run {level}; it has {', '.join(kernels.simd_levels())}")
    return level


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@EACH_LEVEL
def test_every_level(native_tools, native_level, problem):
    check([native_tools / "tq_attn_tool"], problem, native_level)


@pytest.mark.parametrize("problem", SELECTED + HEADS[7::8] + LARGEST, ids=str)
@EACH_LEVEL
def test_every_level_under_the_sanitizers(sanitized_tools, native_level, problem):
    check([sanitized_tools / "tq_attn_tool"], problem, native_level)


@pytest.mark.parametrize("problem", SELECTED, ids=str)
@pytest.mark.parametrize(
    ("cpu", "level"), [("cortex-a72", "neon"), ("neoverse-n1", "dotprod"), ("neoverse-n1", "scalar")]
)
def test_emulated_arm(arm_tools, cpu, level, problem):
    check([QEMU, "-cpu", cpu, arm_tools / "tq_attn_tool"], problem, level)
