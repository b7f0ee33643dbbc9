"""Decodes shards: their rows go to the engine in order, and come back as they are done."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from infer.job.part_file import InUse, PartFile, allow_open_files
from infer.job.prompt_rows import RowId
from infer.job.result_rows import Counts, result_row
from infer.job.row_index import Shard
from infer.job.shard_folder import ShardFolder
from infer.job.stop import GracefulStop
from infer.job.workload import BadRow, Workload
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.completion import Completion, Progress
    from wedlm_jax.generation import Prepared
    from wedlm_jax.llm import LLM


class NotEnoughMemory(InputError):
    """The accelerator has not the memory for a batch."""


@dataclasses.dataclass(slots=True)
class _DecodingRow:
    """A row that the engine has, and where it goes."""

    shard: Shard
    part: PartFile
    number: int
    id: RowId


class ShardDecoder:
    """One model at work on a job's folder.

    Attributes:
      counts: of the rows of this run.
      earlier: rows that earlier runs had finished, in the shards that this one has taken up.
      in_use: shards that another process was at.
    """

    def __init__(self, llm: LLM, workload: Workload, folder: ShardFolder, stop: GracefulStop):
        self._llm, self._workload, self._folder, self._stop = llm, workload, folder, stop
        self._under_way: dict[int, _DecodingRow] = {}
        self._open: dict[int, PartFile] = {}
        self.counts = Counts()
        self.earlier = 0
        self.in_use: list[Shard] = []

    def run(self, shards: Iterable[Shard], on_progress: Callable[[Progress], None]) -> None:
        """Decodes the rows of ``shards`` that are not there yet.

        However it ends, all rows that came back are kept.

        Raises:
          NotEnoughMemory: for a batch.
          InputError: the input has changed, or the folder cannot be written.
          JobStopped: on SIGTERM, if rows under way took too long.
        """

        def told(now: Progress) -> None:
            self._stop.check()
            on_progress(now)

        allow_open_files()
        rows = self._rows(shards)
        try:
            for batch in self._llm.run(rows, told, stopping=lambda: self._stop.requested):
                self._take(batch)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise NotEnoughMemory(
                f"the device has not enough memory for {self._llm.max_batch_size} rows at a time, "
                "try a smaller --batch-size"
            ) from None
        finally:
            rows.close()
            for part in self._open.values():
                part.close()

    def _rows(self, shards: Iterable[Shard]) -> Generator[Prepared, None, None]:
        """Prepared rows for the engine; what cannot be decoded is written down on the way."""
        places = itertools.count()
        for shard in self._and_again(shards):
            try:
                part = self._folder.open(shard)
            except InUse:
                self.in_use.append(shard)
                continue
            if part is None:
                continue
            self._open[shard.number] = part
            self.earlier += len(part)
            for number, place, content in self._workload.rows(shard):
                if number in part:
                    continue
                if self._stop.requested:
                    return
                try:
                    name, row = self._workload.prepare(self._llm, number, content)
                except BadRow as bad:
                    self._add(shard, part, {number: self._workload.error_row(bad, place)})
                    continue
                self._under_way[next(places)] = _DecodingRow(shard, part, number, name)
                yield row
            self._seal_if_whole(shard, part)

    def _and_again(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """All of them, and then those that others were at: they may be free by now."""
        yield from shards
        again, self.in_use = self.in_use, []
        yield from again

    def _take(self, batch: list[tuple[int, Completion]]) -> None:
        by_shard: dict[int, list[tuple[_DecodingRow, Completion]]] = {}
        for place, completion in batch:
            row = self._under_way.pop(place)
            by_shard.setdefault(row.shard.number, []).append((row, completion))
        for rows in by_shard.values():
            first = rows[0][0]
            results = {row.number: result_row(row.id, completion) for row, completion in rows}
            self._add(first.shard, first.part, results)
            self._seal_if_whole(first.shard, first.part)

    def _add(self, shard: Shard, part: PartFile, results: dict[int, dict[str, Any]]) -> None:
        part.add(results)
        for row in results.values():
            self.counts.count(row)

    def _seal_if_whole(self, shard: Shard, part: PartFile) -> None:
        # A shard may become whole by its last row, or, where that is a bad one, before.
        if part.is_whole and shard.number in self._open:
            self._folder.seal(shard, part)
            del self._open[shard.number]
