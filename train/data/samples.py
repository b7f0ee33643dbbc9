"""Turns a chunk of records into samples: documents, conversations, token ids."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np

from train.data.chat import (
    BESIDE,
    PAIRS,
    ChatFormat,
    Conversation,
    Wrong,
    conversation_of,
    pair_of,
    whole_text,
)
from train.data.chunks import Malformed, RecordChunk, records
from train.data.shards import Counts
from train.data.tokenizer import load_tokenizer
from wedlm_jax.errors import InputError, shortened
from wedlm_jax.packing import TokenisedSample
from wedlm_jax.text import CHANGED, TextCodec
from wedlm_jax.typed_tokens import MARK

KEYS = {
    "text": "text",
    "messages": "chat",
    "conversations": "chat",
    **dict.fromkeys(PAIRS, "pairs"),
    "token_ids": "tokens",
    "prompt_token_ids": "completions",
}
"""Keys that hold a record's content, and the format that each implies."""

BESIDE_OF = {
    "text": (),
    "chat": BESIDE,
    "pairs": BESIDE,
    "tokens": ("trainable",),
    "completions": (),
}
"""Further keys that are read, by format; for pairs those in `PAIRS`, too."""

END_OF_TEXT = "<|endoftext|>"

SHOWN = 120
"""The number of characters shown of a turn that the template changed."""


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """The options that determine the samples of a record.

    Attributes:
      tokenizer: folder of the tokenizer.
      row_length: tokens per packed row; no sample is longer.
      format: "text", "chat", "pairs", "tokens" or "completions"; or "auto", by the key that a
        record has.
      train_on_prompt: whether all of a conversation is trainable.
      end_tokens: number of additional end tokens after each assistant's turn.
      document_end: token after each document; None: the tokenizer's own.
      trust_special_tokens: whether special tokens written in messages are tokens, not text.
    """

    tokenizer: str
    row_length: int
    format: str = "auto"
    train_on_prompt: bool = False
    end_tokens: int = 0
    document_end: str | None = None
    trust_special_tokens: bool = False


@dataclasses.dataclass(frozen=True)
class ChunkSamples:
    """The samples of a chunk in order, the records that were left out, and counts of both."""

    samples: list[TokenisedSample]
    malformed: list[Malformed]
    counts: Counts


