"""What callers, scheduler and device exchange: requests and events, bursts and reports.

A device has R replicas of N sequences each; replica r has the indices r·N … r·N + N − 1 of every
array here. Page numbers count from 0 in each replica's own cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from wedlm_jax.completion import Completion

if TYPE_CHECKING:
    from wedlm_jax.decode.logprobs import TokenLogprob
    from wedlm_jax.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
      number: a unique number.
      prompt: token ids.
      params: how it is decoded.
      window: W; None lets the engine choose.
      traced: whether each of its forwards is reported as an event. While such a request is being
        decoded, every burst is a single forward.
      handle: the caller's handle. Events are delivered to its ``caller``, a
        `wedlm_jax.engine.loop.Caller`; None where `Engine.step` returns them.
    """

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    window: int | None = None
    traced: bool = False
    handle: Any = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Admission:
    """A request that starts, or resumes after preemption, at a free index.

    Attributes:
      index: its place in the arrays.
      request: the request.
      text: int32 ``[L]``, the prompt and the tokens committed before preemption.
      num_cached: tokens of the text whose keys and values are already in its pages; fewer than L.
      resume: what `ForwardRunner.save` returned at preemption; None for a new request, and where
        tokens do not depend on the window.
      lookup: maximum number of drafts copied from its text.
      num_forwards, num_token_instances: the sequence's counts so far.
    """

    index: int
    request: Request
    text: np.ndarray
    num_cached: int
    resume: Any = None
    lookup: int = 0
    num_forwards: int = 0
    num_token_instances: int = 0


