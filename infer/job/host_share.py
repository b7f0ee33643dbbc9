"""Decodes one process's share of a job, and shows its progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console

from infer.job.counts import ErrorLimit, JobProgress
from infer.job.graceful_stop import GracefulStop
from infer.job.shard_decoder import ShardDecoder
from infer.job.shard_folder import ShardFolder
from infer.job.workload import Workload
from wedlm_jax.errors import counted
from wedlm_jax.host.processes import Host
from wedlm_jax.host.progress import Progress, ProgressBar

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM


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
