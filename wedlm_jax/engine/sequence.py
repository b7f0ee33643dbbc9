"""What the host knows of one sequence, whether it waits or runs."""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from wedlm_jax.engine.burst import NewTokens, Request
from wedlm_jax.engine.prefix import Node
from wedlm_jax.engine.results import SequenceResult

if TYPE_CHECKING:
    from wedlm_jax.decode.logprobs import TokenLogprob


def widest_span(window: int) -> int:
    """Tokens that a window of W may run in a forward, at most: its masks behind as many filled
    slots, and the last token of the text."""
    return 2 * window + 1


def longest_room(request: Request, window: int) -> int:
    """Tokens that the pages of a request may ever have to hold: its last forward starts with a
    token less than the text will have."""
    return len(request.prompt) + request.params.max_tokens - 1 + widest_span(window)


@dataclasses.dataclass(eq=False)
class SequenceState:
    """One request on its way.

    Attributes:
      request: what is decoded.
      arrival: who came first has the lowest.
      text: prompt and committed tokens.
      index: its place on the device; −1 while it waits.
      nodes: the pages in front that stand in the prefix tree, in the order of the text.
      own: the pages behind these, that nobody else reads.
      num_computed: tokens whose keys and values are final in these pages.
      text_length_admitted: tokens of the text when it last got its index.
      window: W as last chosen.
      resume: what the device saved when the sequence was put back.
      num_admissions: how often it has got an index.
      waited_for: numbers of the requests whose prompt it has waited for, and which of their
        admissions that was.
      num_cached_tokens: tokens of the prompt that were in the cache when it first got an index;
        −1 before.
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
    resume: Any = None
    num_admissions: int = 0
    waited_for: dict[int, int] = dataclasses.field(default_factory=dict)
    num_cached_tokens: int = -1
    num_forwards: int = 0
    num_token_instances: int = 0
    forwards_at: list[int] = dataclasses.field(default_factory=list)
    instances_at: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = array("i")
        self.text.frombytes(np.asarray(self.request.prompt, np.int32).tobytes())

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def num_output(self) -> int:
        """Tokens of the completion."""
        return len(self.text) - len(self.request.prompt)

    @property
    def num_pages(self) -> int:
        return len(self.nodes) + len(self.own)

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of the text it was admitted with are still to be computed, but for the
        last, which an anchored window computes."""
        return self.num_computed < self.text_length_admitted - 1

    @property
    def room_needed(self) -> int:
        """Tokens that its pages must hold for its next forward; while its text is computed, for
        all of it and the window behind it."""
        behind = len(self.text) if self.is_prefilling else self.num_computed
        return behind + widest_span(self.window)

    @property
    def longest_room(self) -> int:
        """Tokens that its pages may ever have to hold."""
        return longest_room(self.request, self.window)

    def append(self, new: NewTokens) -> None:
        """Takes in what a burst has committed."""
        self.text.extend(new.token_ids)
        self.forwards_at.extend(new.forwards_at)
        self.instances_at.extend(new.instances_at)
        if new.logprobs is not None:
            self.logprobs.extend(new.logprobs)

    def result(self, finish_reason: str | None) -> SequenceResult:
        """Returns what it has committed so far."""
        asked = self.request.params.logprobs is not None
        return SequenceResult(
            self.text[len(self.request.prompt) :].tolist(),
            finish_reason,
            self.num_forwards,
            self.num_token_instances,
            list(self.forwards_at),
            list(self.instances_at),
            list(self.logprobs) if asked else None,
            max(self.num_cached_tokens, 0),
        )
