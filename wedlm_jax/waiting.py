"""Prompts that wait for a row: each length class in a queue of its own, most work first."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from wedlm_jax.length_classes import LengthClass
from wedlm_jax.sampling import SamplingParams


@dataclasses.dataclass
class Request:
    """A prompt on its way through the batch.

    Attributes:
      number: its place among the requests, from 0.
      prompt: int32 ``[T]``.
      length: its length class.
      prefilled: tokens of it that stand in its row's cache.
    """

    number: int
    prompt: np.ndarray
    params: SamplingParams
    length: int = 0
    prefilled: int = 0

    @property
    def work(self) -> tuple[int, int]:
        return (self.params.max_tokens, len(self.prompt))


TURNS = 4
"""Times that the waiting prompts of a class fill a batch before those of another make way for them:
a change leaves rows idle until the last of the others is done."""


class Waiting:
    """The queues of all classes.

    Args:
      classes: shortest first.
      most: prompts that wait, at most, in all queues.
    """

    def __init__(self, classes: Sequence[LengthClass], most: int):
        self._classes = classes
        # Where all places are taken some class is due, however the prompts are spread.
        self._share = max(most // (2 * len(classes)), 1)
        self._queues: list[list[tuple[tuple[int, int], int, Request]]] = [[] for _ in classes]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def put(self, request: Request) -> None:
        longest, prompt = request.work
        entry = ((-longest, -prompt), request.number, request)
        heapq.heappush(self._queues[request.length], entry)

    def take(self, length: int, *, shorter: bool = False) -> Request | None:
        """The prompt of a class with most work, or of the longest of the ``shorter`` classes."""
        if not shorter:
            return self._pop(length)
        return next(filter(None, map(self._pop, reversed(range(length)))), None)

    def _pop(self, length: int) -> Request | None:
        queue = self._queues[length]
        return heapq.heappop(queue)[-1] if queue else None

    def count(self, length: int) -> int:
        return len(self._queues[length])

    def is_due(self, length: int) -> bool:
        """Whether so many of a class wait that a batch of others should make way."""
        enough = min(TURNS * self._classes[length].rows, self._share)
        return len(self._queues[length]) >= enough

    def another_is_due(self, length: int) -> bool:
        return any(self.is_due(other) for other in range(len(self._queues)) if other != length)

    def next_class(self, last: int | None) -> int:
        """The class that gets the next batch, behind one of the class ``last``: of those that are
        due the one whose turns would take longest, not the last one again if there is another; of
        all, if none is due. So a rare class waits for a while, and none for ever."""
        due = [number for number in range(len(self._queues)) if self.is_due(number)]
        due = [number for number in due if number != last] or due
        return max(due or range(len(self._queues)), key=self._turns)

    def _turns(self, length: int) -> float:
        return len(self._queues[length]) / self._classes[length].rows

    def up_to(self, length: int) -> list[Request]:
        """All that wait, of a class and of the shorter ones."""
        return [entry[-1] for queue in self._queues[: length + 1] for entry in queue]
