"""The attention core at every SIMD level, emulated Arm included, against softmax attention in float64.

The oracle attends the same decoded keys and values with the exact query; what is left is its rounding to int8.
"""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

import numpy as np
import pytest
from codec_tool import QEMU, call

from tq_ggml import kernels, reference

TYPES = ("tq3", "tq4")
MAX_NMSE = 1e-4
LEVELS = {"x86_64": ("avx2", "avx512bw", "avx512"), "aarch64": ("neon", "dotprod"), "arm64": ("neon", "dotprod")}
EACH_LEVEL = pytest.mark.parametrize("level", ("scalar", *LEVELS.get(platform.machine(), ())))


class Problem(NamedTuple):
    type_k: str
    type_v: str
    head_k: int
    head_v: int
    n_rows: int
    n_keys: int
    softcap: float = 0.0

    def data(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys, values, and a mask that hides a third of the keys, all of them in the last of several rows."""
        rng = np.random.default_rng(self.n_keys)
        shapes = ((self.n_rows, self.head_k), (self.n_keys, self.head_k), (self.n_keys, self.head_v))
        queries, keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        mask = np.where(rng.random((self.n_rows, self.n_keys)) < 1 / 3, -np.inf, 0).astype(np.float32)
        mask[:-1, 0] = 0
        mask[-1] = -np.inf if self.n_rows > 1 else 0
        return queries, keys, values, mask

    @property
    def scale(self) -> float:
        return 1 / np.sqrt(self.head_k)


EACH_PROBLEM = pytest.mark.parametrize(
    "problem",
    [
        Problem("tq4", "tq4", 128, 128, 4, 100),
        Problem("tq3", "tq3", 64, 64, 1, 32),
        Problem("tq3", "tq4", 96, 64, 7, 333),
        Problem("tq4", "tq3", 256, 256, 16, 65, softcap=30.0),
        Problem("tq4", "tq4", 576, 512, 128, 70),
        Problem("tq4", "tq4", 32, 32, 3, 1),
        Problem("tq3", "tq4", 192, 128, 128, 300),
    ],
    ids=lambda p: "-".join(map(str, p)),
)


def stored(x: np.ndarray, name: str) -> np.ndarray:
    return reference.dequantize(reference.quantize(x, name), name).astype(np.float64)


def expected(problem: Problem) -> np.ndarray:
    queries, keys, values, mask = problem.data()
    logits = queries.astype(np.float64) @ stored(keys, problem.type_k).T * problem.scale
    if problem.softcap:
        logits = problem.softcap * np.tanh(logits / problem.softcap)
    seen = np.isfinite(mask)
    weights = np.where(seen, np.exp(logits - logits.max(axis=1, keepdims=True)), 0)
    return weights @ stored(values, problem.type_v) / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)


def attend(command: list, problem: Problem, level: str) -> np.ndarray:
    types = [TYPES.index(problem.type_k), TYPES.index(problem.type_v)]
    sizes = np.array([*types, problem.head_k, problem.head_v, problem.n_rows, problem.n_keys], "<i4")
    numbers = np.array([problem.scale, problem.softcap], "<f4")
    data = b"".join(part.tobytes() for part in (sizes, numbers, *problem.data()))
    done = call(command, input=data, env={**os.environ, "TQ_SIMD": level})
    assert done.stderr.decode().splitlines()[-1] == level, "another level ran"
    return np.frombuffer(done.stdout, "<f4").reshape(problem.n_rows, problem.head_v)


def check(command: list, problem: Problem, level: str) -> None:
    found, want = attend(command, problem, level), expected(problem)
    assert np.isfinite(found).all()
    assert ((found - want) ** 2).sum() <= MAX_NMSE * (want**2).sum()
    if problem.n_rows > 1:
        assert not found[-1].any(), "a row that sees no key must give zeros"


@pytest.fixture
def native_level(level) -> str:
    if level not in kernels.simd_levels():
        pytest.skip(f"this CPU cannot run {level}; it has {', '.join(kernels.simd_levels())}")
    return level


@EACH_PROBLEM
@EACH_LEVEL
def test_every_level(native_tools, native_level, problem):
    check([native_tools / "tq_attn_tool"], problem, native_level)


@EACH_PROBLEM
@EACH_LEVEL
def test_every_level_under_the_sanitizers(sanitized_tools, native_level, problem):
    check([sanitized_tools / "tq_attn_tool"], problem, native_level)


@EACH_PROBLEM
@pytest.mark.parametrize(
    ("cpu", "level"), [("cortex-a72", "neon"), ("neoverse-n1", "dotprod"), ("neoverse-n1", "scalar")]
)
def test_emulated_arm(arm_tools, cpu, level, problem):
    check([QEMU, "-cpu", cpu, arm_tools / "tq_attn_tool"], problem, level)
