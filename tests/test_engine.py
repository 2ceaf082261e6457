"""Model and Context on a real model: bytes as allocated, explicit positions, logits, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from tq_ggml.cache_types import CACHE_TYPES
from tq_ggml.engine import Model
from tq_ggml.errors import CacheTypeError, EngineError, TqError

PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is"


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Model(smollm2_path) as model:
        yield model


def test_what_the_model_says_of_itself(model):
    assert "llama" in model.description
    assert (model.n_params, model.n_vocab, model.n_ctx_train) == (134515008, 49152, 8192)
    assert (model.head_size_k, model.head_size_v) == (64, 64)
    assert model.bos is None  # the file has a BOS token, and says not to add it


def test_tokens_and_back(model):
    text = "Straße, naïve, 東京 and <|im_end|>"
    tokens = model.tokenize(text)
    assert tokens.dtype == np.int32 and tokens.ndim == 1
    assert model.detokenize(tokens) == text
    assert model.tokenize("").shape == (0,) and model.detokenize([]) == ""
    (end,) = model.tokenize("<|im_end|>", special=True)
    assert model.detokenize([end]) == "" and model.detokenize([end], special=True) == "<|im_end|>"
    assert model.detokenize(tokens[:1].repeat(1000)).count(model.detokenize(tokens[:1])) == 1000


def test_more_tokens_than_bytes(tiny_gguf):
    """BOS, the space that SentencePiece puts first, three bytes, EOS."""
    path = tiny_gguf(tokens=["\u2581", "<0xE6>", "<0xBC>", "<0xA2>"])
    with Model(path) as model:
        assert model.tokenize("漢", add_bos=True).tolist() == [1, 3, 4, 5, 6, 2]


@pytest.mark.parametrize("cache_type", CACHE_TYPES, ids=str)
def test_every_type_allocates_exactly_its_bits(model, cache_type):
    with model.context(cache_type, n_ctx=1024) as context:
        values = 30 * 3 * 64 * 1024  # layers x KV heads x head size x cells
        assert context.kv_bytes_k == context.kv_bytes_v == values * cache_type.bits_per_value / 8
        assert context.kv_bytes == 2 * context.kv_bytes_k
        assert (context.type_k, context.type_v, context.n_ctx) == (cache_type, cache_type, 1024)


@pytest.mark.parametrize(("name", "ratio"), [("tq4", 32 / 9), ("tq3", 32 / 7)])
def test_tq_bytes_against_f16(model, name, ratio):
    with model.context("f16", n_ctx=512) as f16, model.context(name, n_ctx=512) as tq:
        assert f16.kv_bytes / tq.kv_bytes == ratio


def test_keys_and_values_of_different_types(model):
    with model.context("q8_0", "turbo3", n_ctx=256) as context:
        assert (context.type_k.name, context.type_v.name) == ("q8_0", "tq3")
        assert context.kv_bytes_k / context.kv_bytes_v == 34 / 14


@pytest.mark.parametrize("name", ["f16", "q8_0", "tq4", "tq3"])
def test_logits_do_not_depend_on_how_tokens_are_split(model, name):
    tokens = model.tokenize(PROMPT)
    with model.context(name, n_ctx=256) as whole, model.context(name, n_ctx=256, n_batch=5) as parts:
        expected = whole.decode(tokens, 0, logits="all")
        assert expected.shape == (len(tokens), model.n_vocab) and expected.dtype == np.float32
        last = parts.decode(tokens, 0, logits="last")
        assert last.shape == (1, model.n_vocab)
        np.testing.assert_allclose(last[0], expected[-1], atol=0.5)
        assert last[0].argmax() == expected[-1].argmax()


@pytest.mark.parametrize("name", ["f16", "q8_0", "tq4"])
def test_greedy_continuation(model, name):
    tokens = model.tokenize(PROMPT)
    with model.context(name, n_ctx=256) as context:
        logits = context.decode(tokens, 0, logits="last")
        words = []
        for pos in range(len(tokens), len(tokens) + 3):
            words.append(int(logits[0].argmax()))
            logits = context.decode(words[-1:], pos, logits="last")
    assert model.detokenize(words).startswith(" Berlin.")


def test_going_back_replaces_what_followed(model):
    tokens = model.tokenize(PROMPT)
    with model.context("tq4", n_ctx=256) as context:
        assert context.decode(tokens, 0) is None
        straight = context.decode(tokens[-4:], len(tokens) - 4, logits="last").copy()
        context.decode(tokens[:9], len(tokens) - 4)
        again = context.decode(tokens[-4:], len(tokens) - 4, logits="last")
        np.testing.assert_array_equal(again, straight)


def test_clear_forgets(model):
    tokens = model.tokenize(PROMPT)
    with model.context("tq3", n_ctx=256) as context:
        first = context.decode(tokens, 0, logits="last").copy()
        context.clear()
        np.testing.assert_array_equal(context.decode(tokens, 0, logits="last"), first)
        context.clear()
        with pytest.raises(EngineError, match="position 5 leaves a gap: the cache holds 0 tokens"):
            context.decode(tokens, 5)


def test_the_end_of_the_context(model):
    with model.context("tq4", n_ctx=256) as context:
        context.decode(np.ones(256, dtype=np.int64), 0)
        with pytest.raises(EngineError, match="positions 256 to 256 do not fit in n_ctx=256"):
            context.decode([1], 256)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "at least one token id"),
        ([[1, 2]], {}, r"not shape \(1, 2\)"),
        ([-1], {}, "between 0 and 49151"),
        ([49152], {}, "between 0 and 49151"),
        ([2**32 + 1], {}, "between 0 and 49151"),
        ([1.5], {}, "must be integers"),
        ([1], {"logits": "some"}, "logits='some': choose"),
        ([1] * 9, {"logits": "all"}, "for 9 tokens, but n_batch is 8"),
    ],
)
def test_requests_that_make_no_sense(model, tokens, options, message):
    with model.context(n_ctx=256, n_batch=8) as context, pytest.raises(EngineError, match=message):
        context.decode(tokens, 0, **options)


def test_no_batch_and_no_threads(model):
    for options in ({"n_batch": 0}, {"n_threads": -1}, {"n_ubatch": 0}):
        with pytest.raises(EngineError, match="must be at least 1"):
            model.context(n_ctx=256, **options)


def test_unknown_type_lists_the_known(model):
    with pytest.raises(CacheTypeError, match="unknown cache type 'tq5'; choose one of .*q8_0.*tq4, tq3"):
        model.context("tq5", n_ctx=256)


def test_a_model_without_a_cache(tiny_gguf):
    """A diffusion model attends to all tokens at once."""
    said = r"\.gguf \(llada\) keeps no KV cache that tq-ggml can measure"
    with Model(tiny_gguf(arch="llada")) as model, pytest.raises(EngineError, match=said):
        model.context(n_ctx=256)


def test_a_model_without_a_vocabulary(tiny_gguf):
    with Model(tiny_gguf()) as model:
        for use in (lambda: model.tokenize("x"), lambda: model.detokenize([1])):
            with pytest.raises(EngineError, match="has no vocabulary"):
                use()


def test_context_larger_than_memory(model):
    with pytest.raises(EngineError, match="a context of 2000000000 tokens needs .* MiB of memory are free"):
        model.context("tq4", n_ctx=2_000_000_000)


def test_closing_the_model_closes_its_contexts(smollm2_path):
    model = Model(smollm2_path)
    context = model.context(n_ctx=256)
    model.close()
    model.close()
    for use in (context.clear, lambda: context.decode([1], 0)):
        with pytest.raises(EngineError, match="this context is closed"):
            use()
    for use in (lambda: model.context(n_ctx=256), lambda: model.tokenize("x")):
        with pytest.raises(EngineError, match="is closed"):
            use()
    context.close()


def test_files_that_are_no_models(smollm2_path, tmp_path):
    whole = smollm2_path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_text("not a model, though it is long enough to be read")
    for name, message in (
        ("absent.gguf", "there is no file"),
        ("cut.gguf", "is truncated: its tensors need"),
        ("text.gguf", "is not a GGUF file"),
        (".", "is a folder"),
    ):
        with pytest.raises(TqError, match=message):
            Model(tmp_path / name)


def test_a_model_that_llama_cpp_refuses(tiny_gguf):
    path = tiny_gguf()
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_doom.weight"))
    with pytest.raises(EngineError, match=r"cannot load .*tiny.* \(llama.cpp: .*blk.1.ffn_down.weight"):
        Model(path)
