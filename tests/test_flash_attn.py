"""FLASH_ATTN_EXT of the built ggml: layouts, masks and threads, against float64 and against ggml's own operator.

tests/tq_flash_attn_tool.c computes the node. Queries are such as int8 holds, so that the float64 limit is tight; ggml's
reference rounds in its own way, and its limit is what the two may differ by.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
from cache_rows import attention, decode, encode, int8_queries, nmse
from codec_tool import call
from gguf import GGMLQuantizationType
from key_mean import Mean

from tq_ggml.cache_types import resolve

MAX_NMSE = 4e-8  # against float64, four times what was measured
MAX_NMSE_THREADS = 1e-6  # of one number of threads against another
MAX_NMSE_GGML = 1e-4  # against ggml's own operator
THREADS = (1, 2, 3, 8)


class Case(NamedTuple):
    type_k: str
    type_v: str
    head_k: int = 64
    head_v: int = 64
    n_head: int = 8
    n_head_kv: int = 2
    n_tokens: int = 1
    n_kv: int = 1100
    n_seq: int = 1
    mask: str = "causal"  # or "", "window", "sequences", "alibi", "by head", "hidden"
    layout: str = "cache"  # heads of a key side by side; or "heads": keys of a head; or "v in k": also in one buffer
    sinks: bool = False
    softcap: float = 0.0
    mean: Mean | None = None

    def __str__(self) -> str:
        sizes = (self.n_head, self.n_head_kv, self.n_tokens, self.n_kv, self.n_seq)
        parts = [
            f"{self.type_k}/{self.type_v}-{self.head_k}/{self.head_v}",
            *sizes,
            self.mask or "no mask",
            self.layout,
        ]
        parts += ["sinks"] * self.sinks + [f"cap {self.softcap}"] * (self.softcap > 0)
        return "-".join(map(str, parts + [self.mean] * (self.mean is not None)))


class Data(NamedTuple):
    q: np.ndarray  # float32 (n_seq, n_head, n_tokens, head_k)
    k: np.ndarray  # uint8 (n_seq, n_head_kv, n_kv, bytes)
    v: np.ndarray
    mask: np.ndarray | None  # float16 (n_seq, 1 or n_head, n_tokens, n_kv)
    sinks: np.ndarray | None  # float32 (n_head,)
    scale: float
    max_bias: float
    mean: np.ndarray  # float32 (3, n_head_kv, head_k): mean, crossed, start
    positions: np.ndarray  # int32 (n_seq, n_kv)


def make(case: Case) -> Data:
    rng = np.random.default_rng(case.n_kv)
    n_rows = case.n_seq * case.n_head * case.n_tokens
    q = int8_queries(rng, n_rows, case.head_k, case.type_k.startswith("tq"))
    rows = (case.n_seq, case.n_head_kv, case.n_kv)
    k = encode(rng.standard_normal((*rows, case.head_k)).astype(np.float32), case.type_k)
    if case.layout == "v in k":
        v = k[..., : k.shape[-1] * case.head_v // case.head_k]
    else:
        v = encode(rng.standard_normal((*rows, case.head_v)).astype(np.float32), case.type_v)
    return Data(
        q.reshape(case.n_seq, case.n_head, case.n_tokens, case.head_k),
        k,
        v,
        make_mask(case, rng),
        rng.uniform(-3, 8, case.n_head).astype(np.float32) if case.sinks else None,
        case.head_k**-0.5,
        8.0 if case.mask == "alibi" else 0.0,
        rng.standard_normal((3, case.n_head_kv, case.head_k)).astype(np.float32),
        np.array([case.mean.positions(case.n_kv, rng) if case.mean else [0] * case.n_kv for _ in range(case.n_seq)]),
    )


def make_mask(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    if not case.mask:
        return None
    shape = (case.n_seq, case.n_head if case.mask == "by head" else 1, case.n_tokens, case.n_kv)
    token, key = np.arange(case.n_tokens)[:, None], np.arange(case.n_kv)[None]
    distance = key - (case.n_kv - case.n_tokens + token)
    hides = distance > 0
    values = np.zeros(shape)
    if case.mask == "window":
        hides = hides | (distance < -100)
    elif case.mask == "sequences":  # of one unified cache: a token sees every n_tokens-th key
        hides = key % case.n_tokens != token
    elif case.mask == "alibi":
        values = values + distance
    elif case.mask == "by head":
        values = rng.uniform(-2, 0, shape)
        hides = rng.random(shape) < 0.5
    elif case.mask == "hidden":  # the first and the last tokens see nothing at all
        hides = hides | (token % (case.n_tokens - 1) == 0)
    return np.where(hides, -np.inf, values).astype(np.float16)


def slopes(n_head: int, max_bias: float) -> np.ndarray:
    """ALiBi's (arXiv 2108.12409): a geometric series, filled up from the finer one where n_head is no power of two."""
    if not max_bias:
        return np.ones(n_head)
    n = 1 << (n_head.bit_length() - 1)
    series = [2 ** (-max_bias * (i + 1) / n) for i in range(n)]
    return np.array(series + [2 ** (-max_bias * (2 * i + 1) / (2 * n)) for i in range(n_head - n)])


