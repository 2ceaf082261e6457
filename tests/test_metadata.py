"""Metadata comes back as it was written, the rest of a GGUF stays as it was, and whatever goes wrong is one line."""

import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tq_ggml import metadata
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.gguf_check import open_gguf
from tq_ggml.metadata import model_digest, read_metadata, write_patched_copy, write_side_file

SCRIPT = Path(__file__).parents[1] / "scripts" / "patch_gguf_metadata.py"

KEYS = {
    "tq_ggml.version": 1,
    "tq_ggml.recommended_type": "tq4",
    "tq_ggml.expected_kld.tq4": 0.25,
    "tq_ggml.layer.0.key_scale": np.linspace(0.5, 2, 128, dtype=np.float32),
    "tq_ggml.layer.0.key_mean": np.arange(5000, dtype=np.float32),
}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(texts, min_size=1, max_size=5),
    hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)),
    hnp.arrays(st.sampled_from([np.int8, np.uint32, np.int64, np.uint64, np.bool_]), st.integers(1, 40)),
)
keys = st.builds("tq_ggml.{}".format, texts)
several = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def no_hang():
    """A length that is believed shows as a hang; stop it rather than the whole run."""

    def stop(signum, frame):
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make(path: Path, *, alignment: int = 32, weight: float = 1.0, tokens: list[str] | None = None) -> Path:
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_name("before")
    writer.add_block_count(3)
    writer.add_array("tokenizer.ggml.tokens", tokens or [f"token {i}" for i in range(300)])
    writer.add_unk_token_id(0)  # looks like one more string
    writer.add_token_scores([0.5] * 300)
    writer.add_uint32("general.quantization_version", 2)
    writer.add_tensor("token_embd.weight", np.full((30, 64), weight, np.float16))
    writer.add_tensor("output_norm.weight", rng.normal(size=7).astype(np.float32))
    blocks = gguf.quantize(rng.normal(size=(128, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path) -> Path:
    return make(tmp_path / "model.gguf")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.gguf"


def fields(path: Path) -> dict:
    """Keys and values as gguf-py reads them."""
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def tensors(path: Path) -> list:
    return [
        (
            t.name,
            t.shape.tolist(),
            t.tensor_type,
            t.data.tobytes(),
            int(t.data_offset) % gguf.GGUFReader(path).alignment,
        )
        for t in gguf.GGUFReader(path).tensors
    ]


def same(left: object, right: object) -> bool:
    return np.array_equal(left, right, equal_nan=isinstance(left, np.ndarray) and left.dtype.kind == "f")


def told(action, *arguments, **options) -> str:
    with pytest.raises(TqError) as problem:
        action(*arguments, **options)
    assert "\n" not in str(problem.value) and len(str(problem.value)) < 1000
    return str(problem.value)


# ---- what is written is read ----------------------------------------------------------------------------------------


@several
@given(st.dictionaries(keys, values, max_size=8))
def test_side_file_returns_what_it_was_given(tmp_path, given_values):
    path = tmp_path / "side.gguf"
    write_side_file(path, given_values)
    found = read_metadata(path)
    assert list(found) == list(given_values)
    for key, value in given_values.items():
        assert same(found[key], value), key
        assert isinstance(value, np.ndarray) or type(found[key]) is type(value)
    assert os.listdir(tmp_path) == ["side.gguf"]
    assert fields(path)["general.architecture"] == "tq_ggml"
    assert "no model" in told(model_digest, path)


@several
@given(st.dictionaries(keys, values, max_size=5), st.dictionaries(keys, values, max_size=5), st.data())
def test_patched_copy_differs_in_what_was_asked_for(tmp_path, first, second, data):
    model, once, twice = make(tmp_path / "m.gguf"), tmp_path / "once.gguf", tmp_path / "twice.gguf"
    removals = data.draw(st.sets(st.sampled_from(sorted(first)))) if first else set()
    write_patched_copy(model, once, first, force=True)
    write_patched_copy(once, twice, second, removals, force=True)
    expected = {key: value for key, value in first.items() if key not in removals} | second
    found = read_metadata(twice)
    assert found.keys() == expected.keys()
    assert all(same(found[key], value) for key, value in expected.items())
    others = {key: value for key, value in fields(twice).items() if key not in expected}
    assert others == fields(model)
    assert tensors(twice) == tensors(model)
    assert model_digest(twice) == model_digest(model)


def test_types_and_places_in_the_file(model, out):
    write_patched_copy(model, out, {**KEYS, "general.name": "after"})
    reader = gguf.GGUFReader(out)
    assert [k for k in reader.fields if not k.startswith("GGUF.")] == [*fields(model), *KEYS]
    assert reader.fields["general.name"].contents() == "after"
    kinds = [reader.fields[key].types for key in KEYS]
    array = [GGUFValueType.ARRAY, GGUFValueType.FLOAT32]
    assert kinds == [[GGUFValueType.UINT32], [GGUFValueType.STRING], [GGUFValueType.FLOAT32], array, array]
    mean = read_metadata(out)["tq_ggml.layer.0.key_mean"]
    assert mean.dtype == np.float32 and mean.flags.writeable


def test_removing_what_was_added_gives_the_same_bytes(model, out, tmp_path):
    write_patched_copy(model, out, KEYS)
    back = tmp_path / "back.gguf"
    write_patched_copy(out, back, {}, [*KEYS, "no.such.key"])
    assert back.read_bytes() == model.read_bytes()


def test_read_metadata_of_other_prefixes(model):
    assert read_metadata(model) == {}
    assert read_metadata(model, "general.name") == {"general.name": "before"}
    everything = read_metadata(model, "")
    assert everything["tokenizer.ggml.tokens"] == [f"token {i}" for i in range(300)]
    assert everything["tokenizer.ggml.scores"].tolist() == [0.5] * 300


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_is_kept(tmp_path, out, alignment):
    model = make(tmp_path / "m.gguf", alignment=alignment)
    write_patched_copy(model, out, KEYS)
    assert tensors(out) == tensors(model)
    assert gguf.GGUFReader(out).data_offset % alignment == 0
    assert model_digest(out) == model_digest(model)
    for changes, removals in (({"general.alignment": 128}, []), ({}, ["general.alignment"])):
        assert "alignment" in told(write_patched_copy, model, out, changes, removals, force=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "\0", "a", "word", "a" + 9 * "\0" + "b", "x" * 300]), st.integers(1, 3000))
    ),
    st.integers(0, 2),
)
def test_vocabularies_of_unusual_strings_are_skipped_rightly(tmp_path, runs, long):
    """The quick way over arrays of strings must end where gguf-py's ends, whatever is in them."""
    tokens = [text for text, n in runs for _ in range(n)] + ["y" * 70000] * long + ["last"]
    path = make(tmp_path / "m.gguf", tokens=tokens)
    assert read_metadata(path, "tokenizer.ggml.tokens")["tokenizer.ggml.tokens"] == tokens
    with open_gguf(path) as (_, header):
        assert list(header.entries)[-1] == "general.quantization_version"


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, kind, words",
    [
        (300, GGUFValueType.UINT8, "300 does not fit uint8"),
        (-1, GGUFValueType.UINT64, "-1 does not fit uint64"),
        (1.5, GGUFValueType.INT32, "1.5 does not fit int32"),
        (1e300, GGUFValueType.FLOAT32, "does not fit float32"),
        (1 << 64, None, "does not fit 64 bits"),
        ("a", GGUFValueType.UINT8, "no uint8"),
        ("\ud800", None, "not Unicode"),
    ],
)
def test_values_that_do_not_fit(value, kind, words):
    assert words in told(metadata.encode, value, kind)


