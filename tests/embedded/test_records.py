"""`python -m examples.embedded.corpus`: questions that the decoding jobs can read, and
conversations to train on."""

import pytest

from examples.embedded.corpus import REGIMES, generate, is_heldout
from examples.embedded.corpus.__main__ import main
from examples.embedded.words import CHAT_PROMPT
from tests.examples.data import EMBEDDED, tokenised
from train.data.manifest import read_manifest
from train.data.samples import load_tokenizer
from train.data.show import read_rows
from wedlm_jax.errors import InputError
from wedlm_jax.records.questions import read_questions


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