def expected(case: Case, data: Data) -> np.ndarray:
    """float64 (n_seq, n_tokens, n_head, head_v)."""
    keys = decode(data.k, case.type_k)
    values = decode(np.ascontiguousarray(data.v), case.type_v)
    for s, kv in np.ndindex(keys.shape[:2]):
        keys[s, kv] += case.mean.at(data.positions[s], *data.mean[:, kv]) if case.mean else 0
    out = np.empty((case.n_seq, case.n_tokens, case.n_head, case.head_v))
    slope = slopes(case.n_head, data.max_bias)
    for s in range(case.n_seq):
        for h in range(case.n_head):
            kv = h // (case.n_head // case.n_head_kv)
            mask = np.zeros((case.n_tokens, case.n_kv)) if data.mask is None else data.mask[s, h % data.mask.shape[1]]
            out[s, :, h] = attention(
                *(data.q[s, h], keys[s, kv], values[s, kv], mask),
                scale=data.scale,
                softcap=case.softcap,
                slope=slope[h],
                sink=None if data.sinks is None else data.sinks[h],
            )
    return out


def tensor(type_: str, rows: np.ndarray, layout: str, gap: int, head: int) -> bytes:
    """A ggml tensor of rows (ne3, ne2, ne1, bytes) that lie as the layout says, with 0xff between them."""
    kind = resolve(type_)
    n3, n2, n1, row = rows.shape
    if layout == "cache":
        nb2, nb1 = row, n2 * row + gap
        nb3 = nb1 * (n1 + 5)
    else:
        nb1, nb2 = row, n1 * row + gap
        nb3 = nb2 * n2
    strides = (nb3, nb2, nb1)
    buffer = np.full(sum((n - 1) * nb for n, nb in zip((n3, n2, n1), strides, strict=True)) + row, 0xFF, np.uint8)
    np.lib.stride_tricks.as_strided(buffer, rows.shape, (*strides, 1))[:] = rows
    return described(kind.ggml_id, (head, n1, n2, n3), (kind.type_size, *reversed(strides)), buffer)


def described(type_id: int, ne: tuple, nb: tuple, data: np.ndarray) -> bytes:
    return np.array([type_id, *ne, *nb, data.nbytes], "<i8").tobytes() + data.tobytes()


def plain(x: np.ndarray | None) -> bytes:
    """A ggml tensor of an array as it is, or of what is not there."""
    if x is None:
        return np.array([-1] + [0] * 9, "<i8").tobytes()
    ne = (1,) * (4 - x.ndim) + x.shape
    nb = [x.itemsize * int(np.prod(ne[i:])) for i in (4, 3, 2, 1)]
    kind = GGMLQuantizationType[f"{x.dtype.kind.upper()}{8 * x.itemsize}"]
    return described(kind, ne[::-1], nb, np.ascontiguousarray(x))


