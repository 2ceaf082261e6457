"""What a cache needs, and the refusals before llama.cpp would fail."""

from __future__ import annotations

import pytest

from tq_ggml import limits
from tq_ggml.cache_types import CACHE_TYPES, resolve
from tq_ggml.engine import Model
from tq_ggml.errors import CacheTypeError, EngineError
from tq_ggml.models import check_gguf

MIB = 1 << 20
F16 = resolve("f16")
QUANTIZED = [t for t in CACHE_TYPES if t.is_quantized]


@pytest.mark.parametrize("cache_type", QUANTIZED, ids=str)
def test_block_must_divide_the_head_size(tiny_gguf, cache_type):
    info = check_gguf(tiny_gguf(head_size=80))
    for pair, what in (((cache_type, F16), "key"), ((F16, cache_type), "value")):
        with pytest.raises(CacheTypeError) as refused:
            limits.check_cache(info, *pair, 512)
        message = str(refused.value)
        assert f"cache type {cache_type} has blocks of 32 values, but the {what} head size 80" in message
        assert message.endswith("use f16, bf16")
    limits.check_cache(info, F16, resolve("bf16"), 512)


def test_what_the_refusal_offers_works(tiny_gguf):
    with Model(tiny_gguf(head_size=80)) as model:
        for name in ("f16", "bf16"):
            with model.context(name, n_ctx=256) as context:
                assert context.decode([1, 2, 3], 0, logits="last").shape == (1, 32)


@pytest.mark.parametrize("n_head_kv", [1, 2, [2, 1, 2]])
@pytest.mark.parametrize("pair", [("f16", "f16"), ("tq4", "tq3"), ("q8_0", "f16")])
def test_header_arithmetic_is_what_the_engine_allocates(tiny_gguf, n_head_kv, pair):
    key, value = (resolve(name) for name in pair)
    with Model(tiny_gguf(n_head_kv=n_head_kv, n_layer=3)) as model, model.context(key, value, n_ctx=700) as context:
        assert context.n_ctx == 768
        allocated = (context.kv_bytes_k, context.kv_bytes_v)
        assert limits.kv_bytes_at_most(model.info, key, value, 700) == allocated
        assert limits.planned_kv_bytes(model.path, key, value, 700) == allocated


def test_dry_run_extrapolates_exactly(tiny_gguf):
    info = check_gguf(tiny_gguf())
    n_ctx = 3 * limits._PROBE + 100
    planned = limits.planned_kv_bytes(info.path, F16, F16, n_ctx)
    assert planned == limits.kv_bytes_at_most(info, F16, F16, n_ctx)


def test_context_larger_than_memory(tiny_gguf, monkeypatch):
    info = check_gguf(tiny_gguf())  # 2 layers x 64 values x 2 bytes: 512 bytes a token in f16, K and V together
    monkeypatch.setattr(limits, "available_memory", lambda: 16 * MIB)
    limits.check_cache(info, F16, F16, 32768)
    with pytest.raises(EngineError) as refused:
        limits.check_cache(info, F16, F16, 65536)
    assert str(refused.value) == (
        "a context of 65536 tokens needs 32 MiB for its KV cache (K f16, V f16), but 16 MiB of memory are free for it; "
        "use a context of at most 32768 tokens (the model was trained on 4096), or cache type tq4 (9 MiB)"
    )
    limits.check_cache(info, resolve("tq4"), resolve("tq4"), 65536)
    with pytest.raises(EngineError, match=r"needs 14 MiB .* or cache type tq3 \(11 MiB\)"):
        limits.check_cache(info, resolve("tq4"), resolve("tq4"), 102400, weights=4 * MIB)


def test_weights_beyond_memory_are_not_held_against_the_cache(tiny_gguf, monkeypatch):
    info = check_gguf(tiny_gguf())
    monkeypatch.setattr(limits, "available_memory", lambda: 16 * MIB)
    limits.check_cache(info, F16, F16, 16384, weights=64 * MIB)


def test_zero_means_the_training_context(tiny_gguf, monkeypatch):
    info = check_gguf(tiny_gguf())
    monkeypatch.setattr(limits, "available_memory", lambda: MIB)
    with pytest.raises(EngineError, match="a context of 4096 tokens needs 2 MiB"):
        limits.check_cache(info, F16, F16, 0)


@pytest.mark.parametrize("n_ctx", [-1, 1 << 31])
def test_sizes_that_are_none(tiny_gguf, n_ctx):
    with pytest.raises(EngineError, match=f"not {n_ctx}"):
        limits.check_cache(check_gguf(tiny_gguf()), F16, F16, n_ctx)


def test_available_memory_is_plausible():
    free = limits.available_memory()
    assert free is None or 16 * MIB < free < 1 << 50


def write_group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_cgroup_v2_limits_of_the_group_and_its_parents(tmp_path):
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    mount = tmp_path / "mount"
    stat = "anon 50\ninactive_file 20\nactive_file 10"
    write_group(mount / "a/b", memory__max="max", memory__current=1)
    write_group(mount / "a", memory__max=100, memory__current=80, memory__stat=stat)
    write_group(mount)
    assert list(limits.cgroup_room(tmp_path / "cgroup", mount)) == [50]


def test_cgroup_v1_in_a_container_whose_path_is_the_hosts(tmp_path):
    (tmp_path / "cgroup").write_text("5:cpu:/host/x\n4:memory:/host/x\n")
    mount = tmp_path / "mount"
    write_group(mount / "memory", memory__limit_in_bytes=1000, memory__usage_in_bytes=400)
    assert list(limits.cgroup_room(tmp_path / "cgroup", mount)) == [600]


def test_no_cgroups(tmp_path):
    assert list(limits.cgroup_room(tmp_path / "absent", tmp_path)) == []
