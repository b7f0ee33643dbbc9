"""Sums over a job's records, and where it stands."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from wedlm_jax.errors import BadData
from wedlm_jax.host.progress import ProgressBar

FIRST_RECORDS = 1000
"""A job without its own limit ends if its first records, this many, are all bad."""


@dataclasses.dataclass
class Counts:
    """Sums over records of the output; the numbers of decoding are of records without an error,
    all samples of each. Manifests and `stats.json` hold them under these names.

    Attributes:
      rows: records.
      error_rows: of these, records with an error in the place of a result.
      mask_drafts, lookup_drafts: that were checked, by where they came from; and of these, those
        that were accepted.
    """

    rows: int = 0
    error_rows: int = 0
    tokens: int = 0
    num_forwards: int = 0
    num_token_instances: int = 0
    mask_drafts: int = 0
    mask_drafts_accepted: int = 0
    lookup_drafts: int = 0
    lookup_drafts_accepted: int = 0

    def count(self, record: dict[str, Any]) -> None:
        self.rows += 1
        if "custom_id" in record and "response" in record:  # the form of OpenAI's batch files
            self._count_answer(record["response"])
            return
        if "error" in record:
            self.error_rows += 1
            return
        for sample in record.get("samples", [record]):
            self.tokens += len(sample["token_ids"])
            self._count_decoding(sample)

    def _count_answer(self, response: dict[str, Any]) -> None:
        if response["status_code"] != 200:
            self.error_rows += 1
            return
        usage = response["body"]["usage"]
        self.tokens += usage["completion_tokens"]
        self._count_decoding(usage)

    def _count_decoding(self, of: dict[str, Any]) -> None:
        self.num_forwards += of["num_forwards"]
        self.num_token_instances += of["num_token_instances"]
        drafts = of["drafts"]
        self.mask_drafts += drafts["masks"]
        self.mask_drafts_accepted += drafts["masks_accepted"]
        self.lookup_drafts += drafts["lookup"]
        self.lookup_drafts_accepted += drafts["lookup_accepted"]

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Counts(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def as_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @property
    def all_bad(self) -> bool:
        return 0 < self.rows == self.error_rows

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.num_forwards, 1)

    @property
    def p_cache(self) -> float:
        return self.tokens / max(self.num_token_instances, 1)


@dataclasses.dataclass
class ErrorLimit:
    """Says how many bad records end a run.

    Attributes:
      most: so many may be bad. None: any number, unless they are the first `FIRST_RECORDS`.
      fresh: whether the run begins with its first records: none are kept of an earlier one.
    """

    most: int | None = None
    fresh: bool = True

    def check(self, counts: Counts, example: str, under_way: bool = False) -> None:
        """Ends the run if too many of its records are bad.

        Args:
          counts: of the run.
          example: what is wrong with one of them.
          under_way: whether others are being decoded, and so are good.

        Raises:
          BadData: saying how many.
        """
        bad = counts.error_rows
        if self.most is not None:
            if bad > self.most:
                most = f"more than --max-errors {self.most}"
                raise BadData(f"{bad:,} records are bad, {most}, such as {example}")
        elif self.fresh and not under_way and counts.all_bad and bad >= FIRST_RECORDS:
            raise BadData(f"all of the first {bad:,} records are bad, such as {example}")


@dataclasses.dataclass(frozen=True)
class JobProgress:
    """A job at one moment; all but ``done`` and ``earlier`` are of this run alone.

    Attributes:
      done: records finished, those of earlier runs and of other processes included.
      earlier: finished by earlier runs.
      total: records that this process has to see to.
      tokens, forwards: of finished and running sequences.
      finished: sums over finished records.
      seconds: wall-clock since decoding began, without compilation.
      compile_seconds: that.
      first_bad: where the first bad record is, and what is wrong with it; empty if there is none.
    """

    done: int
    earlier: int
    total: int
    tokens: int
    forwards: int
    finished: Counts
    seconds: float
    compile_seconds: float
    first_bad: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)

    @property
    def seconds_left(self) -> float:
        """If the remaining records take as long as those that were finished during this run, also
        by other processes; infinite before the first."""
        finished = self.done - self.earlier
        return self.seconds * (self.total - self.done) / finished if finished else math.inf

    def as_json(self) -> dict[str, Any]:
        """Returns what `stats.json` says of a run."""
        return {
            **self.finished.as_json(),
            "seconds": round(self.seconds, 2),
            "compile_seconds": round(self.compile_seconds, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }

    def speed(self) -> str:
        """Returns the speed in words; p_cache is of finished records, and absent before the
        first."""
        known = self.finished.num_token_instances > 0
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, "
            f"{self.tokens_per_forward:.2f} tokens per forward"
            + (f", p_cache {self.finished.p_cache:.2f}" if known else "")
        )

    def show(self, bar: ProgressBar, meanwhile: str | None = None) -> None:
        """Moves the bar of the job here.

        Args:
          meanwhile: what goes on in the place of decoding, such as compiling.
        """
        bad = self.finished.error_rows
        text = meanwhile or self.speed()
        bar.update(
            self.done,
            total=self.total,
            text=f"{bad:,} bad, {text}" if bad else text,
            seconds_left=self.seconds_left,
        )
