"""Questions in mid-run: which are asked, what is refused, and that each is asked once."""

import dataclasses
import json
from pathlib import Path
from typing import cast

import pytest

from tests.examples.tiny_run import tiny_recipe
from train.evaluation.questions import asked_questions, drawn_questions
from train.loop import train as run_training
from train.recipe.config import EvaluationSection
from wedlm_jax.completion import Completion
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError


def write(path, count):
    """Questions of two regimes and of a third that has no right answers; the answer to question i
    is i."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"number {i}?"}],
            "answer": str(i),
            "match": "last_number" if i % 3 else None,
            "regime": ("prose", "odd", "even")[i % 3],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def section(path, **changes):
    return EvaluationSection(every=2, questions=str(path), answer_tokens=8, **changes)


def test_some_are_drawn_by_the_seed_regime_by_regime(tmp_path):
    path = write(tmp_path / "questions.jsonl", 30)

    def drawn(**changes):
        return [int(one.answer) for one in drawn_questions(section(path, **changes))]

    five = drawn(most_questions=5)
    assert len(five) == 5
    assert five == sorted(five, key=lambda i: (i % 3, i))
    assert five == drawn(most_questions=5) != drawn(most_questions=5, seed=1)
    assert set(five) <= set(drawn(most_questions=20)) < set(drawn()) == set(range(30))
    none = dataclasses.replace(section(path), every=0)
    assert drawn_questions(none) == drawn_questions(EvaluationSection(every=2)) == []


def test_a_bad_file_is_refused_before_anything_is_made(tmp_path):
    path = write(tmp_path / "questions.jsonl", 3)
    with path.open("a") as file:
        file.write('{"prompt": "x", "anwser": 1}\n')
    for name, told in (
        (str(path), r"evaluation\.questions: .*line 4: unknown field 'anwser'; did you mean"),
        ("none.jsonl", r"evaluation\.questions: none\.jsonl: no such file"),
        ("gs://bucket/q.jsonl", r"gs://bucket/q\.jsonl: evaluation\.questions cannot be in"),
    ):
        evaluation = section(Path("unused"))
        evaluation.questions = name
        config = tiny_recipe(tmp_path / "run", tmp_path / "no tokenizer", evaluation=evaluation)
        with pytest.raises(InputError, match=told):
            run_training(config)
    assert not (tmp_path / "run").exists()


def asked(path, tokenizer, room=256, **changes):
    config = tiny_recipe("unused", None, evaluation=section(path, **changes))
    found = asked_questions(config, drawn_questions(config.evaluation), tokenizer, room)
    assert found is not None
    return found


def test_a_prompt_without_room_is_refused_by_line(tmp_path, tokenizer_folder):
    path = write(tmp_path / "questions.jsonl", 2)
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "long " * 300, "answer": "x"}) + "\n")
    with pytest.raises(InputError, match=r"line 3: .*answer_tokens=8 do not fit .* of 256"):
        asked(path, tokenizer_folder)
    path.write_text('{"prompt": "", "answer": "x"}\n')
    with pytest.raises(InputError, match="line 1: prompt: expected at least one token"):
        asked(path, tokenizer_folder)


class Parrot:
    """In the stead of an engine: says each prompt's number, and a wrong one to number 4."""

    def __init__(self, tokenizer):
        from wedlm_jax.text import TextCodec

        codec = TextCodec.load(tokenizer)
        assert codec is not None
        self._codec, self.heard = codec, list[str]()

    def decode(self, requests, told, max_forwards):
        return [self._say(self._codec.decode(request.prompt)) for request in requests]

    def _say(self, prompt):
        number = prompt.partition("number ")[2].partition("?")[0]
        self.heard.append(number)
        ids = self._codec.encode(f"it is {number if number != '4' else '5'}")
        return Completion(None, ids, "length" if number == "1" else "abort", 2, 40)


@pytest.mark.parametrize("processes", [1, 3, 20])
def test_processes_ask_each_question_once_and_count_together(tmp_path, tokenizer_folder, processes):
    questions = asked(write(tmp_path / "questions.jsonl", 9), tokenizer_folder)
    parrot = Parrot(tokenizer_folder)
    counts = [questions.answer(cast(Engine, parrot), i, processes, print) for i in range(processes)]
    assert sorted(parrot.heard) == [str(i) for i in range(9)]
    record = questions.record(sum(counts[1:], counts[0]))
    made = record.pop("question_tokens_per_forward")
    assert made > 1
    assert record == {
        "question_accuracy": 5 / 6,
        "question_accuracy/odd": 2 / 3,
        "question_accuracy/even": 1.0,
        "questions": 9,
        "questions_cut": 1,
    }
