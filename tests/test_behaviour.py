"""Passkeys and greedy agreement: the scoring by hand, then real models, whole and broken."""

from __future__ import annotations

import json
import re
from itertools import islice

import gguf
import numpy as np
import pytest

from tq_ggml import behaviour, prompts
from tq_ggml.behaviour import agree, common_prefix, digits_right, greedy, hide_passkeys, pose, retrieve, summarise
from tq_ggml.cache_types import parse_pair
from tq_ggml.cli import N_PROMPTS, main
from tq_ggml.engine import Model
from tq_ggml.errors import TqError
from tq_ggml.evaluation import F16

Q8_0, TQ3 = parse_pair("q8_0"), parse_pair("tq3")


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    with Model(smollm2_path) as model:
        yield model


# ---- pure parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (" 472199.", 1),
        (' "472199".\n\nThe number 1', 1),
        (" 4721990", 1),
        (" 472189.", 5 / 6),
        (" 4721", 4 / 6),
        (" 72199.", 0.5 / 3),  # one digit lost: only the second 9 is still in its place
        ("not known: 472199", 1),
        (" a small wooden box", 0),
        ("", 0),
    ],
)
def test_digits_count_where_they_belong(answer, share):
    assert digits_right("472199", answer) == pytest.approx(share)


def test_a_prefix_is_read_no_further_than_needed():
    tokens = iter([5, 6, 7, 8, 9])
    assert common_prefix([5, 6, 1, 8], tokens) == 2
    assert next(tokens) == 8
    tokens = iter([5, 6, 7])
    assert common_prefix([5, 6], tokens) == 2
    assert next(tokens) == 7
    assert (common_prefix([], iter([1])), common_prefix([1, 2], [1])) == (0, 1)


def test_agreement_by_hand():
    found = summarise(Q8_0, [64, 10, 16, 0], [64, 20, 16, 60])
    assert (found.prefix, found.identical, found.answer_tokens, found.n_answers) == (22.5, 0.5, 40, 4)
    assert found.prefix_err == pytest.approx(np.std([64, 10, 16, 0], ddof=1) / 2)
    row = found.row()
    assert (row["type_k"], row["type_v"], row["prefix"], row["identical"]) == ("q8_0", "q8_0", 22.5, 0.5)
    assert summarise(Q8_0, [3], [4]).prefix_err is None


def test_the_prompts_are_mixed_and_as_many_as_the_command_line_says():
    found = prompts.load_prompts()
    assert len(set(found)) == len(found) == N_PROMPTS == 40
    assert "中国的首都是哪里？" in found[:3]
    assert sum(bool(re.search("[\u4e00-\u9fff]", prompt)) for prompt in found) == 13
    assert all(prompt == prompt.strip() != "" for prompt in found)


def test_the_filler_has_no_digit_and_does_not_repeat_soon():
    found = list(islice(prompts.sentences(), 300))
    assert not re.search("[0-9]", " ".join(found))
    assert len(set(found)) > 250


# ---- prompts -------------------------------------------------------------------------------------------------------


def test_a_number_is_hidden_where_it_should_be(smollm2):
    found = hide_passkeys(smollm2, [512, 300], [0, 0.5, 1])
    assert [(one.length, one.depth) for one in found] == [(n, d) for n in (512, 300) for d in (0, 0.5, 1)]
    assert len({one.digits for one in found}) == 6
    for one in found:
        assert one.length - 40 < len(one.prompt) <= one.length - len(one.digits)
        text = smollm2.detokenize(one.prompt, special=True)
        assert text.count(one.digits) == 2 and set(re.findall("[0-9]+", text)) == {one.digits}
        assert text.endswith("<|im_start|>assistant\nThe pass key is")
        start, end = text.index("the end.\n\n") + 10, text.index("\n\nWhat is the pass key")
        place = (text.index(one.digits) - start) / (end - start)
        assert place == pytest.approx(one.depth, abs=0.1)
    again = hide_passkeys(smollm2, [512], [0.5])[0]
    assert again.digits == found[1].digits
    np.testing.assert_array_equal(again.prompt, found[1].prompt)


