"""What the scheduler tells a device to do, and what the device tells it afterwards.

A device has R replicas of N sequences each, and replica r has the indices r·N … r·N + N − 1 of
every array here. Page numbers are those of the replica's own cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from wedlm_jax.decode.logprobs import TokenLogprob
    from wedlm_jax.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
      number: names the request; no two have the same.
      prompt: token ids.
      params: how it is decoded.
      window: W; None lets the engine choose.
    """

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Admission:
    """A request that begins, or goes on after it was put back, at a free index.

    Attributes:
      index: its place in the arrays.
      request: what is decoded.
      text: int32 ``[L]``, the prompt and what was committed before it was put back.
      num_cached: tokens of the text whose keys and values stand in its pages already; less
        than L.
      resume: what `ForwardRunner.save` returned when it was put back; None for one that begins.
    """

    index: int
    request: Request
    text: np.ndarray
    num_cached: int
    resume: Any


@dataclasses.dataclass(frozen=True)
class Burst:
    """Forwards that the device runs without asking the host.

    The sequence at an index runs from its admission until it finishes or its index is released.
    A forward writes the keys and values of a span behind the n tokens that are computed, so it
    needs a capacity of n + span; while the text of an admission is computed, its pages hold the
    whole text and a window. A sequence without room waits for the next burst.

    Attributes:
      released: indices that stop, before anything else happens.
      admissions: sequences that begin; their indices were released or have finished.
      page_table: int32 ``[R·N, max_pages]``, the pages of each sequence, 0 behind them.
      capacity: int32 ``[R·N]``, tokens that they hold; 0 where there is no sequence.
      arrival: int32 ``[R·N]``, the ranks 0 … N − 1 of the sequences of a replica, who came first
        lowest. Prompts are computed in this order, or one of them might starve.
      windows: int32 ``[R·N]``, W of each sequence in this burst.
      chunk_tokens: tokens of prompts that a forward of a replica may compute beside windows.
      max_forwards: forwards at most, at least 1.
      until_finished: the burst ends when so many sequences have finished in it, of all replicas.
    """

    released: list[int]
    admissions: list[Admission]
    page_table: np.ndarray
    capacity: np.ndarray
    arrival: np.ndarray
    windows: np.ndarray
    chunk_tokens: int
    max_forwards: int
    until_finished: int


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What one sequence committed in a burst.

    Attributes:
      token_ids: in the order of the text.
      forwards_at, instances_at: the sequence's counts after the forward that committed each.
      logprobs: of each; None where they were not asked for.
    """

    token_ids: Sequence[int]
    forwards_at: Sequence[int]
    instances_at: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """Where the sequences stand after a burst; arrays ``[R·N]``, of no meaning where there is no
    sequence. Counts go on from where they stood when a sequence was put back.

    Attributes:
      num_computed: tokens of the text whose keys and values are final.
      num_output: tokens of the completion.
      finished: bool, whether a sequence is done.
      stopped: bool, whether it is so by a stop token; if not, by its length.
      num_forwards: decode forwards.
      num_token_instances: active window slots over these.
      tokens: of each index; None or empty where nothing was committed.
      errors: what went wrong, by index. Such a sequence is over.
      num_run: forwards of the burst.
    """

    num_computed: np.ndarray
    num_output: np.ndarray
    finished: np.ndarray
    stopped: np.ndarray
    num_forwards: np.ndarray
    num_token_instances: np.ndarray
    tokens: Sequence[NewTokens | None]
    errors: Mapping[int, Exception] = dataclasses.field(default_factory=dict)
    num_run: int = 0


class ForwardRunner(Protocol):
    """Who runs forwards."""

    def run(self, burst: Burst) -> Report:
        """Runs a burst and waits for its end."""

    def save(self, index: int) -> Any:
        """Returns all that a sequence needs to go on elsewhere with the same tokens, but for its
        text and its pages: window and counts. Where its text is still being computed, that is what
        it was admitted with, or a window not yet opened. Called between bursts."""
