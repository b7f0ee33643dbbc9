"""Decodes shards with one model, and shows progress; ends early on SIGTERM, or when too many
records are bad."""

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
from infer.job.prompt_record import BatchRecord, RecordId
from infer.job.result_record import Counts, result_record
from infer.job.shard_folder import ShardFolder
from wedlm_jax.errors import TERMINATED, BadData, InputError, counted
from wedlm_jax.host.processes import Host
from wedlm_jax.host.progress import Progress, ProgressBar
from wedlm_jax.host.signals import StopRequest

if TYPE_CHECKING:
    from wedlm_jax.completion import Completion
    from wedlm_jax.generation import Prepared, Windowed
    from wedlm_jax.llm import LLM


GRACE_SECONDS = 20.0
"""Kubernetes sends SIGKILL 30 seconds after SIGTERM."""


class JobStopped(BaseException):
    """The job stops on request. No `Exception`, like `KeyboardInterrupt`: error handlers let it
    pass."""


class GracefulStop(StopRequest):
    """Gives running sequences time to finish after SIGTERM.

    Within `finishing`, no new prompts are started after SIGTERM, and running ones have ``grace``
    seconds; outside of it, `JobStopped` is raised at once. A second SIGTERM ends the process
    immediately.
    """

    def __init__(self, grace: float = GRACE_SECONDS):
        super().__init__()
        self._grace, self._deadline, self._finishing = grace, 0.0, False

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Marks a block that has sequences to finish, and that heeds ``requested`` and `check`."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def check(self) -> None:
        """Raises `JobStopped` once the grace period is over; call it regularly."""
        if self.requested and time.monotonic() >= self._deadline:
            raise JobStopped

    def note(self) -> None:
        """Handles SIGTERM."""
        if self.requested:
            os._exit(TERMINATED)
        self.requested, self._deadline = True, time.monotonic() + self._grace
        if not self._finishing:
            raise JobStopped


FIRST_RECORDS = 1000
"""Number of records after which a job without ``--max-errors`` ends if all of them are bad."""


