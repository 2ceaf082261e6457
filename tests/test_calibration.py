"""Calibration: the sums against numpy, what is kept and found again, and whatever is wrong with it in one line."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from tq_ggml import calibration, metadata
from tq_ggml.cache_types import resolve
from tq_ggml.calibration import (
    SAMPLE_EVERY,
    SINKS,
    Calibration,
    CalibrationError,
    choose,
    cut_tokens,
    default_text,
    gather,
    parse,
    side_file,
    store,
)
from tq_ggml.conditioning import Rows, filtering
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.library import activate
from tq_ggml.llama import Llama
from tq_ggml.models import GgufInfo, check_gguf

TQ4, TQ3, Q8_0, F16 = (resolve(name) for name in ("tq4", "tq3", "q8_0", "f16"))
LETTERS = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
"""A vocabulary for `tiny_gguf` that can cut the text below."""

TEXT = "the quick brown fox jumps over the lazy dog " * 40


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    """Calibrations are kept here, not in the user's folder."""
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TQ_GGML_QUIET", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Model(smollm2_path) as model:
        yield model


@pytest.fixture(scope="module")
def calibrated(model) -> Calibration:
    return calibration.calibrate(model, cut_tokens(model, default_text(), 48), text_name="a text")


@pytest.fixture
def quick(monkeypatch) -> None:
    """Automatic calibration with few tokens, of a text that any vocabulary here has."""
    monkeypatch.setattr(calibration, "DEFAULT_TOKENS", 32)
    monkeypatch.setattr(calibration, "default_text", lambda: TEXT)


@pytest.fixture
def tiny(tiny_gguf) -> GgufInfo:
    return check_gguf(tiny_gguf(tokens=LETTERS))


@pytest.fixture
def made(tiny) -> Calibration:
    """A calibration of the tiny model."""
    with Model(tiny.path) as model:
        return calibration.calibrate(model, cut_tokens(model, TEXT, 32), text_name="a text")


def same(left: Calibration, right: Calibration) -> bool:
    """All fields alike; numbers as float32 keeps them."""
    one, other = (dataclasses.replace(c, layers={}, expected_kld={}) for c in (left, right))
    klds = [{name: np.float32(kld) for name, kld in c.expected_kld.items()} for c in (left, right)]
    return (
        one == other
        and klds[0] == klds[1]
        and left.layers.keys() == right.layers.keys()
        and all(
            np.array_equal(array, getattr(right.layers[il], name))
            for il, layer in left.layers.items()
            for name, array in vars(layer).items()
        )
    )