class Member(Protocol):
    """A sequence that a burst runs.

    Attributes:
      request: its request.
      index: its place in the arrays when the burst was submitted.
      is_present: whether it still has this place. It may have finished in the previous burst, or
        have been aborted or preempted since.
    """

    @property
    def request(self) -> Request: ...
    @property
    def index(self) -> int: ...
    @property
    def is_present(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Burst:
    """A series of forwards that the device runs without the host.

    The sequence at an index runs from its admission until it finishes or its index is released.
    A forward writes the keys and values of a span after the n computed tokens, so it needs a
    capacity of n + span; during prefill the pages hold the whole text and a window. A sequence
    without enough room waits for the next burst.

    Attributes:
      released: indices of sequences to remove before anything else.
      admissions: sequences that start, at indices that are released or have finished.
      page_table: int32 ``[R·N, max_pages]``, the pages of each sequence in order, then 0.
      capacity: int32 ``[R·N]``, tokens that these pages hold; 0 where there is no sequence.
      arrival: int32 ``[R·N]``, the ranks 0 … N − 1 of a replica's sequences by arrival. Prompts are
        computed in this order, so that none starves.
      windows: int32 ``[R·N]``, W of each sequence in this burst.
      chunk_tokens: maximum prompt tokens that a forward of a replica computes in addition to
        windows; 0 pauses all prompts.
      max_forwards: maximum forwards of each replica; 0 runs none.
      until_finished: int32 ``[R]``; a replica is done when this many of its sequences have
        finished. Replicas do not communicate during a burst, which ends when all are done.
      members: the sequences that it runs.
    """

    released: list[int]
    admissions: list[Admission]
    page_table: np.ndarray
    capacity: np.ndarray
    arrival: np.ndarray
    windows: np.ndarray
    chunk_tokens: int
    max_forwards: int
    until_finished: np.ndarray
    members: Sequence[Member] = ()


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The tokens that one sequence committed in a burst.

    Attributes:
      token_ids: the tokens, in the order of the text.
      forwards_at, instances_at: the sequence's counts after the forward that committed each token.
      drafts_at: the drafts that this forward checked, encoded for `wedlm_jax.completion.Drafts`.
      logprobs: log-probabilities of the tokens; None unless requested.
    """

    token_ids: Sequence[int]
    forwards_at: Sequence[int]
    instances_at: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None
    drafts_at: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class WindowForward:
    """What a forward saw and did in a sequence's window, slot by slot.

    Attributes:
      start: logical position of slot 0.
      held: the token in each slot that it ran; None for a mask.
      entropies: entropy, in nats, of its prediction for each slot and for the one after the last;
        None where it predicted nothing.
      drafted: the token with which it filled each mask; None for other slots.
      rejected: slots whose drafts failed verification.
      seconds: how long it took, including the host's work.
      ended: when it ended, by `time.perf_counter`.
    """

    start: int
    held: list[int | None]
    entropies: list[float | None]
    drafted: list[int | None]
    rejected: list[int]
    seconds: float
    ended: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The state of the sequences after a burst, as arrays ``[R·N]`` that are meaningless where
    there is no sequence. Counts continue across preemption.

    Attributes:
      num_computed: tokens of the text whose keys and values are final.
      num_output: tokens of the completion.
      finished: bool, whether a sequence is done.
      stopped: bool, whether a stop token ended it; otherwise its length did.
      num_forwards: decode forwards.
      num_token_instances: active window slots and backup masks, summed over these forwards.
      tokens: the new tokens of each index; None or empty where nothing was committed.
      errors: by index, the error that ended a sequence.
      traced: by index, the last forward of traced sequences, if it ran their window.
      num_run: forwards of the replica that ran the most. Replicas run at the same time, so this
        many forwards took the time of the burst.
      seconds: how long the burst took, at most.
      timed: whether `seconds` shows what its forwards cost. It does not if the burst had ended
        before the host looked; if the state had to be resized for another program first; or if its
        program ran at one of these sizes for the first time, which on a CPU takes 0.1 s longer.
      sizes: the static sizes at which its program runs forwards.
      by_size: int32 ``[S]``, how often the layers ran at each of these sizes.
      windowless: whether its program has no room for windows, though the engine's others have.
    """

    num_computed: np.ndarray
    num_output: np.ndarray
    finished: np.ndarray
    stopped: np.ndarray
    num_forwards: np.ndarray
    num_token_instances: np.ndarray
    tokens: Sequence[NewTokens | None]
    errors: Mapping[int, Exception] = dataclasses.field(default_factory=dict)
    traced: Mapping[int, WindowForward] = dataclasses.field(default_factory=dict)
    num_run: int = 0
    seconds: float = 0.0
    timed: bool = True
    sizes: tuple[int, ...] = ()
    by_size: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    windowless: bool = False


class ForwardRunner(Protocol):
    """Runs forwards for a scheduler."""

    def submit(self, burst: Burst) -> Any:
        """Submits a burst and returns a ticket for its report, without waiting. The device runs
        bursts in the order of submission."""

    def collect(self, ticket: Any) -> Report:
        """Waits for a burst to end and returns its report. Tickets are collected in order."""

    def save(self, index: int, request: Request) -> Any:
        """Returns the window of a sequence in mode "paper", whose tokens depend on it, for
        `Admission.resume`. During prefill this is the window that the sequence was admitted with,
        or one that has not opened yet. Called only while no burst is in flight."""


# --- Events ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _OfRequest:
    """Base class of events.

    Attributes:
      request: the request that the event belongs to.
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
      token_ids: the tokens in the order of the text, a stop token included.
      logprobs: log-probabilities of the tokens; None unless requested.
      num_output: tokens of the completion so far, these included.
      num_forwards, num_token_instances: the sequence's counts so far.
      forwards_at, instances_at: those counts when each of the tokens was committed.
      drafts_at: the drafts checked then, encoded for `wedlm_jax.completion.Drafts`.
      num_cached_tokens: tokens of the prompt found in the prefix cache.
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
        """Returns a single event with the tokens of this event and of a later one."""
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
    """A request is finished. This is its last event."""

    result: Completion


@dataclasses.dataclass(frozen=True)
class Failed(_OfRequest):
    """A request could not be decoded, or not to its end. This is its last event."""

    error: Exception


@dataclasses.dataclass(frozen=True)
class Traced(_OfRequest):
    """A forward that ran the window of a traced request. The event with its tokens follows.

    Attributes:
      forward: what the forward saw and did.
      committed: the tokens that it added to the text.
      num_forwards, num_token_instances: the sequence's counts so far.
    """

    forward: WindowForward
    committed: list[int]
    num_forwards: int
    num_token_instances: int


Event: TypeAlias = TokenDelta | Finished | Failed | Traced


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counters of the scheduler, over all replicas.

    Attributes:
      running, waiting: the numbers of running and of waiting sequences.
      pages: all pages that sequences can have.
      pages_free: empty pages.
      pages_cached: pages that hold only prefixes of finished sequences.
      pages_used: pages of running sequences.
      places_computed: tokens in used pages whose keys and values are final.
      places_spanned: tokens after these that the next forwards write.
      prefix_tokens: tokens found in the prefix cache when their sequence was admitted.
      prompt_tokens: prompt tokens that had to be computed.
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
    preemptions: int
