"""Indexes a job's input in a first pass: counts records, notes where each shard starts, finds
repeated ids, and computes a digest. It takes 8 bytes of memory per record, and a little per
shard."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from infer.job.input import KEYS, Content, Place, read_for_ids
from infer.job.prompt_record import is_envelope, own_fields, record_fields, record_id
from infer.job.result_record import OUTPUT_KEYS, TooDeep, as_json, refuse_output_keys
from wedlm_jax.errors import InputError
from wedlm_jax.records.columns import Columns
from wedlm_jax.records.files import PARQUET, RecordFile, file_size
from wedlm_jax.records.jsonl import Digest
from wedlm_jax.records.parquet import column_names

TELL_EVERY = 2**18
"""Records between two reports of progress."""

MOST_OWN_KEYS = 100
"""The most names of unknown keys that are remembered for the summary."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive records that are written as one file.

    Attributes:
      number: from 0.
      first: number of its first record in the whole input.
      records: how many it has.
      place: where its first record starts.
    """

    number: int
    first: int
    records: int
    place: Place


@dataclasses.dataclass(frozen=True)
class RecordIndex:
    """Holds the result of the first pass over the input.

    Attributes:
      records: how many there are.
      digest: of the files' contents, and of their names if there are several.
      sizes: of the files, in bytes.
      shard_size: records of a shard; the last may have fewer.
      shards: in order.
      repeated: int64 ``[R]``, sorted: numbers of records whose id an earlier one has.
      originals: int64 ``[R]``: the numbers of these earlier ones.
      own_keys: of records, which the output repeats; at most `MOST_OWN_KEYS`.
    """

    records: int
    digest: str
    sizes: tuple[int, ...]
    shard_size: int
    shards: tuple[Shard, ...]
    repeated: np.ndarray
    originals: np.ndarray
    own_keys: tuple[str, ...] = ()

    def original(self, number: int) -> int | None:
        """Returns the number of the first record with the same id, None if it is this one."""
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
      files: in the order of their records.
      shard_size: records of a shard.
      tell: called now and then with how many records have been read.
      columns: where the output has columns, gets the types of the ids and of all own keys.

    Raises:
      InputError: a file cannot be read, or its first record has a key that the output has; or an
        own key has values of which there is no column.
    """
    own_keys: dict[str, None] = {}
    begins: list[Place] = []
    ids = array("Q")
    contents: list[list[str]] = []
    sizes: list[int] = []
    for number, file in enumerate(files):
        digest = hashlib.sha256()
        sizes.append(file_size(file))
        for at, line, claim in _claims(file, digest, ids, own_keys, columns):
            if len(ids) % shard_size == 0:
                begins.append(Place(number, at, line))
            ids.append(_id_digest(claim))
            if len(ids) % TELL_EVERY == 0:
                tell(len(ids))
        name = file.name if len(files) > 1 else ""
        contents.append([name, file.kind, digest.hexdigest()])
    shards = tuple(
        Shard(k, k * shard_size, min(shard_size, len(ids) - k * shard_size), place)
        for k, place in enumerate(begins)
    )
    whole = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    repeated, originals = _repeated(np.array(ids, np.uint64))
    return RecordIndex(
        *(len(ids), whole, tuple(sizes), shard_size, shards),
        *(repeated, originals, tuple(own_keys)),
    )


def _claims(
    file: RecordFile,
    digest: Digest,
    ids: Sequence[int],
    own_keys: dict[str, None],
    columns: Columns | None,
) -> Iterator[tuple[int, int, tuple[str, Any]]]:
    """Yields offset, line and claimed id of each record; notes the keys of their own.

    A record claims the id that it has, or its number if it is an object without one, whatever else
    may be wrong with it. Anything else claims an id that no other record can have.
    """

    def note(own: Collection[str], first: bool, where: str) -> None:
        if first:  # what it has, the others will have, too
            try:
                refuse_output_keys(own)
            except InputError as error:
                raise InputError(f"{file.shown}{where}: {error}") from None
        if len(own_keys) < MOST_OWN_KEYS:
            own_keys.update(dict.fromkeys(key for key in own if key not in OUTPUT_KEYS))

    def claim(fields: Mapping[str, Any] | None) -> tuple[str, Any]:
        number = len(ids)
        try:
            return ("none", number) if fields is None else ("id", record_id(fields, number))
        except InputError:
            return "none", number

    def note_types(fields: Mapping[str, Any], name: tuple[str, Any], where: str) -> None:
        if columns is None:
            return
        if is_envelope(fields):
            raise InputError(
                f"{where}: records in the form of OpenAI's batch files are answered in that form, "
                "which has no columns; give --output a .jsonl file"
            )
        own = {} if file.kind == PARQUET else own_fields(fields)
        with contextlib.suppress(TooDeep):  # a bad record, of which nothing is passed on
            values = {key: as_json(value) for key, value in own.items() if key not in OUTPUT_KEYS}
            columns.add(values | ({"id": name[1]} if name[0] == "id" else {}), where)

    if file.kind == PARQUET:
        names = [name for name in column_names(file.path, file.shown) if name not in KEYS]
        note(names, True, "")
        if columns is not None:
            columns.add_file(file.path, file.shown, names)
    first = True
    for at, line, content in read_for_ids(file, digest):
        fields = _fields(content)
        if fields is not None and file.kind != PARQUET:
            note(own_fields(fields), first, f" line {line}")
        name = claim(fields)
        if fields is not None:
            note_types(fields, name, f"{file.shown} line {line}")
        yield at, line, name
        first = False


def _fields(content: Content) -> Mapping[str, Any] | None:
    try:
        return record_fields(content)
    except InputError:
        return None


def _id_digest(claim: tuple[str, Any]) -> int:
    """Hashes an id to 64 bits: among ten million ids two collide once in 370,000 jobs."""
    text = json.dumps(claim).encode("ascii")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _repeated(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted numbers of records whose digest an earlier one has, and the numbers of the
    first of these."""
    order = np.argsort(digests, kind="stable")
    ranked = digests[order]
    again = np.zeros(len(order), bool)
    again[1:] = ranked[1:] == ranked[:-1]
    # A stable sort keeps equal digests in the order of their records, so each run of equal ones
    # starts with the first.
    run = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    repeated, originals = order[again], order[run[again]]
    by_row = np.argsort(repeated)
    return repeated[by_row], originals[by_row]
