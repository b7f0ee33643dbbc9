"""Questions from a file: how completions are judged, and what is refused."""

import json
from decimal import Decimal

import pytest

from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.completion import Completion
from wedlm_jax.errors import InputError
from wedlm_jax.records.questions import Question, Tally, last_number, read_questions, tally
from wedlm_jax.text import TextCodec

ANSWER = "2 + 3 = 5\nAnswer: 5"
QUESTION = {"regime": "sums", "kind": "k", "prompt": "2 and 3?", "answer": ANSWER}
USER = {"role": "user", "content": "2 and 3?"}


def _write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("match", "answer", "text", "right"),
    [
        ("last_line", ANSWER, "2 + 3 = 6\nAnswer: 5\n", True),
        ("last_line", ANSWER, "Answer: 5\nmore", False),
        ("last_line", ANSWER, "", False),
        ("exact", ANSWER, " 2 + 3 = 5\nAnswer: 5 ", True),
        ("exact", ANSWER, "2 + 3 = 6\nAnswer: 5", False),
        ("contains", " Lima ", "It is Lima, of course.", True),
        ("contains", "Lima", "It is lima.", False),
        ("last_number", "so #### 1,234", "It is $1234.00 in all.", True),
        ("last_number", "5", "5 apples and 3 pears", False),
        ("last_number", "5", "none", False),
        ("last_number", "0.5", "-.5", False),
        (None, "x", "anything", None),
    ],
)
def test_completions_are_judged_as_the_question_says(match, answer, text, right):
    assert Question("?", answer, match).is_right(text) is right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 42.", "42"),
        ("$1,234.50 in 3 parts of 411.5", "411.5"),
        ("5-3", "3"),
        ("minus (-3)", "-3"),
        ("−4 °C", "-4"),
        ("1,2,3", "3"),
        ("12,345,678", "12345678"),
        ("1e5", "1e5"),
        ("about .25", ".25"),
        ("no numbers - none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_questions_come_by_regime_in_the_order_of_the_file(tmp_path):
    prose = QUESTION | {"regime": "prose", "prompt": "Ünïcode?", "match": None}
    path = _write(tmp_path / "q.jsonl", QUESTION, prose, QUESTION | {"prompt": "second"})
    regimes = read_questions(path, match="contains")
    assert [q.prompt for q in regimes["sums"]] == ["2 and 3?", "second"]
    assert [q.match for q in regimes["sums"]] == ["contains"] * 2
    assert [(q.prompt, q.match) for q in regimes["prose"]] == [("Ünïcode?", None)]
    assert [q.place for q in regimes["prose"]] == [f"{path} line 2"]


def test_a_prompt_is_a_users_message_if_asked_for_and_messages_always_are_a_chat(tmp_path):
    chat = [{"role": "system", "content": "Be short."}, USER]
    path = _write(
        tmp_path / "q.jsonl", {"prompt": "2 and 3?", "answer": 5}, {"messages": chat, "answer": "5"}
    )
    raw, conversation = read_questions(path)["q"]
    asked, same = read_questions(path, chat=True)["q"]
    assert (raw.messages, raw.answer) == (None, "5")
    assert (conversation.messages, conversation.prompt) == (chat, "2 and 3?")
    assert conversation == same
    codec = TextCodec.load(EMBEDDED_MODEL)
    assert raw.encode(codec) == codec.encode("2 and 3?")
    assert asked.encode(codec) == codec.encode_chat([USER])
    assert conversation.encode(codec) == codec.encode_chat(chat) != asked.encode(codec)
    codec.tokenizer.chat_template = None
    with pytest.raises(InputError, match=rf"{path} line 2: .*no chat template"):
        conversation.encode(codec)


def test_completions_are_counted_by_what_they_come_to():
    def said(text, tokens, reason):
        return Completion(text, [1] * tokens, reason, tokens // 2, 2 * tokens)

    asked = [Question("?", "5", "contains"), Question("?", "6", "exact"), Question("?", "", None)]
    counted = tally(asked, [said("so 5", 4, "stop"), said("7", 6, "length"), said("x", 2, "stop")])
    assert counted == Tally(
        questions=3, judged=2, right=1, tokens=12, forwards=6, instances=24, cut=1
    )
    assert counted.accuracy == 0.5
    assert tally(asked[2:], [said(None, 2, "stop")]).accuracy is None


BAD = [
    (b"", "no questions"),
    (b"\n \n", "no questions"),
    (b"{\n", "line 1: not JSON"),
    (b'["list"]\n', "line 1: not a JSON object"),
    (b"\xff\xfe\x00binary", "line 1: not UTF-8"),
    (b'{"prompt": "a", "prompt": "b", "answer": "c"}', "duplicate key 'prompt'"),
    ({"answer": "x"}, "line 1: expected either 'prompt' or 'messages'; the record has neither"),
    (QUESTION | {"messages": [USER]}, "the record has both"),
    ({"prompt": "x"}, "line 1: answer: missing"),
    ({"prompt": "x", "anwser": "y"}, "unknown field 'anwser'; did you mean 'answer'"),
    (QUESTION | {"match": "last number"}, 'match: unknown "last number"; did you mean'),
    (QUESTION | {"match": ["exact"]}, "match: unknown"),
    (QUESTION | {"prompt": 3}, "prompt: expected a text, not 3"),
    (QUESTION | {"regime": 3}, "regime: expected a text, not 3"),
    (QUESTION | {"answer": None}, "answer: expected a text or a number, not null"),
    (QUESTION | {"answer": ["a"]}, "answer: expected a text or a number"),
    (QUESTION | {"answer": True}, "answer: expected a text or a number, not true"),
    (QUESTION | {"answer": " \n"}, "answer: expected more than white space"),
    (QUESTION | {"answer": "five", "match": "last_number"}, "answer: expected a number in it"),
    ({"messages": [], "answer": "x"}, "messages: expected a list"),
    ({"messages": [USER, {"role": "user"}], "answer": "x"}, r"messages\[1\]\.content: expected"),
    (
        {"messages": [USER, {"role": "assistant", "content": "5"}], "answer": "5"},
        "messages: expected the user's turn last",
    ),
]


@pytest.mark.parametrize(("content", "says"), BAD)
def test_what_is_no_question_is_refused_by_line_and_field(tmp_path, content, says):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(InputError, match=says) as refused:
        read_questions(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path)
