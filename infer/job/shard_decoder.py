"""Decodes shards: records go to the engine in order, and come back as they are finished."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infer.job.input import BadPrompt, Own, Place, Shard, Workload
from infer.job.part_file import InUse, PartFile, allow_open_files
from infer.job.prompt_record import RecordId
from infer.job.result_record import Counts, result_record
from infer.job.shard_folder import ShardFolder
from wedlm_jax.errors import TERMINATED, BadData, InputError, counted
from wedlm_jax.host.processes import Host
from wedlm_jax.host.progress import Progress, ProgressBar
from wedlm_jax.host.signals import StopRequest

if TYPE_CHECKING:
    from wedlm_jax.completion import Completion
    from wedlm_jax.generation import Prepared, Windowed
    from wedlm_jax.host.progress import Progress
    from wedlm_jax.llm import LLM


class NotEnoughMemory(InputError):
    """The accelerator has too little memory for a batch."""


@dataclasses.dataclass(slots=True)
class _DecodingRecord:
    """A record that is being decoded, where its result goes, where it came from, and what of its
    own the result repeats."""

    shard: Shard
    part: PartFile
    number: int
    id: RecordId
    place: Place
    own: Own


class ShardDecoder:
    """Decodes shards of a job with one model.

    Args:
      limit: of bad records.

    Attributes:
      counts: of the records of this run.
      earlier: records of these shards that earlier runs had finished.
      elsewhere: records of these shards that other processes have finished during this run.
      in_use: shards that another process is decoding.
      first_bad: where the first bad record of this run is, and what is wrong with it.
    """

    def __init__(
        self,
        llm: LLM,
        workload: Workload,
        folder: ShardFolder,
        stop: GracefulStop,
        limit: ErrorLimit,
    ):
        self._limit = limit
        self._llm, self._workload, self._folder, self._stop = llm, workload, folder, stop
        self._under_way: dict[int, _DecodingRecord] = {}
        self._open: dict[int, PartFile] = {}
        self.counts = Counts()
        self.earlier = self.elsewhere = 0
        self.first_bad = ""
        self.in_use: list[Shard] = []

    def run(self, shards: Iterable[Shard], on_progress: Callable[[Progress], None]) -> None:
        """Decodes the records of ``shards`` that are not finished yet.

        However it ends, all results that came back are kept.

        Raises:
          NotEnoughMemory: for a batch.
          InputError: the input has changed, or the folder cannot be written.
          BadData: too many records are bad.
          JobStopped: on SIGTERM, if running sequences took longer than the grace period.
        """

        newest: Progress | None = None

        def told(now: Progress) -> None:
            nonlocal newest
            self._stop.check()
            on_progress(newest := now)

        allow_open_files()
        prompts = self._prompts(shards)
        try:
            stopping, failed = (lambda: self._stop.requested), self._take_failure
            for batch in self._llm.run(prompts, told, stopping=stopping, on_failure=failed):
                self._take(batch)
                if newest is not None:  # only now are its records kept
                    on_progress(newest)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            sequences = self._llm.options.max_batch_size
            raise NotEnoughMemory(
                f"the device has too little memory for {sequences} sequences at a time; try a "
                "smaller --batch-size"
            ) from None
        finally:
            prompts.close()
            for part in self._open.values():
                part.close()

    def _prompts(self, shards: Iterable[Shard]) -> Generator[Prepared | Windowed, None, None]:
        """Yields prepared prompts for the engine; writes an error for what cannot be decoded."""
        places = itertools.count()
        for shard in self._and_again(shards):
            self._count_elsewhere()
            try:
                part = self._folder.open(shard)
            except InUse:
                self.in_use.append(shard)
                continue
            if part is None:
                self.elsewhere += shard.records
                continue
            self._open[shard.number] = part
            self.earlier += len(part)
            self._limit.fresh &= not part.done
            for number, place, content in self._workload.records(shard):
                if number in part:
                    continue
                if self._stop.requested:
                    return
                try:
                    record = self._workload.prepare(self._llm, number, content)
                except BadPrompt as bad:
                    self._add_bad(shard, part, number, bad, place)
                    continue
                self._under_way[next(places)] = _DecodingRecord(
                    shard, part, number, record.id, place, record.own
                )
                yield record.prompt
            self._seal_if_whole(shard, part)

    def _count_elsewhere(self) -> None:
        """Counts the shards in use that have been finished since."""
        done = [shard for shard in self.in_use if self._folder.is_finished(shard)]
        self.elsewhere += sum(shard.records for shard in done)
        self.in_use = [shard for shard in self.in_use if shard not in done]

    def _and_again(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """Yields all shards, and then again those that another process was decoding: it may have
        left them."""
        yield from shards
        again, self.in_use = self.in_use, []
        yield from again

    def _take(self, batch: list[tuple[int, Completion]]) -> None:
        by_shard: dict[int, list[tuple[_DecodingRecord, Completion]]] = {}
        for place, completion in batch:
            record = self._under_way.pop(place)
            by_shard.setdefault(record.shard.number, []).append((record, completion))
        for records in by_shard.values():
            first = records[0][0]
            results = {
                record.number: result_record(record.id, completion, record.own)
                for record, completion in records
            }
            self._add(first.shard, first.part, results)
            self._seal_if_whole(first.shard, first.part)

    def _take_failure(self, number: int, error: InputError) -> None:
        record = self._under_way.pop(number)
        bad = BadPrompt(record.id, str(error), record.own)
        self._add_bad(record.shard, record.part, record.number, bad, record.place)
        self._seal_if_whole(record.shard, record.part)

    def _add_bad(
        self, shard: Shard, part: PartFile, number: int, bad: BadPrompt, place: Place
    ) -> None:
        self._add(shard, part, {number: self._workload.error_record(bad, place)})
        example = f"{self._workload.shown(place)}: {bad.reason}"
        self.first_bad = self.first_bad or example
        self._limit.check(self.counts, example, under_way=bool(self._under_way))

    def _add(self, shard: Shard, part: PartFile, results: dict[int, dict[str, Any]]) -> None:
        part.add(results)
        for record in results.values():
            self.counts.count(record)

    def _seal_if_whole(self, shard: Shard, part: PartFile) -> None:
        # The last record that completes a shard may be a result, or an error before it.
        if part.is_whole and shard.number in self._open:
            self._folder.seal(shard, part)
            del self._open[shard.number]


GRACE_SECONDS = 20.0
"""Kubernetes sends SIGKILL 30 seconds after SIGTERM."""


class JobStopped(BaseException):
    """The job stops on request. As for Ctrl-C, not an `Exception`: error handlers let it pass."""


class GracefulStop(StopRequest):
    """Notes SIGTERM, and gives running sequences time to finish.

    Outside of `finishing` there is nothing to finish, and the job stops at once, by `JobStopped`.
    Inside, no new prompts are started, and running ones have ``grace`` seconds. A second SIGTERM
    ends the process immediately.

    Args:
      grace: seconds.
    """

    def __init__(self, grace: float = GRACE_SECONDS):
        super().__init__()
        self._grace, self._deadline, self._finishing = grace, 0.0, False

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Marks a block that has something to finish, and that checks ``requested`` and `check`."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def check(self) -> None:
        """Raises `JobStopped` once the grace period is over; to be called regularly."""
        if self.requested and time.monotonic() >= self._deadline:
            raise JobStopped

    def note(self) -> None:
        """Notes that SIGTERM has arrived."""
        if self.requested:
            os._exit(TERMINATED)
        self.requested, self._deadline = True, time.monotonic() + self._grace
        if not self._finishing:
            raise JobStopped


FIRST_RECORDS = 1000
"""A job without its own limit ends if its first records, this many, are all bad."""


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


class JobShare:
    """Decodes the unfinished shards of one host.

    Args:
      host: this one of the processes that share the job.
      most_errors: bad records that do not end the run; None as `ErrorLimit`.
    """

    def __init__(
        self,
        llm: LLM,
        workload: Workload,
        folder: ShardFolder,
        host: Host,
        stop: GracefulStop,
        most_errors: int | None,
    ):
        self._llm, self._folder, self._stop = llm, folder, stop
        self._shards = [s for s in folder.shards if s.number % host.count == host.index]
        self._total = sum(shard.records for shard in self._shards)
        done = folder.finished()
        self._missing = [shard for shard in self._shards if shard.number not in done]
        self._finished = self._total - sum(shard.records for shard in self._missing)
        limit = ErrorLimit(most_errors, fresh=not self._finished)
        self._decoder = ShardDecoder(llm, workload, folder, stop, limit)
        self._decoding: Progress | None = None
        self._compiled, self._started = llm.engine.compile_seconds, time.monotonic()

    def decode(self, console: Console) -> None:
        """Decodes what is missing and shows progress; raises what `ShardDecoder.run` does."""
        if left := self._total - self._folder.kept_records(self._shards):
            console.print(
                f"{counted(left, 'record')} to decode, "
                f"{self._llm.engine.settings.sequences} at a time; "
                "programs are compiled when they are first needed",
                markup=False,
            )
        self._compiled, self._started = self._llm.engine.compile_seconds, time.monotonic()
        bar = ProgressBar("records", done=self._finished, console=console)
        with self._stop.finishing(), bar:

            def tell(now: Progress) -> None:
                self._decoding = now
                self.progress().show(bar)

            self._llm.engine.device.programs.while_busy = bar.while_busy
            self._decoder.run(self._missing, tell)

    def is_short(self) -> bool:
        """Tells whether shards of this host are not finished."""
        return not all(map(self._folder.is_finished, self._missing))

    def progress(self) -> JobProgress:
        """Returns how far this process is."""
        now, counts = self._decoding, self._decoder.counts
        compiling = self._llm.engine.compile_seconds - self._compiled
        earlier = self._finished + self._decoder.earlier
        return JobProgress(
            done=earlier + self._decoder.elsewhere + counts.rows,
            earlier=earlier,
            total=self._total,
            tokens=now.tokens if now else 0,
            forwards=now.forwards if now else 0,
            finished=counts,
            seconds=time.monotonic() - self._started - compiling,
            compile_seconds=compiling,
            first_bad=self._decoder.first_bad,
        )
