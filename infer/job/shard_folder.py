"""The folder of a job: which job owns it, its finished shards, and the parts of unfinished ones.

    job.json                               identifies the job: input, checkpoint, settings
    rows-00003-of-00010.jsonl              a finished shard
    rows-00003-of-00010.manifest.json      its identity and counts; written last
    parts/                                 finished records of unfinished shards
    stats.json                             sums over all shards; written when the job is finished

A shard is finished once it has a manifest, whichever process wrote it. No other state is kept, so
any number of processes may work on the folder, one after another or at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from infer.job.input import SPOOL, Shard, Workload
from infer.job.part_file import FORMAT, SUFFIX, PartFile, any_in_use, parsed_line, whole_records
from infer.job.result_record import Counts
from wedlm_jax import __version__
from wedlm_jax.errors import InputError, counted, file_error
from wedlm_jax.host.atomic import alone, create_json, naming, write_json, written_beside
from wedlm_jax.host.storage import sampled

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM


JOB, STATS, PARTS = "job.json", "stats.json", "parts"
DATA, MANIFEST = ".jsonl", ".manifest.json"
OURS = re.compile(rf"(job|stats)\.json(\..*\.tmp)?|rows-\d+-of-\d+\..*|{PARTS}|{SPOOL}.*")
READERS, ATTEMPTS = 16, 5


SAMPLES = 256
MODEL_FILES = (".json", ".safetensors", ".txt", ".jinja")


Identity: TypeAlias = dict[str, Any]
"""What distinguishes a job from all others, as JSON values: the digests of the ``input`` and of the
``checkpoint``'s files, which may be moved; ``settings``, everything else that results depend on,
except what only changes how sums are rounded; ``shard_size``; and ``rows``, the number of input
records."""


def identity_of(llm: LLM, workload: Workload) -> Identity:
    """Returns the identity of a job that decodes these records with this model."""
    settings = {
        "version": __version__,
        "params": dataclasses.asdict(workload.params),
        "chat": workload.chat,
        "window_size": llm.engine.window_size,
        "max_model_len": llm.engine.max_model_len,
        "dtype": llm.dtype,
        "deterministic": llm.engine.settings.deterministic,
    }
    rare = {
        "quantization": llm.options.quantization,
        "drafter": llm.options.drafter,
        "prompt_token_ids": workload.prompt_token_ids,
        "kv_cache_dtype": llm.engine.kv_cache_dtype,
        "chat_template_kwargs": dict(llm.codec.variables) if llm.codec else {},
        "trust_special_tokens": llm.codec is not None and llm.codec.trust_special_tokens,
    }
    index = workload.index
    identity = {
        "input": index.digest,
        "checkpoint": folder_digest(llm.folder),
        "settings": settings | {name: value for name, value in rare.items() if value},
        "shard_size": index.shard_size,
        "rows": index.records,
    }
    return dict(json.loads(json.dumps(identity)))  # tuples become lists


def differences(mine: Identity, theirs: dict[str, Any]) -> str:
    """Describes how another job differs: "max_tokens is 24 there and 23 here"."""
    mine, theirs = _flat(mine), _flat(theirs)
    words = []
    for name in {**mine, **theirs}:
        if name == "rows" or mine.get(name) == theirs.get(name):
            continue
        if name in ("input", "checkpoint"):
            words.append(f"the {name} differs")
        else:
            words.append(f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} here")
    return ", ".join(words)


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        result |= _flat(item) if isinstance(item, dict) else {key: item}
    return result


def folder_digest(folder: Path) -> str:
    """Hashes a checkpoint's files: names, sizes and contents.

    Of a large file, 256 evenly spread pieces are read: reading everything takes as long as loading
    the model, and further training changes weights everywhere."""
    digest = hashlib.sha256()
    with naming(folder, "cannot be read"):
        for path in sorted(folder.iterdir()):
            if path.suffix in MODEL_FILES and path.is_file():
                digest.update(os.fsencode(path.name) + f"\n{path.stat().st_size}\n".encode())
                for piece in sampled(path, SAMPLES):
                    digest.update(piece)
    return digest.hexdigest()


class ShardFolder:
    """The folder of a job, created if needed.

    Args:
      file: the file into which they are merged at the end; None if they stay.
      overwrite: whether another job may be replaced.

    Raises:
      InputError: the folder or the file belongs to another job, is something else, or cannot be
        written.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        shards: Sequence[Shard],
        *,
        file: Path | None = None,
        overwrite: bool = False,
    ):
        self.folder, self.identity, self.shards, self.file = folder, identity, shards, file
        self.parts = folder / PARTS
        self._job = {"wedlm_generate": FORMAT, **identity}
        with naming(folder):
            folder.mkdir(exist_ok=True)
            with alone(folder):
                self._take_folder(overwrite)

    def name(self, shard: Shard) -> str:
        return _name(shard, len(self.shards))

    def data_path(self, shard: Shard) -> Path:
        return self.folder / f"{self.name(shard)}{DATA}"

    def manifest_path(self, shard: Shard) -> Path:
        return self.folder / f"{self.name(shard)}{MANIFEST}"

    def finished(self) -> set[int]:
        """Returns the numbers of the finished shards."""
        return finished_shards(self.folder, self.shards)

    def is_finished(self, shard: Shard) -> bool:
        return self.manifest_path(shard).exists() and self.data_path(shard).exists()

    def kept_records(self, shards: Sequence[Shard]) -> int:
        """Counts the finished records of ``shards``."""
        done, parts = self.finished(), _part_records(self.parts, self._digest)
        return sum(
            shard.records if shard.number in done else parts.get(self.name(shard), 0)
            for shard in shards
        )

    @property
    def _digest(self) -> str:
        """Identifies the job in its part files."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def open(self, shard: Shard) -> PartFile | None:
        """Opens the part file of a shard; returns None if the shard is finished.

        Raises:
          InUse: another process is decoding it.
          InputError: another job has taken the folder.
        """
        self.check_owner()
        if self.is_finished(shard):
            return None
        self.make_parts()
        numbers = range(shard.first, shard.first + shard.records)
        header = {"job": self._digest, "shard": shard.number}
        part = PartFile(self.parts, self.name(shard), header, numbers)
        if self.is_finished(shard):  # it was finished in the meantime
            part.remove()
            return None
        return part

    def seal(self, shard: Shard, part: PartFile) -> None:
        """Turns a complete part file into a finished shard.

        Raises:
          InputError: another job has taken the folder, or it cannot be written.
        """
        assert part.is_whole, "records are missing"
        self.check_owner()
        self.make_parts()
        counts, digest, size = Counts(), hashlib.sha256(), 0
        with contextlib.ExitStack() as until_sealed:
            with written_beside(self.data_path(shard), self.parts) as out:
                for line in part.lines():
                    counts.count(json.loads(line))
                    digest.update(line + b"\n")
                    size += out.write(line + b"\n")
                # Before the file gets its name, which a shard of another job may have.
                until_sealed.enter_context(self.owned())
            manifest = {
                "shard": shard.number,
                "first_row": shard.first + 1,
                "counts": counts.as_json(),
                "bytes": size,
                "sha256": digest.hexdigest(),
                "job": self.identity,
            }
            write_json(self.manifest_path(shard), manifest, self.parts)
        part.remove()

    def manifests(self) -> Iterator[dict[str, Any]]:
        """Yields the manifests of all shards, in order.

        Raises:
          InputError: a manifest is missing, damaged, or belongs to another job.
        """

        def read(shard: Shard) -> dict[str, Any]:
            path = self.manifest_path(shard)
            try:
                manifest = json.loads(path.read_bytes())
                Counts(**manifest["counts"])
                of_this_job = manifest["job"] == self.identity
            except (OSError, ValueError, KeyError, TypeError):
                raise InputError(
                    f"{path}: cannot be read; remove it, and run the same command again"
                ) from None
            if not of_this_job:
                raise InputError(
                    f"{path}: belongs to another job; remove it, and run the same command again"
                )
            return manifest

        # Opening a file in a mounted bucket is slow.
        with ThreadPoolExecutor(READERS) as readers:
            yield from readers.map(read, self.shards)

    def drop_leftovers(self) -> None:
        """Removes what a finished job does not need: parts, the copy of a pipe, what was left half
        written, shards that were merged into a file, and those of a job that was here before, which
        are left if this job was killed as it began."""
        shards = {self.name(shard) for shard in self.shards if self.file is None}
        with naming(self.folder):
            for path in _ours(self.folder):
                name, _, end = path.name.partition(".")
                is_shard = name in shards and f".{end}" in (DATA, MANIFEST)
                if path.name not in (JOB, STATS) and not is_shard:
                    _remove(path)

    def make_parts(self) -> None:
        """Makes the folder of parts: another process may have finished the job and removed it."""
        with naming(self.parts):
            self.parts.mkdir(exist_ok=True)

    def release(self) -> None:
        """Gives up the folder if it holds neither records of the job nor the copy of a pipe, and no
        other process works on it."""
        with naming(self.folder), alone(self.folder):
            if (
                read_job(self.folder) != self._job
                or _kept_of_another(self.folder)
                or any_in_use(self.parts)
                or (self.folder / STATS).exists()
                or any(self.folder.glob(f"{SPOOL}*"))
            ):
                return
            for path in [*_replaceable(self.folder), self.folder / JOB]:
                _remove(path)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Keeps other jobs from taking the folder, unless its file system has no locks.

        Raises:
          InputError: one has taken it.
        """
        with naming(self.folder), alone(self.folder):
            self.check_owner()
            yield

    def check_owner(self) -> None:
        """Checks that no other job has taken the folder, with ``overwrite``.

        Raises:
          InputError: one has.
        """
        found = read_job(self.folder)
        if found is None:  # another process of this job has released it, or somebody removed it
            with naming(self.folder):
                self.folder.mkdir(exist_ok=True)
            if create_json(self.folder / JOB, self._job):
                return
            found = read_job(self.folder)
        if found == self._job:
            return
        raise InputError(
            f"{self.folder}: another job has taken this folder since ({self._unlike(found)})"
        )

    def _unlike(self, found: dict[str, Any] | None) -> str:
        theirs = dict(found or {})
        if theirs.pop("wedlm_generate", None) != FORMAT:
            return (
                "it was started by another version of wedlm, which counts forwards differently; "
                "finish it with that version"
            )
        return differences(self.identity, theirs)

    def _take_folder(self, overwrite: bool) -> None:
        """Claims the folder: of several jobs that begin at once, only one gets it."""
        found = read_job(self.folder)
        if found is None:
            names = os.listdir(self.folder)
            if other := sorted(n for n in names if not (OURS.fullmatch(n) or n.startswith("."))):
                raise InputError(
                    f"{self.folder}: expected a new folder or a job's, but it contains {other[0]}"
                )
            if not overwrite:
                self._refuse_to_replace(None)
            # Listed before the claim: other hosts of this job write to the folder after it.
            old = _replaceable(self.folder)
            if create_json(self.folder / JOB, self._job):
                for path in old:
                    _remove(path)
                return
            found = read_job(self.folder)
        if found == self._job:
            return
        if not overwrite:
            self._refuse_to_replace(found)
        for path in _replaceable(self.folder):
            _remove(path)
        write_json(self.folder / JOB, self._job, self.folder)

    def _refuse_to_replace(self, found: dict[str, Any] | None) -> None:
        """Refuses to replace the records of another job, or a job that may be running."""
        check_file_is_new(self.file, found)
        merged = self.file is not None and self.file.exists()
        kept = "finished records" if merged else _kept_of_another(self.folder)
        if kept:
            raise InputError(
                f"{self.file if merged else self.folder}: holds {kept} of another job "
                f"({self._unlike(found)}); choose another output, or delete them with --overwrite"
            )
        if found is not None and not (self.folder / STATS).exists():
            raise InputError(
                f"{self.folder}: another job has begun here ({self._unlike(found)}) and has no "
                "records yet; choose another output, or use --overwrite if it is no longer running"
            )


