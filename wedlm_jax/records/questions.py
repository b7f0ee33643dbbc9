"""Reads questions with known answers from a JSONL file, and judges completions of them: for demo,
evaluate, bench, and runs that evaluate during training.

The file next to the included model holds prompts whose hash kept them out of its training data.
docs/evaluation.md describes the format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import (
    InputError,
    did_you_mean,
    errors_at,
    file_error,
    refuse_unknown,
    shown_value,
)
from wedlm_jax.messages import check_text, checked_messages
from wedlm_jax.records.jsonl import parse_object, read_lines

if TYPE_CHECKING:
    from wedlm_jax.completion import Completion
    from wedlm_jax.text import Messages, TextCodec

MATCHES = ("exact", "contains", "last_line", "last_number")
"""How an answer is compared with a completion; white space around either never counts."""

FIELDS = ("prompt", "messages", "answer", "match", "regime", "kind", "id")

NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?"  # a sign; the minus of 5-3 is not one
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<![\w.])(?=\.\d))(?:\.\d+)?"  # 1,000 or 1000 or 0.5 or .5
    r"(?:[eE][-+]?\d{1,3}\b)?"
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, its reference answer, and how completions are judged.

    Attributes:
      prompt: what is asked, as a person reads it: a text, or the last message of a conversation.
      answer: the reference.
      match: one of `MATCHES`; None if there is no right answer.
      messages: the conversation, for the chat template; None if ``prompt`` is completed as it is.
      regime: the group in which it is counted.
      kind: a note on it.
      place: its file and line, for messages.
    """

    prompt: str
    answer: str
    match: str | None
    messages: Messages | None = None
    regime: str = "questions"
    kind: str = ""
    place: str = ""

    @property
    def expected(self) -> str:
        """The part of the answer that is compared."""
        return self._compared(self.answer)

    def is_right(self, text: str) -> bool | None:
        """Returns whether a completion is right; None if there is no right answer."""
        if self.match is None:
            return None
        if self.match == "contains":
            return self.expected in text
        if self.match == "last_number":
            number = last_number(text)
            return number is not None and number == last_number(self.answer)
        return self._compared(text) == self.expected

    def encode(self, codec: TextCodec) -> list[int]:
        """Returns the token ids of the prompt as the model reads it.

        Raises:
          InputError: the tokenizer cannot encode the prompt; the message names the line and why.
        """
        with self.named():
            if self.messages is None:
                return codec.encode(self.prompt)
            return codec.encode_chat(self.messages)

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Names the question's line in an `InputError`."""
        return errors_at(self.place) if self.place else contextlib.nullcontext()

    def _compared(self, text: str) -> str:
        if self.match == "last_number":
            return str(last_number(text))
        if self.match == "last_line":
            text = text.strip().rpartition("\n")[2]
        return text.strip()


@dataclasses.dataclass(frozen=True)
class Tally:
    """Scores of completions of questions.

    Attributes:
      questions: number of questions.
      judged: number of those with a right answer.
      right: number of those answered correctly.
      tokens, forwards, instances: totals: tokens committed, decode forwards, active window slots.
      cut: number of answers that reached their token limit before an end.
    """

    questions: int = 0
    judged: int = 0
    right: int = 0
    tokens: int = 0
    forwards: int = 0
    instances: int = 0
    cut: int = 0

    @property
    def accuracy(self) -> float | None:
        """The share answered correctly; None if no question has a right answer."""
        return self.right / self.judged if self.judged else None

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)

    @property
    def p_cache(self) -> float:
        """Completion tokens over processed token instances (WeDLM section 3)."""
        return self.tokens / max(self.instances, 1)

    def as_row(self) -> dict[str, object]:
        """Returns the fields and the derived ratios, as a row for a JSON file."""
        ratios = ("accuracy", "tokens_per_forward", "p_cache")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in ratios}


def tally(questions: Sequence[Question], completions: Sequence[Completion]) -> Tally:
    """Judges the completion of each question, and counts."""
    pairs = zip(questions, completions, strict=True)
    verdicts = [question.is_right(completion.text or "") for question, completion in pairs]
    return Tally(
        questions=len(questions),
        judged=sum(verdict is not None for verdict in verdicts),
        right=sum(verdict is True for verdict in verdicts),
        tokens=sum(len(completion.token_ids) for completion in completions),
        forwards=sum(completion.num_forwards for completion in completions),
        instances=sum(completion.num_token_instances for completion in completions),
        cut=sum(completion.finish_reason == "length" for completion in completions),
    )


def last_number(text: str) -> Decimal | None:
    """Returns the last number that a text writes in digits; 1,000 and 1000.0 are the same."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def read_questions(
    path: Path, *, match: str | None = "exact", chat: bool = False
) -> dict[str, list[Question]]:
    """Reads the questions of a file by regime, in the order of the file.

    Args:
      path: a JSONL file; its name without the ending is the regime of records that name none.
      match: how records without a ``match`` are judged.
      chat: whether a ``prompt`` is a user's message, for the chat template.

    Raises:
      InputError: a record is not valid; the message names the file, the line and the field.
    """
    regimes: dict[str, list[Question]] = {}
    try:
        with path.open("rb") as stream:
            for line in read_lines(stream):
                place = f"{path} line {line.number}"
                with errors_at(place):
                    fields = {"regime": path.stem} | parse_object(line.content)
                    question = _question(fields, match, chat, place)
                regimes.setdefault(question.regime, []).append(question)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file of questions") from None
    except OSError as error:
        raise file_error(path, "cannot be read", error) from None
    if not regimes:
        raise InputError(f"{path}: no questions in this file")
    return regimes


def _question(fields: Mapping[str, Any], match: str | None, chat: bool, place: str) -> Question:
    refuse_unknown(fields, FIELDS, "field")
    if ("prompt" in fields) == ("messages" in fields):
        have = "both" if "prompt" in fields else "neither"
        raise InputError(f"expected either 'prompt' or 'messages'; the record has {have}")
    match = fields.get("match", match)
    if match is not None and match not in MATCHES:
        hint = did_you_mean(str(match), MATCHES)
        raise InputError(f"match: unknown {shown_value(match)}; {hint}, or null")
    labels = {name: fields[name] for name in ("regime", "kind") if name in fields}
    for name, label in labels.items():
        if not isinstance(label, str) or not label:
            raise InputError(f"{name}: expected a text, not {shown_value(label)}")
    answer = _answer(fields, match)
    if "messages" in fields:
        messages: Messages = checked_messages(fields["messages"])
        if messages[-1]["role"] == "assistant":
            raise InputError("messages: expected the user's turn last; the model answers it")
        return Question(messages[-1]["content"], answer, match, messages, **labels, place=place)
    prompt = fields["prompt"]
    check_text(prompt)
    turn = [{"role": "user", "content": prompt}] if chat else None
    return Question(prompt, answer, match, turn, **labels, place=place)


def _answer(fields: Mapping[str, Any], match: str | None) -> str:
    """Returns the reference as a text; it may be missing if there is no right answer."""
    if "answer" not in fields and match is None:
        return ""
    if "answer" not in fields:
        raise InputError('answer: missing; only questions with "match": null need none')
    answer = fields["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise InputError(f"answer: expected a text or a number, not {shown_value(answer)}")
    text = str(answer)
    if match is not None and not text.strip():
        raise InputError("answer: expected more than white space")
    if match == "last_number" and last_number(text) is None:
        raise InputError(f"answer: expected a number in it, not {shown_value(answer)}")
    return text
