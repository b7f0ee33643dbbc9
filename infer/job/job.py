"""Rows of files in, a row of results for each out; a job that was stopped goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from infer.job.finish import finish, finished_before
from infer.job.hosts import Host
from infer.job.identity import Identity, identity_of
from infer.job.output import Output, find_output
from infer.job.parquet import unread_columns
from infer.job.progress import PLAIN_INTERVAL, Standing
from infer.job.result_rows import Counts
from infer.job.row_index import RowIndex, build_index
from infer.job.shard_decoder import NotEnoughMemory
from infer.job.shard_folder import ShardFolder, read_job
from infer.job.share import JobShare
from infer.job.source import find_input, spool
from infer.job.stop import GRACE_SECONDS, GracefulStop, JobStopped
from infer.job.workload import Workload
from wedlm_jax.errors import InputError
from wedlm_jax.signals import INTERRUPTED, TERMINATED

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

SHARD_SIZE = 1000


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What `wedlm generate` is told of a job.

    Attributes:
      inputs: files, folders, or one pipe.
      output: a folder, or a .jsonl file.
      params: of rows that do not say otherwise.
      chat: texts are a user's message, for the chat template.
      shard_size: rows of a shard; None is that of the job that is there, or `SHARD_SIZE`.
      host: which of the processes that share the job this is.
      fail_fast: refuse the job for the first bad row.
      overwrite: rows of another job, in the same output, may be dropped.
      grace: seconds after SIGTERM for rows under way.
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


class Job:
    """A job, from its options to its exit status.

    Args:
      options: see there.

    Raises:
      InputError: input or output cannot be used.
    """

    def __init__(self, options: JobOptions):
        self.options = options
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.source = find_input(options.inputs)
        self.output = find_output(options.output, self.source)
        self.folder: ShardFolder | None = None
        self._spooled: Path | None = None
        if self.source.pipe and options.host.count > 1:
            raise InputError(f"{self.source.pipe}: one pipe is not read by several hosts")
        if options.shard_size is not None and options.shard_size < 1:
            raise InputError(f"--shard-size: expected 1 or more, not {options.shard_size}")

    def run(self, load: Callable[[], LLM]) -> int:
        """Decodes what is not decoded yet; returns the exit status.

        Args:
          load: the model, once the rows have been counted.

        Raises:
          InputError: the job cannot be begun, or goes no further; what is done is kept.
        """
        return self.until_stopped(lambda stop: self._run(load, stop))

    def until_stopped(self, work: Callable[[GracefulStop], int]) -> int:
        """Runs ``work``; says what is kept where SIGTERM or Ctrl-C ends it."""
        with GracefulStop(self.options.grace) as stop:
            try:
                return work(stop)
            except JobStopped:
                self.say(f"stopped by SIGTERM: {self.kept()}")
                return TERMINATED
            except KeyboardInterrupt:
                self.say(f"interrupted: {self.kept()}")
                return INTERRUPTED
            finally:
                if self.folder is None:
                    self._drop_spool()

    def _run(self, load: Callable[[], LLM], stop: GracefulStop) -> int:
        workload = self.read_input()
        if not workload.index.rows:
            return self.end_empty(workload.index)
        llm = load()
        if self.options.fail_fast:
            workload.check_all(llm)
        folder = self.open_folder(workload.index, identity_of(llm, workload))
        if self.was_finished(folder):
            return 0
        run = JobShare(llm, workload, folder, self.options.host, stop)
        try:
            run.decode(self.console)
        except NotEnoughMemory as error:
            raise InputError(f"{error}; {self.kept()}") from None
        if stop.requested and run.is_short():
            raise JobStopped
        return self.end(folder, run.standing())

    def read_input(self) -> Workload:
        """The first pass over the input."""
        files, started = self.source.files, time.monotonic()
        if self.source.pipe:
            files = (spool(self.source.pipe, self.output.folder),)
            self._spooled = files[0].path
        if self.source.others:
            count = f"{self.source.others:,} in the folders"
            self.say(f"files not read, as neither .jsonl nor .parquet: {count}")
        if columns := unread_columns(files):
            self.say(f"columns that are no keys of a row are not read: {', '.join(columns)}")
        told = started

        def tell(rows: int) -> None:
            nonlocal told
            if time.monotonic() - told >= PLAIN_INTERVAL:
                told = time.monotonic()
                self.say(f"reading the input: {rows:,} rows so far")

        index = build_index(files, self.shard_size(), tell)
        if time.monotonic() - started >= PLAIN_INTERVAL:
            self.say(f"{index.rows:,} rows read in {time.monotonic() - started:.0f} s")
        return Workload(files, index, self.options.params, self.options.chat)

    def open_folder(self, index: RowIndex, identity: Identity) -> ShardFolder:
        self.folder = ShardFolder(
            self.output.folder, identity, index.shards, overwrite=self.options.overwrite
        )
        return self.folder

    def was_finished(self, folder: ShardFolder) -> bool:
        """Whether the job has ended already; says that, or what is there of it."""
        if counts := finished_before(folder, self.output.file):
            folder.drop_shards()  # a pipe's copy, or what an end that was cut short has left
            self.say(f"{self.output.shown} is there already, with {counts.rows:,} rows")
            return True
        if folder.kept_rows(folder.shards):
            self.say(f"going on behind {self._kept_rows(folder)}")
        return False

    def end(self, folder: ShardFolder, standing: Standing) -> int:
        """Ends the job if all its shards are there, whoever finished them."""
        missing, host = len(folder.shards) - len(folder.finished()), self.options.host
        # Asked after: whoever ends the job says so before it takes the shards away.
        counts = finished_before(folder, self.output.file)
        if counts is not None:
            # Another process has ended the job while this one was at its last shards.
            folder.drop_shards()
        elif missing:
            who = f"{host} has done its share" if host.count > 1 else "this process has no more"
            self.say(
                f"{who}; {missing:,} of {len(folder.shards):,} shards are still to be finished, "
                "by other processes or by a further run"
            )
            return 0
        else:
            counts = self._finish(folder, standing)
        self.say(summary(self.output, counts, standing))
        return 0

    def _finish(self, folder: ShardFolder, standing: Standing) -> Counts:
        host = self.options.host
        run = {"host": host.number, "hosts": host.count, **standing.as_json()}
        try:
            return finish(folder, self.output.file, run)
        except InputError:
            # Another process may have taken the shards away in this very moment.
            counts = finished_before(folder, self.output.file)
            if counts is None:
                raise
            return counts

    def end_empty(self, index: RowIndex) -> int:
        """No rows are a job, too, but one that needs no model."""
        identity = Identity(index.digest, "", {}, index.shard_size, 0)
        finish(self.open_folder(index, identity), self.output.file, {})
        self.say(f"{self.source.shown} has no rows, and so has {self.output.shown} now")
        return 0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def shard_size(self) -> int:
        """Rows of a shard: as asked for, or as the job that is there has it."""
        if self.options.shard_size is not None:
            return self.options.shard_size
        found = (read_job(self.output.folder) or {}).get("shard_size")
        return found if isinstance(found, int) and found > 0 else SHARD_SIZE

    def kept(self) -> str:
        if self.folder is None:
            return "nothing had been decoded"
        return f"{self._kept_rows(self.folder)}; the same command goes on from there"

    def _kept_rows(self, folder: ShardFolder) -> str:
        kept = folder.kept_rows(folder.shards)
        return f"{kept:,} of {folder.identity.rows:,} rows kept in {folder.folder}"

    def _drop_spool(self) -> None:
        """A job that was refused leaves nothing."""
        if self._spooled is not None:
            self._spooled.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.output.folder.rmdir()


def summary(output: Output, counts: Counts, standing: Standing) -> str:
    """The job in one line: all its rows, and the speed of the run that has ended it."""
    notes = []
    if standing.earlier:
        notes.append(f"{standing.earlier:,} of them from before")
    if counts.error_rows:
        notes.append(f"{counts.error_rows:,} bad, with an error in the place of a result")
    noted = f" ({', '.join(notes)})" if notes else ""
    return (
        f"{output.shown}: {counts.rows:,} rows{noted}, "
        f"{standing.tokens:,} tokens in {standing.seconds:.1f} s ({standing.speed()}), "
        f"after {standing.compile_seconds:.1f} s of compiling"
    )
