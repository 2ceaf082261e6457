"""tq_ggml.Llama: llama_cpp.Llama with named cache types."""

from __future__ import annotations

import pickle
import re

import pytest

from tq_ggml.errors import CacheTypeError, EngineError, TqError
from tq_ggml.library import activate
from tq_ggml.llama import Llama


@pytest.fixture(autouse=True)
def no_types_from_the_environment(monkeypatch):
    for name in ("LLAMA_ARG_CACHE_TYPE_K", "LLAMA_ARG_CACHE_TYPE_V", "TQ_GGML_QUIET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def load(smollm2_path):
    """A loader of SmolLM2; what it loads is freed at the end of the test."""
    loaded = []

    def load(**options) -> Llama:
        loaded.append(Llama(smollm2_path, **{"n_ctx": 256, **options}))
        return loaded[-1]

    yield load
    for llama in loaded:
        llama.close()


def types(llama: Llama) -> tuple[str, str]:
    return llama.cache_type_k.name, llama.cache_type_v.name


def flash_attention(llama: Llama) -> bool:
    return llama.context_params.flash_attn_type == activate().LLAMA_FLASH_ATTN_TYPE_ENABLED


@pytest.mark.parametrize(
    ("options", "expected", "flash"),
    [
        ({}, ("f16", "f16"), False),
        ({"flash_attn": True}, ("f16", "f16"), True),
        ({"cache_type": "tq4"}, ("tq4", "tq4"), True),
        ({"cache_type": "TURBO3"}, ("tq3", "tq3"), True),
        ({"cache_type": 44}, ("tq4", "tq4"), True),
        ({"cache_type": "q8_0/tq4"}, ("q8_0", "tq4"), True),
        ({"cache_type": "tq4", "cache_type_k": "q8_0"}, ("q8_0", "tq4"), True),
        ({"cache_type_v": "tq3"}, ("f16", "tq3"), True),
        ({"cache_type_k": "tq3"}, ("tq3", "f16"), True),
        ({"type_k": 8}, ("q8_0", "f16"), False),
        ({"type_k": "q8_0", "type_v": 44}, ("q8_0", "tq4"), True),
        ({"cache_type_k": "tq4", "type_v": 1}, ("tq4", "f16"), True),
    ],
)
def test_ways_to_name_the_types(load, options, expected, flash):
    llama = load(**options)
    assert types(llama) == expected
    assert (llama.context_params.type_k, llama.context_params.type_v) == (
        llama.cache_type_k.ggml_id,
        llama.cache_type_v.ggml_id,
    )
    assert flash_attention(llama) is flash


def test_the_environment_is_the_default_only(load, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "q8_0")
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_V", "tq4")
    assert types(load()) == ("q8_0", "tq4")
    assert types(load(cache_type="tq3")) == ("tq3", "tq3")
    assert types(load(type_v="f16")) == ("q8_0", "f16")
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_V", "q9")
    with pytest.raises(CacheTypeError, match="environment variable LLAMA_ARG_CACHE_TYPE_V: unknown cache type 'q9'"):
        load()


def test_is_a_llama_and_generates(load):
    llama = load(cache_type="tq4", n_ctx=512)
    assert isinstance(llama, activate().Llama)
    answer = llama.create_chat_completion(
        [{"role": "user", "content": "Write one sentence about the sea."}], max_tokens=24, temperature=0
    )
    assert "sea" in answer["choices"][0]["message"]["content"]
    again = llama("Once upon a time", max_tokens=16, temperature=0)["choices"][0]["text"]
    assert len(again.split()) >= 8


def test_sizes_and_their_line(load, capfd):
    llama = load(cache_type="q8_0/tq4", n_ctx=1024)
    values = 30 * 3 * 64 * 1024
    assert llama.kv_bytes_k == values * 34 // 32
    assert llama.kv_bytes_v == values * 18 // 32
    assert llama.kv_bytes_f16 == 2 * 2 * values
    assert capfd.readouterr().err == (
        "tq-ggml: KV cache K (q8_0): 5.98 MiB, V (tq4): 3.16 MiB; f16 would be 22.50 MiB (2.46x); flash attention on; "
        "keys as they are\n"
    )


def test_quiet_and_verbose(load, capfd, monkeypatch):
    monkeypatch.setenv("TQ_GGML_QUIET", "1")
    load(cache_type="tq4")
    assert capfd.readouterr().err == ""
    load(cache_type="tq4", verbose=True)
    assert re.search(r"llama_kv_cache: size = .* K \(tq4\)", capfd.readouterr().err)
    load(cache_type="tq4")
    assert capfd.readouterr().err == ""


def test_pickle_keeps_the_types(load):
    copy = pickle.loads(pickle.dumps(load(cache_type="q8_0/tq3", n_ctx=512)))
    assert type(copy) is Llama
    assert types(copy) == ("q8_0", "tq3") and copy.n_ctx() == 512
    copy.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type": "tq5"}, "unknown cache type 'tq5'; choose one of f32, f16, .*tq4, tq3"),
        ({"type_k": 99}, "unknown cache type 99"),
        ({"cache_type": "a/b/c"}, "more than one '/'"),
        ({"cache_type": "tq4", "type_k": 44}, "cache_type and type_k are both given"),
        ({"cache_type_v": "tq4", "type_v": 44}, "cache_type_v and type_v are both given"),
        ({"cache_type": "tq4", "flash_attn": False}, "flash_attn=False does not go with tq4 values"),
    ],
)
def test_contradictions(load, options, message):
    with pytest.raises(CacheTypeError, match=message):
        load(**options)


def test_head_size_that_no_block_divides(tiny_gguf):
    with pytest.raises(CacheTypeError, match=r"blocks of 32 values, but the key head size 80 .*; use f16, bf16"):
        Llama(tiny_gguf(head_size=80), cache_type="tq4")


def test_context_larger_than_memory(load):
    with pytest.raises(EngineError, match="a context of 2000000000 tokens needs"):
        load(cache_type="tq4", n_ctx=2_000_000_000)


def test_files(tmp_path, smollm2_path):
    with pytest.raises(TqError, match="there is no file"):
        Llama(tmp_path / "absent.gguf", cache_type="tq4")
    (tmp_path / "cut.gguf").write_bytes(smollm2_path.read_bytes()[:5_000_000])
    with pytest.raises(TqError, match="truncated"):
        Llama(tmp_path / "cut.gguf")


def test_a_refusal_of_llama_cpp_is_quoted(load):
    with pytest.raises(EngineError, match=r"Failed to create llama_context \(llama.cpp: .*n_batch"):
        load(n_batch=0)
    with pytest.raises(ValueError, match="is too long"):
        load(kv_overrides={"general.name": "x" * 200})


def test_a_model_without_a_cache_says_only_that_no_size_is_known(tiny_gguf, capfd):
    Llama(tiny_gguf(arch="llada")).close()
    assert capfd.readouterr().err == "tq-ggml: llama.cpp reports no size of a KV cache for this model\n"


def test_a_model_without_a_vocabulary(tiny_gguf):
    llama = Llama(tiny_gguf(), cache_type="tq4")
    with pytest.raises(EngineError, match="has no vocabulary"):
        llama("Once upon a time", max_tokens=1)
    llama.close()


def test_a_failed_constructor_leaves_nothing_behind(load, recwarn):
    with pytest.raises(CacheTypeError):
        load(cache_type="tq5")
    assert not recwarn.list  # pytest turns an exception in __del__ into a warning