def check_file_is_new(file: Path | None, job: dict[str, Any] | None) -> None:
    """Refuses an output file that exists but was not written by a job (`read_job`)."""
    if file is not None and file.exists() and job is None:
        raise InputError(
            f"{file}: exists, but was not written by a job; choose another output, or replace it "
            "with --overwrite"
        )


def finished_shards(folder: Path, shards: Sequence[Shard]) -> set[int]:
    """Returns the numbers of the finished shards in ``folder``, which need not exist."""
    names: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        names.update(os.listdir(folder))
    return {
        shard.number
        for shard in shards
        if {f"{_name(shard, len(shards))}{end}" for end in (MANIFEST, DATA)} <= names
    }


def _name(shard: Shard, count: int) -> str:
    return f"rows-{shard.number:05}-of-{count:05}"


def read_job(folder: Path) -> dict[str, Any] | None:
    """Reads `JOB`; returns None if the file does not exist."""
    path = folder / JOB
    for attempt in range(ATTEMPTS):
        try:
            job = json.loads(path.read_bytes())
            break
        except FileNotFoundError:
            return None
        except OSError as error:
            raise file_error(path, "cannot be read", error) from None
        except ValueError:
            # On a file system without links it may be half-written.
            if attempt + 1 < ATTEMPTS:
                time.sleep(0.2)
                continue
            raise InputError(f"{path}: cannot be read; choose another output") from None
    if not isinstance(job, dict) or "wedlm_generate" not in job:
        raise InputError(f"{path}: not written by wedlm generate; choose another output")
    return job


