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


class Waiting:
    """The queues of all classes."""

    def __init__(self, classes: Sequence[LengthClass]):
        self._classes = classes
        self._queues: list[list[tuple[tuple[int, int], int, Request]]] = [[] for _ in classes]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def put(self, request: Request) -> None:
        longest, prompt = request.work
        entry = ((-longest, -prompt), request.number, request)
        heapq.heappush(self._queues[request.length], entry)

    def has(self, length: int, *, or_shorter: bool) -> bool:
        """Whether a prompt of a class waits, or one of a shorter class."""
        return any(self._queues[: length + 1] if or_shorter else [self._queues[length]])

    def take(self, length: int, *, or_shorter: bool) -> Request | None:
        """The prompt of a class with most work; where there is none, of the next shorter one."""
        for number in range(length, -1, -1):
            if self._queues[number]:
                return heapq.heappop(self._queues[number])[-1]
            if not or_shorter:
                break
        return None

    def longest_queue(self) -> int:
        """The class whose turns would take longest: a batch of it is opened next. So a rare class
        waits until it fills a batch, or until nothing else is left."""
        turns = [
            len(queue) / each.rows
            for queue, each in zip(self._queues, self._classes, strict=True)
        ]  # fmt: skip
        return max(range(len(turns)), key=turns.__getitem__)

    def up_to(self, length: int) -> list[Request]:
        """All that wait, of a class and of the shorter ones."""
        return [entry[-1] for queue in self._queues[: length + 1] for entry in queue]
