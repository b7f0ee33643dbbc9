"""`python -m train.embedded.corpus`: held-out questions that the decoding jobs can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.embedded.corpus import REGIMES, generate, is_heldout
from train.embedded.corpus.__main__ import main
from wedlm_jax.errors import InputError
from wedlm_jax.records.questions import read_questions


def test_samples_become_questions_that_are_right_by_themselves(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("out.jsonl", "--samples", "0"), "--samples"), (("no/such/out.jsonl",), "cannot be written")],
)
def test_bad_arguments_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        main(list(arguments))
