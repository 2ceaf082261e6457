"""A llama.cpp context with everything that its API can do to a cache: sequences, positions, streams, states."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tq_ggml.cache_types import parse_pair, resolve
from tq_ggml.calibration import choose
from tq_ggml.conditioning import conditioned, conditioned_layers
from tq_ggml.engine import Model
from tq_ggml.evaluation import log_softmax
from tq_ggml.library import engine_log

TEXT = (
    "The sea was calm, and the old harbour lay asleep under a pale moon while the boats rocked gently at their ropes. "
    "On the quay a clerk counted barrels of salt, wrote a number in his ledger, crossed it out and began again. He "
    "had three daughters in Lisbon, none of whom answered letters, and a debt to the apothecary that grew by the "
    "week. When the customs bell rang he lit a second lamp, though oil was dear, because the captain of the last ship "
    "was known to lie."
)


@dataclass(frozen=True)
class Config:
    """A cache, and how far from f16 the next token's probabilities may be (KL divergence)."""

    types: str
    calibration: str
    bound: float

    def __str__(self) -> str:
        return f"{self.types} {'plain' if self.calibration == 'off' else 'conditioned'}"


F16 = Config("f16", "off", 0.0)
CONFIGS = [
    Config("tq4", "on", 0.03),
    Config("tq4", "off", 0.12),
    Config("tq3", "on", 0.08),
    Config("tq3", "off", 0.4),
    Config("tq4/tq3", "on", 0.06),
    Config("q8_0/tq4", "off", 0.03),
]


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """KL divergence in nats of rows of log-probabilities, their mean."""
    return float(np.mean(np.sum(np.exp(expected) * (expected - found), axis=-1)))


class RawContext:
    """``params`` are fields of llama_context_params."""

    def __init__(self, model: Model, config: Config, **params: Any) -> None:
        self.model, self.api = model, model._llama_cpp
        wanted = self.api.llama_context_default_params()
        type_k, type_v = parse_pair(config.types)
        wanted.type_k, wanted.type_v = resolve(type_k).ggml_id, resolve(type_v or type_k).ggml_id
        wanted.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        wanted.n_threads = wanted.n_threads_batch = os.cpu_count() or 1
        for name, value in {"n_ctx": 256, **params}.items():
            assert hasattr(wanted, name)
            setattr(wanted, name, value)
        chosen = choose(config.calibration, model.info, [resolve(type_k)])
        with conditioned(chosen and chosen.constants_for(resolve(type_k))):
            self.ctx = self.api.llama_init_from_model(model._model, wanted)
        assert self.ctx, engine_log.reason()
        assert (conditioned_layers(self.ctx).positional > 0) == (config.calibration != "off")
        self.memory = self.api.llama_get_memory(self.ctx)

    def __enter__(self) -> RawContext:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.api.llama_free(self.ctx)

    def decode(self, tokens: Sequence[int], pos: int = 0, sequences: Iterable[int] = (0,)) -> np.ndarray:
        """Tokens in all the sequences, from a position on; log-probabilities after each, float32 (n, n_vocab)."""
        return self.batch([(int(token), pos + i, list(sequences)) for i, token in enumerate(tokens)])

    def batch(self, entries: list[tuple[int, int, list[int]]]) -> np.ndarray:
        """One call of llama_decode."""
        batch = self.api.llama_batch_init(len(entries), 0, max(len(s) for _, _, s in entries))
        try:
            batch.n_tokens = len(entries)
            for i, (token, pos, sequences) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, pos, True
                batch.n_seq_id[i] = len(sequences)
                for j, sequence in enumerate(sequences):
                    batch.seq_id[i][j] = sequence
            assert self.api.llama_decode(self.ctx, batch) == 0
            rows = np.ctypeslib.as_array(self.api.llama_get_logits(self.ctx), shape=(len(entries), self.model.n_vocab))
            return np.array([log_softmax(row) for row in rows])
        finally:
            self.api.llama_batch_free(batch)

    def end(self, sequence: int = 0) -> int:
        """The position that comes next."""
        return self.api.llama_memory_seq_pos_max(self.memory, sequence) + 1

    def forget(self, first: int, last: int, sequence: int = 0) -> None:
        """Context shift: drop positions ``first`` to ``last`` - 1 and move what follows to their place."""
        end = self.end(sequence)
        assert self.api.llama_memory_can_shift(self.memory)
        assert self.api.llama_memory_seq_rm(self.memory, sequence, first, last)
        self.api.llama_memory_seq_add(self.memory, sequence, last, end, first - last)

    # States; None and False for what llama.cpp refuses.

    def save(self, sequence: int | None = None) -> bytes:
        if sequence is None:
            size = self.api.llama_state_get_size(self.ctx)
            data = (ctypes.c_uint8 * size)()
            n = self.api.llama_state_get_data(self.ctx, data, size)
        else:
            size = self.api.llama_state_seq_get_size(self.ctx, sequence)
            data = (ctypes.c_uint8 * size)()
            n = self.api.llama_state_seq_get_data(self.ctx, data, size, sequence)
        assert n == size
        return bytes(data)

    def load(self, state: bytes, sequence: int | None = None) -> bool:
        engine_log.clear()
        data = (ctypes.c_uint8 * max(len(state), 1)).from_buffer_copy(state or b"\0")
        if sequence is None:
            return self.api.llama_state_set_data(self.ctx, data, len(state)) == len(state)
        return self.api.llama_state_seq_set_data(self.ctx, data, len(state), sequence) == len(state)

    def save_file(self, path: Path, tokens: Sequence[int], sequence: int | None = None) -> bool:
        engine_log.clear()
        ids = (ctypes.c_int32 * len(tokens))(*map(int, tokens))
        if sequence is None:
            return bool(self.api.llama_state_save_file(self.ctx, os.fsencode(path), ids, len(tokens)))
        return bool(self.api.llama_state_seq_save_file(self.ctx, os.fsencode(path), sequence, ids, len(tokens)))

    def load_file(self, path: Path, sequence: int | None = None) -> list[int] | None:
        """Its tokens."""
        engine_log.clear()
        ids, n = (ctypes.c_int32 * 4096)(), ctypes.c_size_t(0)
        if sequence is None:
            taken = self.api.llama_state_load_file(self.ctx, os.fsencode(path), ids, 4096, ctypes.byref(n))
        else:
            taken = self.api.llama_state_seq_load_file(
                self.ctx, os.fsencode(path), sequence, ids, 4096, ctypes.byref(n)
            )
        return ids[: n.value] if taken else None
