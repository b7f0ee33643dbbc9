"""Reads a job's input: finds files and pipes, indexes their records, and prepares each for the
engine.

The input is read twice. The first pass (`build_index`) counts the records and notes where each
shard begins; the second (`Workload`) reads the records of a shard when it is decoded.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from infer.job.prompt_record import (
    KEYS,
    PROMPT_KINDS,
    BatchRecord,
    Content,
    Extra,
    RecordId,
    extra_fields,
    is_envelope,
    prepared_record,
    record_fields,
    record_id,
    record_seed,
)
from infer.job.result_record import OUTPUT_KEYS, TooDeep, as_json, error_record, refuse_output_keys
from wedlm_jax.errors import InputError, errors_at
from wedlm_jax.host.atomic import naming, writer_name
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.columns import Columns
from wedlm_jax.records.compressed import is_compressed, naming_damage, skip, unpacked
from wedlm_jax.records.files import (
    JSONL,
    PARQUET,
    FoundFiles,
    RecordFile,
    file_size,
    find_files,
    reading,
)
from wedlm_jax.records.jsonl import Digest, read_lines
from wedlm_jax.records.parquet import column_names, read_rows

if TYPE_CHECKING:
    from wedlm_jax.generation import Prepared, Windowed
    from wedlm_jax.llm import LLM

ENDINGS = {".jsonl": JSONL, ".jsonl.gz": JSONL, ".jsonl.zst": JSONL, ".parquet": PARQUET}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files; those in `ENDINGS` are unpacked here."""
STANDARD_INPUT = "-"
SPOOL = "spooled-"
COPY_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Source(FoundFiles):
    """The files that ``--input`` names, or the ``pipe``, which can be read only once."""

    pipe: str | None = None

    @property
    def shown(self) -> str:
        """The name of the file in messages."""
        if self.pipe is not None:
            return "standard input" if self.pipe == STANDARD_INPUT else self.pipe
        return self.files[0].shown if len(self.files) == 1 else "the input"


class Place(NamedTuple):
    """The place where a record begins.

    Attributes:
      file: index among the job's files.
      at: byte offset in the (unpacked) JSONL file; in Parquet the row, from 0.
      line: line (in Parquet the row), from 1.
    """

    file: int
    at: int
    line: int


def find_input(names: Sequence[str]) -> Source:
    """Finds the named files, in that order, and those in named folders, sorted.

    Raises:
      InputError: a name does not exist, cannot be read, or cannot be combined with the others.
    """
    pipes = [name for name in names if _is_pipe(name)]
    if pipes:
        if len(names) > 1:
            raise InputError(f"{pipes[0]}: a pipe is read alone, without other input")
        return Source((), pipe=pipes[0])
    found = find_files(names, ENDINGS, otherwise=JSONL)
    seen: set[Path] = set()
    for file in found.files:
        name = file.path.name.lower()
        if name.endswith(COMPRESSED) and not name.endswith(tuple(ENDINGS)):
            raise InputError(
                f"{file.shown}: is compressed; unpack it, or pipe its contents to --input -"
            )
        if file.path.resolve() in seen:
            raise InputError(f"{file.shown}: is named twice as input")
        seen.add(file.path.resolve())
    return Source(found.files, found.others, found.folders)


def spool(source: Source, folder: Path) -> RecordFile:
    """Copies JSONL from the pipe of ``source`` to a file in ``folder``, which can be read twice."""
    assert source.pipe is not None
    digest = hashlib.sha256()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        arriving = folder / f"{SPOOL}{writer_name()}.tmp"
        try:
            with arriving.open("xb") as file:
                for block in _blocks(source.pipe):
                    digest.update(block)
                    file.write(block)
            # Named by its contents, so that it never overwrites the copy of another job.
            path = folder / f"{SPOOL}{digest.hexdigest()[:16]}.jsonl"
            os.replace(arriving, path)
        except BaseException:
            arriving.unlink(missing_ok=True)
            raise
    return RecordFile(path, source.shown, source.shown, JSONL)


