"""Brings the metrics of steps from the devices to the log, as means over an interval and as lines
of JSONL files; records skipped steps.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.recipe.skipped_batches import SkippedBatches
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import written_beside
from wedlm_jax.host.processes import is_first, say

Record = dict[str, float]
BY_RATIO = "mlm_loss_by_ratio"
COUNTS = "denominators"
COUNT_OF = {
    "mlm_loss": "mlm",
    "ar_loss": "ar",
    "masked_accuracy": "masked",
    "ar_accuracy": "ar",
    BY_RATIO: "masked_by_ratio",
    "agreement_by_offset": "masks_by_offset",
    "overlap_by_offset": "masks_by_offset",
    "tokens_per_forward": "windows",
}
"""For each mean of a step: the name in `COUNTS` of the count by which it was divided."""
BY_SOURCE = {"mlm_loss_by_source": "mlm_by_source", "ar_loss_by_source": "ar_by_source"}
"""Losses of a step by data source, and the names of their counts."""
TOKENS = "tokens_by_source"
"""The name in a step's `COUNTS` of the number of tokens of each source."""
NEWEST = ("learning_rate",)
"""Metrics that are not averaged: the newest step's value is reported."""


class Interval:
    """Computes means over the steps since the last record.

    A loss or an accuracy is weighted by the count that it was divided by in its step, so that the
    mean is over all tokens of the interval; ``loss`` is recomputed from these means. Other numbers
    are means over the steps. Skipped steps count only in ``skipped``.

    A loss by source becomes a number per source, ``mlm_loss/NAME``, and ``tokens/NAME`` counts the
    source's tokens in the interval. Both are stored by name, so a run can continue with other
    sources.

    Args:
      ar_weight: a in (MLM + a AR) / (1 + a).
      sources: names of the sources, if steps report losses by source.
    """

    def __init__(self, ar_weight: float = 1.0, sources: Sequence[str] = ()):
        self._ar_weight, self._sources = ar_weight, sources
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, Any] = {}
        self._tokens: Record = {}
        self._newest: Record = {}
        self._skipped = 0

    @property
    def empty(self) -> bool:
        return not (self._sums or self._skipped)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of one step, on the host (`train.step.make_train_step`)."""
        self._newest = {name: float(metrics[name]) for name in NEWEST if name in metrics}
        if metrics.get("skipped"):
            self._skipped += 1
            return
        counts = metrics.get(COUNTS, {})
        for name, value, weight in self._weighted(metrics, counts):
            # A mean over nothing is 0 in the step, and its weight is 0.
            self._sums[name] = self._sums.get(name, 0.0) + weight * np.float64(value)
            self._weights[name] = self._weights.get(name, 0.0) + weight
        for source, tokens in self._by_source(counts.get(TOKENS, ())):
            if tokens:  # a phase may not have all sources
                name = f"tokens/{source}"
                self._tokens[name] = self._tokens.get(name, 0.0) + float(tokens)

    def _weighted(
        self, metrics: Mapping[str, Any], counts: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, np.float64]]:
        """Yields each number of a step with its weight."""
        for name, value in metrics.items():
            if name in BY_SOURCE:
                loss = name.removesuffix("_by_source")
                weights = dict(self._by_source(counts[BY_SOURCE[name]]))
                for source, own in self._by_source(value):
                    if weights[source]:
                        yield f"{loss}/{source}", own, weights[source]
            elif name not in (COUNTS, "skipped", *NEWEST):
                yield name, value, np.float64(counts.get(COUNT_OF.get(name, ""), 1.0))

    def _by_source(self, values: Sequence[Any]) -> Iterator[tuple[str, np.float64]]:
        return zip(self._sources, map(np.float64, values), strict=False)

    def record(self) -> Record:
        """Returns the means, and starts a new interval."""
        tiny = np.finfo(np.float64).tiny
        record = flatten(
            {name: x / np.maximum(self._weights[name], tiny) for name, x in self._sums.items()}
        )
        if "mlm_loss" in record:
            a = self._ar_weight
            record["loss"] = (record["mlm_loss"] + a * record["ar_loss"]) / (1 + a)
        elif "ar_loss" in record:
            record["loss"] = record["ar_loss"]
        record |= {**self._tokens, **self._newest, "skipped": float(self._skipped)}
        self._clear()
        return record

    def state(self) -> dict[str, Any]:
        """Returns the whole state, for a line of JSON."""
        return {
            "sums": {name: np.asarray(x).tolist() for name, x in self._sums.items()},
            "weights": {name: np.asarray(x).tolist() for name, x in self._weights.items()},
            "tokens": self._tokens,
            "newest": self._newest,
            "skipped": self._skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._sums = {name: np.float64(x) for name, x in state["sums"].items()}
        self._weights = {name: np.float64(x) for name, x in state["weights"].items()}
        self._newest, self._skipped = dict(state["newest"]), int(state["skipped"])
        self._tokens = dict(state["tokens"])


def flatten(metrics: Mapping[str, Any]) -> Record:
    """Returns metrics of a step as plain numbers. The MLM loss by mask ratio becomes a number per
    bin, ``mlm_loss_ratio_0.25_0.50``; bins without a mask are left out. Metrics by a draft's offset
    become ``agreement_1``, ``agreement_2``, ..."""
    record: Record = {}
    for name, value in metrics.items():
        if name.endswith("_by_offset"):
            prefix = name.removesuffix("by_offset")
            record |= {f"{prefix}{k}": float(x) for k, x in enumerate(np.asarray(value), 1)}
            continue
        if name != BY_RATIO:
            record[name] = float(value)
            continue
        losses = np.asarray(value)
        for i, loss in enumerate(losses):
            if loss > 0:
                low, high = i / len(losses), (i + 1) / len(losses)
                record[f"mlm_loss_ratio_{low:.2f}_{high:.2f}"] = float(loss)
    return record


def as_json(step: int, record: Mapping[str, float], **more: Any) -> str:
    """Returns a line of a JSONL file. Numbers that are not finite become null, since JSON cannot
    represent them. ``more`` follows the numbers unchanged.
    """
    known = {name: x if math.isfinite(x) else None for name, x in record.items()}
    return json.dumps({"step": step, **known, **more}, ensure_ascii=False) + "\n"


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops the records after ``step`` and a line that a crash cut off; returns the rest."""
    if not path.exists():
        return []
    kept = [(line, record) for line, record in logged(path) if record["step"] <= step]
    with written_beside(path) as file:
        file.write("".join(f"{line}\n" for line, _ in kept).encode("utf-8"))
    return [record for _, record in kept]