def _part_records(parts: Path, job: str | None = None) -> dict[str, int]:
    """Counts the records of each shard in the part files of a job, or of any, each record once. A
    process of another job may have left some when this one took the folder."""
    found: dict[str, set[int]] = {}
    for path in parts.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            header = parsed_line(file.readline())
            if job is not None and not (isinstance(header, dict) and header.get("job") == job):
                continue
            numbers = found.setdefault(path.name.partition(".")[0], set())
            numbers.update(number for number, _ in whole_records(file))
    return {name: len(numbers) for name, numbers in found.items()}


def _kept_of_another(folder: Path) -> str:
    """Describes what would be deleted: "3 shards and 40 records", or nothing."""
    shards = len(list(folder.glob(f"rows-*{MANIFEST}")))
    records = sum(_part_records(folder / PARTS).values())
    words = [counted(n, what) for n, what in ((shards, "shard"), (records, "record")) if n]
    return " and ".join(words)


def _ours(folder: Path) -> list[Path]:
    return [folder / name for name in os.listdir(folder) if OURS.fullmatch(name)]


def _replaceable(folder: Path) -> list[Path]:
    """Lists the files of another job, without copies of pipes, which may be this job's."""
    return [path for path in _ours(folder) if not path.name.startswith((JOB, SPOOL))]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