def read_from(files: Sequence[RecordFile], place: Place) -> Iterator[tuple[Place, Content]]:
    """Yields the records from ``place`` to the end of the last file; raises as `read_file` does."""
    yield from read_file(files[place.file], place)
    for number in range(place.file + 1, len(files)):
        yield from read_file(files[number], Place(number, 0, 1))


def read_file(
    file: RecordFile, start: Place, digest: Digest | None = None
) -> Iterator[tuple[Place, Content]]:
    """Yields the records of a file, beginning at a place in it.

    Args:
      digest: updated with all bytes of the file. With it, only the ids of records are needed, so
        of Parquet only the column ``id`` is read.
    """
    if file.kind == PARQUET:
        if digest is not None:
            with reading(file), file.path.open("rb") as stream:
                while block := stream.read(COPY_BYTES):
                    digest.update(block)
        columns = None if digest is None else ["id"]
        rows = read_rows(file.path, file.shown, columns, start=start.at, optional=KEYS)
        for row, fields in enumerate(rows, start.at):
            yield Place(start.file, row, row + 1), _with_sampling(fields)
        return
    with (
        reading(file),
        file.path.open("rb") as raw,
        naming_damage(file.shown),
        unpacked(raw, file.path) as stream,
    ):
        if is_compressed(file.path):
            skip(stream, start.at)
        else:
            stream.seek(start.at)
        for line in read_lines(stream, start.at, start.line, digest):
            yield Place(start.file, line.at, line.number), line.content


def _with_sampling(columns: dict[str, Any]) -> dict[str, Any]:
    """Parses the ``sampling`` of a Parquet row if it is JSON text: no column type fits the fields
    of every record."""
    sampling = columns.get("sampling")
    if isinstance(sampling, str):
        with contextlib.suppress(ValueError, RecursionError):
            return columns | {"sampling": json.loads(sampling)}
    return columns


def _blocks(pipe: str) -> Iterator[bytes]:
    with naming(pipe, "cannot be read"), contextlib.ExitStack() as opened:
        stream: IO[bytes] = sys.stdin.buffer
        if pipe != STANDARD_INPUT:
            stream = opened.enter_context(open(pipe, "rb"))
        while block := stream.read(COPY_BYTES):
            yield block


def _is_pipe(name: str) -> bool:
    path = Path(name)
    return name == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir())


TELL_EVERY = 2**18
"""Records between two progress reports."""
MOST_EXTRA_KEYS = 100
"""Maximum number of unknown keys remembered, for the message about them."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive records that are written to one file.

    Attributes:
      number: from 0.
      first: number of its first record in the whole input, from 0.
      place: where its first record begins.
    """

    number: int
    first: int
    records: int
    place: Place


@dataclasses.dataclass(frozen=True)
class RecordIndex:
    """What the first pass finds. It takes 8 bytes of memory per record while it runs, and a little
    per shard.

    Attributes:
      digest: hash of the files' contents, and of their names if there are several.
      sizes: sizes of the files in bytes.
      shard_size: records per shard; the last may have fewer.
      repeated: int64 ``[R]``, sorted: numbers of records with the id of an earlier one.
      originals: int64 ``[R]``: numbers of these earlier records.
      extra_keys: keys that the output repeats; at most `MOST_EXTRA_KEYS`.
    """

    records: int
    digest: str
    sizes: tuple[int, ...]
    shard_size: int
    shards: tuple[Shard, ...]
    repeated: np.ndarray
    originals: np.ndarray
    extra_keys: tuple[str, ...] = ()

    def original(self, number: int) -> int | None:
        """Returns the number of the first record with the same id; None if that is this one."""
        place = int(np.searchsorted(self.repeated, number))
        if place < len(self.repeated) and self.repeated[place] == number:
            return int(self.originals[place])
        return None


