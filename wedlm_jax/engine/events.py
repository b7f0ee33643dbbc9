"""What a step tells its caller about requests, by their numbers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from wedlm_jax.engine.results import SequenceResult

if TYPE_CHECKING:
    from wedlm_jax.decode.logprobs import TokenLogprob


@dataclasses.dataclass(frozen=True)
class TokenDelta:
    """Tokens that a sequence has committed since the last step.

    Attributes:
      token_ids: in the order of the text, a stop token included.
      logprobs: of each; None where they were not asked for.
      num_output: tokens of the completion so far, these included.
      num_forwards, num_token_instances: counts of the sequence so far.
      forwards_at, instances_at: those two when each of the tokens was committed.
    """

    number: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    num_output: int
    num_forwards: int
    num_token_instances: int
    forwards_at: list[int]
    instances_at: list[int]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A sequence is done; the last event of its request."""

    number: int
    result: SequenceResult


@dataclasses.dataclass(frozen=True)
class Failed:
    """A request cannot be decoded, or not to its end; the last event of it."""

    number: int
    error: Exception


Event: TypeAlias = TokenDelta | Finished | Failed