@pytest.mark.parametrize("value", [None, [[1, 2]], {}, object(), np.zeros((2, 2)), 1j])
def test_values_that_gguf_does_not_have(value):
    with pytest.raises(TypeError):
        metadata.encode(value)


@pytest.mark.parametrize(
    "value, kind",
    [(0, "UINT32"), (-1, "INT32"), (1 << 32, "UINT64"), (-(1 << 40), "INT64"), ([1, -1], "INT32"), ([True], "BOOL")],
)
def test_types_that_are_chosen(value, kind):
    assert metadata.value_type(metadata.encode(value))[0] == GGUFValueType[kind]


@pytest.mark.parametrize("key", ["", "k" * 70000, "\udcff"])
def test_impossible_keys(out, key):
    told(write_side_file, out, {key: 1})
    assert not out.exists()


# ---- digest ---------------------------------------------------------------------------------------------------------


def test_digest_tells_weights_names_shapes_and_types_apart(model, tmp_path):
    first = model_digest(model)
    assert len(first) == 64 and int(first, 16)
    assert model_digest(make(tmp_path / "same.gguf")) == first
    digests = {first, model_digest(make(tmp_path / "other.gguf", weight=2.0))}
    whole = model.read_bytes()
    for tensor in gguf.GGUFReader(model).tensors:
        for at in (int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes) - 1):
            model.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            digests.add(model_digest(model))
    model.write_bytes(whole.replace(b"output_norm.weight", b"output_norn.weight"))
    digests.add(model_digest(model))
    model.write_bytes(whole.replace(struct.pack("<QQ", 64, 128), struct.pack("<QQ", 128, 64)))
    digests.add(model_digest(model))
    assert len(digests) == 2 + 6 + 2