def build_index(
    files: Sequence[RecordFile],
    shard_size: int,
    tell: Callable[[int], None] = lambda _: None,
    columns: Columns | None = None,
) -> RecordIndex:
    """Reads the whole input once.

    Args:
      tell: called every `TELL_EVERY` records with the number read so far.
      columns: for Parquet output, collects the types of ids and extra keys.

    Raises:
      InputError: a file cannot be read; its first record has a key of the output; or the values
        of an extra key do not fit into a column.
    """
    extra_keys: dict[str, None] = {}
    begins: list[Place] = []
    ids = array("Q")
    contents: list[list[str]] = []
    sizes: list[int] = []
    for number, file in enumerate(files):
        digest = hashlib.sha256()
        sizes.append(file_size(file))
        for place, claim in _claims(file, number, digest, ids, extra_keys, columns):
            if len(ids) % shard_size == 0:
                begins.append(place)
            ids.append(_id_digest(claim))
            if len(ids) % TELL_EVERY == 0:
                tell(len(ids))
        name = file.name if len(files) > 1 else ""
        contents.append([name, file.kind, digest.hexdigest()])
    shards = tuple(
        Shard(k, k * shard_size, min(shard_size, len(ids) - k * shard_size), place)
        for k, place in enumerate(begins)
    )
    _, first, inverse = np.unique(np.array(ids, np.uint64), return_index=True, return_inverse=True)
    originals = first[inverse]
    repeated = np.flatnonzero(originals != np.arange(len(ids)))
    return RecordIndex(
        records=len(ids),
        digest=hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
        sizes=tuple(sizes),
        shard_size=shard_size,
        shards=shards,
        repeated=repeated,
        originals=originals[repeated],
        extra_keys=tuple(extra_keys),
    )


def _claims(
    file: RecordFile,
    number: int,
    digest: Digest,
    ids: Sequence[int],
    extra_keys: dict[str, None],
    columns: Columns | None,
) -> Iterator[tuple[Place, tuple[str, Any]]]:
    """Yields the place and the claimed id of each record of a file; collects extra keys.

    A record claims its id, or its number if it is an object without one, even if something else is
    wrong with it. Anything else claims an id that no other record can have.
    """

    def collect(extra: Iterable[str]) -> None:
        if len(extra_keys) < MOST_EXTRA_KEYS:
            extra_keys.update(dict.fromkeys(key for key in extra if key not in OUTPUT_KEYS))

    if file.kind == PARQUET:
        names = column_names(file.path, file.shown)
        if not set(names) & set(PROMPT_KINDS):
            raise InputError(
                f"{file.shown}: expected a column {', '.join(PROMPT_KINDS[:-1])} or "
                f"{PROMPT_KINDS[-1]}; there are {', '.join(names) or 'none'}"
            )
        names = [name for name in names if name not in KEYS]
        refuse_output_keys(names, file.shown)
        collect(names)
        if columns is not None:
            columns.add_file(file.path, file.shown, names)
    is_first = True
    for place, content in read_file(file, Place(number, 0, 1), digest):
        where, claim = f"{file.shown} line {place.line}", ("none", cast(Any, len(ids)))
        fields: Mapping[str, Any] | None = None
        with contextlib.suppress(InputError):
            fields = record_fields(content)
            claim = "id", record_id(fields, len(ids))
        if fields is not None:
            extra = extra_fields(fields)
            if is_first:  # the others will have the same keys
                refuse_output_keys(extra, where)
            collect(extra)
            if columns is not None:
                _add_types(columns, fields, extra, claim, where)
        yield place, claim
        is_first = False


def _add_types(
    columns: Columns,
    fields: Mapping[str, Any],
    extra: Mapping[str, Any],
    claim: tuple[str, Any],
    where: str,
) -> None:
    if is_envelope(fields):
        raise InputError(
            f"{where}: records in the form of OpenAI's batch files are answered in that form, "
            "which has no columns; give --output a .jsonl file"
        )
    with contextlib.suppress(TooDeep):  # a bad record, whose keys are not copied
        values = {key: as_json(value) for key, value in extra.items() if key not in OUTPUT_KEYS}
        columns.add(values | ({"id": claim[1]} if claim[0] == "id" else {}), where)


