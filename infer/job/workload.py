"""Reads and checks the records of a job, one by one."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from infer.job.input import Content, Place, read_from
from infer.job.openai_record import BatchRecord
from infer.job.prompt_record import (
    RecordId,
    checked_record,
    is_envelope,
    own_fields,
    prepared_record,
    record_fields,
    record_id,
)
from infer.job.record_index import RecordIndex, Shard
from infer.job.result_record import as_json, error_record, refuse_output_keys
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.compressed import is_compressed
from wedlm_jax.records.files import RecordFile, file_size

if TYPE_CHECKING:
    from wedlm_jax.generation import Prepared, Windowed
    from wedlm_jax.llm import LLM


Own: TypeAlias = Mapping[str, Any] | BatchRecord
"""What a record's result has besides: keys of its own, or the envelope that it came in."""


class BadPrompt(Exception):
    """A record that cannot be decoded.

    Attributes:
      id: its id, None if none could be read.
      reason: what is wrong with it.
      own: its own keys, for the output.
    """

    def __init__(self, name: RecordId | None, reason: str, own: Own):
        super().__init__(reason)
        self.id, self.reason, self.own = name, reason, own


class PreparedRecord(NamedTuple):
    """A record that can be decoded.

    Attributes:
      id: of the result.
      own: keys of its own, for the output.
      prompt: what the engine gets.
    """

    id: RecordId
    own: Own
    prompt: Prepared | Windowed


@dataclasses.dataclass(frozen=True)
class Workload:
    """Reads and checks the records of a job when their shard is decoded.

    Attributes:
      files: of the input, in order.
      index: of their records.
      params: of records that do not have their own.
      chat: whether a text is a user's message, for the chat template.
    """

    files: tuple[RecordFile, ...]
    index: RecordIndex
    params: SamplingParams
    chat: bool
    _reading: dict[str, Any] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Where the last shard was read to: ``records``, which go on with ``next`` in ``file``."""

    def records(self, shard: Shard) -> Iterator[tuple[int, Place, Content]]:
        """Yields number, place and content of each record of a shard.

        Raises:
          InputError: the input has changed since it was indexed.
        """
        number, file = shard.first, self.files[shard.place.file]
        if file_size(file) == self.index.sizes[shard.place.file]:
            for place, content in itertools.islice(self._from(shard), shard.records):
                self._reading["next"] = number + 1
                yield number, place, content
                number += 1
        if number != shard.first + shard.records:
            raise InputError(f"{file.shown}: has changed while the job was running")

    def _from(self, shard: Shard) -> Iterator[tuple[Place, Content]]:
        """Yields records from the first of a shard on; goes on where the last shard ended, if it
        can, as a place in a compressed file, or in a row group, is only found from its start."""
        before, file = self._reading.get("next", -1), shard.place.file
        packed = is_compressed(self.files[file].path) and self._reading.get("file") == file
        if 0 <= before <= shard.first and (before == shard.first or packed):
            records = self._reading["records"]
            collections.deque(itertools.islice(records, shard.first - before), maxlen=0)
        else:
            records = read_from(self.files, shard.place)
        self._reading.update(records=records, next=shard.first, file=file)
        return cast(Iterator[tuple[Place, Content]], records)

    def prepare(self, llm: LLM, number: int, content: Content) -> PreparedRecord:
        """Checks a record, and returns its prompt as the engine takes it.

        Raises:
          BadPrompt: it cannot be decoded.
        """
        name: RecordId | None = None
        own: Own = {}
        try:
            fields = record_fields(content)
            if is_envelope(fields):
                own = BatchRecord(fields)
                name = record_id(fields, number)
            else:
                name = record_id(fields, number)
                own = as_json(own_fields(fields))
            if (original := self.index.original(number)) is not None:
                raise InputError(
                    f"duplicate id: record {original + 1} has it (one without an id has its "
                    "number, from 1, as id)"
                )
            if isinstance(own, BatchRecord):
                record = own.checked(self.params)
            else:
                refuse_output_keys(own)
                record = checked_record(fields, name, self.params)
            prompt = prepared_record(llm, record, chat=self.chat)
            if isinstance(own, BatchRecord):
                own.prepared(llm, prompt)
            return PreparedRecord(name, own, prompt)
        except InputError as error:
            raise BadPrompt(name, str(error), own) from error

    def check_all(self, llm: LLM) -> None:
        """Prepares every record, and keeps none.

        Raises:
          InputError: naming the file and the first line that cannot be decoded, and why.
        """
        for shard in self.index.shards:
            for number, place, content in self.records(shard):
                try:
                    self.prepare(llm, number, content)
                except BadPrompt as bad:
                    raise InputError(f"{self.shown(place)}: {bad.reason}") from None

    def shown(self, place: Place) -> str:
        """Returns what messages call the place of a record: its file and line."""
        return f"{self.files[place.file].shown} line {place.line}"

    def error_record(self, bad: BadPrompt, place: Place) -> dict[str, Any]:
        file = self.files[place.file].name if len(self.files) > 1 else None
        return error_record(bad.id, bad.reason, place.line, file, bad.own)
