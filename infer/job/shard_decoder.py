"""Decodes shards with one model and shows progress; ends early on SIGTERM or when too many records
are bad."""

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

from infer.job.input import Record, Shard, Workload
from infer.job.part_file import InUse, PartFile, allow_open_files
from infer.job.result_record import Counts, result_record
from infer.job.shard_folder import ShardFolder
from wedlm_jax.errors import TERMINATED, BadData, InputError, counted
from wedlm_jax.host.processes import Host
from wedlm_jax.host.progress import Progress, ProgressBar
from wedlm_jax.host.signals import StopRequest

if TYPE_CHECKING:
    from wedlm_jax.generation import Prepared, Windowed
    from wedlm_jax.llm import LLM


GRACE_SECONDS = 20.0
"""Kubernetes sends SIGKILL 30 seconds after SIGTERM."""


class JobStopped(BaseException):
    """The job stops on request. Like `KeyboardInterrupt` it is not an `Exception`, so that error
    handlers let it pass."""


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
class JobProgress:
    """Progress of a job; all but ``earlier`` and ``elsewhere`` is about this run alone.

    Attributes:
      total: records of this process's share.
      earlier: records that earlier runs finished.
      elsewhere: records that other processes finished during this run.
      finished: sums over finished records.
      tokens, forwards: sums over finished and running sequences.
      seconds: wall-clock time since decoding began, without compilation.
      compile_seconds: time spent compiling.
      first_bad: the first bad record and what is wrong with it; empty if there is none.
    """

    total: int
    earlier: int = 0
    elsewhere: int = 0
    finished: Counts = dataclasses.field(default_factory=Counts)
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    first_bad: str = ""

    @property
    def done(self) -> int:
        return self.earlier + self.elsewhere + self.finished.rows

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Estimate from the records finished during this run, also by other processes; infinite
        before the first that is decoded, since bad ones take no time."""
        finished = self.done - self.earlier
        if finished == self.finished.error_rows:
            return math.inf
        return self.seconds * (self.total - self.done) / finished

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of `stats.json` about a run."""
        return {
            **self.finished.as_json(),
            "seconds": round(self.seconds, 2),
            "compile_seconds": round(self.compile_seconds, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }

    def speed(self) -> str:
        """Returns the speed in words; p_cache is known once a record is finished."""
        per_forward = self.tokens / max(self.forwards, 1)
        text = f"{self.tokens_per_second:,.0f} tokens/s, {per_forward:.2f} tokens per forward"
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

    def check_errors(self, most: int | None, example: str, *, first: bool = True) -> None:
        """Ends a run that has too many bad records.

        Args:
          most: number of bad records that are accepted; None for any number, unless they are the
            job's first `FIRST_RECORDS`.
          example: one of the bad records, and what is wrong with it.
          first: whether this run may have begun with the job's first records, and is not decoding
            a good one.

        Raises:
          BadData: there are too many bad records.
        """
        bad = self.finished.error_rows
        if most is not None and bad > most:
            raise BadData(
                f"{bad:,} records are bad, more than --max-errors {most}, such as {example}"
            )
        fresh = most is None and first and not self.earlier
        if fresh and self.finished.all_bad and bad >= FIRST_RECORDS:
            raise BadData(f"all of the first {bad:,} records are bad, such as {example}")


class NotEnoughMemory(InputError):
    """The accelerator has too little memory for a batch."""


@dataclasses.dataclass
class ShardDecoder:
    """Decodes shards of a job with one model: records go to the engine in order and come back as
    they are finished.

    Attributes:
      progress: counts the records, including those of earlier runs and other processes.
      most_errors, first: as in `JobProgress.check_errors`.
    """

    llm: LLM
    workload: Workload
    folder: ShardFolder
    stop: GracefulStop
    progress: JobProgress
    most_errors: int | None
    first: bool = True

    def __post_init__(self) -> None:
        self._under_way: dict[int, tuple[Shard, PartFile, Record]] = {}
        self._open: dict[int, PartFile] = {}
        self._in_use: list[Shard] = []

    def run(self, shards: Iterable[Shard], on_progress: Callable[[Progress], None]) -> None:
        """Decodes the unfinished records of ``shards``.

        However it ends, all results that came back are kept.

        Raises:
          NotEnoughMemory: a batch does not fit into the device's memory.
          InputError: the input has changed, or the folder cannot be written.
          BadData: too many records are bad.
          JobStopped: on SIGTERM, if running sequences took longer than the grace period.
        """

        newest: Progress | None = None

        def report(now: Progress) -> None:
            nonlocal newest
            self.stop.check()
            on_progress(newest := now)

        allow_open_files()
        prompts = self._prompts(shards)
        try:
            stopping, failed = (lambda: self.stop.requested), self._take_failure
            for batch in self.llm.run(prompts, report, stopping=stopping, on_failure=failed):
                for place, completion in batch:
                    shard, part, record = self._under_way.pop(place)
                    result = result_record(record.id, completion, record.extra)
                    self._add(shard, part, record.number, result)
                if newest is not None:  # only now are its records kept
                    on_progress(newest)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            sequences = self.llm.options.max_batch_size
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
                part = self.folder.open(shard)
            except InUse:
                self._in_use.append(shard)
                continue
            if part is None:
                self.progress.elsewhere += shard.records
                continue
            self._open[shard.number] = part
            self.progress.earlier += len(part.done)
            for record, content in self.workload.records(shard):
                if record.number in part.done:
                    continue
                if self.stop.requested:
                    return
                try:
                    prompt = self.workload.prepare(self.llm, record, content)
                except InputError as error:
                    self._add_bad(shard, part, record, error)
                    continue
                self._under_way[next(places)] = shard, part, record
                yield prompt
            self._seal_if_whole(shard, part)

    def _count_elsewhere(self) -> None:
        """Counts shards that were in use and have been finished since."""
        done = [shard for shard in self._in_use if self.folder.is_finished(shard)]
        self.progress.elsewhere += sum(shard.records for shard in done)
        self._in_use = [shard for shard in self._in_use if shard not in done]

    def _and_again(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """Yields all shards, then again those that another process was decoding, as it may have
        died."""
        yield from shards
        again, self._in_use = self._in_use, []
        yield from again

    def _take_failure(self, place: int, error: InputError) -> None:
        self._add_bad(*self._under_way.pop(place), error)

    def _add_bad(self, shard: Shard, part: PartFile, record: Record, error: InputError) -> None:
        bad = self.workload.error_record(record, str(error))
        self._add(shard, part, record.number, bad)
        example, progress = f"{self.workload.shown(record.place)}: {error}", self.progress
        progress.first_bad = progress.first_bad or example
        first = self.first and not self._under_way
        progress.check_errors(self.most_errors, example, first=first)

    def _add(self, shard: Shard, part: PartFile, number: int, result: dict[str, Any]) -> None:
        part.add(number, result)
        self.progress.finished.count(result)
        self._seal_if_whole(shard, part)

    def _seal_if_whole(self, shard: Shard, part: PartFile) -> None:
        if part.is_whole and shard.number in self._open:
            self.folder.seal(shard, part)
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
    """Decodes the unfinished shards of one host, as `ShardDecoder.run` does, and shows progress.

    Raises:
      JobStopped: on SIGTERM, if shards are left.
    """
    shards = [shard for shard in folder.shards if shard.number % host.count == host.index]
    total, done, engine = sum(shard.records for shard in shards), folder.finished(), llm.engine
    missing = [shard for shard in shards if shard.number not in done]
    finished = total - sum(shard.records for shard in missing)
    progress = JobProgress(total, earlier=finished)
    decoder = ShardDecoder(llm, workload, folder, stop, progress, most_errors=most_errors)
    if left := total - folder.kept_records(shards):
        console.print(
            f"{counted(left, 'record')} to decode, {engine.settings.sequences} at a time; "
            "programs are compiled when they are first needed",
            markup=False,
        )
    clock = engine.clock()
    bar = ProgressBar("records", done=finished, console=console)

    def measure() -> None:
        progress.seconds, progress.compile_seconds = clock.seconds, clock.compiling

    def tell(now: Progress) -> None:
        progress.tokens, progress.forwards = now.tokens, now.forwards
        measure()
        progress.show(bar)

    with stop.finishing(), bar:
        engine.device.programs.while_busy = bar.while_busy
        decoder.run(missing, tell)
    if stop.requested and not all(map(folder.is_finished, missing)):
        raise JobStopped
    measure()
    return progress
