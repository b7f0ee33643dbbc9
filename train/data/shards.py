"""Folders of packed rows: what they contain, how rows are written and read, and `wedlm rows`.

`dataset.json` says what a folder contains and how it was made. The rows are in ArrayRecord shards,
such as ``rows-00000-of-00008.arrayrecord``, written in order and read by row number. A record is
one row. Its bytes are, all little-endian: the number of samples, the length of each, then their
tokens one after another (uint32 each), then their trainable flags, eight to a byte. Padding,
positions and segment ids follow from the lengths, because every sample begins at a multiple of the
block size.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from tokenizers import Tokenizer

from train.data.chunks import UNREADABLE, open_array_record
from wedlm_jax.errors import InputError, StorageFailure, shortened
from wedlm_jax.host.storage import why_absent
from wedlm_jax.packing import TokenisedSample, row_arrays

MANIFEST = "dataset.json"
VERSION = 1

DECISIVE = ("added_tokens", "normalizer", "pre_tokenizer", "model")
"""The parts of a tokenizer.json that turn a text into ids."""

MOST_UNREAD = 50
"""The number of unread keys that are counted by name; the rest are counted together."""
OTHERS = "(others)"
FIRST_NAMED = 5
"""The number of malformed records that are named for each reason."""


@dataclasses.dataclass
class Counts:
    """Counts of records and of the rows that they fill: for a chunk of the input, a part of a job,
    or a whole folder. The names are those of `Manifest`."""

    records: int = 0
    samples: int = 0
    rows: int = 0
    tokens: int = 0
    trainable_tokens: int = 0
    trainable_blocks: int = 0
    most_trainable_blocks: int = 0
    malformed: int = 0
    reasons: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    added_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    unread_keys: dict[str, int] = dataclasses.field(default_factory=dict)
    turns: int = 0
    changed_turns: int = 0
    first_changed: dict[str, str] | None = None
    typed: int = 0

    def add(self, other: Counts) -> None:
        """Adds the counts of what follows in the input."""
        most = max(self.most_trainable_blocks, other.most_trainable_blocks)
        for name in (field.name for field in dataclasses.fields(self)):
            if isinstance(value := getattr(self, name), int):
                setattr(self, name, value + getattr(other, name))
        self.most_trainable_blocks = most
        self.first_changed = self.first_changed or other.first_changed
        if other.added_tokens:
            total = collections.Counter(self.added_tokens) + collections.Counter(other.added_tokens)
            self.added_tokens = dict(sorted(total.items(), key=lambda item: int(item[0])))
        for key, records in other.unread_keys.items():
            name = shortened(key, 60)
            if name not in self.unread_keys and len(self.unread_keys) >= MOST_UNREAD:
                name = OTHERS
            self.unread_keys[name] = self.unread_keys.get(name, 0) + records
        for reason, found in other.reasons.items():
            none = {"records": 0, "first": [], "detail": found["detail"]}
            known = self.reasons.setdefault(reason, none)
            known["records"] += found["records"]
            known["first"] = [*known["first"], *found["first"]][:FIRST_NAMED]


@dataclasses.dataclass(frozen=True)
class DataShard:
    """Describes one file of rows."""

    file: str
    rows: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `dataset.json` says of a folder of packed rows.

    Attributes:
      row_length, block_size: L and B of the packed rows.
      tokenizer: its `tokenizer_fingerprint`.
      records: records that were read, the malformed included.
      samples: samples in the rows; a long document is several.
      rows: packed rows.
      tokens, trainable_tokens: tokens in the rows, without padding.
      fill: tokens / (rows * row_length).
      malformed: records left out.
      reasons: for each reason, how many records were left out, where the first ones are, and what
        is particular to the very first.
      made_with: the settings that determined the rows.
      content: SHA-256 of all rows in order.
      shards: the files in order.
      added_tokens: how often each id occurs that is an added token of the tokenizer, or none of its
        tokens. A mask token should not be among them.
      trainable_blocks, most_trainable_blocks: blocks with a trainable token, in all rows together
        and at most in one row.
      unread_keys: number of records that have a key that is not read, by its name.
      turns, changed_turns, first_changed: turns of assistants; how many of them the chat template
        changed; and the first of these: ``place``, ``written`` and ``became``.
      turn_end: the token that ends turns; None if there are no conversations.
      typed: records whose messages spell special tokens, which are read as text.
    """

    row_length: int
    block_size: int
    tokenizer: str
    records: int
    samples: int
    rows: int
    tokens: int
    trainable_tokens: int
    fill: float
    malformed: int
    reasons: dict[str, dict[str, Any]]
    made_with: dict[str, Any]
    content: str
    shards: list[DataShard]
    added_tokens: dict[str, int]
    trainable_blocks: int
    most_trainable_blocks: int
    unread_keys: dict[str, int]
    turns: int
    changed_turns: int
    first_changed: dict[str, str] | None
    turn_end: int | None
    typed: int
    version: int = VERSION


