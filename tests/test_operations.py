"""Everything a KV cache is asked to do, with tq types: close to the same run over an f16 cache, and where the cache's
bytes are the same, the same answer to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from raw_context import CONFIGS, F16, TEXT, Config, RawContext, divergence

from tq_ggml import Llama
from tq_ggml.engine import Model

OTHER_TEXT = "A compiler reads a program and writes another one, which does the same thing in the machine's language."


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Model(smollm2_path) as model:
        yield model


# ---- what is done to a cache ---------------------------------------------------------------------------------------

Scenario = Callable[[RawContext, np.ndarray, np.ndarray], np.ndarray]
"""A context, the tokens of two texts; log-probabilities after the last `N`."""
N = 16


def plain(ctx, a, _b):
    return ctx.decode(a)


def one_shift(ctx, a, _b):
    ctx.decode(a[:-N])
    ctx.forget(4, 36)
    return ctx.decode(a[-N:], ctx.end())


def several_shifts(ctx, a, _b):
    ctx.decode(a[:40])
    for start in range(40, len(a) - N, 8):
        ctx.forget(4, 12)
        ctx.decode(a[start : min(start + 8, len(a) - N)], ctx.end())
    return ctx.decode(a[-N:], ctx.end())


def shift_to_the_right(ctx, a, _b):
    """A gap is opened, and stays."""
    ctx.decode(a[:-N])
    ctx.api.llama_memory_seq_add(ctx.memory, 0, 4, -1, 50)
    return ctx.decode(a[-N:], ctx.end())


def reused_prefix(ctx, a, b):
    ctx.decode(a)
    assert ctx.api.llama_memory_seq_rm(ctx.memory, 0, 20, -1)
    return ctx.decode(b[1:], 20)


def copied_sequence(ctx, a, b):
    ctx.decode(a[:30])
    ctx.api.llama_memory_seq_cp(ctx.memory, 0, 1, -1, -1)
    ctx.decode(a[30:], 30, [0])
    return ctx.decode(b[1:], 30, [1])


def shared_then_kept(ctx, a, b):
    ctx.decode(a[:30], 0, [0, 1])
    ctx.decode(b[1:], 30, [1])
    ctx.api.llama_memory_seq_keep(ctx.memory, 0)
    assert ctx.end(1) == 0
    return ctx.decode(a[30:], 30, [0])


def shift_of_a_copy(ctx, a, b):
    """The cells are shared, so only those that one sequence has to itself may move; here that is all."""
    ctx.decode(a[:-N], 0, [0])
    ctx.decode(b, 0, [1])
    assert ctx.api.llama_memory_seq_rm(ctx.memory, 0, -1, -1)
    ctx.forget(1, 4, 1)
    return ctx.decode(a[:20], ctx.end(1), [1])


def mixed_batch(ctx, a, b):
    n = min(len(a), len(b))
    return ctx.batch([(int(t[i]), i, [s]) for i in range(n) for s, t in enumerate((a, b))])


def cleared(ctx, a, b):
    ctx.decode(b)
    ctx.api.llama_memory_clear(ctx.memory, False)
    return ctx.decode(a)


def moved_by_state(ctx, a, _b):
    ctx.decode(a[:-N])
    ctx.forget(4, 20)
    state = ctx.save(0)
    assert ctx.load(state, 1)
    ctx.api.llama_memory_seq_rm(ctx.memory, 0, -1, -1)
    ctx.forget(4, 20, 1)
    return ctx.decode(a[-1:], ctx.end(1), [1])


UNIFIED = {"n_seq_max": 2, "kv_unified": True}
SPLIT = {"n_seq_max": 2, "kv_unified": False, "n_ctx": 512}
SCENARIOS = {
    "plain": (plain, {}),
    "one shift": (one_shift, {}),
    "several shifts": (several_shifts, {}),
    "a shift to the right": (shift_to_the_right, {}),
    "a reused prefix": (reused_prefix, {}),
    "a copied sequence": (copied_sequence, UNIFIED),
    "a copied sequence, split": (copied_sequence, SPLIT),
    "a shared prefix, then one kept": (shared_then_kept, UNIFIED),
    "shift of one of two": (shift_of_a_copy, UNIFIED),
    "shift of one of two, split": (shift_of_a_copy, SPLIT),
    "a batch of two": (mixed_batch, UNIFIED),
    "a batch of two, split": (mixed_batch, SPLIT),
    "cleared": (cleared, {}),
    "moved by a state between shifts": (moved_by_state, UNIFIED),
    "moved by a state, split": (moved_by_state, SPLIT),
    "cache off the device": (one_shift, {"offload_kqv": False}),
}


def answer(model: Model, config: Config, name: str) -> np.ndarray:
    scenario, params = SCENARIOS[name]
    texts = [model.tokenize(text, add_bos=True) for text in (TEXT, OTHER_TEXT)]
    with RawContext(model, config, **params) as ctx:
        return scenario(ctx, *texts)


@pytest.fixture(scope="module", params=SCENARIOS)
def in_f16(request, model):
    return request.param, answer(model, F16, request.param)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_operation(model, in_f16, config):
    name, expected = in_f16
    assert 0 < divergence(expected, answer(model, config, name)) < config.bound


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_shift_without_llama_cpps_rotation(model, config, monkeypatch):
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    expected = answer(model, F16, "several shifts")
    assert divergence(expected, answer(model, config, "several shifts")) < config.bound


# ---- how it is run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=str)
@pytest.mark.parametrize("n_batch", [1, 7, 64, 500, 2048])
def test_batch_sizes(model, config, n_batch):
    """Which tokens come together decides on the order of sums, and on whether a key is seen before it is quantised."""
    tokens = model.tokenize(TEXT * 6, add_bos=True)
    whole = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 512}
    with RawContext(model, config, **whole) as ctx:
        expected = ctx.decode(tokens)
    with RawContext(model, config, n_ctx=1024, n_batch=n_batch, n_ubatch=n_batch) as ctx:
        parts = [ctx.decode(tokens[start : start + n_batch], start) for start in range(0, len(tokens), n_batch)]
    assert divergence(expected, np.concatenate(parts)) < config.bound / 3


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=str)
@pytest.mark.parametrize("n_threads", [1, 2, 3, 5, 8])
def test_threads(model, config, n_threads):
    tokens = model.tokenize(TEXT, add_bos=True)
    with RawContext(model, config) as ctx:
        expected = ctx.decode(tokens)
    with RawContext(model, config, n_threads=n_threads, n_threads_batch=n_threads) as ctx:
        ctx.decode(tokens[:-N])
        found = ctx.decode(tokens[-N:], len(tokens) - N)
    assert divergence(expected[-N:], found) < 0.01


def test_warm_up_leaves_no_trace(model):
    tokens = model.tokenize(TEXT, add_bos=True)
    answers = []
    for warm in (False, True):
        with RawContext(model, CONFIGS[0]) as ctx:
            if warm:
                ctx.api.llama_set_warmup(ctx.ctx, True)
                ctx.decode([1, 2])
                ctx.api.llama_memory_clear(ctx.memory, True)
                ctx.api.llama_set_warmup(ctx.ctx, False)
            answers.append(ctx.decode(tokens))
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("options", [{"use_mmap": False}, {"offload_kqv": False}, {"swa_full": False}], ids=str)
def test_loading_options(smollm2_path, options):
    assert generate(smollm2_path, "tq4", **options) == generate(smollm2_path, "tq4")


# ---- what llama-cpp-python does with it ----------------------------------------------------------------------------

PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


def generate(path: Path, cache_type: str, *prompts: str, **options) -> list[str]:
    with_cache = options.pop("cache", None)
    llama = Llama(path, n_ctx=512, cache_type=cache_type, **options)
    if with_cache:
        llama.set_cache(with_cache)
    try:
        return [llama(p, max_tokens=24, temperature=0)["choices"][0]["text"] for p in prompts or (PROMPT,)]
    finally:
        llama.close()


@pytest.mark.parametrize("cache_type", ["tq4", "tq3"])
def test_prompt_lookup_decoding_changes_nothing(smollm2_path, cache_type):
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = PROMPT + " Madrid. " + PROMPT
    expected = generate(smollm2_path, cache_type, prompt)
    drafted = []

    class Draft(LlamaPromptLookupDecoding):
        def __call__(self, input_ids, /, **kwargs):
            drafted.append(found := super().__call__(input_ids, **kwargs))
            return found

    assert generate(smollm2_path, cache_type, prompt, draft_model=Draft(num_pred_tokens=6)) == expected
    assert sum(map(len, drafted)) > 20


@pytest.mark.parametrize("kind", ["RAM", "disk"])
def test_prompt_caches(smollm2_path, kind, tmp_path, capfd):
    """A prompt, something else, then the prompt again, from the cache."""
    from llama_cpp import llama_cache

    def new():
        return llama_cache.LlamaRAMCache() if kind == "RAM" else llama_cache.LlamaDiskCache(str(tmp_path))

    prompts = (PROMPT, "Once upon a time", PROMPT, PROMPT + " Madrid, and")
    assert generate(smollm2_path, "tq4", *prompts, cache=new()) == generate(smollm2_path, "tq4", *prompts)


def test_a_prompt_cache_of_another_type_is_refused(smollm2_path, tmp_path, capfd):
    from llama_cpp.llama_cache import LlamaDiskCache

    from tq_ggml.errors import EngineError

    expected = generate(smollm2_path, "tq4", "Once upon a time")
    generate(smollm2_path, "tq3", PROMPT, cache=LlamaDiskCache(str(tmp_path)))
    llama = Llama(smollm2_path, n_ctx=512, cache_type="tq4")
    llama.set_cache(LlamaDiskCache(str(tmp_path)))
    llama("Once upon a", max_tokens=1)
    with pytest.raises(EngineError, match="saved with tq3 keys and tq3 values, and this context has tq4"):
        llama(PROMPT, max_tokens=8)
    assert [llama("Once upon a time", max_tokens=24, temperature=0)["choices"][0]["text"]] == expected
    llama.close()


def test_states_of_llama(smollm2_path):
    from tq_ggml.errors import EngineError

    def logits(llama, token):
        llama.eval([token])
        return np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),)).copy()

    llama = Llama(smollm2_path, n_ctx=512, cache_type="tq4")
    llama.eval(llama.tokenize(TEXT.encode()))
    state = llama.save_state()
    expected = logits(llama, 5)
    llama.load_state(state)
    np.testing.assert_array_equal(logits(llama, 5), expected)
    llama.load_state(state)
    others = {"tq3 keys": {"cache_type": "tq3"}, "n_ctx=1024": {"n_ctx": 1024}, "another n_batch": {"n_batch": 64}}
    for reason, other in others.items():
        wrong = Llama(smollm2_path, **{"n_ctx": 512, "cache_type": "tq4", **other})
        wrong.eval(wrong.tokenize(TEXT.encode()))
        with pytest.raises(EngineError, match=reason):
            llama.load_state(wrong.save_state())
        wrong.close()
    np.testing.assert_array_equal(logits(llama, 5), expected)
    state.llama_state = state.llama_state[:-100]
    with pytest.raises(EngineError, match="the state is refused"):
        llama.load_state(state)
    assert llama.n_tokens == 0
    assert llama("The capital of France is", max_tokens=4, temperature=0)["choices"][0]["text"].startswith(" Paris")
    llama.close()


@pytest.mark.parametrize("cache_type", ["tq4", "tq3", "q8_0/tq4"])
def test_embeddings(smollm2_path, cache_type):
    texts = [TEXT, OTHER_TEXT]
    found = {}
    for each in ("f16", cache_type):
        llama = Llama(smollm2_path, n_ctx=512, n_batch=512, embedding=True, cache_type=each)
        found[each] = [np.mean(llama.embed(text, normalize=True), axis=0) for text in texts]  # a row for each token
        llama.close()
    for expected, vector in zip(found["f16"], found[cache_type], strict=True):
        similarity = expected @ vector / np.linalg.norm(expected) / np.linalg.norm(vector)
        assert 0.99 < similarity < 1


# ---- LoRA ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """A LoRA of random weights on the keys and values of every layer."""
    path = tmp_path_factory.mktemp("lora") / "adapter.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    rng, rank = np.random.default_rng(3), 4
    n_embd = int(model._llama_cpp.llama_model_n_embd(model._model))
    for layer in range(30):
        for part in ("attn_k", "attn_v"):
            width = 3 * 64
            name = f"blk.{layer}.{part}.weight"
            writer.add_tensor(f"{name}.lora_a", rng.normal(0, 0.02, (rank, n_embd)).astype(np.float32))
            writer.add_tensor(f"{name}.lora_b", rng.normal(0, 0.02, (width, rank)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_adapter(model: Model, config: Config, adapter: Path | None) -> np.ndarray:
    import ctypes

    api = model._llama_cpp
    with RawContext(model, config) as ctx:
        lora = None
        if adapter:
            lora = api.llama_adapter_lora_init(model._model, bytes(adapter))
            assert lora
            adapters = (api.llama_adapter_lora_p_ctypes * 1)(lora)
            assert api.llama_set_adapters_lora(ctx.ctx, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0
        found = several_shifts(ctx, model.tokenize(TEXT, add_bos=True), None)
        if lora:
            api.llama_adapter_lora_free(lora)
        return found


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_lora(model, adapter, config):
    """The keys are not those that were calibrated, which may cost quality and nothing else."""
    expected = with_adapter(model, F16, adapter)
    assert divergence(expected, with_adapter(model, F16, None)) > 0.001
    assert divergence(expected, with_adapter(model, config, adapter)) < 2 * config.bound