def refused(call, *arguments, **options) -> str:
    with pytest.raises(CalibrationError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


# ---- gathering -----------------------------------------------------------------------------------------------------


def rows_by_hand(model: Model, tokens: np.ndarray) -> dict[tuple[int, Rows], np.ndarray]:
    """What layers store and attend with: float64 (n_tokens, n_head, head_size), keys and queries before RoPE.

    SmolLM2's pairs are neighbours, and its base is 100000: complex numbers turn them back.
    """
    rows = {}

    def keep(batch) -> None:
        found = batch.rows.astype(np.float64)
        if batch.kind != Rows.V:
            back = np.exp(-1j * batch.positions[:, None] * 100000.0 ** (-np.arange(32) / 32))[:, None, :]
            found = np.ascontiguousarray(found.view(complex) * back).view(float)
        rows[batch.layer, batch.kind] = found

    with filtering(keep) as check, model.context("f16", n_ctx=256) as context:
        context.decode(tokens, 0)
        check()
    return rows


def test_sums_are_those_of_the_rows(model, monkeypatch):
    """Those of a run in one batch, while the calibration takes three."""
    tokens = cut_tokens(model, default_text(), 48)
    expected = rows_by_hand(model, tokens)
    monkeypatch.setattr(model, "context", partial(model.context, n_batch=20))
    gathered = gather(model, tokens)
    assert list(gathered) == list(range(30))
    for (il, kind), rows in expected.items():
        sums, kept = gathered[il].sums[kind], rows[SINKS:]
        assert sums.n == 48 - SINKS == len(kept)
        scale = np.abs(kept).mean()
        np.testing.assert_allclose(sums.mean, kept.mean(axis=0), atol=2e-3 * scale)
        np.testing.assert_allclose(sums.energy, (kept**2).mean(axis=0), rtol=0.02, atol=1e-3 * scale**2)
        np.testing.assert_allclose(sums.variance, kept.var(axis=0), rtol=0.02, atol=1e-3 * scale**2)


def test_what_a_layer_of_a_run_has(model):
    tokens = cut_tokens(model, default_text(), 48)
    layer = gather(model, tokens)[7]
    assert layer.logit_scale == 0.125
    sampled = np.arange(SINKS, 48, SAMPLE_EVERY)
    assert np.concatenate(layer.positions).tolist() == sampled.tolist()
    for kind, n_head in ((Rows.K, 3), (Rows.V, 3), (Rows.Q, 9)):
        assert layer.sums[kind].mean.shape == (n_head, 64)
        assert np.concatenate(layer.sample[kind]).shape == (len(sampled), n_head, 64)
    moments = layer.key_moments()
    assert {array.shape for array in vars(moments).values()} == {(3, 64)}
    assert {array.dtype for array in vars(moments).values()} == {np.dtype(np.float32)}
    # Three query heads in a row share a KV head.
    energy = layer.sums[Rows.Q].energy
    np.testing.assert_allclose(moments.query_energy[1], energy[3:6].mean(axis=0), rtol=1e-6)


def test_keys_at_position_0_are_those_of_several_first_tokens(model):
    """SmolLM2 opens no text with BOS."""
    tokens = cut_tokens(model, default_text(), 34)
    first = tokens[::2]
    starts = gather(model, tokens)[3].starts
    expected = [rows_by_hand(model, np.array([token]))[3, Rows.K][0] for token in first]
    assert starts.n == len(first) == 17
    np.testing.assert_allclose(starts.mean, np.mean(expected, axis=0), atol=1e-3)


def test_a_model_with_bos_has_one_first_token(tiny):
    with Model(tiny.path) as model:
        assert model.bos == 1
        assert gather(model, cut_tokens(model, TEXT, 32))[0].starts.n == 1


def test_a_failure_while_rows_are_added_up_is_not_swallowed(model, monkeypatch):
    def fail(*_arguments):
        raise ZeroDivisionError("in a filter")

    monkeypatch.setattr(calibration.Layer, "add", fail)
    with pytest.raises(ZeroDivisionError, match="in a filter"):
        gather(model, cut_tokens(model, default_text(), 16))


def test_too_few_tokens(model):
    with pytest.raises(TqError, match="calibration needs more than 8 tokens, not 8"):
        gather(model, np.arange(8, dtype=np.int32))
    with pytest.raises(TqError, match="the text has 2 tokens, fewer than 40; give a longer --text or fewer --tokens"):
        cut_tokens(model, "two words", 40)
    assert len(cut_tokens(model, default_text(), 40)) == 40


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(model, calibrated, tmp_path):
    path = tmp_path / "side.gguf"
    store(calibrated, path)
    again = parse(metadata.read_metadata(path), calibrated.digest, model.info, path)
    assert same(again, calibrated)
    assert (again.n_tokens, again.text, again.every_type) == (48, "a text", False)
    assert again.digest == metadata.model_digest(model.path)
    assert list(again.expected_kld) == ["tq3", "tq4/tq3", "tq4", "q8_0/tq4", "q8_0"]
    assert again.recommended_type in (*again.expected_kld, "f16")


def test_the_comparison_of_these_tests_can_fail(made):
    layer = made.layers[1]
    other = dataclasses.replace(layer, start=np.nextafter(layer.start, np.float32(9)))
    assert same(made, made)
    assert not same(made, dataclasses.replace(made, layers={**made.layers, 1: other}))
    assert not same(made, dataclasses.replace(made, n_tokens=1))


def change(key: str, value) -> dict:
    return {metadata.PREFIX + key: value}


WRONG = {
    "another version": (change("version", 3), "has version 3, and this tq-ggml reads 2"),
    "no version": (change("version", None), "has version 0"),
    "a version of two numbers": (change("version", np.ones(2, np.uint32)), "tq_ggml.version is of a wrong type"),
    "another model": (change("model_digest", "0" * 64), "belongs to another model than tiny-"),
    "no model": (change("model_digest", None), "belongs to another model than tiny-"),
    "a digest of numbers": (change("model_digest", np.ones(3, np.float32)), "model_digest is of a wrong type"),
    "a word for the tokens": (change("calibration.tokens", "many"), "calibration.tokens is of a wrong type"),
    "numbers for the text": (change("calibration.text", np.ones(3)), "calibration.text is of a wrong type"),
    "a word for a figure": (change("expected_kld.tq4", "low"), "expected_kld.tq4 is of a wrong type"),
    "a list of figures": (change("expected_kld.tq4", np.ones(2)), "expected_kld.tq4 is of a wrong type"),
    "no array": (change("layer.1.key_mean", None), "layer.1 has no array key_mean of float32 for 1 heads"),
    "one number": (change("layer.0.key_start", 1.0), "layer.0 has no array key_start"),
    "words": (change("layer.0.key_start", ["one"]), "layer.0 has no array key_start"),
    "an empty array": (change("layer.0.key_mean", np.float32([])), "layer.0 has no array key_mean"),
    "another type": (change("layer.0.key_mean", np.ones(64, np.int32)), "layer.0 has no array key_mean"),
    "a short array": (change("layer.0.key_mean", np.ones(63, np.float32)), "layer.0 has arrays of different lengths"),
    "other heads than the model": (change("layer.0.head_count_kv", 2), "layer.0 has no number of KV heads"),
    "no heads": (change("layer.0.head_count_kv", 0), "layer.0 has no number of KV heads"),
    "more heads than the model": (change("layer.0.head_count_kv", 3), "layer.0 has no number of KV heads"),
    "a list of heads": (change("layer.0.head_count_kv", np.ones(2, np.uint32)), "layer.0 has no number of KV heads"),
    "NaN": (change("layer.1.key_mean", np.full(64, np.nan, np.float32)), "values in key_mean that are not finite"),
    "infinity": (change("layer.1.query_energy", np.full(64, np.inf, np.float32)), "query_energy that are not finite"),
    "a negative variance": (change("layer.1.key_variance", np.full(64, -1, np.float32)), "has a negative variance"),
    "negative energy": (change("layer.0.query_energy", np.full(64, -1, np.float32)), "has a negative variance"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG.keys())
def test_metadata_that_does_not_fit(made, tiny, tmp_path, changes, words):
    values = {key: value for key, value in {**made.metadata(), **changes}.items() if value is not None}
    path = tmp_path / "wrong.gguf"
    metadata.write_side_file(path, values)
    message = refused(choose, path, tiny, [TQ4])
    assert words in message and str(path) in message
    assert "`tq-ggml calibrate`" in message


def test_layers_that_the_model_does_not_have(made, tiny, tmp_path):
    for name, layers in (("other.gguf", {2: made.layers[0]}), ("none.gguf", {})):
        store(dataclasses.replace(made, layers=layers), tmp_path / name)
        message = refused(choose, tmp_path / name, tiny, [TQ4])
        assert f"{name} is damaged: its layers are not those of tiny-64-2-2.gguf; make it again" in message


def test_keys_that_only_look_like_a_layer(made, tiny, tmp_path):
    path = tmp_path / "side.gguf"
    more = {f"tq_ggml.layer.{name}.head_count_kv": 1 for name in ("x", "1.2", "", "-1", "\u0661", "9" * 5000, "1\n")}
    metadata.write_side_file(path, {**made.metadata(), **more})
    assert same(choose(path, tiny, [TQ4]), dataclasses.replace(made, every_type=True))


def test_files_that_hold_no_calibration(made, tiny, tmp_path):
    side, other = tmp_path / "side.gguf", tmp_path / "other.gguf"
    store(made, side)
    metadata.write_side_file(other, {"other.key": 1})
    whole = side.read_bytes()
    assert f"{other} holds no calibration; make one with `tq-ggml calibrate`" in refused(choose, other, tiny, [TQ4])
    assert "holds no calibration" in refused(choose, tiny.path, tiny, [TQ4])
    for name, content, words in (
        ("text.gguf", b"not a GGUF, but long enough to be read as one", "is not a GGUF file"),
        ("short.gguf", whole[: len(whole) // 2], "is truncated or damaged"),
        ("empty.gguf", b"", "text"),
        ("absent.gguf", None, "there is no file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(TqError) as caught:
            choose(tmp_path / name, tiny, [TQ4])
        assert name in str(caught.value) and "\n" not in str(caught.value)
        assert words in str(caught.value) or name == "empty.gguf"
    with pytest.raises(TqError, match="is a folder|is no"):
        choose(tmp_path, tiny, [TQ4])


def test_flipped_bits_and_cut_files(made, tiny, tmp_path):
    """Whatever the file says, the answer is a calibration or one line."""
    path, draw = tmp_path / "side.gguf", random.Random(0)
    store(made, path)
    whole = path.read_bytes()
    numbers = {i for at in _array_bytes(whole, made) for i in range(*at)}
    headers = [i for i in range(len(whole)) if i not in numbers][::3]
    files = [whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :] for at in headers]
    files += [whole[:at] + bytes([draw.randrange(256)]) + whole[at + 1 :] for at in draw.sample(sorted(numbers), 60)]
    files += [whole[:at] for at in range(0, len(whole), 61)]
    read = 0
    for content in files:
        path.write_bytes(content)
        try:
            assert isinstance(choose(path, tiny, [TQ4]), Calibration)
            read += 1
        except TqError as problem:
            assert "\n" not in str(problem)
    assert 60 < read < len(files) - 100, (read, len(files))


def _array_bytes(content: bytes, made: Calibration) -> list[tuple[int, int]]:
    """Where the numbers of the layers' arrays stand in a side file."""
    arrays = [array.tobytes() for layer in made.layers.values() for array in vars(layer).values()]
    return [(content.index(array), content.index(array) + len(array)) for array in arrays]


# ---- choosing ------------------------------------------------------------------------------------------------------


def test_auto_calibrates_once(smollm2_path, quick, capfd, cache_folder):
    info = check_gguf(smollm2_path)
    first = choose("auto", info, [TQ4, F16])
    path = side_file(first.digest)
    assert capfd.readouterr().err == (
        f"tq-ggml: calibrating {smollm2_path.name} once, a run over 32 tokens, to be kept in {path.parent}\n"
    )
    assert path.is_relative_to(cache_folder) and [path] == [p for p in cache_folder.rglob("*") if p.is_file()]
    assert (len(first.layers), first.n_tokens, first.text, first.every_type) == (30, 32, "tq-ggml", False)
    before = path.stat().st_mtime_ns
    second = choose("auto", info, [TQ3])
    assert same(first, second)
    assert capfd.readouterr().err == "" and path.stat().st_mtime_ns == before


def test_a_damaged_file_of_the_cache_is_made_again(tiny, quick, capfd):
    first = choose("auto", tiny, [TQ4])
    path = side_file(first.digest)
    wrong = dataclasses.replace(first, digest="0" * 64)
    for damage in (lambda: path.write_bytes(path.read_bytes()[:99]), lambda: store(wrong, path)):
        damage()
        capfd.readouterr()
        assert same(choose("auto", tiny, [TQ4]), first)
        note, again = capfd.readouterr().err.splitlines()
        assert str(path) in note and note.startswith("tq-ggml: ") and note.endswith("; making it again")
        assert again.startswith(f"tq-ggml: calibrating {tiny.path.name} once")
        assert same(choose("auto", tiny, [TQ4]), first)
        assert capfd.readouterr().err == ""


def test_which_types_take_constants(tiny, quick, cache_folder):
    for spec, types in (("off", [TQ4]), ("auto", [Q8_0, F16]), ("on", [F16]), ("auto", []), ("no.gguf", [F16])):
        assert choose(spec, tiny, types) is None
    assert not cache_folder.exists()
    automatic, every = choose("auto", tiny, [Q8_0, TQ4]), choose("on", tiny, [Q8_0])
    assert same(dataclasses.replace(automatic, every_type=True), every)
    for found, conditioned in ((automatic, {"tq4", "tq3"}), (every, {"tq4", "tq3", "q8_0"})):
        for cache_type in (TQ4, TQ3, Q8_0, F16):
            expected = found.layers if cache_type.name in conditioned else None
            assert found.constants_for(cache_type) is expected


def test_the_models_own_constants_win(made, tiny, tmp_path, quick, capfd):
    own = tmp_path / "own.gguf"
    metadata.write_patched_copy(tiny.path, own, dataclasses.replace(made, text="its own").metadata())
    store(dataclasses.replace(made, text="the cache's"), side_file(made.digest))
    assert set(made.metadata()) <= gguf.GGUFReader(own).fields.keys()
    assert choose("auto", check_gguf(own), [TQ4]).text == "its own"
    assert choose("on", check_gguf(own), [Q8_0]).text == "its own"
    assert choose("auto", tiny, [TQ4]).text == "the cache's"
    assert choose(side_file(made.digest), check_gguf(own), [TQ4]).text == "the cache's"
    assert capfd.readouterr().err == ""


def test_a_model_whose_own_constants_are_damaged(made, tiny, tmp_path):
    own = tmp_path / "own.gguf"
    metadata.write_patched_copy(tiny.path, own, {**made.metadata(), "tq_ggml.version": 9})
    assert f"the calibration in {own} has version 9" in refused(choose, "auto", check_gguf(own), [TQ4])
    assert choose("off", check_gguf(own), [TQ4]) is None
    assert choose("auto", check_gguf(own), [Q8_0]) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has no vocabulary to calibrate with"),
        ({"arch": "llada", "tokens": LETTERS}, "keeps no KV cache that tq-ggml can measure"),
    ],
)
def test_models_that_cannot_be_calibrated_work_without(tiny_gguf, quick, capfd, cache_folder, options, said):
    path = tiny_gguf(**options)
    assert choose("auto", check_gguf(path), [TQ4]) is None
    note = capfd.readouterr().err.splitlines()[-1]
    assert (
        note.startswith(f"tq-ggml: {path.name} ") and note.endswith(": its keys are not conditioned") and said in note
    )
    assert not cache_folder.exists()
    Llama(path, cache_type="tq4").close()


def test_a_cache_folder_that_cannot_be_written(tiny, quick, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TQ_GGML_CACHE", str(tiny.path / "below"))
    assert len(choose("auto", tiny, [TQ4]).layers) == 2
    assert "cannot make the folder" in capfd.readouterr().err.splitlines()[-1]


# ---- Llama ---------------------------------------------------------------------------------------------------------


def test_llama_conditions_the_keys_of_tq_types(smollm2_path, model, calibrated, capfd, tmp_path, cache_folder):
    def summary(**options) -> str:
        Llama(smollm2_path, n_ctx=256, **options).close()
        (line,) = capfd.readouterr().err.splitlines()
        return line.rsplit("; ", 1)[1]

    store(calibrated, side_file(calibrated.digest))
    conditioned = "keys conditioned in 30 of 30 layers"
    assert summary(cache_type="tq4") == conditioned
    assert summary(cache_type="tq4", calibration="off") == "keys as they are"
    assert summary(cache_type="q8_0/tq4") == "keys as they are"
    assert summary(cache_type="q8_0/tq4", calibration="on") == conditioned
    side_file(calibrated.digest).rename(tmp_path / "side.gguf")
    assert summary(cache_type="tq3", calibration=tmp_path / "side.gguf") == conditioned
    assert summary(calibration="auto") == summary(cache_type="f16", calibration="on") == "keys as they are"
    assert not any(path.is_file() for path in cache_folder.rglob("*"))
    with pytest.raises(TqError, match="there is no file"):
        Llama(smollm2_path, cache_type="tq4", calibration=tmp_path / "absent.gguf")


def test_llama_answers_as_well(smollm2_path, calibrated):
    store(calibrated, side_file(calibrated.digest))
    llama = Llama(smollm2_path, cache_type="tq4", n_ctx=256)
    prompt = "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is"
    assert llama(prompt, max_tokens=3, temperature=0)["choices"][0]["text"].startswith(" Berlin.")
    llama.close()


def test_a_model_with_constants_inside(smollm2_path, calibrated, tmp_path, capfd, cache_folder):
    own = tmp_path / "own.gguf"
    metadata.write_patched_copy(smollm2_path, own, calibrated.metadata())
    Llama(own, cache_type="tq4", n_ctx=256).close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("keys conditioned in 30 of 30 layers") and not cache_folder.exists()
    # Every other reader of GGUFs takes it as the same model.
    plain = activate().Llama(str(own), n_ctx=256, verbose=False)
    assert plain.metadata["general.name"]
    text = plain("The capital of France is", max_tokens=4, temperature=0)["choices"][0]["text"]
    assert "Paris" in text
    plain.close()
