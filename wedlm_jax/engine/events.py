"""What the engine reports to its callers: the events of a step, a sequence's window, and
counters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from wedlm_jax.completion import Completion
from wedlm_jax.engine.burst import Request, WindowForward

if TYPE_CHECKING:
    from wedlm_jax.decode.logprobs import TokenLogprob


@dataclasses.dataclass(frozen=True)
class _OfRequest:
    """What all events have.

    Attributes:
      request: whose event it is.
    """

    request: Request = dataclasses.field(repr=False)

    @property
    def number(self) -> int:
        """The number of the request."""
        return self.request.number


@dataclasses.dataclass(frozen=True)
class TokenDelta(_OfRequest):
    """Tokens that a sequence has committed since the last step.

    Attributes:
      token_ids: in the order of the text, a stop token included.
      logprobs: of each; None where they were not asked for.
      num_output: tokens of the completion so far, these included.
      num_forwards, num_token_instances: counts of the sequence so far.
      forwards_at, instances_at: those two when each of the tokens was committed.
      drafts_at: the drafts that were checked then, as `wedlm_jax.completion.Drafts` reads them.
      num_cached_tokens: tokens of the prompt that were in the cache before.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    num_output: int
    num_forwards: int
    num_token_instances: int
    forwards_at: list[int]
    instances_at: list[int]
    drafts_at: list[int] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0

    def followed_by(self, later: TokenDelta) -> TokenDelta:
        """Returns both in one: the tokens of two steps."""
        logprobs = self.logprobs
        if logprobs is not None and later.logprobs is not None:
            logprobs = logprobs + later.logprobs
        return dataclasses.replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            logprobs=logprobs,
            forwards_at=self.forwards_at + later.forwards_at,
            instances_at=self.instances_at + later.instances_at,
            drafts_at=self.drafts_at + later.drafts_at,
        )


@dataclasses.dataclass(frozen=True)
class Finished(_OfRequest):
    """A sequence is finished; the last event of its request."""

    result: Completion


@dataclasses.dataclass(frozen=True)
class Failed(_OfRequest):
    """A request cannot be decoded, or not to its end; its last event."""

    error: Exception


@dataclasses.dataclass(frozen=True)
class Traced(_OfRequest):
    """A forward of a traced request that ran its window; the event of its tokens follows.

    Attributes:
      forward: what it saw and did.
      committed: the tokens that it added to the text.
      num_forwards, num_token_instances: counts of the sequence so far.
    """

    forward: WindowForward
    committed: list[int]
    num_forwards: int
    num_token_instances: int


Event: TypeAlias = TokenDelta | Finished | Failed | Traced


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


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counters of the scheduler, over all replicas.

    Attributes:
      running, waiting: sequences.
      pages: all pages that sequences can have.
      pages_free: of these, the empty ones.
      pages_cached: those that hold only prefixes of finished sequences.
      pages_used: those of running sequences.
      places_computed: tokens in used pages whose keys and values are final.
      places_spanned: tokens after these that the next forwards write.
      prefix_tokens: tokens found in the prefix cache when their sequence was admitted.
      prompt_tokens: prompt tokens that had to be computed.
      recomputed_tokens: tokens computed again after a preemption.
      preemptions: how often a sequence was preempted.
    """

    running: int
    waiting: int
    pages: int
    pages_free: int
    pages_cached: int
    pages_used: int
    places_computed: int
    places_spanned: int
    prefix_tokens: int
    prompt_tokens: int
    recomputed_tokens: int
    preemptions: int
