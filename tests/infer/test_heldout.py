"""Questions from a file: how completions are judged, and what is refused."""

import json
from pathlib import Path

import pytest

from infer.heldout import Question, read_questions
from wedlm_jax.errors import InputError

QUESTION = {
    "regime": "reasoning",
    "kind": "sum",
    "prompt": "2 and 3?",
    "answer": "2 + 3 = 5\nAnswer: 5",
    "match": "last_line",
}


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("match", "text", "right"),
    [
        ("last_line", "2 + 3 = 6\nAnswer: 5\n", True),
        ("last_line", "Answer: 5\nmore", False),
        ("last_line", "", False),
        ("text", " 2 + 3 = 5\nAnswer: 5 ", True),
        ("text", "2 + 3 = 6\nAnswer: 5", False),
        (None, "anything", None),
    ],
)
def test_completions_are_judged_by_what_the_question_names(
    match: str | None, text: str, right: bool | None
) -> None:
    assert Question(**(QUESTION | {"match": match})).is_right(text) is right


def test_questions_come_by_regime_in_the_order_of_the_file(tmp_path: Path) -> None:
    prose = QUESTION | {"regime": "prose", "prompt": "Ünïcode?", "match": None}
    path = _write(tmp_path / "q.jsonl", QUESTION, prose, QUESTION | {"prompt": "second"})
    regimes = read_questions(path)
    assert [q.prompt for q in regimes["reasoning"]] == ["2 and 3?", "second"]
    assert [q.prompt for q in regimes["prose"]] == ["Ünïcode?"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no questions"),
        (b"{\n", "line 1: not a question"),
        (b'{"regime": "x"}\n', "line 1: not a question"),
        (b'["list"]\n', "line 1: not a question"),
        (json.dumps(QUESTION | {"match": "best"}).encode(), "line 1: expected texts"),
        (json.dumps(QUESTION | {"prompt": 3}).encode(), "line 1: expected texts"),
        (b"\xff\xfe\x00binary", "UTF-8"),
    ],
)
def test_what_is_not_a_file_of_questions_is_refused(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_questions(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl"):
        read_questions(tmp_path / "none.jsonl")
