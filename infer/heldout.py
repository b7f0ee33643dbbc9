"""Questions with known answers, from a JSONL file: what demo and evaluation decode.

The file beside the embedded model holds prompts whose hash kept them out of its training
data. A line has ``regime``, ``kind``, ``prompt``, ``answer`` and ``match``: how a completion
is judged, by its whole ``"text"``, by its ``"last_line"``, or not at all (null).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from wedlm_jax.errors import InputError

MATCHES = ("text", "last_line", None)


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, its reference answer, and how completions are judged."""

    regime: str
    kind: str
    prompt: str
    answer: str
    match: str | None

    @property
    def expected(self) -> str:
        """The part of the answer that is compared."""
        return _last_line(self.answer) if self.match == "last_line" else self.answer.strip()

    def is_right(self, text: str) -> bool | None:
        """Whether a completion is right; None where there is no right answer.

        White space at both ends counts for nothing.
        """
        if self.match is None:
            return None
        given = _last_line(text) if self.match == "last_line" else text.strip()
        return given == self.expected


def read_questions(path: Path) -> dict[str, list[Question]]:
    """The questions of a file by regime, in the order of the file.

    Raises:
      InputError: naming the file and the line that is not a question.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file of questions") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    regimes: dict[str, list[Question]] = {}
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            question = Question(**fields)
        except (json.JSONDecodeError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a question ({error})") from None
        texts = (question.regime, question.kind, question.prompt, question.answer)
        if not all(isinstance(text, str) for text in texts) or question.match not in MATCHES:
            raise InputError(
                f"{path}, line {number}: expected texts, and match as one of "
                '"text", "last_line" or null'
            )
        regimes.setdefault(question.regime, []).append(question)
    if not regimes:
        raise InputError(f"{path}: no questions in this file")
    return regimes


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()
