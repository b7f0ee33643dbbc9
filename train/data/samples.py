"""A chunk of records into samples: documents, conversations, token ids."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from train.data.chat import ChatFormat, TurnsNotFound
from train.data.chunks import Malformed, RecordChunk, records
from wedlm_jax.errors import InputError, shortened
from wedlm_jax.host.storage import why_absent
from wedlm_jax.packing import TokenisedSample
from wedlm_jax.text import TextCodec

KEYS = {"text": "text", "messages": "chat", "conversations": "chat", "token_ids": "tokens"}
"""Keys that hold a record, and their format."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
"""Role in a chat template by the ``from`` of a ShareGPT turn."""

END_OF_TEXT = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """Holds what decides the samples of a record.

    Attributes:
      tokenizer: folder.
      row_length: of packed rows; no sample is longer.
      format: "text", "chat" or "tokens", or "auto": by the key that a record has.
      train_on_prompt: whether all of a conversation is trainable.
      end_tokens: further end tokens after each assistant's turn.
      document_end: token after each document; None: the tokenizer's own.
    """

    tokenizer: str
    row_length: int
    format: str = "auto"
    train_on_prompt: bool = False
    end_tokens: int = 0
    document_end: str | None = None


@dataclasses.dataclass(frozen=True)
class ChunkSamples:
    """Holds what became of a chunk, in its order."""

    samples: list[TokenisedSample]
    malformed: list[Malformed]
    records: int


