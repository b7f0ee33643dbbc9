"""How often a run reads each of its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from train.recipe.phases import Phase
from train.recipe.skipped_batches import SkippedBatches
from train.watch.records import Record

MANY = 4.0
"""Up to about so many epochs, rows that are read again are worth nearly what new ones are
(Muennighoff et al., arXiv 2305.16264, section 6)."""


class Epochs:
    """Counts the epochs of each source of a run, the rows of skipped batches included.

    Args:
      phases: of the recipe.
      rows: how many each source has, by its name in the recipe; "" is the synthetic corpus.
    """

    def __init__(self, phases: Sequence[Phase], rows: Mapping[str, int]):
        self._phases, self._rows = phases, rows
        self._skipped = SkippedBatches.of(phases[0].config.data.skip)

    def after(self, step: int) -> dict[str, float]:
        """Returns the epochs of each source that the first ``step`` steps take, to a row or two."""
        read = dict.fromkeys(self._rows, 0.0)
        for phase in self._phases:
            if phase.first >= step:
                break
            batches = self._skipped.between(phase.first, min(step, phase.stop))
            rows = batches * phase.config.accumulation * phase.config.rows
            sources = phase.config.data.sources or {"": 1.0}
            for (name, weight), stream in zip(sources.items(), phase.streams, strict=True):
                read[name] = stream.taken + rows * weight / sum(sources.values())
        return {name: count / self._rows[name] for name, count in read.items()}

    def record(self, step: int) -> Record:
        """Returns `after` by the names that metrics have: ``epoch/NAME``, or ``epoch``."""
        return {
            f"epoch/{name}" if name else "epoch": round(epochs, 4)
            for name, epochs in self.after(step).items()
        }

    def lines(self, done: int) -> list[str]:
        """Tells a run of which ``done`` steps are completed what it takes of each source, and warns
        where that is much."""
        whole, now = self.after(self._phases[-1].stop), self.after(done)
        lines = []
        for name, epochs in whole.items():
            shown = name or "the synthetic corpus"
            lines.append(
                f"{shown}: {epochs:.2f} epochs of {self._rows[name]:,} rows in the whole run, "
                f"{now[name]:.2f} done"
            )
            if epochs > MANY:
                lines.append(
                    f"warning: {shown}: more than {MANY:g} epochs, from where on repeated rows "
                    "teach less and less; more rows, a smaller share or fewer steps would help"
                )
        return lines
