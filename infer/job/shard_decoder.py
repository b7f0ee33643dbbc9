"""Decodes shards: records go to the engine in order, and come back as they are finished."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from infer.job.counts import Counts, ErrorLimit
from infer.job.graceful_stop import GracefulStop
from infer.job.input import Place
from infer.job.part_file import InUse, PartFile, allow_open_files
from infer.job.prompt_record import RecordId
from infer.job.record_index import Shard
from infer.job.result_record import result_record
from infer.job.shard_folder import ShardFolder
from infer.job.workload import BadPrompt, Own, Workload
from wedlm_jax.errors import InputError

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