def _id_digest(claim: tuple[str, Any]) -> int:
    """Hashes an id to 64 bits: among ten million ids two collide once in 370,000 jobs."""
    text = json.dumps(claim).encode("ascii")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclasses.dataclass(slots=True)
class Record:
    """A record of the input, and what `Workload.prepare` has read of it.

    Attributes:
      number: its number in the whole input, from 0.
      place: where it begins.
      id: None if it could not be read.
      extra: its parts that the output repeats.
    """

    number: int
    place: Place
    id: RecordId | None = None
    extra: Extra = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Reads and checks the records of a shard when it is decoded.

    Attributes:
      params: sampling parameters that a record may override; with a seed, so that a restart gives
        the same samples.
      chat: whether a ``prompt`` is a user message, for the chat template.
      prompt_token_ids: whether results include the prompt's tokens.
    """

    files: tuple[RecordFile, ...]
    index: RecordIndex
    params: SamplingParams
    chat: bool
    prompt_token_ids: bool = False
    _reading: dict[str, Any] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """Where the last shard was read to: ``records`` continues with number ``next`` in ``file``."""

    def records(self, shard: Shard) -> Iterator[tuple[Record, Content]]:
        """Yields each record of a shard, not prepared yet, and its content.

        Raises:
          InputError: the input has changed since it was indexed.
        """
        number, file = shard.first, self.files[shard.place.file]
        if file_size(file) == self.index.sizes[shard.place.file]:
            for place, content in itertools.islice(self._from(shard), shard.records):
                self._reading["next"] = number + 1
                yield Record(number, place), content
                number += 1
        if number != shard.first + shard.records:
            raise InputError(f"{file.shown}: has changed while the job was running")

    def _from(self, shard: Shard) -> Iterator[tuple[Place, Content]]:
        """Yields records, beginning with the first of a shard. Continues where the last shard ended
        if possible: a place in a compressed file or a row group is only found from its start."""
        before, file = self._reading.get("next", -1), shard.place.file
        packed = is_compressed(self.files[file].path) and self._reading.get("file") == file
        if 0 <= before <= shard.first and (before == shard.first or packed):
            records = self._reading["records"]
            collections.deque(itertools.islice(records, shard.first - before), maxlen=0)
        else:
            records = read_from(self.files, shard.place)
        self._reading.update(records=records, next=shard.first, file=file)
        return cast(Iterator[tuple[Place, Content]], records)

    def prepare(self, llm: LLM, record: Record, content: Content) -> Prepared | Windowed:
        """Checks a record and tokenizes its prompt; sets the record's id and extra keys as far as
        they can be read."""
        fields = record_fields(content)
        if is_envelope(fields):
            record.extra = BatchRecord(fields)
        record.id = record_id(fields, record.number)
        if not isinstance(record.extra, BatchRecord):
            record.extra = as_json(extra_fields(fields))
        if (original := self.index.original(record.number)) is not None:
            raise InputError(
                f"duplicate id: record {original + 1} has it (one without an id has its "
                "number, from 1, as id)"
            )
        assert self.params.seed is not None
        seed = record_seed(self.params.seed, record.id)
        params = dataclasses.replace(self.params, seed=seed)
        if isinstance(record.extra, BatchRecord):
            return record.extra.prepare(llm, params)
        refuse_output_keys(record.extra)
        prompt = prepared_record(llm, fields, params, chat=self.chat)
        if self.prompt_token_ids:
            record.extra = {"prompt_token_ids": list(prompt[0]), **record.extra}
        return prompt

    def check_all(self, llm: LLM) -> None:
        """Prepares every record and keeps none."""
        for shard in self.index.shards:
            for record, content in self.records(shard):
                with errors_at(self.shown(record.place)):
                    self.prepare(llm, record, content)

    def shown(self, place: Place) -> str:
        """Returns the name of a record in messages: its file and line."""
        return f"{self.files[place.file].shown} line {place.line}"

    def error_record(self, record: Record, reason: str) -> dict[str, Any]:
        file = self.files[record.place.file].name if len(self.files) > 1 else None
        return error_record(record.id, reason, record.place.line, file, record.extra)