def packed(case: Case, data: Data) -> bytes:
    layout = "cache" if case.layout == "cache" else "heads"
    q_bytes = np.ascontiguousarray(data.q).view(np.uint8)
    parts = [np.array([data.scale, data.max_bias, case.softcap], "<f4").tobytes()]
    parts.append(np.array(case.mean.parameters if case.mean else (0,) * 4, "<i4").tobytes())
    parts.append(tensor("f32", q_bytes, layout, 64, case.head_k))
    parts.append(keys := tensor(case.type_k, data.k, layout, 2 * 34, case.head_k))
    # A sub-view of the keys has their strides: the gap is the rest of each row.
    parts.append(tensor(case.type_v, data.v, layout, 0 if layout == "cache" else 36, case.head_v))
    if case.layout == "v in k":
        parts[-1] = sub_view(keys, case)
    cells_turns_mean = (data.positions, case.mean.table(), data.mean) if case.mean else (None,) * 3
    return b"".join([*parts, *map(plain, (data.mask, data.sinks, *cells_turns_mean))])


def sub_view(keys: bytes, case: Case) -> bytes:
    """The keys' tensor once more, its rows cut to the values' head size."""
    header = np.frombuffer(keys[:80], "<i8").copy()
    header[1] = case.head_v
    return header.tobytes() + keys[80:]


def compute(tool, case: Case, data: Data, *runs, **environment: str):
    """The tool's results, float32 (run, n_seq, n_tokens, n_head, head_v), and its stderr."""
    env = {key: value for key, value in os.environ.items() if key not in ("TQ_ATTENTION", "TQ_SIMD")}
    done = call([tool, *map(str, runs)], input=packed(case, data), env=env | environment)
    shape = (len(runs), case.n_seq, case.n_tokens, case.n_head, case.head_v)
    return np.frombuffer(done.stdout, "<f4").reshape(shape), done.stderr.decode()


TYPES = ("tq3", "tq4", "q4_0", "iq4_nl", "q8_0", "f16")
CASES = [
    *(Case(name, name) for name in TYPES),
    *(Case(name, name, n_tokens=70, n_kv=333, layout="heads") for name in TYPES),
    *(Case(k, v, 128, 64, n_tokens=9, n_kv=700) for k, v in (("tq4", "tq3"), ("q8_0", "tq4"), ("tq4", "f16"))),
    *(Case(k, v, 64, 128, n_tokens=9, n_kv=700) for k, v in (("tq3", "tq4"), ("tq4", "q8_0"), ("f16", "tq4"))),
    *(Case("tq4", "tq4", n_head=2 * group, n_tokens=3) for group in (1, 3, 16)),
    *(Case(name, name, n_tokens=5, n_kv=300, mask="by head") for name in ("tq4", "q8_0")),
    *(Case("tq3", "tq3", n_tokens=8, mask=mask, n_kv=2000) for mask in ("", "window", "sequences", "hidden")),
    *(Case("tq4", name, n_head=6, n_tokens=4, mask="alibi") for name in ("tq4", "f16")),
    *(Case(name, name, n_tokens=4, mask="hidden", sinks=True) for name in TYPES[1::2]),
    *(Case(name, name, n_tokens=2, softcap=20.0) for name in TYPES[::2]),
    *(
        Case(name, name, n_tokens=2, n_seq=3, n_kv=300, layout=layout)
        for name in ("tq4", "f16")
        for layout in ("cache", "heads")
    ),
    *(Case(name, name, 576, 512, 16, 1, 3, 600, layout="v in k") for name in ("tq4", "q8_0")),
    *(Case(name, name, n_head=4, n_head_kv=1, n_tokens=32, n_kv=5000) for name in ("tq4", "f16")),
    Case("tq4", "tq4", 128, 128, n_head=32, n_head_kv=8, n_tokens=160, n_kv=160, mask="window"),
]
MEANS = [
    *(Case(name, name, mean=Mean(64, True, 3, "ordered", n_used=140)) for name in TYPES),
    Case("tq4", "tq4", 128, 64, n_tokens=9, n_kv=700, mean=Mean(128, False, 3, "later", n_used=90)),
    Case("tq3", "tq4", 64, 64, n_tokens=70, n_kv=333, layout="heads", mean=Mean(20, True, 2, "shuffled")),
    Case("tq4", "tq3", n_tokens=8, n_kv=2000, mask="sequences", mean=Mean(64, True, 0, "sequences")),
    *(
        Case("tq4", "tq4", n_tokens=2, n_seq=3, n_kv=300, layout=layout, mean=Mean(64, is_neox, 3, "shuffled"))
        for layout, is_neox in (("cache", True), ("heads", False))
    ),
    Case("tq4", "f16", n_head=6, n_tokens=4, mask="alibi", mean=Mean(16, False, 3, "far")),
    Case("tq3", "tq3", n_tokens=4, mask="hidden", sinks=True, mean=Mean(64, True, 3, "around 0", n_used=140)),
    Case("tq3", "q8_0", n_tokens=5, n_kv=300, mask="by head", softcap=20.0, mean=Mean(64, False, 1, "ordered")),
    Case("tq4", "tq4", n_tokens=3, n_kv=600, mask="", mean=Mean(0, False, 3, "very far")),
    Case("tq4", "tq4", 576, 512, 16, 1, 3, 600, layout="v in k", mean=Mean(64, False, 3, "ordered")),
    Case("tq4", "tq4", 128, 128, 32, 8, 160, 160, mask="window", mean=Mean(128, True, 3, "ordered")),
]
# Keys split over threads, with partial results; rows alone; and a type whose rows are read in place.
RACES = [CASES[1], CASES[5], CASES[7], *CASES[-3:], MEANS[1]]


