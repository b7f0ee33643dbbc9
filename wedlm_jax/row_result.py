"""What is known of one decoded row: its tokens, its counts, its open window."""

from __future__ import annotations

import dataclasses

from wedlm_jax.logprobs import TokenLogprob


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What a row has committed so far.

    Attributes:
      token_ids: completion tokens, a stop token included.
      finish_reason: "stop", "length", or None while it is decoding.
      num_forwards: decode forwards this row took part in; prefill is not counted.
      num_token_instances: active window slots over those forwards.
      forwards_at, instances_at: those two counts when each token was committed.
      logprobs: of each token; None where they were not asked for.
    """

    token_ids: list[int]
    finish_reason: str | None
    num_forwards: int
    num_token_instances: int
    forwards_at: list[int]
    instances_at: list[int]
    logprobs: list[TokenLogprob] | None = None

    def cut(self, length: int) -> RowResult:
        """The row as if it had stopped at its first ``length`` (at least 1) tokens."""
        return RowResult(
            self.token_ids[:length],
            "stop",
            self.forwards_at[length - 1],
            self.instances_at[length - 1],
            self.forwards_at[:length],
            self.instances_at[:length],
            None if self.logprobs is None else self.logprobs[:length],
        )


@dataclasses.dataclass(frozen=True)
class WindowView:
    """The open window of one row as the next forward will see it, in logical order.

    Attributes:
      start: logical position of the first slot.
      tokens: the token of each active slot, None where it is masked.
      order: the slots in physical order.
    """

    start: int
    tokens: list[int | None]
    order: list[int]
