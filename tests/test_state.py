"""Saved caches: a restored one goes on identically, and one of anything else is refused and changes nothing."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from raw_context import CONFIGS, F16, TEXT, Config, RawContext, divergence

from tq_ggml.engine import Model
from tq_ggml.library import engine_log

TQ4 = Config("tq4", "on", 0.0)
PLAIN = Config("tq4", "off", 0.0)


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Model(smollm2_path) as model:
        yield model


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenize(TEXT, add_bos=True)


@pytest.mark.parametrize("config", [F16, *CONFIGS], ids=str)
@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_a_restored_cache_goes_on_identically(model, tokens, config, sequence, tmp_path):
    with RawContext(model, config) as saved:
        saved.decode(tokens[:-1])
        state = saved.save(sequence)
        assert saved.save_file(tmp_path / "state", tokens[:-1], sequence)
        expected = saved.decode(tokens[-1:], len(tokens) - 1)
    with RawContext(model, config) as restored:
        assert restored.load(state, sequence)
        np.testing.assert_array_equal(restored.decode(tokens[-1:], len(tokens) - 1), expected)
    with RawContext(model, config) as restored:
        assert restored.load_file(tmp_path / "state", sequence) == tokens[:-1].tolist()
        np.testing.assert_array_equal(restored.decode(tokens[-1:], len(tokens) - 1), expected)
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("unified", [True, False], ids=["one stream", "a stream each"])
def test_a_sequence_moves_to_another_one(model, tokens, config, unified):
    """Its cells are not where they were."""
    streams = {"n_seq_max": 3, "kv_unified": unified, "n_ctx": 768}
    with RawContext(model, config, **streams) as ctx:
        ctx.decode(tokens[:20], 0, [1])
        ctx.decode(tokens[:-1], 0, [0])
        state = ctx.save(0)
        expected = ctx.decode(tokens[-1:], len(tokens) - 1, [0])
        assert ctx.load(state, 2)
        found = ctx.decode(tokens[-1:], len(tokens) - 1, [2])
    # Among others' cells sums have another order.
    assert divergence(expected, found) <= (0.01 if unified else 0)


@pytest.mark.parametrize("config", [F16, CONFIGS[0]], ids=str)
@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_a_shift_that_the_cache_has_put_off_is_in_the_state(model, tokens, config, sequence):
    """Unpatched, llama.cpp saves the new positions with the old keys."""
    with RawContext(model, config) as saved, RawContext(model, config) as restored:
        saved.decode(tokens[:-1])
        saved.forget(4, 30)
        assert restored.load(saved.save(sequence), sequence)
        found = restored.decode(tokens[-1:], restored.end())
        assert divergence(saved.decode(tokens[-1:], saved.end()), found) < 0.01  # cells may lie elsewhere


STREAMS = {"n_seq_max": 2, "kv_unified": False, "n_ctx": 512}


@pytest.mark.parametrize("config", [F16, CONFIGS[0]], ids=str)
def test_a_copy_that_the_cache_has_put_off_is_in_the_state(model, tokens, config):
    with RawContext(model, config, **STREAMS) as ctx:
        ctx.decode(tokens[:-1])
        ctx.api.llama_memory_seq_cp(ctx.memory, 0, 1, -1, -1)
        copy = ctx.save(1)
        expected = ctx.decode(tokens[-1:], len(tokens) - 1)
        assert ctx.load(copy, 1)
        np.testing.assert_array_equal(ctx.decode(tokens[-1:], len(tokens) - 1, [1]), expected)


@pytest.mark.parametrize("config", [F16, CONFIGS[0]], ids=str)
def test_a_copy_that_the_cache_has_put_off_spares_what_is_restored(model, tokens, config):
    with RawContext(model, config, **STREAMS) as ctx:
        ctx.decode(tokens[:-1])
        state = ctx.save(0)
        expected = ctx.decode(tokens[-1:], len(tokens) - 1)
        ctx.decode([5] * (len(tokens) - 1), 0, [1])
        ctx.api.llama_memory_seq_cp(ctx.memory, 1, 0, -1, -1)
        assert ctx.load(state, 0)
        np.testing.assert_array_equal(ctx.decode(tokens[-1:], len(tokens) - 1), expected)


# ---- refused -------------------------------------------------------------------------------------------------------


class Running:
    """A context in the middle of a text, which must not notice a refused state."""

    def __init__(self, ctx: RawContext, tokens: np.ndarray) -> None:
        self.ctx, self.tokens = ctx, tokens
        ctx.decode(tokens[:-1])
        self.expected = self._next()

    def _next(self) -> np.ndarray:
        last = len(self.tokens) - 1
        assert self.ctx.end() in (last, last + 1)
        assert self.ctx.api.llama_memory_seq_rm(self.ctx.memory, 0, last, -1)
        return self.ctx.decode(self.tokens[-1:], last)

    def refuses(self, state: bytes | Path, reason: str, sequence: int | None = None) -> None:
        taken = self.ctx.load_file(state, sequence) if isinstance(state, Path) else self.ctx.load(state, sequence)
        assert not taken
        assert reason in engine_log.reason()
        np.testing.assert_array_equal(self._next(), self.expected)


@pytest.fixture(scope="module")
def running(model, tokens):
    with RawContext(model, TQ4) as ctx:
        yield Running(ctx, tokens)


@pytest.fixture(scope="module")
def files(model, tokens, tmp_path_factory):
    """What a context of the same kind as `running` saves, by sequence."""
    folder = tmp_path_factory.mktemp("states")
    with RawContext(model, TQ4) as ctx:
        ctx.decode(tokens)
        for name, sequence in (("whole", None), ("sequence", 0)):
            assert ctx.save_file(folder / name, tokens, sequence)
    return {None: folder / "whole", 0: folder / "sequence"}


@pytest.mark.parametrize(
    ("other", "params", "reason"),
    [
        (Config("tq3", "on", 0), {}, "saved with tq3 keys and tq3 values, and this context has tq4"),
        (Config("tq4/q8_0", "off", 0), {}, "saved with tq4 keys and q8_0 values"),
        (PLAIN, {}, "saved with another calibration"),
        (TQ4, {"n_ctx": 512}, "or one for another context length"),
        (TQ4, {"rope_freq_base": 5e5}, "saved with other RoPE settings"),
    ],
)
@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_another_context_is_refused(model, tokens, running, other, params, reason, sequence, tmp_path):
    with RawContext(model, other, **params) as ctx:
        ctx.decode(tokens)
        state = ctx.save(sequence)
        assert ctx.save_file(tmp_path / "state", tokens, sequence)
    running.refuses(state, reason, sequence)
    running.refuses(tmp_path / "state", reason, sequence)


def test_a_longer_context_takes_unconditioned_states(model, tokens):
    with RawContext(model, PLAIN) as ctx:
        ctx.decode(tokens[:-1])
        state = ctx.save()
    with RawContext(model, PLAIN, n_ctx=512) as ctx:
        assert ctx.load(state)
        assert ctx.end() == len(tokens) - 1


@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_another_rotation_is_refused(model, tokens, monkeypatch, sequence):
    """Unpatched, llama.cpp takes it and answers nonsense."""
    q8_0 = Config("q8_0", "off", 0)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    with RawContext(model, q8_0) as ctx:
        ctx.decode(tokens)
        state = ctx.save(sequence)
    monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE")
    with RawContext(model, q8_0) as ctx:
        Running(ctx, tokens).refuses(state, "saved with another rotation of keys", sequence)


def test_another_model_is_refused(tiny_gguf, tmp_path):
    """Also one of the same shape, of which a single weight differs."""
    path = tiny_gguf()
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 64 * 1024):  # more than one tensor, its middle too
        data[at] ^= 1
    (other := tmp_path / "other.gguf").write_bytes(data)
    with Model(other) as model, RawContext(model, PLAIN) as ctx:
        ctx.decode(range(10))
        state = ctx.save()
    with Model(path) as model, RawContext(model, PLAIN) as ctx:
        Running(ctx, np.arange(10)).refuses(state, "saved with another model")


def test_a_calibrated_copy_is_the_same_model(model, calibrated_path, tokens):
    config = Config("tq4", str(calibrated_path), 0)
    with Model(calibrated_path) as copy, RawContext(copy, config) as there, RawContext(model, config) as here:
        there.decode(tokens)
        assert here.load(there.save())


FOREIGN = {"empty": b"", "short": b"ggsn", "text": b"hello, this is no state at all, but long enough\n" * 100}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_foreign_files_are_refused(running, data, sequence, tmp_path):
    (path := tmp_path / "state").write_bytes(data)
    running.refuses(path, "cut short, or was not saved by tq-ggml's llama.cpp", sequence)


@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_files_of_the_other_kind_and_missing_ones_are_refused(running, files, sequence, smollm2_path, tmp_path):
    running.refuses(files[0 if sequence is None else None], "(magic, version)", sequence)
    running.refuses(smollm2_path, "not saved by tq-ggml's llama.cpp", sequence)
    running.refuses(tmp_path / "missing", "cannot be read", sequence)
    running.refuses(tmp_path, "", sequence)


@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_truncated_and_damaged_files_are_refused(running, files, sequence, tmp_path):
    whole, rng = files[sequence].read_bytes(), random.Random(7)
    path = tmp_path / "state"
    for n in [*range(0, 200, 7), *(rng.randrange(len(whole)) for _ in range(20)), len(whole) - 1]:
        path.write_bytes(whole[:n])
        running.refuses(path, "cut short", sequence)
    for at in [*range(0, 200, 5), *(rng.randrange(len(whole)) for _ in range(40))]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        running.refuses(path, "damaged" if at < len(whole) - 8 else "cut short", sequence)


@pytest.mark.parametrize("sequence", [None, 0], ids=["whole", "sequence"])
def test_truncated_memory_is_refused(model, tokens, running, sequence):
    """What is cut before the cells changes nothing; what is cut later leaves an empty cache that works."""
    state = running.ctx.save(sequence)
    for n in range(1, 64, 9):
        running.refuses(state[:n], "", sequence)
    with RawContext(model, TQ4) as ctx:
        for n in range(len(state) - 1, 100, -len(state) // 7):
            ctx.decode(tokens[:-1])
            assert not ctx.load(state[:n], sequence)
            assert ctx.end() == 0
        ctx.decode(tokens[:-1])
        assert np.array_equal(ctx.decode(tokens[-1:], len(tokens) - 1), running.expected)


# ---- files are written whole ---------------------------------------------------------------------------------------

SAVES_FOREVER = """
import sys
sys.path.insert(0, {tests!r})
from test_state import *
with Model({model!r}) as model, RawContext(model, PLAIN, n_ctx=4096) as ctx:
    for i in range(8):
        ctx.decode([1000 + i] * 256, 256 * i)
    while ctx.save_file(Path({path!r}), range(10)):
        print("saved", flush=True)
    print(engine_log.reason())
"""


def start_saving(model: Model, path: Path, **options) -> subprocess.Popen:
    code = SAVES_FOREVER.format(tests=os.path.dirname(__file__), model=str(model.path), path=str(path))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **options)


def test_a_killed_save_leaves_the_last_whole_file(model, tmp_path):
    path = tmp_path / "state"
    for delay in (0.0, 0.001, 0.003, 0.007):
        with start_saving(model, path) as process:
            assert process.stdout.readline() == "saved\n"
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        with RawContext(model, PLAIN, n_ctx=4096) as ctx:
            assert ctx.load_file(path) == list(range(10))
            assert ctx.end() == 2048
            assert ctx.save_file(path, [1])
        assert os.listdir(tmp_path) == ["state"]


def test_a_file_that_does_not_fit_leaves_the_old_one(model, tmp_path):
    """As on a full disk: files may not grow past a megabyte here."""
    (path := tmp_path / "state").write_text("precious")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with start_saving(model, path, preexec_fn=limit) as process:
        output = process.stdout.read()
    assert "saved" not in output and "error saving session file" in output
    assert path.read_text() == "precious" and os.listdir(tmp_path) == ["state"]
