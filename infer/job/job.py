"""Decodes the prompts of files into one result for each; a job that was stopped can be resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from infer.job.counts import Counts, JobProgress
from infer.job.finish import finish, finished_before, shards_finished
from infer.job.graceful_stop import GRACE_SECONDS, GracefulStop, JobStopped
from infer.job.host_share import JobShare
from infer.job.identity import Identity, identity_of
from infer.job.input import find_input, spool
from infer.job.output import Output, find_output
from infer.job.prompt_record import hint_of
from infer.job.record_index import RecordIndex, build_index
from infer.job.shard_decoder import NotEnoughMemory
from infer.job.shard_folder import ShardFolder, check_file_is_new, read_job
from infer.job.workload import Workload
from wedlm_jax.errors import (
    BAD_DATA,
    TERMINATED,
    BadData,
    InputError,
    StorageFailure,
    counted,
    exit_status,
    shortened,
)
from wedlm_jax.host.processes import Host
from wedlm_jax.records.columns import Columns

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

SHARD_SIZE = 1000

TELL_SECONDS = 5.0
"""Seconds between two messages on how far the first pass over the input is."""


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of `wedlm generate` for a job.

    Attributes:
      inputs: files, folders, or one pipe.
      output: a folder, or a .jsonl file.
      params: of records that do not have their own.
      chat: whether a text is a user's message, for the chat template.
      shard_size: records of a shard; None takes that of the job in the output, or `SHARD_SIZE`.
      host: this one of the processes that share the job.
      fail_fast: whether the first bad record refuses the job.
      overwrite: whether records of another job in the same output may be deleted.
      grace: seconds after SIGTERM for running sequences.
      max_errors: bad records that do not end the run; None as `infer.job.counts.ErrorLimit`.
    """

    inputs: tuple[str, ...]
    output: str
    params: SamplingParams
    chat: bool = False
    shard_size: int | None = None
    host: Host = dataclasses.field(default_factory=Host)
    fail_fast: bool = False
    overwrite: bool = False
    grace: float = GRACE_SECONDS
    max_errors: int | None = None


