"""A job of `wedlm tokenize` in parts, so that it resumes and hosts can share it.

The input alone decides the parts: files that follow one another, about `PART_BYTES` together.
Each is tokenised and packed by itself, in a folder that appears whole, so any host can make any
of them at any time, and the end is the same. Until then all lie in a hidden folder beside the
output.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train.data.chunks import Malformed, input_size
from train.data.manifest import DataShard, Manifest, added_up, write_manifest
from wedlm_jax.errors import InputError, file_error, shortened
from wedlm_jax.host.atomic import create_json, part_folder, sync_path, written_beside
from wedlm_jax.records.files import RecordFile

PART_BYTES = 2**30
MALFORMED = "malformed.jsonl"
PLAN, PART = "plan.json", "part.json"
POLL_S = 2.0
MOST_UNREAD = 50
"""Names of keys that are counted, before the rest is counted together."""
OTHERS = "(others)"
FIRST_NAMED = 5
"""Malformed records that the manifest names for each reason."""


@dataclasses.dataclass
class PartCounts:
    """Counts what is in a part; grows while samples stream into rows."""

    records: int = 0
    samples: int = 0
    rows: int = 0
    tokens: int = 0
    trainable: int = 0
    trainable_blocks: int = 0
    most_trainable_blocks: int = 0
    malformed: int = 0
    reasons: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    content: str = ""
    added_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    unread_keys: dict[str, int] = dataclasses.field(default_factory=dict)
    turns: int = 0
    changed_turns: int = 0
    first_changed: dict[str, str] | None = None
    typed: int = 0

    def note_row(self, blocks: int) -> None:
        """Counts a row with this many blocks that have a trainable token."""
        self.rows += 1
        self.trainable_blocks += blocks
        self.most_trainable_blocks = max(self.most_trainable_blocks, blocks)

    def note(self, what: Malformed) -> None:
        """Counts a malformed record."""
        place = f"{what.file}:{what.line}" if what.line else what.file
        self._add_reason(what.reason, 1, [place])

    def note_unread(self, keys: dict[str, int]) -> None:
        """Counts records that have a key that is not read, by its name."""
        for key, records in keys.items():
            name = shortened(key, 60)
            if name not in self.unread_keys and len(self.unread_keys) >= MOST_UNREAD:
                name = OTHERS
            self.unread_keys[name] = self.unread_keys.get(name, 0) + records

    def _add_reason(self, reason: str, records: int, places: Sequence[str]) -> None:
        self.malformed += records
        known = self.reasons.setdefault(reason, {"records": 0, "first": []})
        known["records"] += records
        known["first"] = [*known["first"], *places][:FIRST_NAMED]

    def add(self, other: PartCounts) -> None:
        """Counts another part, which follows."""
        names = ("records", "samples", "rows", "tokens", "trainable", "trainable_blocks")
        for name in (*names, "turns", "changed_turns", "typed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_trainable_blocks = max(self.most_trainable_blocks, other.most_trainable_blocks)
        self.added_tokens = added_up([self.added_tokens, other.added_tokens])
        self.note_unread(other.unread_keys)
        self.first_changed = self.first_changed or other.first_changed
        for reason, found in other.reasons.items():
            self._add_reason(reason, found["records"], found["first"])


def cut_into_parts(files: Sequence[RecordFile]) -> list[list[RecordFile]]:
    """Cuts files, in their order, into parts of at least `PART_BYTES`, but for the last."""
    parts: list[list[RecordFile]] = [[]]
    size = 0
    for file in files:
        if size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(file)
        size += input_size(file)
    return parts


class PartFolders:
    """Keeps the hidden folder in which the parts of one output lie.

    Args:
      output: the folder to make.
      plan: all that decides the parts, as JSON has it; hosts and later attempts must have the
        same one.
      count: number of parts.

    Raises:
      InputError: another job with the same output was begun and is not finished.
    """

    def __init__(self, output: Path, plan: dict[str, Any], count: int):
        self._output, self._count = output.resolve(), count
        self.folder = part_folder(output)
        plan = json.loads(json.dumps(plan))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / PLAN
            found = plan if create_json(path, plan) else json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise file_error(output, "cannot be written here", error) from None
        except ValueError as error:
            raise InputError(f"{self.folder / PLAN}: cannot be read ({error})") from None
        if found != plan:
            raise InputError(
                f"{self.folder}: was begun by a job of other settings or other input; if it is not "
                "running any more, remove the folder to start over"
            )

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def missing(self) -> list[int]:
        """Lists the parts that are not made yet."""
        if (self.folder / "dataset.json").exists():
            return []
        return [n for n in range(self._count) if not (self.part(n) / PART).exists()]

    def wait(self, say: Callable[[str], None]) -> None:
        """Returns when all parts are there."""
        told = None
        while missing := self.missing():
            if len(missing) != told:
                told = len(missing)
                say(f"{told} of {self._count} parts are not made yet by the other hosts")
            time.sleep(POLL_S)

    def remove_if_empty(self) -> None:
        """Leaves nothing where no part was made."""
        if len(self.missing()) == self._count:
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, describe: Callable[[PartCounts, list[DataShard]], Manifest]) -> None:
        """Makes the output of the parts, which are all there. Killed halfway, it can be called
        again."""
        if not (self.folder / "dataset.json").exists():
            total, shards = self._gather()
            write_manifest(describe(total, shards), self.folder)
        for number in range(self._count):
            shutil.rmtree(self.part(number), ignore_errors=True)
        (self.folder / PLAN).unlink(missing_ok=True)
        if self._output.exists():
            self._output.rmdir()  # it is empty
        os.rename(self.folder, self._output)
        sync_path(self._output.parent)

    def _gather(self) -> tuple[PartCounts, list[DataShard]]:
        parts = [PartCounts(**_read(self.part(n) / PART)) for n in range(self._count)]
        total = PartCounts()
        for part in parts:
            total.add(part)
        digests = [part.content for part in parts if part.rows]
        whole = hashlib.sha256("".join(digests).encode()).hexdigest()
        total.content = digests[0] if len(digests) == 1 else whole
        every = [(n, shard) for n, part in enumerate(parts) for shard in part.shards]
        shards = []
        for number, (part_number, shard) in enumerate(every):
            name = f"rows-{number:05d}-of-{len(every):05d}.arrayrecord"
            file = self.part(part_number) / shard["file"]
            if file.exists():  # else an earlier attempt has moved it
                os.rename(file, self.folder / name)
            shards.append(DataShard(**{**shard, "file": name}))
        with written_beside(self.folder / MALFORMED) as named:
            for number in range(self._count):
                named.write((self.part(number) / MALFORMED).read_bytes())
        return total, shards


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
