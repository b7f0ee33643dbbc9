"""Decodes shards: their rows go to the engine in order, and come back as they are done."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from infer.job.part_file import InUse, PartFile, allow_open_files
from infer.job.prompt_rows import RowId, checked_row, prepared_row, row_fields, row_id
from infer.job.records import Content, Place, read_from
from infer.job.result_rows import Counts, error_row, result_row
from infer.job.row_index import RowIndex, Shard
from infer.job.shard_folder import ShardFolder
from infer.job.source import InputFile, file_size
from infer.job.stop import StopRequest
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.completion import Completion, Progress
    from wedlm_jax.generation import Prepared
    from wedlm_jax.llm import LLM


class BadRow(Exception):
    """A row that cannot be decoded.

    Attributes:
      id: its id, None where none could be read.
      reason: what is wrong with it.
    """

    def __init__(self, name: RowId | None, reason: str):
        super().__init__(reason)
        self.id, self.reason = name, reason


class NotEnoughMemory(InputError):
    """The accelerator has not the memory for a batch."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The rows of a job, and how they are decoded.

    Attributes:
      files: of the input, in order.
      index: of their rows.
      params: of rows that do not say otherwise.
      chat: texts are a user's message, for the chat template.
    """

    files: tuple[InputFile, ...]
    index: RowIndex
    params: SamplingParams
    chat: bool

    def rows(self, shard: Shard) -> Iterator[tuple[int, Place, Content]]:
        """Number, place and content of each row of a shard.

        Raises:
          InputError: the input is no longer what the index was made of.
        """
        number, file = shard.first, self.files[shard.place.file]
        if file_size(file) == self.index.sizes[shard.place.file]:
            for place, content in itertools.islice(read_from(self.files, shard.place), shard.rows):
                yield number, place, content
                number += 1
        if number != shard.first + shard.rows:
            raise InputError(f"{file.shown}: has changed while the job was running")

    def prepare(self, llm: LLM, number: int, content: Content) -> tuple[RowId, Prepared]:
        """A row's id, and what the engine takes.

        Raises:
          BadRow: it cannot be decoded.
        """
        name: RowId | None = None
        try:
            fields = row_fields(content)
            name = row_id(fields, number)
            if (original := self.index.original(number)) is not None:
                raise InputError(
                    f"its id is that of row {original} already (rows count from 0, and one "
                    "without an id takes its number)"
                )
            return name, prepared_row(llm, checked_row(fields, name, self.params), chat=self.chat)
        except InputError as error:
            raise BadRow(name, str(error)) from error

    def check_all(self, llm: LLM) -> None:
        """Prepares every row, and keeps none.

        Raises:
          InputError: naming the file and the first line that cannot be decoded, and why.
        """
        for shard in self.index.shards:
            for number, place, content in self.rows(shard):
                try:
                    self.prepare(llm, number, content)
                except BadRow as bad:
                    shown = self.files[place.file].shown
                    raise InputError(f"{shown} line {place.line}: {bad.reason}") from None

    def error_row(self, bad: BadRow, place: Place) -> dict[str, Any]:
        file = self.files[place.file].name if len(self.files) > 1 else None
        return error_row(bad.id, bad.reason, place.line, file)


@dataclasses.dataclass(slots=True)
class _UnderWay:
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

    def __init__(self, llm: LLM, workload: Workload, folder: ShardFolder, stop: StopRequest):
        self._llm, self._workload, self._folder, self._stop = llm, workload, folder, stop
        self._under_way: dict[int, _UnderWay] = {}
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
          Stopped: on SIGTERM, if rows under way took too long.
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
                self._under_way[next(places)] = _UnderWay(shard, part, number, name)
                yield row
            self._seal_if_whole(shard, part)

    def _and_again(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """All of them, and then those that others were at: they may be free by now."""
        yield from shards
        again, self.in_use = self.in_use, []
        yield from again

    def _take(self, batch: list[tuple[int, Completion]]) -> None:
        by_shard: dict[int, list[tuple[_UnderWay, Completion]]] = {}
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
