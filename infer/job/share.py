"""One process's share of a job: its shards decoded, and how far it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console

from infer.job.hosts import Host
from infer.job.progress import Standing, progress
from infer.job.shard_decoder import ShardDecoder
from infer.job.shard_folder import ShardFolder
from infer.job.stop import GracefulStop
from infer.job.workload import Workload

if TYPE_CHECKING:
    from wedlm_jax.completion import Progress
    from wedlm_jax.llm import LLM


class JobShare:
    """Decodes the shards of one host that are not finished.

    Args:
      host: which of the processes that share the job this is.
    """

    def __init__(
        self, llm: LLM, workload: Workload, folder: ShardFolder, host: Host, stop: GracefulStop
    ):
        self._llm, self._folder, self._stop = llm, folder, stop
        self._shards = [s for s in folder.shards if s.number % host.count == host.number]
        self._rows = sum(shard.rows for shard in self._shards)
        done = folder.finished()
        self._missing = [shard for shard in self._shards if shard.number not in done]
        self._finished = self._rows - sum(shard.rows for shard in self._missing)
        self._decoder = ShardDecoder(llm, workload, folder, stop)
        self._progress: Progress | None = None
        self._compiled, self._started = llm.engine.compile_seconds, time.monotonic()

    def decode(self, console: Console) -> None:
        """Decodes what is missing, saying how far it is; raises what `ShardDecoder.run` does."""
        if left := self._rows - self._folder.kept_rows(self._shards):
            console.print(
                f"{left:,} rows to decode, {self._llm.engine.settings.sequences} at a time; "
                "compiling first",
                markup=False,
            )
        self._compiled, self._started = self._llm.engine.compile_seconds, time.monotonic()
        with self._stop.finishing(), progress(console) as show:

            def tell(now: Progress) -> None:
                self._progress = now
                show(self.standing())

            self._decoder.run(self._missing, tell)

    def is_short(self) -> bool:
        """Whether shards of this host are not finished."""
        return not all(map(self._folder.is_finished, self._missing))

    def standing(self) -> Standing:
        now, counts = self._progress, self._decoder.counts
        compiling = self._llm.engine.compile_seconds - self._compiled
        earlier = self._finished + self._decoder.earlier
        return Standing(
            rows=earlier + max(counts.rows, counts.error_rows + (now.finished if now else 0)),
            earlier=earlier,
            total=self._rows,
            tokens=now.tokens if now else 0,
            forwards=now.forwards if now else 0,
            finished=counts,
            seconds=time.monotonic() - self._started - compiling,
            compile_seconds=compiling,
        )