def test_lengths_that_do_not_work(smollm2):
    with pytest.raises(TqError, match="context of 8193 tokens is longer than the 8192 of the training"):
        hide_passkeys(smollm2, [1024, 8193])
    with pytest.raises(TqError, match=r"context of 100 tokens is too short; give at least (\d+)") as refused:
        hide_passkeys(smollm2, [100], [0.1])
    offered = int(str(refused.value).split()[-1])
    assert hide_passkeys(smollm2, [offered], [0.1])[0].length == offered
    with pytest.raises(TqError, match=f"too short; give at least {offered}"):
        hide_passkeys(smollm2, [offered - 1], [0.1])


def test_an_answer_longer_than_the_training_context(smollm2):
    with pytest.raises(TqError, match=r"8192 tokens of answer take \d+, but the model was trained on 8192"):
        pose(smollm2, ["hello"], 8192)


# ---- models --------------------------------------------------------------------------------------------------------


def test_f16_agrees_with_itself_and_finer_types_agree_longer(smollm2):
    pairs = [F16, Q8_0, TQ3]
    f16, q8_0, tq3 = agree(smollm2, pairs, pose(smollm2, prompts.load_prompts()[:4]), n_tokens=24, n_threads=2)
    assert [(one.type_k, one.type_v) for one in (f16, q8_0, tq3)] == pairs
    assert f16.prefix == f16.answer_tokens > 10 and f16.identical == 1
    assert f16.prefix > tq3.prefix and q8_0.prefix > tq3.prefix and tq3.identical < 1


def test_a_prefix_is_that_of_whole_answers(smollm2):
    (question,) = pose(smollm2, ["Name three fruits."])
    answers = {}
    for pair in (F16, TQ3):
        with smollm2.context(*pair, n_ctx=256, n_threads=2) as context:
            answers[pair] = [list(islice(greedy(context, question), 16)) for _ in range(2)]
            assert answers[pair][0] == answers[pair][1]  # nothing is left over from the run before
    (tq3,) = agree(smollm2, [TQ3], [question], n_tokens=16, n_threads=2)
    different = np.not_equal(answers[F16][0], answers[TQ3][0])
    assert different.any() and tq3.prefix == different.argmax()


def test_an_answer_ends_with_the_models_end_token(smollm2):
    (question,) = pose(smollm2, ["Answer with one word: what is the capital of France?"])
    (f16,) = agree(smollm2, [F16], [question], n_tokens=200, n_threads=2)
    assert f16.answer_tokens < 200
    with smollm2.context(n_ctx=512, n_threads=2) as context:
        answer = list(islice(greedy(context, question), int(f16.answer_tokens)))
    assert smollm2.detokenize(answer[-1:], special=True) == "<|im_end|>"


def test_a_number_comes_back_from_the_cache_and_from_nowhere_else(smollm2):
    passkeys = hide_passkeys(smollm2, [256, 400], [0.5])
    f16, tq4 = retrieve(smollm2, [F16, parse_pair("tq4")], passkeys, n_threads=2)
    assert f16.found == {256: 1, 400: 1}
    assert f16.row() == {"type_k": "f16", "type_v": "f16", "passkey_256": 1, "passkey_400": 1}
    assert tq4.found[400] > 0.4
    # The same prompts marked with other numbers: what comes back must not count.
    swapped = [
        behaviour.Passkey(one.length, one.depth, other.digits, one.prompt)
        for one, other in zip(passkeys, reversed(passkeys), strict=True)
    ]
    (wrong,) = retrieve(smollm2, [F16], swapped, n_threads=2)
    assert max(wrong.found.values()) < 0.5


def test_a_model_that_gives_nan_is_named(tiny_gguf):
    path = tiny_gguf()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    tensors["output.weight"].data[3] = np.nan
    tensors["output.weight"].data.flush()
    with Model(path) as model, pytest.raises(TqError, match="q8_0 gave logits that are not finite"):
        passkey = behaviour.Passkey(64, 0.5, "123456", np.arange(32, dtype=np.int32))
        retrieve(model, [Q8_0], [passkey], n_threads=1)


