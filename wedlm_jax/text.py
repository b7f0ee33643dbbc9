"""Text in and out: the tokenizer, incremental decoding, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError

INCOMPLETE = "\ufffd"
"""What decoding puts where the bytes of a character are not all there."""

Messages = Sequence[dict[str, str]]


class TextCodec:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._incomplete_ids = self.encode(INCOMPLETE)

    @classmethod
    def load(cls, folder: Path) -> TextCodec | None:
        """The tokenizer in ``folder``; None where it has none."""
        if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
            return None
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            return cls(AutoTokenizer.from_pretrained(str(folder)))
        except (ValueError, KeyError, OSError) as error:
            # An unknown model_type and no tokenizer_class: the fast file stands for itself.
            if (folder / "tokenizer.json").exists():
                return cls(PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")))
            reason = str(error).splitlines()[0]
            raise InputError(f"{folder}: the tokenizer cannot be read ({reason})") from None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Messages) -> list[int]:
        """A conversation through the chat template, ready for the assistant's turn.

        Raises:
          InputError: the tokenizer has no template, or the messages do not fit it.
        """
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= set(message):
                raise InputError("messages: expected objects with 'role' and 'content'")
        if not getattr(self._tokenizer, "chat_template", None):
            raise InputError("this checkpoint's tokenizer has no chat template")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # Templates are programs of their own and raise what they like.
            raise InputError(f"messages: the chat template refused them ({error})") from None
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens, as it stands."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def complete_text(self, token_ids: Sequence[int]) -> str:
        """As `decode`, without a last character whose bytes are not all there."""
        text = self.decode(token_ids)
        meant = self._incomplete_ids and list(token_ids[-len(self._incomplete_ids) :])
        if text.endswith(INCOMPLETE) and meant != self._incomplete_ids:
            return text.rstrip(INCOMPLETE)
        return text


class StopStrings:
    """Finds the first of some texts in a growing completion.

    Matching is on the decoded text, so a stop string may begin and end inside tokens.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]):
        self._codec, self._stop = codec, tuple(stop)

    def find(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """The number of tokens in which the first stop string is complete, and the text
        before it; None where there is none."""
        text = self._codec.complete_text(token_ids)
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if not places:
            return None
        # The fewest tokens whose text holds a stop string: decoding is monotonic in length.
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            part = self._codec.complete_text(token_ids[:middle])
            if any(stop in part for stop in self._stop):
                high = middle
            else:
                low = middle + 1
        return low, text[: min(places)]

    def safe_length(self, text: str) -> int:
        """How much of ``text`` cannot turn out to belong to a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return len(text) - longest
