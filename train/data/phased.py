"""The batches of a run through all of its phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.sharding import Sharding

from train.data.batches import TrainBatches, TrainingRows
from train.recipe.phases import Phase
from train.recipe.skipped_batches import SkippedBatches
from wedlm_jax.corruption import PackedRows
from wedlm_jax.host.processes import say


class PhasedBatches:
    """Yields the global `PackedRows` of a run's steps, one phase after another, and says where
    batches are skipped.

    Args:
      phases: of the recipe.
      data: the rows of each.
      sharding: of the arrays ``[A, R, L]``, whose sizes the phases may change.
      start: the first step.
      sources: as in `TrainBatches`.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        data: Sequence[TrainingRows],
        sharding: Sharding,
        start: int = 0,
        *,
        sources: int = 1,
    ):
        self._left = [(p, d) for p, d in zip(phases, data, strict=True) if p.stop > start]
        self._sharding, self._step, self._sources = sharding, start, sources
        self._skipped = SkippedBatches.of(phases[0].config.data.skip)
        self._phase, self._batches = self._open()
        self._earlier: list[tuple[int, Callable[[int], list[dict[str, list[int]]]]]] = []

    def _open(self) -> tuple[Phase, TrainBatches]:
        phase, data = self._left.pop(0)
        batches = TrainBatches(
            data,
            phase.config,
            self._sharding,
            start=self._step,
            stop=phase.stop,
            first=phase.first,
            streams=phase.streams,
            sources=self._sources,
        )
        return phase, batches

    def __next__(self) -> PackedRows:
        if self._step == self._phase.stop and self._left:
            self._earlier.append((self._phase.stop, self._batches.read_from))
            self._batches.close()
            self._phase, self._batches = self._open()
        self._step += 1
        for first, last in self._skipped.passed_by(self._step):
            say(f"step {self._step}: batches {first} to {last} are skipped (data.skip)")
        return next(self._batches)

    def read_from(self, step: int) -> list[dict[str, list[int]]]:
        """Tells what `TrainBatches.read_from` does, of any step since the first."""
        for stop, read_from in self._earlier:
            if step < stop:
                return read_from(step)
        return self._batches.read_from(step)

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        self._batches.close()