def write_manifest(manifest: Manifest, folder: Path) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder, and checks that its shards exist and have the right sizes.

    Raises:
      InputError: the folder or a file is missing, truncated or of another version; the message
        names it.
    """
    path = folder / MANIFEST
    if folder.is_file():
        raise InputError(
            f"{folder}: is a file; run `wedlm tokenize --input {folder}` on it first, and name the "
            "folder that it creates"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields["version"]
        if version != VERSION:
            raise InputError(f"{path}: version {version!r}; only version {VERSION} is supported")
        manifest = Manifest(**{**fields, "shards": [DataShard(**one) for one in fields["shards"]]})
    except FileNotFoundError:
        raise InputError(f"{why_absent(folder, MANIFEST)}; `wedlm tokenize` makes one") from None
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a manifest of packed rows ({error})") from None
    for shard in manifest.shards:
        file = folder / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != shard.bytes:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise InputError(f"{file}: {found}, but {path} says {shard.bytes:,} bytes")
    return manifest


def mask_token_in(manifest: Manifest, folder: str, token_id: int) -> str | None:
    """Returns a message if the text has the mask token; else None."""
    count = manifest.added_tokens.get(str(token_id), 0)
    if not count:
        return None
    return (
        f"{folder}: the text has the mask token {token_id} {count:,} times, and the model would "
        "read each as a mask; leave those records out, or set model.mask_token to another token"
    )


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a digest of everything in a tokenizer that determines the ids of a text.

    Files that differ only in layout, or in what is done with ids afterwards, have the same digest.
    """
    content = json.loads(tokenizer.to_str())
    decisive = {name: content.get(name) for name in DECISIVE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


_WORD = np.dtype("<u4")


def encode_row(samples: Sequence[TokenisedSample]) -> bytes:
    sizes = [len(sample.tokens) for sample in samples]
    tokens = np.concatenate([sample.tokens for sample in samples])
    trainable = np.concatenate([sample.trainable for sample in samples])
    words = np.concatenate([np.array([len(sizes), *sizes], _WORD), tokens.astype(_WORD)])
    return words.tobytes() + np.packbits(trainable).tobytes()


def decode_row(
    record: bytes, *, row_length: int, block_size: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Reads the arrays of `wedlm_jax.packing.row_arrays`, ``[L]`` each.

    Raises:
      ValueError: ``record`` is not a row of these sizes.
    """
    samples = decode_samples(record)
    room = sum(-(-len(sample.tokens) // block_size) * block_size for sample in samples)
    if not 0 < room <= row_length:
        raise ValueError(f"{len(samples)} samples take {room} tokens of {row_length}")
    return row_arrays(
        samples, row_length=row_length, block_size=block_size, pad_token_id=pad_token_id
    )


def decode_samples(record: bytes) -> list[TokenisedSample]:
    """Reads the samples of a row.

    Raises:
      ValueError: ``record`` is not a row.
    """
    count = int(np.frombuffer(record, _WORD, 1)[0])
    sizes = np.frombuffer(record, _WORD, count, _WORD.itemsize).astype(np.int64)
    total = int(sizes.sum())
    start = (1 + count) * _WORD.itemsize
    end = start + total * _WORD.itemsize
    if len(record) != end + -(-total // 8):
        raise ValueError(f"{len(record)} bytes do not match {total} tokens")
    tokens = np.frombuffer(record, _WORD, total, start).astype(np.int32)
    trainable = np.unpackbits(np.frombuffer(record, np.uint8, offset=end), count=total)
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(tokens, ends), np.split(trainable.astype(bool), ends), strict=True)
    return [TokenisedSample(ids, flags) for ids, flags in parts]


WRITER_OPTIONS = "group_size:1,zstd:1"
"""One row per group: rows are read one at a time, in random order."""


class ShardWriter:
    """Writes rows into numbered shards of ``shard_rows`` each, in a folder without shards.

    Raises:
      StorageFailure: a file cannot be written.
    """

    def __init__(self, folder: Path, shard_rows: int):
        self._folder, self._shard_rows = folder, shard_rows
        self._shards: list[DataShard] = []
        self._writer: Any = None
        self._rows = 0
        self._digest = hashlib.sha256()

    def write(self, record: bytes) -> None:
        if self._rows == self._shard_rows:
            self._finish_shard()
        if self._writer is None:
            self._writer = self._checked(ArrayRecordWriter, str(self._path), WRITER_OPTIONS)
        self._checked(self._writer.write, record)
        self._rows += 1
        self._digest.update(len(record).to_bytes(8, "little"))
        self._digest.update(record)

    def finish(self) -> tuple[list[DataShard], str]:
        """Closes the shards; returns them and the SHA-256 of all rows in order."""
        if self._writer is not None:
            self._finish_shard()
        return self._shards, self._digest.hexdigest()

    @property
    def _path(self) -> Path:
        return self._folder / f"{len(self._shards):05d}.arrayrecord"

    def _finish_shard(self) -> None:
        self._checked(self._writer.close)
        self._shards.append(DataShard(self._path.name, self._rows, self._path.stat().st_size))
        self._writer, self._rows = None, 0

    def _checked(self, act: Any, *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except UNREADABLE as error:
            # The folder has just been made, so only the disk can refuse.
            reason = shortened(str(error))
            raise StorageFailure(f"{self._path}: cannot be written ({reason})") from None


class ShardRows:
    """Returns the rows of a folder by number; files are opened by the first read, in whichever
    process reads.

    Attributes:
      manifest: the folder's manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest, pad_token_id: int):
        self._folder, self.manifest = folder, manifest
        self._ends = list(itertools.accumulate(shard.rows for shard in manifest.shards))
        self._sizes = {
            "row_length": manifest.row_length,
            "block_size": manifest.block_size,
            "pad_token_id": pad_token_id,
        }
        # With the numbers of rows given, files need not be opened to count them.
        self._records = ArrayRecordDataSource(
            [f"{folder / shard.file}[0:{shard.rows}]" for shard in manifest.shards]
        )

    def __len__(self) -> int:
        return self.manifest.rows

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        """Reads row ``index``: the fields of `wedlm_jax.corruption.PackedRows`, ``[L]`` each.

        Raises:
          InputError: the row cannot be read; the message names it and the folder.
        """
        try:
            return decode_row(self._records[int(index)], **self._sizes)
        except (*UNREADABLE, IndexError) as error:
            raise InputError(
                f"{self._folder}: row {index} cannot be read ({shortened(str(error))})"
            ) from None

    def place(self, index: int) -> tuple[str, int]:
        """Returns the shard with row ``index``, and the row's number there, from 0."""
        shard = bisect.bisect_right(self._ends, index)
        first = self._ends[shard] - self.manifest.shards[shard].rows
        return str(self._folder / self.manifest.shards[shard].file), index - first


def read_rows(file: Path, rows: list[int]) -> list[list[TokenisedSample]]:
    """Reads the samples of each of these rows of a shard, which are numbered from 0.

    Raises:
      InputError: the file is missing or not a shard, or has no row with such a number.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        reader, count = open_array_record(file)
    except UNREADABLE as error:
        raise InputError(f"{file}: not a file of packed rows ({shortened(str(error))})") from None
    if wrong := [row for row in rows if not 0 <= row < count]:
        raise InputError(f"{file}: no row {wrong[0]}; it has rows 0 to {count - 1}")
    try:
        return [decode_samples(record) for record in reader.read(rows)]
    except UNREADABLE as error:
        raise InputError(f"{file}: a row cannot be read ({shortened(str(error))})") from None


def main(arguments: list[str]) -> int:
    """Runs `wedlm rows`: prints packed rows as text, for people who look for a document."""
    from train.data.tokenizer import load_tokenizer
    from wedlm_jax.checkpoint.open import packaged
    from wedlm_jax.host.command_line import CommandParser

    parser = CommandParser(
        prog="wedlm rows",
        description="Shows packed rows as text, sample by sample, such as those that\n"
        "skipped.jsonl names.",
        epilog="example:\n"
        "  wedlm rows data/corpus/rows-00000-of-00008.arrayrecord 17 204 --tokenizer Qwen3-8B",
    )
    parser.add_argument("file", type=Path, help="a shard written by `wedlm tokenize`")
    parser.add_argument("rows", nargs="+", type=int, metavar="ROW", help="row number, from 0")
    parser.add_argument(
        "--tokenizer", required=True, type=Path, metavar="DIR", help="folder of tokenizer.json"
    )
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(Path(packaged(options.tokenizer)))
    for row, samples in zip(options.rows, read_rows(options.file, options.rows), strict=True):
        for number, sample in enumerate(samples, 1):
            print(
                f"== row {row}, sample {number} of {len(samples)}: {len(sample.tokens)} tokens, "
                f"{int(sample.trainable.sum())} trained on"
            )
            print(tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False))
    return 0