def check(case: Case, data: Data, found: list[np.ndarray]) -> None:
    want = expected(case, data)
    for n_threads, result in zip(THREADS, found, strict=True):
        assert nmse(result, want) <= MAX_NMSE, f"{n_threads} threads"
        assert nmse(result, found[0].astype(np.float64)) <= MAX_NMSE_THREADS, f"{n_threads} threads"
    if case.mask == "hidden":
        assert not found[0][:, [0, -1]].any(), "a token that sees no key must give zeros"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_threads_gives_the_same(flash_attn_tool, case):
    data = make(case)
    (reference, *found), _ = compute(flash_attn_tool, case, data, "ref", *THREADS)
    check(case, data, found)
    assert nmse(found[0], reference.astype(np.float64)) <= MAX_NMSE_GGML
    assert not np.array_equal(found[0], reference), "ggml's own operator ran in place of ours"


@pytest.mark.parametrize("case", MEANS, ids=str)
def test_a_key_mean_is_added_back(flash_attn_tool, case):
    """Which ggml's own operator does not know."""
    data = make(case)
    found, _ = compute(flash_attn_tool, case, data, *THREADS)
    check(case, data, list(found))


def test_the_switch_gives_f16_back_to_ggml_and_leaves_ours(flash_attn_tool):
    for case, same in ((Case("f16", "f16"), False), (Case("q8_0", "q8_0"), False), (Case("tq4", "f16"), True)):
        data = make(case)
        (ours,), said = compute(flash_attn_tool, case, data, 2)
        (stock, reference), said_stock = compute(flash_attn_tool, case, data, 2, "ref", TQ_ATTENTION="stock")
        assert said == said_stock == ""
        assert np.array_equal(ours, stock) is same
        assert nmse(stock, ours.astype(np.float64)) <= MAX_NMSE_GGML
        assert nmse(stock, reference.astype(np.float64)) <= MAX_NMSE_GGML


def test_an_unknown_value_of_the_switch_is_reported_and_ignored(flash_attn_tool):
    case = Case("f16", "f16")
    data = make(case)
    (ours,), _ = compute(flash_attn_tool, case, data, 1)
    (found,), said = compute(flash_attn_tool, case, data, 1, TQ_ATTENTION="fast")
    assert said == "tq-ggml: TQ_ATTENTION=fast is neither tq nor stock; using tq\n"
    assert np.array_equal(found, ours)


@pytest.mark.parametrize("case", RACES, ids=str)
def test_no_race_under_the_thread_sanitizer(thread_sanitized_tool, case):
    data = make(case)
    (found, one), said = compute(thread_sanitized_tool, case, data, 4, 1, TSAN_OPTIONS="exitcode=0")
    assert "ThreadSanitizer" not in said, said
    assert nmse(found, expected(case, data)) <= MAX_NMSE
    assert nmse(one, found.astype(np.float64)) <= MAX_NMSE_THREADS


def test_the_thread_sanitizer_is_on(thread_sanitized_tool):
    for name in ("libggml-cpu.so", "libtq.so"):
        assert b"__tsan_" in (thread_sanitized_tool.parent / name).read_bytes(), name