def logged(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of a JSONL file and their records, without a line that a crash cut off."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            int(record["step"])
            yield line, record


SKIPPED = "skipped.jsonl"
INTERVAL = "interval.jsonl"
"""The file of the running means at each checkpoint within a logging interval, so that a run that
continues from there logs the same means."""


class TooManySkipped(InputError):
    """Raised when as many steps in a row were skipped as the recipe allows."""


class PendingMetrics:
    """Collects metrics of the steps since the last record.

    Each skipped step becomes a line in ``skipped.jsonl``, with the number of its batch and, for
    each process, where its rows are stored.

    Args:
      output: the run's folder.
      max_skipped: number of steps skipped in a row that ends the run.
      read_from: returns, for a step counted from 0, the files that each process reads for its
        batch, and the numbers of the rows in each.
      skipped: the batches that no step reads.
      ar_weight, sources: as in `Interval`.
      done: completed steps; the means of the interval that was open then are continued.
    """

    def __init__(
        self,
        output: Path,
        max_skipped: int,
        read_from: Callable[[int], list[dict[str, list[int]]]],
        skipped: SkippedBatches,
        *,
        ar_weight: float = 1.0,
        sources: Sequence[str] = (),
        done: int = 0,
    ):
        self._skipped = skipped
        self._output, self._max, self._read_from = output, max_skipped, read_from
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        self._interval = Interval(ar_weight, sources)
        if is_first():
            for line in cut_back(output / INTERVAL, done):
                if line["step"] == done:
                    self._interval.restore(line)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a step that has been sent to the devices, and waits for the step
        before it, so that the host is never more than a step ahead and its timings are right."""
        if self._waiting:
            jax.block_until_ready(self._waiting[-1][1])
        self._waiting.append((step, metrics))

    def record(self) -> Record:
        """Returns the means over the steps since the last record; waits for the newest step.

        Raises:
          TooManySkipped: as many steps in a row were skipped as the recipe allows.
        """
        self._gather()
        return self._interval.record()

    def keep(self, step: int) -> None:
        """Saves the running means for a run that continues from ``step``; raises as `record`."""
        self._gather()
        if is_first() and not self._interval.empty:
            line = json.dumps({"step": step, **self._interval.state()}) + "\n"
            with (self._output / INTERVAL).open("a", encoding="utf-8") as file:
                file.write(line)

    def _gather(self) -> None:
        """Brings all metrics to the host; raises as `record`."""
        waiting, self._waiting = jax.device_get(self._waiting), []
        refused = None
        for step, metrics in waiting:
            self._interval.add(metrics)
            if metrics["skipped"]:
                self._note(step, metrics)
            if metrics["skipped"] >= self._max:
                refused = refused or (step, int(metrics["skipped"]))
        if refused:
            raise TooManySkipped(
                f"step {refused[0]}: {refused[1]} steps in a row were skipped, which is as "
                f"many as optimizer.max_skipped allows; {SKIPPED} in the run's folder names their "
                "batches and rows; the same command continues after them"
            )

    def _note(self, step: int, metrics: Mapping[str, Any]) -> None:
        why = flatten({name: metrics[name] for name in ("loss", "gradient_norm")})
        say(f"step {step} skipped: " + ", ".join(f"{k} {v:.4g}" for k, v in why.items()))
        if is_first():
            with (self._output / SKIPPED).open("a", encoding="utf-8") as file:
                rows, batch = self._read_from(step - 1), self._skipped.batch(step)
                file.write(as_json(step, {"batch": batch, **why}, rows=rows))
