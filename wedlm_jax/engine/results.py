"""What is known of one decoded sequence: its tokens and its counts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wedlm_jax.decode.logprobs import TokenLogprob


@dataclasses.dataclass(frozen=True)
class SequenceResult:
    """What a sequence has committed.

    Attributes:
      token_ids: completion tokens, a stop token included.
      finish_reason: "stop", "length", or None while it is decoding.
      num_forwards: decode forwards it took part in; chunks of its prompt are not counted.
      num_token_instances: active window slots over those forwards.
      forwards_at, instances_at: those two counts when each token was committed.
      logprobs: of each token; None where they were not asked for.
      num_cached_tokens: tokens of the prompt that were in the cache before.
    """

    token_ids: list[int]
    finish_reason: str | None
    num_forwards: int
    num_token_instances: int
    forwards_at: list[int]
    instances_at: list[int]
    logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0

    def cut(self, length: int) -> SequenceResult:
        """Returns the result as if it had stopped at its first ``length`` (at least 1) tokens."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:length],
            finish_reason="stop",
            num_forwards=self.forwards_at[length - 1],
            num_token_instances=self.instances_at[length - 1],
            forwards_at=self.forwards_at[:length],
            instances_at=self.instances_at[:length],
            logprobs=None if self.logprobs is None else self.logprobs[:length],
        )


@dataclasses.dataclass(frozen=True)
class WindowView:
    """The window of a sequence as its next forward will see it, in logical order.

    Attributes:
      start: logical position of the first slot.
      tokens: the token of each active slot, None where it is masked.
      order: the slots in physical order.
    """

    start: int
    tokens: list[int | None]
    order: list[int]
