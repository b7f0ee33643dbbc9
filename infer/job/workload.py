"""The rows of a job, read and checked one by one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infer.job.prompt_rows import RowId, checked_row, prepared_row, row_fields, row_id
from infer.job.records import Content, Place, read_from
from infer.job.result_rows import error_row
from infer.job.row_index import RowIndex, Shard
from infer.job.source import InputFile, file_size
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
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


@dataclasses.dataclass(frozen=True)
class Workload:
    """Reads and checks the rows of a job, each when its shard is decoded.

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