class SampleMaker:
    """Makes samples of records. Heavy to make: one a process.

    Raises:
      InputError: the folder has no tokenizer, or one without what the options need.
    """

    def __init__(self, options: SampleOptions):
        self.options = options
        folder = Path(options.tokenizer)
        self.tokenizer = load_tokenizer(folder)
        self._vocabulary = self.tokenizer.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def document_end(self) -> int:
        """Returns the id of the token after each document."""
        wanted = self.options.document_end or END_OF_TEXT
        token = self.tokenizer.token_to_id(wanted)
        if token is None and self.options.document_end is None:
            token = self._codec.eos_token_id
            wanted = "an end-of-text token; name one with --document-end"
        if token is None:
            raise InputError(f"{self.options.tokenizer}: the tokenizer has no {wanted}")
        return int(token)

    @functools.cached_property
    def chat(self) -> ChatFormat:
        codec = self._codec
        return ChatFormat(
            lambda messages, ask: codec.render_chat(messages, add_generation_prompt=ask),
            self.tokenizer,
            self.options.end_tokens,
        )

    @functools.cached_property
    def _codec(self) -> TextCodec:
        codec = TextCodec.load(Path(self.options.tokenizer))
        assert codec is not None, "load_tokenizer has seen the file"
        return codec

    def make(self, chunk: RecordChunk) -> ChunkSamples:
        """Makes the samples of a chunk in its order; documents are tokenised together."""
        made: list[list[TokenisedSample] | str] = []
        malformed: list[Malformed] = []
        count = 0
        for line, record in records(chunk):
            count += 1
            try:
                made.append(self._one(record, chunk.file.shown, line))
            except _Refused as refused:
                malformed.append(refused.what)
        texts = [one for one in made if isinstance(one, str)]
        documents = iter(self.tokenizer.encode_batch_fast(texts)) if texts else iter(())
        samples: list[TokenisedSample] = []
        for one in made:
            samples += self._pieces(next(documents).ids) if isinstance(one, str) else one
        return ChunkSamples(samples, malformed, count)

    def _one(
        self, record: dict[str, Any] | str | Malformed, file: str, line: int
    ) -> list[TokenisedSample] | str:
        """Returns samples, or the text of a document, which is tokenised with others."""
        if isinstance(record, Malformed):
            raise _Refused(record)

        def refuse(reason: str, detail: str = "") -> _Refused:
            return _Refused(Malformed(file, line, reason, detail))

        if isinstance(record, str):
            record = {"text": record}
        wanted = self.options.format
        known = [key for key, kind in KEYS.items() if wanted in ("auto", kind)]
        keys = [key for key in known if key in record]
        if not keys:
            missing = f"no {known[0]!r}" if len(known) == 1 else f"none of {', '.join(known)}"
            raise refuse("missing key", missing)
        if len(keys) > 1:
            raise refuse("several formats", f"{' and '.join(keys)}; choose one with --format")
        try:
            if keys[0] == "text":
                return _whole_text(record["text"], "text")
            if keys[0] == "messages":
                return [self._conversation(record["messages"])]
            if keys[0] == "conversations":
                return [self._conversation(_from_sharegpt(record["conversations"]))]
            return self._token_ids(record)
        except _Wrong as wrong:
            raise refuse(*wrong.args) from None

    def _conversation(self, messages: Any) -> TokenisedSample:
        if not isinstance(messages, list) or not messages:
            raise _Wrong("wrong type", "messages must be a list of at least one message")
        turns = []
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict):
                raise _Wrong("wrong type", f"message {number} must be an object")
            turn = {key: message.get(key) for key in ("role", "content")}
            for key, value in turn.items():
                if not isinstance(value, str):
                    raise _Wrong("wrong type", f"{key!r} of message {number} must be a text")
                _whole_text(value, f"{key!r} of message {number}", empty=key == "content")
            turns.append({**message, **turn})
        if not any(turn["role"] == "assistant" for turn in turns):
            raise _Wrong("no assistant turn")
        chat = self.chat
        try:
            sample = chat.sample(turns, train_on_prompt=self.options.train_on_prompt)
        except TurnsNotFound as error:
            raise _Wrong("turns not found in the chat template's text", str(error)) from None
        except InputError as error:
            raise _Wrong("refused by the chat template", str(error)) from None
        return self._fitting(sample)

    def _token_ids(self, record: dict[str, Any]) -> list[TokenisedSample]:
        tokens, flags = record["token_ids"], record.get("trainable")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise _Wrong("wrong type", "token_ids must be a list of integers")
        if not tokens:
            raise _Wrong("empty", "token_ids")
        if wrong := next((t for t in tokens if not 0 <= t < self._vocabulary), None):
            raise _Wrong("unknown token", f"{wrong}; ids are 0 to {self._vocabulary - 1}")
        if flags is None:
            return list(self._cut(np.array(tokens, np.int32)))
        if not isinstance(flags, list) or not all(flag in (0, 1) for flag in flags):
            raise _Wrong("wrong type", "trainable must be a list of true and false")
        if len(flags) != len(tokens):
            raise _Wrong("wrong length", f"{len(tokens)} token_ids, {len(flags)} trainable")
        if not any(flags):
            raise _Wrong("nothing to train on", "trainable is false everywhere")
        return [self._fitting(TokenisedSample(np.array(tokens, np.int32), np.array(flags, bool)))]

    def _pieces(self, ids: list[int]) -> Iterator[TokenisedSample]:
        """Yields a document's samples; its end token follows the last."""
        end = [] if ids and ids[-1] == self.document_end else [self.document_end]
        return self._cut(np.array(ids + end, np.int32))

    def _cut(self, tokens: np.ndarray) -> Iterator[TokenisedSample]:
        for start in range(0, len(tokens), self.options.row_length):
            piece = tokens[start : start + self.options.row_length]
            yield TokenisedSample(piece, np.ones(len(piece), bool))

    def _fitting(self, sample: TokenisedSample) -> TokenisedSample:
        if (size := len(sample.tokens)) > self.options.row_length:
            raise _Wrong("longer than a row", f"{size} tokens of {self.options.row_length}")
        return sample


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a folder, so that it cuts nothing off and pads nothing.

    Raises:
      InputError: naming the file that is missing or malformed.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InputError(why_absent(folder, path.name))
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        # The parser raises a bare Exception.
        reason = shortened(str(error))
        raise InputError(f"{path}: the tokenizer is truncated or malformed ({reason})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _Refused(Exception):
    """Carries a `Malformed` out of the code that makes a sample."""

    def __init__(self, what: Malformed):
        super().__init__(what)
        self.what = what


class _Wrong(Exception):
    """Holds reason and detail where file and line are not known."""


def _from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    """Converts ``[{"from": ..., "value": ...}, ...]`` to messages."""
    if not isinstance(turns, list) or not turns:
        raise _Wrong("wrong type", "conversations must be a list of at least one turn")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise _Wrong("wrong type", f"turn {number} must be an object")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise _Wrong("unknown speaker", f"'from' of turn {number} must be one of {known}")
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": turn.get("value")})
    return messages


def _whole_text(value: Any, name: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _Wrong("wrong type", f"{name} must be a text")
    if not value and not empty:
        raise _Wrong("empty", name)
    return value