class SampleMaker:
    """Makes samples from records. Expensive to create: one per process.

    Raises:
      InputError: the folder has no tokenizer, or one without what the options need.
    """

    def __init__(self, options: SampleOptions):
        self.options = options
        folder = Path(options.tokenizer)
        self.tokenizer = load_tokenizer(folder)
        self._counts = Counts()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True).values()
        self._vocabulary = len(vocabulary)
        ordinary = set(vocabulary) - set(self.tokenizer.get_added_tokens_decoder())
        self._ordinary = np.zeros(max(ordinary, default=0) + 2, bool)  # the last: all higher ids
        self._ordinary[list(ordinary)] = True

    @functools.cached_property
    def document_end(self) -> int:
        """Returns the id of the token after each document."""
        name = self.options.document_end or END_OF_TEXT
        token = self.tokenizer.token_to_id(name)
        if token is None and self.options.document_end is None:
            token = self._codec.eos_token_id
            name = "an end-of-text token; name one with --document-end"
        if token is None:
            raise InputError(f"{self.options.tokenizer}: the tokenizer has no {name}")
        return int(token)

    @functools.cached_property
    def chat(self) -> ChatFormat:
        codec = self._codec
        return ChatFormat(
            lambda messages, ask, variables: codec.render_chat(
                messages, add_generation_prompt=ask, variables=variables
            ),
            self.tokenizer,
            self.options.end_tokens,
            codec.encode_rendered,
        )

    @functools.cached_property
    def _codec(self) -> TextCodec:
        trust = self.options.trust_special_tokens
        codec = TextCodec.load(Path(self.options.tokenizer), trust_special_tokens=trust)
        assert codec is not None, "load_tokenizer has seen the file"
        return codec

    def make(self, chunk: RecordChunk) -> ChunkSamples:
        """Makes the samples of a chunk in its order; documents are tokenised together."""
        made: list[list[TokenisedSample] | str] = []
        malformed: list[Malformed] = []
        # Only known columns of a table are read, so its rows do not show the others.
        unread = dict.fromkeys(chunk.unread, chunk.count)
        self._counts = counts = Counts(unread_keys=unread)
        for line, record in records(chunk):
            counts.records += 1
            if isinstance(record, Malformed):
                malformed.append(record)
                continue
            try:
                made.append(self._one(record, f"{chunk.file.shown}:{line}"))
            except Wrong as wrong:
                malformed.append(Malformed(chunk.file.shown, line, *wrong.args))
        for what in malformed:
            place = f"{what.file}:{what.line}" if what.line else what.file
            first = {"records": 1, "first": [place], "detail": what.detail}
            counts.add(Counts(malformed=1, reasons={what.reason: first}))
        texts = [one for one in made if isinstance(one, str)]
        documents = iter(self.tokenizer.encode_batch_fast(texts)) if texts else iter(())
        samples: list[TokenisedSample] = []
        for one in made:
            samples += self._pieces(next(documents).ids) if isinstance(one, str) else one
        tokens = np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)])
        added = tokens[~self._ordinary[np.minimum(tokens, self._ordinary.size - 1)]]
        counts.samples, counts.tokens = len(samples), len(tokens)
        counts.trainable_tokens = sum(int(sample.trainable.sum()) for sample in samples)
        counts.added_tokens = dict(collections.Counter(map(str, added.tolist())))
        return ChunkSamples(samples, malformed, counts)

    def _one(self, record: dict[str, Any], place: str) -> list[TokenisedSample] | str:
        """Returns samples, or the text of a document, to be tokenised with others; counts keys that
        are not read."""
        known = [key for key, kind in KEYS.items() if self.options.format in ("auto", kind)]
        keys = [key for key in known if _has(record, key)]
        if not keys:
            missing = f"no {known[0]!r}" if len(known) == 1 else f"none of {', '.join(known)}"
            if known == ["prompt_token_ids"]:
                missing += ", which `wedlm generate --prompt-token-ids` writes"
            for half in (key for key in known if key in record):
                missing = f"{half!r} without {PAIRS[half][0]!r}"
            raise Wrong("missing key", missing)
        if len(keys) > 1:
            raise Wrong("several formats", f"{' and '.join(keys)}; choose one with --format")
        key, kind = keys[0], KEYS[keys[0]]
        # With another content key, each of these keys would change the sample. Ignoring it would
        # make a wrong sample.
        there = [other for other in KEYS if _has(record, other)]
        meant = {name for other in there for name in BESIDE_OF[KEYS[other]]}
        for name in (name for names in BESIDE_OF.values() for name in names):
            if name in record and name not in meant:
                raise Wrong("unused key", f"{name!r} has no meaning with {key!r}")
        meant |= {name for other in there for name in (other, *PAIRS.get(other, ()))}
        extra = [name for name in record if name not in meant]
        if kind == "text":
            made: list[TokenisedSample] | str = whole_text(record["text"], "text")
        elif kind == "chat":
            conversation = conversation_of(record, key)
            made = [self._conversation(conversation, place)]
            extra += conversation.unread
        elif kind == "pairs":
            made = [self._pair(*pair_of(record, key), record, place)]
        elif kind == "completions":
            made = self._completions(record)
            extra = []  # a job's own results, whose other keys nobody means to train on
        else:
            made = self._token_ids(record)
        unread = self._counts.unread_keys
        unread |= {name: unread.get(name, 0) + 1 for name in extra}
        return made

    def _conversation(self, conversation: Conversation, place: str) -> TokenisedSample:
        given: Any = [conversation.messages, dict(conversation.variables)]
        try:
            messages, variables = self._codec.marked(given)
            spelt = [messages, variables] != given
            whole, spans = self.chat.turns(messages, variables)
            if spelt and whole.replace(MARK, "") != self._codec.render_chat(
                given[0], add_generation_prompt=False, variables=given[1]
            ):
                raise Wrong("special tokens in messages", CHANGED)
        except InputError as error:
            raise Wrong("refused by the chat template", str(error)) from None
        sample = self.chat.tokenised(whole, spans, train_on_prompt=self.options.train_on_prompt)
        self._check_length(sample.tokens)
        changed = self.chat.changed(messages, whole, spans)
        first = None
        if changed:
            written, became = (shortened(text.replace(MARK, ""), SHOWN) for text in changed[0])
            first = {"place": place, "written": written, "became": became}
        self._counts.add(
            Counts(
                turns=len(spans), changed_turns=len(changed), first_changed=first, typed=int(spelt)
            )
        )
        return sample

    def _pair(
        self, prompt: str, completion: str, beside: Mapping[str, Any], place: str
    ) -> TokenisedSample:
        """Returns the sample of a prompt, not trained on, and its completion: a user's and an
        assistant's turn of the chat template or, without a template, both texts, tokenised
        separately, with an end token."""
        if self._codec.has_chat_template:
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ]
            variables = {name: beside[name] for name in BESIDE if name in beside}
            record = {"messages": messages, **variables}
            return self._conversation(conversation_of(record, "messages"), place)
        if given := [name for name in BESIDE if name in beside]:
            raise Wrong("unused key", f"{given[0]!r}: the tokenizer has no chat template")
        before, after = (
            self.tokenizer.encode(text, add_special_tokens=False).ids
            for text in (prompt, completion)
        )
        after += [self.document_end] * (1 + self.options.end_tokens)
        trainable = [self.options.train_on_prompt] * len(before) + [True] * len(after)
        return self._sample(before + after, trainable)

    def _completions(self, record: dict[str, Any]) -> list[TokenisedSample]:
        """Returns the samples of a job's result: a prompt, which is not trained on, and what was
        decoded, token for token."""
        prompt, samples = self._ids(record, "prompt_token_ids"), record.get("samples") or [record]
        if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
            raise Wrong("wrong type", "samples must be a list of results")
        made = []
        for sample in samples:
            tokens = self._ids(sample, "token_ids")
            flags = [False] * len(prompt) + [True] * len(tokens)
            made.append(self._sample(prompt + tokens, flags))
        return made

    def _ids(self, record: Mapping[str, Any], name: str) -> list[int]:
        tokens = record.get(name)
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise Wrong("wrong type", f"{name} must be a list of integers")
        if not tokens:
            raise Wrong("empty", name)
        if wrong := next((t for t in tokens if not 0 <= t < self._vocabulary), None):
            raise Wrong("unknown token", f"{wrong}; ids are 0 to {self._vocabulary - 1}")
        return tokens

    def _token_ids(self, record: dict[str, Any]) -> list[TokenisedSample]:
        tokens, flags = self._ids(record, "token_ids"), record.get("trainable")
        if flags is None:
            return self._cut(tokens)
        if not isinstance(flags, list) or not all(flag in (0, 1) for flag in flags):
            raise Wrong("wrong type", "trainable must be a list of true and false")
        if len(flags) != len(tokens):
            raise Wrong("wrong length", f"{len(tokens)} token_ids, {len(flags)} trainable")
        if not any(flags):
            raise Wrong("nothing to train on", "trainable is false everywhere")
        return [self._sample(tokens, flags)]

    def _pieces(self, ids: list[int]) -> list[TokenisedSample]:
        """Returns a document's samples; its end token follows the last."""
        end = [] if ids and ids[-1] == self.document_end else [self.document_end]
        return self._cut(ids + end)

    def _cut(self, tokens: list[int]) -> list[TokenisedSample]:
        length = self.options.row_length
        pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
        return [self._sample(piece, [True] * len(piece)) for piece in pieces]

    def _sample(self, tokens: list[int], trainable: list[bool]) -> TokenisedSample:
        self._check_length(tokens)
        return TokenisedSample(np.array(tokens, np.int32), np.array(trainable, bool))

    def _check_length(self, tokens: Sized) -> None:
        if (size := len(tokens)) > self.options.row_length:
            raise Wrong("longer than a row", f"{size} tokens, over {self.options.row_length}")


def _has(record: Mapping[str, Any], key: str) -> bool:
    """Returns whether a record has the content that a key stands for: a prompt without a
    completion, such as one next to messages, is not a pair."""
    return key in record and (key not in PAIRS or PAIRS[key][0] in record)