# ---- refusals and failures ------------------------------------------------------------------------------------------


def test_never_in_place(model, out, tmp_path):
    before = model.read_bytes()
    (tmp_path / "soft").symlink_to(model)
    (tmp_path / "hard").hardlink_to(model)
    (tmp_path / "folder").mkdir()
    for target in (model, tmp_path / "soft", tmp_path / "hard", tmp_path / "folder" / ".." / "model.gguf"):
        assert "in place" in told(write_patched_copy, model, target, KEYS, force=True)
    assert "in place" in told(write_patched_copy, tmp_path / "soft", model, KEYS, force=True)
    assert model.read_bytes() == before and (tmp_path / "soft").is_symlink()


def test_targets(model, out, tmp_path):
    out.write_text("mine")
    assert "exists" in told(write_patched_copy, model, out, KEYS)
    assert out.read_text() == "mine"
    write_patched_copy(model, out, KEYS, force=True)
    assert tensors(out) == tensors(model)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert "exists" in told(write_patched_copy, model, tmp_path / "dangling", KEYS)
    for target in (tmp_path, Path(os.devnull)):
        assert "not a regular file" in told(write_patched_copy, model, target, KEYS, force=True)
        assert "not a regular file" in told(write_side_file, target, KEYS)
    assert "cannot write" in told(write_patched_copy, model, tmp_path / "none" / "out.gguf", KEYS)
    assert "cannot write" in told(write_side_file, model / "below-a-file", KEYS)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "model.gguf", "out.gguf"]


def test_missing_sources(out, tmp_path):
    for source, words in ((tmp_path / "none", "there is no file"), (tmp_path, "is a folder")):
        assert words in told(write_patched_copy, source, out, KEYS)
        assert words in told(read_metadata, source)
        assert words in told(model_digest, source)


def test_dry_run_writes_nothing_and_checks_all(model, out, tmp_path):
    write_patched_copy(model, out, KEYS, dry_run=True)
    assert os.listdir(tmp_path) == ["model.gguf"]
    told(write_patched_copy, model, model, KEYS, dry_run=True)
    told(write_patched_copy, model, out, {"tq_ggml.x": 1 << 64}, dry_run=True)