class Job:
    """Runs a job, from its options to its exit status.

    Args:
      options: of the job.

    Raises:
      InputError: input or output cannot be used.
    """

    def __init__(self, options: JobOptions):
        self.options = options
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.source = find_input(options.inputs)
        self.output = find_output(options.output, self.source)
        if not options.overwrite:
            check_file_is_new(self.output.file, read_job(self.output.folder))
        self.columns = Columns() if self.output.is_parquet else None
        self.folder: ShardFolder | None = None
        self._spooled: Path | None = None
        if self.source.pipe and options.host.count > 1:
            raise InputError(f"{self.source.pipe}: one pipe is not read by several hosts")
        if options.shard_size is not None and options.shard_size < 1:
            raise InputError(f"--shard-size: expected 1 or more, not {options.shard_size}")
        if options.max_errors is not None and options.max_errors < 0:
            raise InputError(f"--max-errors: expected 0 or more, not {options.max_errors}")

    def run(self, load: Callable[[], LLM]) -> int:
        """Decodes what is not decoded yet; returns the exit status.

        Args:
          load: loads the model; called when the records have been counted.

        Raises:
          InputError: the job cannot start or continue; what is done is kept.
        """
        return self.until_stopped(lambda stop: self._run(load, stop))

    def until_stopped(self, work: Callable[[GracefulStop], int]) -> int:
        """Runs ``work``; reports what is kept if SIGTERM or Ctrl-C stops it."""
        with GracefulStop(self.options.grace) as stop:
            try:
                return work(stop)
            except JobStopped:
                self.say(f"stopped by SIGTERM: {self.kept()}")
                return TERMINATED
            except BadData as error:
                raise BadData(f"{error}; {self.kept()}") from None
            except KeyboardInterrupt as interrupt:
                self.say(f"{str(interrupt) or 'interrupted'}: {self.kept()}")
                return exit_status(interrupt)
            finally:
                if self.folder is None:
                    self._drop_spool()
                elif self.options.host.count == 1:
                    # Whoever mistyped an option, and stopped the job, gives it another.
                    with contextlib.suppress(InputError, StorageFailure):
                        self.folder.release()

    def _run(self, load: Callable[[], LLM], stop: GracefulStop) -> int:
        workload = self.read_input()
        llm = load()
        if self.options.fail_fast:
            workload.check_all(llm)
        folder = self.open_folder(workload.index, identity_of(llm, workload))
        if (status := self.finished_status(folder)) is not None:
            return status
        run = JobShare(
            llm, workload, folder, self.options.host, stop, most_errors=self.options.max_errors
        )
        try:
            run.decode(self.console)
        except NotEnoughMemory as error:
            raise InputError(f"{error}; {self._kept_records(folder)}") from None
        if stop.requested and run.is_short():
            raise JobStopped
        return self.end(folder, run.progress())

    def read_input(self) -> Workload:
        """Reads the whole input once: counts records and indexes them.

        Raises:
          InputError: it has none, or cannot be read.
        """
        files, started = self.source.files, time.monotonic()
        if self.source.pipe:
            files = (spool(self.source.pipe, self.output.folder),)
            self._spooled = files[0].path
        if self.source.others:
            count = counted(len(self.source.others), "file")
            self.say(f"{count} in the folders, neither .jsonl nor .parquet, not read")
        told = started

        def tell(records: int) -> None:
            nonlocal told
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                self.say(f"reading the input: {records:,} records so far")

        index = build_index(files, self.shard_size(), tell, self.columns)
        if not index.records:
            raise InputError(f"{self.source.shown}: has no records")
        if own := index.own_keys:
            names = [shortened(name, 60) for name in own]
            self.say(f"keys that are not read, and passed on to the output: {', '.join(names)}")
            for hint in filter(None, map(hint_of, names)):
                self.say(hint)
        if time.monotonic() - started >= TELL_SECONDS:
            self.say(
                f"{counted(index.records, 'record')} read in {time.monotonic() - started:.0f} s"
            )
        return Workload(files, index, self.options.params, self.options.chat)

    def open_folder(self, index: RecordIndex, identity: Identity) -> ShardFolder:
        self.folder = ShardFolder(
            self.output.folder,
            identity,
            index.shards,
            file=self.output.file,
            overwrite=self.options.overwrite,
        )
        return self.folder

    def finished_status(self, folder: ShardFolder) -> int | None:
        """Returns the exit status of a job that is finished already, else None; reports that, or
        what is kept of it."""
        if self.output.file is None:
            counts, drop_left = shards_finished(folder), folder.drop_parts
        else:
            counts, drop_left = finished_before(folder, self.output.file), folder.drop_shards
        if counts:
            # A pipe's copy, or what a kill in the middle of `finish` left. Nothing else is written:
            # what is finished may lie where nobody may write any more.
            with contextlib.suppress(InputError):
                drop_left()
            self.say(
                f"{self.output.shown} is already complete, with {counted(counts.rows, 'record')}"
            )
            return BAD_DATA if counts.all_bad else 0
        if folder.kept_records(folder.shards):
            self.say(f"resuming: {self._kept_records(folder)}")
        return None

    def end(self, folder: ShardFolder, progress: JobProgress) -> int:
        """Finishes the job if all its shards are there, whichever process decoded them."""
        missing, host = len(folder.shards) - len(folder.finished()), self.options.host
        # Asked after counting: the process that finishes a job writes `STATS` before it removes
        # shards.
        counts = finished_before(folder, self.output.file)
        if counts is not None:
            # Another process finished the job while this one was decoding its last shards.
            folder.drop_shards()
        elif missing:
            who = f"{host} has done its share" if host.count > 1 else "this process is done"
            self.say(
                f"{who}; {missing:,} of {counted(len(folder.shards), 'shard')} still unfinished: "
                "other processes, or another run, will decode them"
            )
            return 0
        else:
            counts = self._finish(folder, progress)
        self.say(summary(self.output, counts, progress))
        if counts.all_bad and progress.first_bad:
            self.say(f"all records are bad, such as {progress.first_bad}")
        return BAD_DATA if counts.all_bad else 0

    def _finish(self, folder: ShardFolder, progress: JobProgress) -> Counts:
        host = self.options.host
        run = {"host": host.index, "hosts": host.count, **progress.as_json()}
        try:
            return finish(folder, self.output.file, run, self.columns)
        except InputError:
            # Another process may have merged and removed the shards at this very moment.
            counts = finished_before(folder, self.output.file)
            if counts is None:
                raise
            return counts

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def shard_size(self) -> int:
        """Returns the records of a shard: as requested, or as in the job that is in the output."""
        if self.options.shard_size is not None:
            return self.options.shard_size
        found = (read_job(self.output.folder) or {}).get("shard_size")
        return found if isinstance(found, int) and found > 0 else SHARD_SIZE

    def kept(self) -> str:
        if self.folder is None:
            return "nothing was decoded yet"
        return f"{self._kept_records(self.folder)}; the same command continues from there"

    def _kept_records(self, folder: ShardFolder) -> str:
        kept = folder.kept_records(folder.shards)
        return f"{kept:,} of {folder.identity.rows:,} records are kept in {folder.folder}"

    def _drop_spool(self) -> None:
        """Removes the copy of a pipe when the job was refused."""
        if self._spooled is not None:
            self._spooled.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.output.folder.rmdir()


def summary(output: Output, counts: Counts, progress: JobProgress) -> str:
    """Summarises a finished job in one line: its records, and the speed of the run that finished
    it."""
    notes = []
    if progress.earlier:
        notes.append(f"{progress.earlier:,} from earlier runs")
    if counts.error_rows:
        notes.append(f"{counts.error_rows:,} bad, with an error instead of a result")
    noted = f" ({', '.join(notes)})" if notes else ""
    return (
        f"{output.shown}: {counted(counts.rows, 'record')}{noted}, "
        f"{progress.tokens:,} tokens{' by this run' if progress.earlier else ''} in "
        f"{progress.seconds:.1f} s ({progress.speed()}), "
        f"after {progress.compile_seconds:.1f} s of compiling"
    )
