"""Where a call that decodes many prompts stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from wedlm_jax.completion import Completion
from wedlm_jax.scheduler import Running


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a call to `LLM.generate` stands, counted over finished and running rows.

    Attributes:
      total: None where the rows come from an iterator.
    """

    finished: int
    total: int | None
    tokens: int
    forwards: int
    instances: int


class Tally:
    """Adds finished and running rows up for `Progress`."""

    def __init__(self, total: int | None, report: Callable[[Progress], None] | None):
        self._total, self._report = total, report
        self._finished = self._tokens = self._forwards = self._instances = 0

    def running(self, now: Running) -> None:
        self._tell(now)

    def add(self, completion: Completion) -> None:
        """Counts one sample."""
        self._tokens += len(completion.token_ids)
        self._forwards += completion.num_forwards
        self._instances += completion.num_token_instances

    def finished(self, prompts: int) -> None:
        self._finished += prompts
        self._tell(Running(0, 0, 0))

    def _tell(self, now: Running) -> None:
        if self._report is not None:
            self._report(
                Progress(
                    self._finished,
                    self._total,
                    self._tokens + now.tokens,
                    self._forwards + now.forwards,
                    self._instances + now.instances,
                )
            )