def test_a_type_that_does_not_fit_is_refused_before_any_run(tiny_gguf, monkeypatch):
    with Model(tiny_gguf(head_size=80)) as model:
        monkeypatch.setattr(behaviour, "greedy", lambda *_: pytest.fail("f16 was run first"))
        with pytest.raises(TqError, match="head size 80"):
            agree(model, [F16, TQ3], [np.arange(8)], n_tokens=4, n_threads=1)


def test_a_model_without_a_template_gets_plain_text(tiny_gguf):
    with Model(tiny_gguf(tokens=["▁", "a", "b", "<0x0A>"])) as model:
        (tokens,) = pose(model, ["ab"], 1)
        assert tokens[0] == model.bos == 1
        assert 2 not in tokens  # the end token that this vocabulary puts after a text would end the answer


def test_a_template_that_fails_is_one_line(tiny_gguf, tmp_path):
    with Model(tiny_gguf(tokens=["a"])) as model, pytest.raises(TqError) as refused:
        prompts._rendered(model, "{{ raise_exception('no\nuser') }}", "a")
    assert str(refused.value) == f"the chat template of {model.path.name} fails: no user"


def test_a_template_sees_the_message_and_the_control_tokens(tiny_gguf):
    with Model(tiny_gguf(tokens=["a"])) as model:
        template = "{{ bos_token }}{{ messages[0]['role'] }}: {{ messages[0]['content'] }}{{ eos_token }}"
        assert prompts._rendered(model, template, "hello") == "<s>user: hello</s>"


# ---- command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def compare(smollm2_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking. " * 20, encoding="utf-8")

    def run(*words):
        small = ["--text", str(text), "--ctx", "32", "--windows", "1", "-d", "8", "-n", "1", "-r", "1", "-t", "2"]
        code = main(["compare", "-m", str(smollm2_path), "--types", "f16,tq4", *small, *words])
        return code, capsys.readouterr()

    return run


def test_compare_adds_columns_to_its_rows(compare):
    words = ["--passkey", "300", "--passkey-depths", "50", "--agreement", "2", "--agreement-tokens", "8"]
    code, printed = compare(*words, "-o", "json")
    f16, tq4 = json.loads(printed.out)
    assert code == 0
    assert (f16["passkey_300"], f16["prefix"], f16["identical"], f16["kld"]) == (1, f16["answer_tokens"], 1, 0)
    assert (tq4["type_k"], tq4["n_answers"]) == ("tq4", 2) and tq4["prefix"] <= 8
    assert "agreement: 2 prompts, f16 answers of" in printed.err

    code, printed = compare(*words[:4])
    header, _, first, _ = printed.out.splitlines()
    assert header.endswith("| passkey 300 % |\n".strip()) and "same tokens" not in header
    assert first.endswith("|           100 |")


def test_compare_refuses_a_length_before_it_measures(compare):
    code, printed = compare("--passkey", "9000")
    assert (code, printed.out) == (2, "")
    assert "9000 tokens is longer than the 8192" in printed.err and "scored" not in printed.err


@pytest.mark.parametrize("words", [["--passkey", "x"], ["--passkey-depths", "101"], ["--agreement", "41"]])
def test_values_that_are_none(compare, words):
    code, printed = compare(*words)
    assert code == 2 and f"'{words[1]}' is not a whole number from" in printed.err


def test_default_lengths_are_those_the_model_allows(tiny_gguf, monkeypatch):
    from tq_ggml import cli, commands

    asked = []
    monkeypatch.setattr(behaviour, "hide_passkeys", lambda model, lengths, depths: asked.append((lengths, depths)))
    args = cli.build_parser().parse_args(["compare", "-m", "x", "--passkey"])
    with Model(tiny_gguf()) as model:  # trained on 4096
        commands._passkeys(args, model)
        model.n_ctx_train = 700
        commands._passkeys(args, model)
    assert asked == [([1024, 4096], [0.1, 0.5, 0.9]), ([700], [0.1, 0.5, 0.9])]
