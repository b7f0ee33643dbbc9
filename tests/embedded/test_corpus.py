"""The synthetic corpus: reproducible, split by prompt, right in every sum; and its files."""

import hashlib
import json
import operator
import re
from functools import cache

import pytest

from examples.embedded.corpus import KINDS, REGIMES, generate, is_heldout
from examples.embedded.corpus.__main__ import main
from examples.embedded.words import CHAT_PROMPT
from tests.examples.data import EMBEDDED, tokenised
from train.data.shards import read_manifest, read_rows
from train.data.tokenizer import load_tokenizer
from wedlm_jax.errors import InputError
from wedlm_jax.records.questions import read_questions

EQUATION = re.compile(r"(\d+) ([-+x/]) (\d+) = (\d+)")
APPLY = {"+": operator.add, "-": operator.sub, "x": operator.mul, "/": operator.truediv}


@cache
def samples(seed=0, count=3000, split="train"):
    return tuple(generate(seed, count, split=split))


def test_samples_are_those_that_trained_models_saw():
    """All kinds, by the seed. A changed sample would change every trained model's data."""
    digest = hashlib.sha256(json.dumps(samples(seed=7)).encode()).hexdigest()
    assert digest[:16] == "7304a8417a661258"
    assert samples(seed=7, count=100) == samples(seed=7)[:100] != samples()[:100]
    seen = {(sample.regime, sample.kind) for sample in samples(seed=7)}
    assert seen == {(regime, kind) for regime in REGIMES for kind in KINDS[regime]}


def test_splits_share_no_prompt_whatever_the_seed():
    train = {sample.prompt for sample in (*samples(), *samples(seed=5))}
    heldout = {sample.prompt for sample in samples(seed=5, count=300, split="heldout")}
    assert not train & heldout
    assert not any(map(is_heldout, train))
    assert all(map(is_heldout, heldout))


def test_a_regime_left_out_of_the_weights_does_not_occur():
    only = list(generate(0, 50, split="train", weights={"prose": 2.0}))
    assert {sample.regime for sample in only} == {"prose"}
    both = {"prose": 0.5, "reasoning": 0.5}
    backwards = dict(reversed(both.items()))
    assert list(generate(0, 50, split="train", weights=both)) == list(
        generate(0, 50, split="train", weights=backwards)
    )


def test_every_equation_of_a_solution_holds_and_has_numbers_that_are_known():
    solved = [sample for sample in samples() if sample.regime == "reasoning"]
    assert len(solved) > 500
    for sample in solved:
        equations = EQUATION.findall(sample.answer)
        assert len(equations) == sample.answer.count("="), sample
        assert len(equations) >= 2, sample
        # Words such as "perimeter" or "both" stand for 2, averages divide by how many there are.
        known = {int(n) for n in re.findall(r"\d+", sample.prompt)} | {2, 3}
        for left, sign, right, result in equations:
            assert APPLY[sign](int(left), int(right)) == int(result), sample
            assert {int(left), int(right)} <= known, sample
            known.add(int(result))
        marked = re.fullmatch(r".*\nAnswer: (\d+)", sample.answer, re.DOTALL)
        assert marked, sample
        assert marked.group(1) == equations[-1][-1], sample


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "'test'"),
        ({"count": -1}, "negative"),
        ({"weights": {"poems": 1.0}}, "poems.*low_entropy"),
        ({"weights": {"prose": -1.0}}, "non-negative"),
        ({"weights": {}}, "positive sum"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(**{"seed": 0, "count": 1, "split": "train", **arguments})


def test_samples_become_questions_that_are_right_by_themselves(tmp_path):
    path = tmp_path / "questions.jsonl"
    assert main([str(path), "--samples", "60", "--seed", "5"]) == 0
    regimes = read_questions(path)
    assert set(regimes) == set(REGIMES)
    questions = [question for some in regimes.values() for question in some]
    expected = {sample.prompt for sample in generate(5, 60, split="heldout")}
    assert {question.prompt for question in questions} == expected
    assert all(is_heldout(question.prompt) for question in questions)
    for question in questions:
        right = None if question.regime == "prose" else True
        assert question.is_right(question.answer) is right


def test_conversations_become_the_samples_that_the_embedded_model_saw(tmp_path):
    path = tmp_path / "chats.jsonl"
    shares = ["--weights", "0.42", "0.5", "0.08"]
    given = ["--form", "conversations", "--split", "train", "--samples", "60", "--seed", "3"]
    assert main([str(path), *given, *shares]) == 0
    tokenised([path], tmp_path / "rows", row_length=192, block_size=16, end_tokens=16)
    manifest = read_manifest(tmp_path / "rows")
    file = tmp_path / "rows" / manifest.shards[0].file
    found = {
        (tuple(one.tokens), tuple(one.trainable))
        for row in read_rows(file, list(range(manifest.rows)))
        for one in row
    }
    tokenizer, expected = load_tokenizer(EMBEDDED), set()
    weights = dict(zip(REGIMES, (0.42, 0.5, 0.08), strict=True))
    for sample in generate(3, 60, split="train", weights=weights):
        asked = tokenizer.encode(CHAT_PROMPT.format(prompt=sample.prompt)).ids
        said = tokenizer.encode(sample.answer + 17 * "<|im_end|>").ids
        if len(asked) + len(said) <= 192:
            flags = (False,) * len(asked) + (True,) * len(said)
            expected.add(((*asked, *said), flags))
    assert len(expected) > 50
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("out.jsonl", "--samples", "0"), "--samples"),
        (("out.jsonl", "--weights", "0", "0", "0"), "--weights: .*positive sum"),
        (("no/such/out.jsonl",), "cannot be written"),
    ],
)
def test_bad_arguments_are_one_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        main(list(arguments))
