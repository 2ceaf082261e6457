"""Rows of keys and queries that take every path of the codec's rows, for the tests that run tests/tq_codec_tool.c."""

from __future__ import annotations

import numpy as np

from tq_ggml import reference as ref

ROW = 128
BLOCKS = ROW // ref.BLOCK
BLOCK_BYTES = {"tq3": 14, "tq4": 18}


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
    """Scales within rounding errors of half the smallest fp16, below which a block becomes zeros."""
    rng = np.random.default_rng(14)
    x = rng.standard_normal((1024, ref.BLOCK)).astype(np.float32)
    scales = ref.quantize(x, "tq4")[:, :2].copy().view("<f2").astype(np.float64)
    near = 1 + np.repeat([1e-3, 0.3], len(x) // 2)[:, None] * rng.uniform(-1, 1, (len(x), 1))
    return (x * (2.0**-25 / scales * near)).astype(np.float32).reshape(-1, ROW)


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
    "subnormal scales": lambda: scaled(256, -9, -4, 10),  # and around those that round to 0
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


def queries_for_blocks(rows: int) -> np.ndarray:
    """Queries at the limits of int8, for keys that are given as blocks."""
    queries = gaussian(rows, 12)
    queries[::2] = ref.unrotate(np.sign(queries[::2]))  # all int8 +-127
    queries[1] = queries[3] = ref.unrotate(np.ones(ROW, np.float32))  # every product the largest there is
    return queries
