"""The host's state of a waiting or running sequence."""

from __future__ import annotations

import dataclasses
import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from wedlm_jax.completion import Completion
from wedlm_jax.engine.interface import NewTokens, Request
from wedlm_jax.engine.pages import Node

if TYPE_CHECKING:
    from wedlm_jax.decode.logprobs import TokenLogprob
    from wedlm_jax.decode.options import Traits


def widest_span(window: int, lookup: int, backup_room: int = 0) -> int:
    """Returns the maximum number of tokens that a forward with a window of W needs room for: W
    masks after W filled slots or after copied drafts, the last token of the text, and backup masks.

    Args:
      backup_room: room for backup masks, which only sequences with a window have.
    """
    return window + max(window, lookup) + 1 + (backup_room if window else 0)


def longest_room(request: Request, window: int, lookup: int, backup_room: int = 0) -> int:
    """Returns the maximum number of tokens that a request's pages ever have to hold. Its last
    forward starts one token before the end of the text."""
    text = len(request.prompt) + request.params.max_tokens
    return text - 1 + widest_span(window, lookup, backup_room)


@dataclasses.dataclass(eq=False)
class SequenceState:
    """A request that waits or runs.

    Attributes:
      request: the request.
      arrival: its rank in the order of arrival.
      text: prompt and committed tokens.
      index: its place on the device; −1 while it waits.
      nodes: its first pages, which are in the prefix tree, in the order of the text.
      own: the pages after these, which no other sequence reads.
      num_computed: tokens whose keys and values in these pages are final.
      text_length_admitted: length of the text when it was last admitted.
      window: W as last chosen.
      lookup: maximum number of drafts copied from its text.
      backup_room: the tokens that its pages must hold for backup masks while it has a window.
      evidence: a `WindowChoice`'s data on the sequence.
      resume: the window that the device saved when the sequence was preempted, in mode "paper".
      num_admissions: how often it was admitted.
      waited_for: the requests whose prefill it has waited for: their ``num_admissions`` at that
        time, by number.
      num_cached_tokens: tokens of the prompt that were in the cache when it was first admitted;
        −1 before.
      forwards_in_flight: maximum forwards of the burst that is not reported yet; 0 for none.
      capacity_in_flight: tokens that its pages hold in that burst.
      traits: the traits that a program needs to decode it; None until the engine sets them.
    """

    request: Request
    arrival: int
    text: array[int] = dataclasses.field(init=False)
    index: int = -1
    nodes: list[Node] = dataclasses.field(default_factory=list)
    own: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    text_length_admitted: int = 0
    window: int = 0
    lookup: int = 0
    backup_room: int = 0
    evidence: Any = None
    resume: Any = None
    num_admissions: int = 0
    waited_for: dict[int, int] = dataclasses.field(default_factory=dict)
    num_cached_tokens: int = -1
    forwards_in_flight: int = 0
    capacity_in_flight: int = 0
    traits: Traits | None = None
    num_forwards: int = 0
    num_token_instances: int = 0
    forwards_at: list[int] = dataclasses.field(default_factory=list)
    instances_at: list[int] = dataclasses.field(default_factory=list)
    drafts_at: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = array("i")
        self.text.frombytes(np.asarray(self.request.prompt, np.int32).tobytes())

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def num_output(self) -> int:
        """The number of tokens of the completion."""
        return len(self.text) - len(self.request.prompt)

    @property
    def num_pages(self) -> int:
        return len(self.nodes) + len(self.own)

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of the text that it was admitted with remain to be computed, apart from
        the last, which an anchored window computes."""
        return self.num_computed < self.text_length_admitted - 1

    def outlasts_flight(self, prefill_forwards: int) -> bool:
        """Returns whether the sequence may still run after the burst in flight. An anchored
        sequence commits at least one token in every forward after its prompt; a sequence in mode
        "paper" does so from its second forward on.

        Args:
          prefill_forwards: number of the burst's forwards that may run only prompts.
        """
        left = self.request.params.max_tokens - self.num_output
        return left + prefill_forwards > self.forwards_in_flight

    @property
    def room_needed(self) -> int:
        """How many tokens its pages must hold for the first forward after the burst in flight,
        however far that burst gets; during prefill, for the whole text and the window after it."""
        start = len(self.text) if self.is_prefilling else self.num_computed
        span = self._widest_span
        if not self.forwards_in_flight:
            return start + span
        reached = min(start + span * self.forwards_in_flight, self.capacity_in_flight)
        return max(start + span, min(reached + span, self.longest_room))

    def room_expected(self, rate: float, forwards: int) -> int:
        """Returns how many tokens its pages will probably have to hold after the burst in flight
        and ``forwards`` more forwards, if each forward commits ``rate`` tokens."""
        start = len(self.text) if self.is_prefilling else self.num_computed
        committed = math.ceil(rate * (self.forwards_in_flight + forwards))
        return start + self._widest_span + committed

    @property
    def longest_room(self) -> int:
        """The maximum number of tokens that its pages ever have to hold."""
        return longest_room(self.request, self.window, self.lookup, self.backup_room)

    @property
    def _widest_span(self) -> int:
        return widest_span(self.window, self.lookup, self.backup_room)

    def append(self, new: NewTokens) -> None:
        """Appends the tokens that a burst has committed."""
        self.text.extend(new.token_ids)
        self.forwards_at.extend(new.forwards_at)
        self.instances_at.extend(new.instances_at)
        self.drafts_at.extend(new.drafts_at)
        if new.logprobs is not None:
            self.logprobs.extend(new.logprobs)

    def result(self, finish_reason: str | None) -> Completion:
        """Returns the completion so far."""
        asked = self.request.params.logprobs is not None
        return Completion(
            None,
            self.text[len(self.request.prompt) :].tolist(),
            finish_reason,
            self.num_forwards,
            self.num_token_instances,
            list(self.logprobs) if asked else None,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            forwards_at=list(self.forwards_at),
            instances_at=list(self.instances_at),
            drafts_at=list(self.drafts_at),
        )


@dataclasses.dataclass(frozen=True)
class Member:
    """A sequence in a burst; see `wedlm_jax.engine.interface.Member`.

    Attributes:
      admission: which of its admissions gave it the index.
    """

    sequence: SequenceState
    index: int
    admission: int

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def is_present(self) -> bool:
        now = self.sequence
        return (now.index, now.num_admissions) == (self.index, self.admission)