@dataclasses.dataclass
class ErrorLimit:
    """The number of bad records that ends a run.

    Attributes:
      most: bad records that are accepted. None: any number, unless they are the first
        `FIRST_RECORDS`.
      fresh: whether the run begins with the job's first records: none of an earlier run are kept.
    """

    most: int | None = None
    fresh: bool = True

    def check(self, counts: Counts, example: str, under_way: bool = False) -> None:
        """Ends the run if too many of its records are bad.

        Args:
          counts: sums over the run's records.
          example: one of the bad records, and what is wrong with it.
          under_way: whether others are being decoded, and so are good.

        Raises:
          BadData: there are too many.
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
    """How far a job is; all but ``done`` and ``earlier`` is about this run alone.

    Attributes:
      done: finished records, including those of earlier runs and of other processes.
      earlier: records finished by earlier runs.
      total: records of this process's share.
      tokens, forwards: sums over finished and running sequences.
      finished: sums over finished records.
      seconds: wall-clock time since decoding began, without compilation.
      compile_seconds: time spent compiling.
      first_bad: the first bad record and what is wrong with it; empty if there is none.
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
        """Estimate from the records finished during this run, also by other processes; infinite
        before the first."""
        finished = self.done - self.earlier
        return self.seconds * (self.total - self.done) / finished if finished else math.inf

    def as_json(self) -> dict[str, Any]:
        """Returns what `stats.json` says about a run."""
        return {
            **self.finished.as_json(),
            "seconds": round(self.seconds, 2),
            "compile_seconds": round(self.compile_seconds, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }

    def speed(self) -> str:
        """Returns the speed in words; p_cache is known once a record is finished."""
        text = (
            f"{self.tokens_per_second:,.0f} tokens/s, "
            f"{self.tokens_per_forward:.2f} tokens per forward"
        )
        known = self.finished.num_token_instances > 0
        return f"{text}, p_cache {self.finished.p_cache:.2f}" if known else text

    def show(self, bar: ProgressBar) -> None:
        """Moves the job's progress bar."""
        bad, text = self.finished.error_rows, self.speed()
        bar.update(
            self.done,
            total=self.total,
            text=f"{bad:,} bad, {text}" if bad else text,
            seconds_left=self.seconds_left,
        )


class NotEnoughMemory(InputError):
    """The accelerator has too little memory for a batch."""


@dataclasses.dataclass(slots=True)
class _DecodingRecord:
    """A record that is being decoded, where its result goes, and where it came from."""

    shard: Shard
    part: PartFile
    number: int
    id: RecordId
    place: Place
    own: Own


class ShardDecoder:
    """Decodes shards of a job with one model: records go to the engine in order, and come back as
    they are finished.

    Attributes:
      counts: sums over the records of this run.
      earlier: records of these shards that earlier runs finished.
      elsewhere: records of these shards that other processes finished during this run.
      first_bad: as in `JobProgress`.
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
        self._in_use: list[Shard] = []

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
        """Yields prompts for the engine; writes an error for each record that has none."""
        places = itertools.count()
        for shard in self._and_again(shards):
            self._count_elsewhere()
            try:
                part = self._folder.open(shard)
            except InUse:
                self._in_use.append(shard)
                continue
            if part is None:
                self.elsewhere += shard.records
                continue
            self._open[shard.number] = part
            self.earlier += len(part.done)
            self._limit.fresh &= not part.done
            for number, place, content in self._workload.records(shard):
                if number in part.done:
                    continue
                if self._stop.requested:
                    return
                try:
                    record = self._workload.prepare(self._llm, number, content)
                except BadPrompt as bad:
                    self._add_bad(shard, part, number, bad, place)
                    continue
                own = record.own
                if self._workload.prompt_token_ids and not isinstance(own, BatchRecord):
                    own = {"prompt_token_ids": list(record.prompt[0]), **own}
                self._under_way[next(places)] = _DecodingRecord(
                    shard, part, number, record.id, place, own
                )
                yield record.prompt
            self._seal_if_whole(shard, part)

    def _count_elsewhere(self) -> None:
        """Counts shards that were in use, and have been finished since."""
        done = [shard for shard in self._in_use if self._folder.is_finished(shard)]
        self.elsewhere += sum(shard.records for shard in done)
        self._in_use = [shard for shard in self._in_use if shard not in done]

    def _and_again(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """Yields all shards, and then again those that another process was decoding: it may have
        died."""
        yield from shards
        again, self._in_use = self._in_use, []
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


def decode_share(
    llm: LLM,
    workload: Workload,
    folder: ShardFolder,
    host: Host,
    stop: GracefulStop,
    most_errors: int | None,
    console: Console,
) -> JobProgress:
    """Decodes the unfinished shards of one host, and shows progress.

    Args:
      host: this one of the processes that share the job.
      most_errors: as `ErrorLimit.most`.
      console: where progress is shown.

    Raises:
      JobStopped: on SIGTERM, if shards are left.
      Exception: as `ShardDecoder.run`.
    """
    shards = [shard for shard in folder.shards if shard.number % host.count == host.index]
    total, done, engine = sum(shard.records for shard in shards), folder.finished(), llm.engine
    missing = [shard for shard in shards if shard.number not in done]
    finished = total - sum(shard.records for shard in missing)
    limit = ErrorLimit(most_errors, fresh=not finished)
    decoder = ShardDecoder(llm, workload, folder, stop, limit)
    if left := total - folder.kept_records(shards):
        console.print(
            f"{counted(left, 'record')} to decode, {engine.settings.sequences} at a time; "
            "programs are compiled when they are first needed",
            markup=False,
        )
    compiled, started = engine.compile_seconds, time.monotonic()
    newest: Progress | None = None

    def progress() -> JobProgress:
        compiling = engine.compile_seconds - compiled
        earlier = finished + decoder.earlier
        return JobProgress(
            done=earlier + decoder.elsewhere + decoder.counts.rows,
            earlier=earlier,
            total=total,
            tokens=newest.tokens if newest else 0,
            forwards=newest.forwards if newest else 0,
            finished=decoder.counts,
            seconds=time.monotonic() - started - compiling,
            compile_seconds=compiling,
            first_bad=decoder.first_bad,
        )

    bar = ProgressBar("records", done=finished, console=console)

    def tell(now: Progress) -> None:
        nonlocal newest
        newest = now
        progress().show(bar)

    with stop.finishing(), bar:
        engine.device.programs.while_busy = bar.while_busy
        decoder.run(missing, tell)
    if stop.requested and not all(map(folder.is_finished, missing)):
        raise JobStopped
    return progress()
