"""Encodes special tokens in messages as plain text, so that a user who types `<|im_end|>` cannot
end a turn and begin another in someone else's name.

A template puts messages between its own special tokens. To distinguish the two, every character of
a typed special token is marked before the template sees it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from wedlm_jax.errors import InputError

MARK = "\ufdd0"
"""Precedes each character of a typed special token. Unicode reserves this code point for internal
use in programs, so it occurs in no text."""


class TypedTokens:
    """Marks special tokens in messages, and encodes texts that have such marks, for a tokenizer of
    `transformers`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = {
            token.content: (int(token_id), token)
            for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if token.special and token.content
        }
        # If two begin at the same place the longer one counts, as in the tokenizer.
        names = sorted(self._special, key=len, reverse=True)
        choices = "|".join(map(re.escape, names)) or "(?!)"
        self._any = re.compile(choices)
        self._unmarked = re.compile(f"(?<!{MARK})(?:{choices})")
        self._plain: Tokenizer | None = None

    def marked(self, value: Any) -> Any:
        """Returns a value with the special tokens in its texts marked, at any depth.

        Raises:
          InputError: a text contains the mark already.
        """
        if isinstance(value, str):
            if MARK in value:
                raise InputError("messages: U+FDD0 is not a valid character; leave it out")
            return self._any.sub(lambda found: MARK + MARK.join(found[0]), value)
        if isinstance(value, Mapping):
            return {self.marked(name): self.marked(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text with marks: special tokens without marks become their
        ids, and everything between them is encoded as plain text."""
        ids: list[int] = []
        last, skipped = 0, False

        def add(piece: str) -> None:
            piece = piece.lstrip() if skipped else piece
            ids.extend(self._as_plain_text(piece.replace(MARK, "")))

        for found in self._unmarked.finditer(text):
            token_id, token = self._special[found[0]]
            before = text[last : found.start()]
            add(before.rstrip() if token.lstrip else before)
            ids.append(token_id)
            last, skipped = found.end(), token.rstrip
        add(text[last:])
        return ids

    def _as_plain_text(self, text: str) -> list[int]:
        if self._plain is None:
            # A copy, since other threads encode with the original, which has another setting.
            plain = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            plain.encode_special_tokens = True
            plain.no_truncation()
            plain.no_padding()
            self._plain = plain
        return list(self._plain.encode(text, add_special_tokens=False).ids)
