"""Text in and out: the tokenizer, incremental decoding, stop strings."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError

INCOMPLETE = "\ufffd"
"""What decoding puts where the bytes of a character are not all there."""

NO_LIMIT = 10**30
"""Transformers' own value for a tokenizer without a maximal length."""

Messages = Sequence[dict[str, str]]


class TextCodec:
    """A checkpoint's tokenizer and chat template.

    Attributes:
      tokenizer: of `transformers`.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._incomplete_ids = list(tokenizer(INCOMPLETE, add_special_tokens=False)["input_ids"])

    @classmethod
    def load(cls, folder: Path) -> TextCodec | None:
        """The tokenizer in ``folder``; None where it has none.

        Raises:
          InputError: naming the file that is cut off or no tokenizer's.
        """
        fast = folder / "tokenizer.json"
        if not fast.exists() and not (folder / "vocab.json").exists():
            return None
        _check_json(folder / "tokenizer_config.json")
        with _quiet_transformers():
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            # tokenizer.json describes itself; only without it must config.json be asked
            # which class this is, and transformers does not know every model_type.
            kind = PreTrainedTokenizerFast if fast.exists() else AutoTokenizer
            try:
                # Lengths are the engine's to check, against the model and not this number.
                tokenizer = kind.from_pretrained(str(folder), model_max_length=NO_LIMIT)
            except Exception as error:
                # The parser of tokenizer.json raises a bare Exception.
                name = fast if fast.exists() else folder
                reason = " ".join(str(error).split())[:200]
                raise InputError(
                    f"{name}: the tokenizer is truncated or malformed ({reason})"
                ) from None
        return cls(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        token = self.tokenizer.eos_token_id
        return None if token is None else int(token)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def spellings(self, text: str) -> list[tuple[int, ...]]:
        """The token ids of a word where a text begins with it, and where it stands behind a
        space."""
        word = text.lstrip()
        found = (
            tuple(self.tokenizer(form, add_special_tokens=False)["input_ids"])
            for form in (word, f" {word}")
        )
        return list(dict.fromkeys(ids for ids in found if ids))

    def encode_chat(self, messages: Messages) -> list[int]:
        """A conversation through the chat template, ready for the assistant's turn.

        Raises:
          InputError: the tokenizer has no template, or the messages do not fit it.
        """
        text = self.render_chat(messages, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """A conversation as the text that the chat template makes of it.

        Raises:
          InputError: the tokenizer has no template, or the messages do not fit it.
        """
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= set(message):
                raise InputError("messages: expected objects with 'role' and 'content'")
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("this checkpoint's tokenizer has no chat template")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            # Templates are programs of their own and raise what they like.
            raise InputError(f"messages: the chat template refused them ({error})") from None
        return str(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens, as it stands."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def complete_text(self, token_ids: Sequence[int]) -> str:
        """As `decode`, without a last character whose bytes are not all there."""
        text = self.decode(token_ids)
        meant = self._incomplete_ids and list(token_ids[-len(self._incomplete_ids) :])
        if text.endswith(INCOMPLETE) and meant != self._incomplete_ids:
            return text.rstrip(INCOMPLETE)
        return text


class StopStrings:
    """Finds the first of some texts in a growing completion.

    Matching is on the decoded text, so a stop string may begin and end inside tokens. One that
    is complete within the first ``min_tokens`` tokens does not count.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], min_tokens: int = 0):
        self._codec, self._stop, self._min_tokens = codec, tuple(stop), min_tokens

    def find(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """The number of tokens in which the first stop string is complete, and the text
        before it; None where there is none."""
        early = len(self._codec.complete_text(token_ids[: self._min_tokens]))
        if not self._places(self._codec.complete_text(token_ids), early):
            return None
        # The fewest tokens whose text holds a stop string: decoding is monotonic in length.
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if self._places(self._codec.complete_text(token_ids[:middle]), early):
                high = middle
            else:
                low = middle + 1
        # Only what those tokens say counts: the answer must not depend on how many more
        # tokens had come when this was asked.
        text = self._codec.complete_text(token_ids[:low])
        return low, text[: min(self._places(text, early))]

    def _places(self, text: str, early: int) -> list[int]:
        """Where each stop string first stands that does not end within ``early`` characters."""
        found = (text.find(stop, max(early - len(stop) + 1, 0)) for stop in self._stop)
        return [place for place in found if place >= 0]

    def safe_length(self, text: str) -> int:
        """How much of ``text`` cannot turn out to belong to a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return len(text) - longest


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keeps transformers from advising on PyTorch and on model types it does not know."""
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        # Importing sets the level of this logger, so it is lowered only afterwards.
        importlib.import_module("transformers")
        logger = logging.getLogger("transformers")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logger.setLevel(level)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
