"""Answers in the shape of OpenAI's API, whole or as chunks of a stream."""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from infer.serve.calls import Call
from wedlm_jax.completion import Chunk, Completion, total_drafts
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.text import TextCodec

IMPOSSIBLE = -9999.0
"""The API's log-probability of an impossible token, as JSON has no −∞."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new in one choice: its index, its new tokens and the new part of its trace."""

    index: int
    chunk: Chunk
    trace: dict[str, Any] | None = None


class TextShape:
    """Builds the answer to a call of /v1/completions.

    Args:
      model: the model's name in the API.
      identity: the end of the answer's id, and its creation time; by default a random id and now.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        call: Call,
        model: str,
        logprobs: LogprobShapes,
        *,
        identity: tuple[str, int] | None = None,
    ):
        self._call, self._logprobs = call, logprobs
        name, created = identity or (uuid.uuid4().hex, int(time.time()))
        self.id = f"{self.prefix}-{name}"
        self._head = {
            "id": self.id,
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the whole answer; each choice is one piece."""
        choices = [self._choice(piece, whole=True) for piece in pieces]
        head = self._head | {"object": self.whole_object}
        usage = self._usage([piece.chunk.completion for piece in pieces])
        return head | {"choices": choices, "usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        """Returns the first chunks of a stream, before any token."""
        return []

    def chunks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Returns a chunk per piece."""
        return [self._chunk([self._choice(piece, whole=False)]) for piece in pieces]

    def closing(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """Returns the last chunks of a stream, after all tokens."""
        if not self._call.with_usage:
            return []
        return [self._chunk([]) | {"usage": self._usage(completions)}]

    def _content(self, text: str, whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs_of(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        """Returns the log-probabilities of a choice's new tokens."""
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + self._logprobs.length(token_ids)
        return self._logprobs.of_text(token_ids, logprobs, start)

    def _choice(self, piece: Piece, whole: bool) -> dict[str, Any]:
        completion, ids = piece.chunk.completion, piece.chunk.token_ids
        logprobs = None
        if (every := completion.logprobs) is not None:
            logprobs = self._logprobs_of(piece.index, ids, every[len(every) - len(ids) :])
        choice = {
            "index": piece.index,
            **self._content(piece.chunk.text, whole),
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        if self._call.with_token_ids:
            choice["token_ids"] = ids
        if piece.trace is not None:
            choice["trace"] = piece.trace
        return choice

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._call.with_usage else chunk

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Counts the tokens of each prompt once and those of all samples, and adds this project's
        own figures."""
        prompts = self._call.num_prompt_tokens
        tokens = sum(len(completion.token_ids) for completion in completions)
        first, cached = 0, 0
        for _, params in self._call.prompts:
            cached += completions[first].num_cached_tokens
            first += params.n
        return {
            "prompt_tokens": prompts,
            "completion_tokens": tokens,
            "total_tokens": prompts + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "num_forwards": sum(one.num_forwards for one in completions),
            "num_token_instances": sum(one.num_token_instances for one in completions),
            "drafts": total_drafts(completions)._asdict(),
        }


class ChatShape(TextShape):
    """Builds the answer to a call of /v1/chat/completions."""

    prefix, whole_object = "chatcmpl", "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self._call.num_choices)
        ]

    def _content(self, text: str, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text}}

    def _logprobs_of(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        return self._logprobs.of_chat(token_ids, logprobs)


class LogprobShapes:
    """Builds log-probabilities. Tokens are named by unique texts or, without a tokenizer, by their
    ids."""

    def __init__(self, codec: TextCodec | None):
        @functools.lru_cache(maxsize=2**16)
        def token_bytes(token_id: int) -> bytes:
            return str(token_id).encode() if codec is None else codec.token_bytes(token_id)

        self._bytes = token_bytes
        self._special = frozenset(() if codec is None else codec.special_ids)

    def of_chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns log-probabilities in the chat's shape."""
        content = [
            self._entry(token_id, one.logprob)
            | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def of_text(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], offset: int
    ) -> dict[str, Any]:
        """Returns log-probabilities in the completion's shape, for tokens whose text begins at
        character ``offset``."""
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += self.length([token_id])
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                {self._name(other): _finite(value) for other, value in reversed(one.top)}
                for one in logprobs
            ],
            "text_offset": offsets,
        }

    def length(self, token_ids: Sequence[int]) -> int:
        """Returns the number of characters that tokens add to the text; special tokens add none,
        and a character of several tokens counts for the one with its first byte."""
        return sum(
            byte & 0b1100_0000 != 0b1000_0000
            for token_id in token_ids
            if token_id not in self._special
            for byte in self._bytes(token_id)
        )

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        text = data.decode("utf-8", "backslashreplace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _name(self, token_id: int) -> str:
        """Returns a token's text or, if that is not whole characters, its bytes, marked as such."""
        data = self._bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
