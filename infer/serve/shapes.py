"""Answers as OpenAI's API has them: whole, or in the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from infer.serve.answer import Call, Piece
from infer.serve.logprob_shapes import LogprobShapes
from wedlm_jax.completion import Completion, total_drafts


class TextShape:
    """The answer to a call of /v1/completions.

    Args:
      call: what was asked.
      model: its name.
      logprobs: writes log-probabilities.
      identity: the end of its id, and when it was made; by default an id of its own, and now.
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
        self._head = {
            "id": f"{self.prefix}-{name}",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._offsets: dict[int, int] = {}

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the answer in one piece a choice."""
        choices = [self._choice(piece, self._content(piece.chunk.text)) for piece in pieces]
        head = self._head | {"object": self.whole_object}
        usage = self._usage([piece.chunk.completion for piece in pieces])
        return head | {"choices": choices, "usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        """Returns the chunks that come before all others."""
        return []

    def chunks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Returns the chunks of what has come."""
        return [
            self._chunk([self._choice(piece, self._delta(piece.chunk.text))]) for piece in pieces
        ]

    def closing(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """Returns the chunks after all others."""
        if not self._call.with_usage:
            return []
        return [self._chunk([]) | {"usage": self._usage(completions)}]

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _said(self, piece: Piece) -> dict[str, Any] | None:
        """Returns the log-probabilities of a piece's tokens."""
        said, ids = piece.chunk.completion.logprobs, piece.chunk.token_ids
        if said is None:
            return None
        start = self._offsets.get(piece.index, 0)
        shape = self._logprobs.of_text(ids, said[len(said) - len(ids) :], start)
        self._offsets[piece.index] = start + self._logprobs.length(ids)
        return shape

    def _choice(self, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        completion = piece.chunk.completion
        choice = {
            "index": piece.index,
            **content,
            "logprobs": self._said(piece),
            "finish_reason": completion.finish_reason,
        }
        if self._call.with_token_ids:
            choice["token_ids"] = piece.chunk.token_ids
        if piece.trace is not None:
            choice["trace"] = piece.trace
        return choice

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._call.with_usage else chunk

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Counts tokens of each prompt once, and of all its samples; beside these, this project's
        own figures."""
        prompts = sum(len(token_ids) for token_ids, _ in self._call.prompts)
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
    """The answer to a call of /v1/chat/completions."""

    prefix, whole_object = "chatcmpl", "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self._call.num_choices)
        ]

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _said(self, piece: Piece) -> dict[str, Any] | None:
        said, ids = piece.chunk.completion.logprobs, piece.chunk.token_ids
        if said is None:
            return None
        return self._logprobs.of_chat(ids, said[len(said) - len(ids) :])
