"""A mean that was taken out of the keys by their positions: what attention must add back, and the table for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Mean(NamedTuple):
    n_rot: int
    is_neox: bool
    block_log2: int
    order: str  # of the positions
    n_used: int = 40  # blocks; of those behind them only the channels that do not turn have a mean
    n_unused: int = 1  # windows behind them: the last block is that of all positions beyond the table
    angles: tuple[float, float] = (1.0, 1e-4)  # radians per position of the first pair and of the last

    def __str__(self) -> str:
        pairs = "neox" if self.is_neox else "norm"
        return f"mean.{self.n_rot}.{pairs}.{1 << self.block_log2}.{self.order}.{self.n_fast} fast"

    @property
    def angle(self) -> np.ndarray:
        return np.geomspace(*self.angles, self.n_rot // 2)

    @property
    def n_fast(self) -> int:
        return int((self.angle * 16 * 2**self.block_log2 >= 0.5).sum())

    @property
    def n_blocks(self) -> int:
        """Of whole windows."""
        return 16 * (-(-self.n_used // 16) + self.n_unused)

    @property
    def parameters(self) -> tuple[int, ...]:
        """n_rot, n_fast, is_neox, positions of a block."""
        return self.n_rot, self.n_fast, int(self.is_neox), 1 << self.block_log2

    def turned(self, block: int) -> np.ndarray:
        """Radians that each pair has turned in the middle of a block, of slow pairs in that of its window."""
        size = 1 << self.block_log2
        window = block // 16 * 16 * size + (16 * size - 1) / 2
        middle = np.where(np.arange(self.angle.size) < self.n_fast, block * size + (size - 1) / 2, window)
        return self.angle * middle

    def used(self, block: int) -> np.ndarray:
        """Which pairs have a mean there: slow ones in the whole of a window that begins with a used block."""
        fast = np.arange(self.angle.size) < self.n_fast
        return np.where(fast, block < self.n_used, block // 16 * 16 < self.n_used)

    def table(self) -> np.ndarray:
        """float32 (n_windows, floats of a window), as tq_key_mean describes it; one float where nothing turns."""
        windows = []
        for first in range(0, self.n_blocks, 16):
            angles = np.array([self.turned(b) for b in range(first, first + 16)])
            used = np.array([self.used(b) for b in range(first, first + 16)])
            cosines, sines = np.cos(angles) * used, np.sin(angles) * used
            fast = np.concatenate([t[:, : self.n_fast].T.ravel() for t in (cosines, sines)])
            slow = np.concatenate([t[0, self.n_fast :] for t in (cosines, sines)])
            windows.append(np.concatenate([fast, slow, np.zeros(-slow.size % 16 if self.n_rot else 1)]))
        return np.array(windows, np.float32)

    def positions(self, n_keys: int, rng: np.random.Generator) -> np.ndarray:
        """int32 (n_keys,)."""
        return {
            "ordered": lambda: np.arange(n_keys),
            "later": lambda: np.arange(n_keys) + 77,
            "around 0": lambda: np.arange(n_keys) - 37,
            "shuffled": lambda: rng.permutation(n_keys),
            "sequences": lambda: np.arange(n_keys) % 50,
            "far": lambda: np.where(np.arange(n_keys) % 3, np.arange(n_keys) * 2**24 % 2**31, -1),
            "very far": lambda: np.arange(n_keys) + 2**30,
        }[self.order]().astype(np.int32)

    def at(self, positions: np.ndarray, mean: np.ndarray, crossed: np.ndarray, start: np.ndarray) -> np.ndarray:
        """What was taken out at positions, of tq_key_mean's arrays (head_k,): float64 (n_keys, head_k)."""
        half = np.arange(self.n_rot // 2)
        a, b = (half, half + half.size) if self.is_neox else (2 * half, 2 * half + 1)
        out = np.tile(mean.astype(np.float64), (len(positions), 1))
        for row, position in zip(out, positions, strict=True):
            block = position >> self.block_log2
            block = block if 0 <= block < self.n_blocks else self.n_blocks - 1
            angle, used = self.turned(block), self.used(block)
            cosine, sine = np.cos(angle) * used, np.sin(angle) * used
            row[a], row[b] = mean[a] * cosine - crossed[a] * sine, mean[b] * cosine + crossed[b] * sine
            if position == 0:
                row[:] = start
        return out