@pytest.mark.parametrize("limit", [0, 100, 12000])
def test_a_full_disk_leaves_nothing(model, out, tmp_path, limit):
    """A limit on the size of files ends writing as a full disk does."""
    write_side_file(tmp_path / "side.gguf", {"tq_ggml.version": 7})
    before = sorted(os.listdir(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        problems = [
            told(write_patched_copy, model, out, KEYS),
            told(write_side_file, tmp_path / "side.gguf", KEYS),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all("cannot write" in problem for problem in problems)
    assert sorted(os.listdir(tmp_path)) == before
    assert read_metadata(tmp_path / "side.gguf") == {"tq_ggml.version": 7}


def test_an_interrupted_copy_leaves_nothing(model, out, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfileobj", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_patched_copy(model, out, KEYS)
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_large_tensors_pass_through_little_memory(tmp_path, out):
    path, n = tmp_path / "large.gguf", 96 << 20
    tensor = struct.pack("<Q1sIQIQ", 1, b"t", 1, n, gguf.GGMLQuantizationType.I8, 0)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor)
        file.write(bytes(-file.tell() % 32))
        file.truncate(file.tell() + n)  # sparse
    tracemalloc.start()
    try:
        write_patched_copy(path, out, KEYS)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert model_digest(out) == model_digest(path)


# ---- damaged files --------------------------------------------------------------------------------------------------


def survives(path: Path, out: Path) -> bool:
    """Whether every reader takes the file; if not, each says why in a line."""
    fine = 0
    for action in (read_metadata, model_digest, lambda p: write_patched_copy(p, out, KEYS, force=True)):
        try:
            action(path)
            fine += 1
        except TqError as problem:
            assert str(problem).startswith(str(path)) and "\n" not in str(problem)
    return fine == 3


def test_every_truncation_is_told(model, out, tmp_path):
    patched = tmp_path / "patched.gguf"
    write_patched_copy(model, patched, KEYS)
    last = max(gguf.GGUFReader(patched).tensors, key=lambda t: t.data_offset)
    needed = int(last.data_offset + last.n_bytes)
    assert survives(patched, out)
    with patched.open("r+b") as file:
        for cut in range(needed - 1, -1, -7):
            file.truncate(cut)
            for action in (read_metadata, model_digest):
                told(action, patched)
            told(write_patched_copy, patched, out, KEYS, force=True)


def test_flipped_bits(model, out, tmp_path):
    patched = tmp_path / "patched.gguf"
    small = {key: value for key, value in KEYS.items() if "mean" not in key}
    write_patched_copy(model, patched, small)
    whole, draw, fine = patched.read_bytes(), random.Random(0), 0
    end = int(gguf.GGUFReader(patched).data_offset)
    for at in [*range(0, 200, 2), *range(end - 900, end, 3), *draw.sample(range(200, end - 900), 150)]:
        patched.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        fine += survives(patched, out)
    assert 0 < fine < 550


@pytest.mark.parametrize("lie", [0, 1 << 16, 1 << 31, (1 << 61) + 1, 1 << 63, (1 << 64) - 1])
def test_lying_lengths(out, tmp_path, lie):
    """Each length and count of a side file in turn, once with endless zeros behind it."""
    path = tmp_path / "side.gguf"
    write_side_file(path, {**KEYS, "tq_ggml.words": ["one", "two"]})
    whole, places = path.read_bytes(), [8, 16]
    with open_gguf(path) as (data, header):
        for entry in header.entries.values():
            kind = struct.unpack_from("<I", data, entry.value)[0]
            places += [entry.start] + [entry.value + 4] * (kind == 8) + [entry.value + 8] * (kind == 9)
    for at in places:
        for zeros in (0, 64 << 20):
            path.write_bytes(whole[:at] + struct.pack("<Q", lie) + whole[at + 8 :])
            os.truncate(path, len(whole) + zeros)
            tracemalloc.start()
            survives(path, out)
            assert tracemalloc.get_traced_memory()[1] < 256 << 20
            tracemalloc.stop()


def test_a_header_that_would_fill_the_memory(out, tmp_path):
    path = tmp_path / "absurd.gguf"
    entry = struct.pack("<Q9sIIQ", 9, b"tq_ggml.x", 9, 6, 1 << 31)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    os.truncate(path, path.stat().st_size + (8 << 30))  # sparse
    assert "damaged: its header has" in told(read_metadata, path)
    assert "damaged: its header has" in told(write_patched_copy, path, out, {})


def test_a_key_twice(model):
    model.write_bytes(model.read_bytes().replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"))
    assert "twice" in told(read_metadata, model)


# ---- the script -----------------------------------------------------------------------------------------------------


def run(*arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == code, done.stderr
    if code == 0:
        assert done.stderr == ""
        return done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_script_lists(model, tmp_path):
    lines = run("list", model).splitlines()
    assert len(lines) == len(fields(model))
    assert lines[1].split() == ["2:", "STRING", "|", "1", "|", "general.name", "=", "'before'"]
    assert "[STRING]   |      300 | tokenizer.ggml.tokens = ['token 0', 'token 1'," in lines[3]
    write_side_file(tmp_path / "side.gguf", {"tq_ggml.\33[31m": "\33[31mred\n"})
    assert "\33" not in run("list", tmp_path / "side.gguf", "--prefix", "tq_ggml.")


def test_script_sets(model, out):
    words = ["tq_ggml.i=-3", "tq_ggml.f=2.5", "tq_ggml.b=true", "tq_ggml.s=a=b", "tq_ggml.e=", "general.version=1.0"]
    told_lines = run("set", model, "-o", out, *words, "general.name=新").splitlines()
    assert "change general.name = 'before' -> '新'" in told_lines and told_lines[-1] == str(out)
    expected = {"tq_ggml.i": -3, "tq_ggml.f": 2.5, "tq_ggml.b": True, "tq_ggml.s": "a=b", "tq_ggml.e": ""}
    assert read_metadata(out) == expected
    assert read_metadata(out, "general.version") == {"general.version": "1.0"}
    again = out.with_name("again.gguf")
    run("set", out, "-o", again, "tq_ggml.f=7", "--type", "uint8")
    run("set", again, "-o", out, "tq_ggml.f=8", "--force")
    assert gguf.GGUFReader(out).fields["tq_ggml.f"].types == [GGUFValueType.UINT8]
    assert "is of type uint8" in run("set", out, "-o", again, "tq_ggml.f=x", "--force", code=2)


def test_script_guards_what_llama_cpp_goes_by(model, out):
    assert "--force" in run("set", model, "-o", out, "llama.block_count=4", code=2)
    assert "--force" in run("remove", model, "-o", out, "general.architecture", code=2)
    assert "--force" in run("copy", model, model, "-o", out, "--prefix", "llama.", code=2)
    assert not out.exists()
    run("set", model, "-o", out, "llama.block_count=4", "--force")
    assert fields(out)["llama.block_count"] == 4


def test_script_removes_and_copies(model, out, tmp_path):
    side, plain = tmp_path / "side.gguf", tmp_path / "plain.gguf"
    write_side_file(side, {**KEYS, "other.key": 1})
    run("copy", side, model, "-o", out)
    assert all(same(read_metadata(out)[key], value) for key, value in KEYS.items())
    assert "other.key" not in fields(out)
    run("remove", out, "-o", plain, "tq_ggml.layer.*", "tq_ggml.version")
    assert list(read_metadata(plain)) == ["tq_ggml.recommended_type", "tq_ggml.expected_kld.tq4"]
    run("remove", out, "-o", plain, "tq_ggml.*", "--force")
    assert plain.read_bytes() == model.read_bytes()


def test_script_dry_run_and_errors(model, out, tmp_path):
    write_side_file(tmp_path / "side.gguf", KEYS)
    before = sorted(os.listdir(tmp_path))
    for command in (["set", model, "general.name=x"], ["remove", model, "general.name"]):
        assert "not written" in run(*command, "-o", out, "--dry-run")
    assert "not written" in run("copy", tmp_path / "side.gguf", model, "-o", out, "--dry-run")
    for arguments in (
        [],
        ["set", model, "-o", out],
        ["set", model, "-o", out, "novalue"],
        ["set", model, "-o", model, "general.name=x", "--force"],
        ["set", model, "-o", tmp_path / "side.gguf", "general.name=x"],
        ["set", model, "-o", out, "tq_ggml.x=1", "--type", "complex"],
        ["set", model, "-o", out, "tokenizer.ggml.tokens=1", "--force"],
        ["remove", model, "-o", out, "tq_ggml.*"],
        ["copy", model, model, "-o", out],
        ["list", tmp_path / "none.gguf"],
        ["list", SCRIPT],
    ):
        run(*arguments, code=2)
    assert sorted(os.listdir(tmp_path)) == before


# ---- a real model ---------------------------------------------------------------------------------------------------


def test_a_patched_model_runs_as_before(smollm2_path, tmp_path):
    patched, side = tmp_path / "patched.gguf", tmp_path / "side.gguf"
    write_patched_copy(smollm2_path, patched, KEYS)
    assert model_digest(patched) == model_digest(smollm2_path)
    logits = []
    for path in (smollm2_path, patched):
        with Model(path) as model, model.context("f16", n_ctx=64, n_threads=1) as context:
            logits.append(context.decode(model.tokenize("The capital of France is"), 0, logits="last").copy())
    assert np.array_equal(*logits)
    write_side_file(side, KEYS)
    told(Model, side)
