"""Small models with random weights of llama.cpp's architectures: a tq cache is as close to f16 as q4_0 is, or refused.

llama.cpp's test-llama-archs writes them; ``TQ_TEST_ALL_MODELS=1`` takes all that it knows, about 130.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from raw_context import Config, RawContext
from test_llama_cpp_tests import run

from tq_ggml import Llama
from tq_ggml.engine import Model
from tq_ggml.errors import CacheTypeError, EngineError

ARCHITECTURES = {
    "qwen3": "one KV head",
    "muse-glimmer": "two query heads share one",
    "phi2": "part of a head turns",
    "gemma2": "sliding window, soft-cap",
    "gemma3": "sliding window",
    "gpt-oss": "sinks, sliding window",
    "mimo2": "sinks, heads of several sizes",
    "llama4": "layers without RoPE, chunks",
    "deepseek2": "latent attention, 576/512",
    "deepseek4": "compressed, one KV head",
    "glm5-next": "latent attention without RoPE, hybrid",
    "minicpm3": "latent attention, unfolded",
    "bloom": "ALiBi",
    "gpt2": "learned positions",
    "hrm_text": "layers that loop",
    "jamba": "hybrid: Mamba",
    "nemotron_h": "hybrid: Mamba 2",
    "lfm2": "hybrid: convolutions",
    "qwen35": "hybrid: delta net",
    "kimi-linear": "hybrid: latent and linear attention",
    "mamba": "recurrent: no KV cache",
}
REFUSED = {
    "laguna": (CacheTypeError, "the key head size 80 of .* is not a multiple of 32"),
    "grok": (EngineError, "quantized V cache requires flash_attn"),
}
# Times the error of q4_0: tq3 has a bit less for each value, which is four times the error to begin with.
TIMES_Q4_0 = {"tq4": 2, "tq3": 10}
# Where the pinned llama.cpp says that it cannot shift, and where a shift aborts: with any quantised type (q4_0 and q8_0
# too), and with f16 as well.
CANNOT_SHIFT = ("deepseek4", "qwen35")
SHIFT_ABORTS = ("deepseek2", "lfm2")
WITHOUT_CACHE = ("mamba", "mamba2")
# Diffusion models, which see the batch alone.
WITHOUT_PAST = ("dream", "llada", "llada-moe", "rnd1")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("architectures")
    wanted = "." if os.environ.get("TQ_TEST_ALL_MODELS") else "|".join(f"^{name}$" for name in NAMES)
    # With a larger deviation than its own 0.1, attention has a say in what the model answers.
    run("test-llama-archs", "-s", "1", "-d", "0.3", "-a", wanted, "-o", str(folder))
    return {re.sub("-(dense|moe)$", "", path.stem): path for path in folder.glob("*.gguf")}


NAMES = [*ARCHITECTURES, *REFUSED]


def answers(model: Model, types: str, *, shift: bool) -> np.ndarray:
    """Log-probabilities of a prefill and of single tokens after it; with ``shift``, of a moved cache."""
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, 112)
    with RawContext(model, Config(types, "off", 0.0), n_ubatch=128) as ctx:
        rows = ctx.decode(tokens[:96])
        if shift:
            ctx.forget(4, 20)
        return np.concatenate([rows, *(ctx.decode([token], ctx.end()) for token in tokens[96:])])


def error(expected: np.ndarray, found: np.ndarray) -> float:
    assert np.isfinite(found).all()
    return float(np.mean((found - expected) ** 2) / np.var(expected, axis=-1).mean())


def check(path: Path, name: str, *, shift: bool) -> None:
    with Model(path) as model:
        expected = answers(model, "f16", shift=shift)
        allowed = error(expected, answers(model, "q4_0", shift=shift))
        for types, times in TIMES_Q4_0.items():
            found = error(expected, answers(model, types, shift=shift))
            if name in (*WITHOUT_CACHE, *WITHOUT_PAST):
                assert found == 0
            else:
                assert 0 < found < times * allowed, f"{name} with {types}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(models, name):
    check(models[name], name, shift=False)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in (*CANNOT_SHIFT, *SHIFT_ABORTS)])
def test_context_shift(models, name):
    check(models[name], name, shift=True)


@pytest.mark.parametrize("name", CANNOT_SHIFT)
def test_llama_cpp_says_that_it_cannot_shift(models, name):
    with Model(models[name]) as model, RawContext(model, Config("tq4", "off", 0.0)) as ctx:
        assert not ctx.api.llama_memory_can_shift(ctx.memory)


@pytest.mark.skipif(not os.environ.get("TQ_TEST_ALL_MODELS"), reason="all architectures: TQ_TEST_ALL_MODELS=1")
def test_every_architecture(models):
    others = {name: path for name, path in models.items() if name not in NAMES}
    assert len(others) > 90
    for name, path in others.items():
        check(path, name, shift=False)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(models, name):
    kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        Llama(models[name], n_ctx=256, cache_type="tq4", calibration="off")


def test_mixed_types_of_latent_attention_are_refused(models):
    with pytest.raises(EngineError, match="does not support different K"):
        Llama(models["deepseek2"], n_ctx=256, cache_type="q8_0/tq4", calibration="off")
