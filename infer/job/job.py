"""Runs a job: one result for each record of the input, in a folder of shards or in one file. A job
that was stopped is resumed by the same command."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from infer.job.input import SPOOL, RecordIndex, Source, Workload, build_index, find_input, spool
from infer.job.prompt_record import hint_of
from infer.job.result_record import Counts, writable, write_results
from infer.job.shard_decoder import (
    GRACE_SECONDS,
    GracefulStop,
    JobProgress,
    JobStopped,
    NotEnoughMemory,
    decode_share,
)
from infer.job.shard_folder import (
    STATS,
    Identity,
    ShardFolder,
    check_file_is_new,
    identity_of,
    read_job,
)
from wedlm_jax.errors import (
    BAD_DATA,
    TERMINATED,
    BadData,
    InputError,
    StorageFailure,
    counted,
    exit_status,
    shortened,
)
from wedlm_jax.host.atomic import naming, write_json, written_beside
from wedlm_jax.host.processes import Host
from wedlm_jax.records.columns import Columns
from wedlm_jax.records.parquet import require_pyarrow

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams


SHARDS_SUFFIX = ".shards"
JSONL, PARQUET = ".jsonl", ".parquet"
OTHER_FILES = (".json", ".txt", ".csv", ".tsv", ".gz", ".zst")


@dataclasses.dataclass(frozen=True)
class Output:
    """The folder or file that ``--output`` names.

    Attributes:
      shown: as the user named it.
      folder: the folder of shards.
      file: the file into which they are merged at the end; None if the folder itself is the output.
    """

    shown: str
    folder: Path
    file: Path | None

    @property
    def is_parquet(self) -> bool:
        return self.file is not None and self.file.suffix.lower() == PARQUET

    def absolute(self) -> Output:
        """Returns the same output with absolute paths."""
        file = None if self.file is None else self.file.absolute()
        return dataclasses.replace(self, folder=self.folder.absolute(), file=file)


def find_output(name: str, source: Source) -> Output:
    """Returns the output at a path: a file if it ends in .jsonl or .parquet, otherwise a folder.

    Raises:
      InputError: it cannot be written, or would overwrite the input; or pyarrow is missing.
    """
    path = Path(name)
    if path.suffix.lower() in OTHER_FILES:
        raise InputError(f"{path}: expected a folder, or a .jsonl or .parquet file, as output")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: no such folder, {path.parent}")
    if path.suffix.lower() in (JSONL, PARQUET):
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: exists and is not a file")
        if path.suffix.lower() == PARQUET:
            require_pyarrow()
        output = Output(name, path.with_name(path.name + SHARDS_SUFFIX), path)
    else:
        output = Output(name, path, None)
    if output.folder.exists() and not output.folder.is_dir():
        raise InputError(f"{output.folder}: is a file; the output needs a folder of this name")
    _check_apart(output, source)
    return output


def _check_apart(output: Output, source: Source) -> None:
    for file in source.files:
        if output.file is not None and output.file.exists() and output.file.samefile(file.path):
            raise InputError(f"{output.file}: input and output are the same file")
        inside = output.folder.resolve() in file.path.resolve().parents
        if inside and not file.path.name.startswith(SPOOL):
            raise InputError(f"{file.shown}: the input is inside the output folder")
    for path in (output.file, output.folder):
        for folder in source.folders:
            if path is not None and folder.resolve() in (path.resolve(), *path.resolve().parents):
                raise InputError(f"{path}: the output is inside the input folder {folder}")


SHARD_SIZE = 1000
TELL_SECONDS = 5.0
"""Seconds between two progress messages of the first pass over the input."""


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of `wedlm generate` for a job.

    Attributes:
      inputs: files, folders, or one pipe.
      output: a folder, or a .jsonl or .parquet file.
      params, chat, prompt_token_ids: as in `Workload`.
      shard_size: records per shard; None takes that of the job in the output, or `SHARD_SIZE`.
      host: this process among those that share the job.
      fail_fast: whether a bad record refuses the job.
      overwrite: whether records of another job in the same output may be deleted.
      grace: seconds in which running sequences may finish after SIGTERM.
      max_errors: number of bad records that are accepted, see `JobProgress.check_errors`.
    """

    inputs: tuple[str, ...]
    output: str
    params: SamplingParams
    chat: bool = False
    prompt_token_ids: bool = False
    shard_size: int | None = None
    host: Host = dataclasses.field(default_factory=Host)
    fail_fast: bool = False
    overwrite: bool = False
    grace: float = GRACE_SECONDS
    max_errors: int | None = None


class Job:
    """Runs a job, from its options to its exit status."""

    def __init__(self, options: JobOptions):
        self.options = options
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.source = find_input(options.inputs)
        self.output = find_output(options.output, self.source)
        if not options.overwrite:
            check_file_is_new(self.output.file, read_job(self.output.folder))
        self.columns = Columns() if self.output.is_parquet else None
        self.folder: ShardFolder | None = None
        self._spooled: Path | None = None
        if self.source.pipe and options.host.count > 1:
            raise InputError(f"{self.source.pipe}: several hosts cannot read one pipe")
        if options.shard_size is not None and options.shard_size < 1:
            raise InputError(f"--shard-size: expected 1 or more, not {options.shard_size}")
        if options.max_errors is not None and options.max_errors < 0:
            raise InputError(f"--max-errors: expected 0 or more, not {options.max_errors}")

    def run(self, load: Callable[[], LLM]) -> int:
        """Decodes the remaining records, and returns the exit status.

        Args:
          load: loads the model; called after the input has been read once.

        Raises:
          InputError: the job cannot start or continue; finished records are kept.
        """
        return self.until_stopped(lambda stop: self._run(load, stop))

    def until_stopped(self, work: Callable[[GracefulStop], int]) -> int:
        """Runs ``work``; if SIGTERM or Ctrl-C stops it, reports what is kept."""
        with GracefulStop(self.options.grace) as stop:
            try:
                return work(stop)
            except JobStopped:
                self.say(f"stopped by SIGTERM: {self.kept()}")
                return TERMINATED
            except BadData as error:
                raise BadData(f"{error}; {self.kept()}") from None
            except KeyboardInterrupt as interrupt:
                self.say(f"{str(interrupt) or 'interrupted'}: {self.kept()}")
                return exit_status(interrupt)
            finally:
                if self.folder is None:
                    self._drop_spool()
                elif self.options.host.count == 1:
                    # A user who stops the job to correct an option can then run it again.
                    with contextlib.suppress(InputError, StorageFailure):
                        self.folder.release()

    def _run(self, load: Callable[[], LLM], stop: GracefulStop) -> int:
        workload = self.read_input()
        llm = load()
        if self.options.fail_fast:
            workload.check_all(llm)
        folder = self.open_folder(workload.index, identity_of(llm, workload))
        if (status := self.finished_status(folder)) is not None:
            return status
        host, most = self.options.host, self.options.max_errors
        try:
            progress = decode_share(llm, workload, folder, host, stop, most, self.console)
        except NotEnoughMemory as error:
            raise InputError(f"{error}; {self._kept_records(folder)}") from None
        return self.end(folder, progress)

    def read_input(self) -> Workload:
        """Reads the whole input once, and indexes its records."""
        files, started = self.source.files, time.monotonic()
        if self.source.pipe:
            before = {*self.output.folder.glob(f"{SPOOL}*")}
            files = (spool(self.source, self.output.folder),)
            if files[0].path not in before:
                self._spooled = files[0].path
        if self.source.others:
            count = counted(len(self.source.others), "file")
            self.say(f"{count} in the folders not read: neither .jsonl nor .parquet")
        told = started

        def tell(records: int) -> None:
            nonlocal told
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                self.say(f"reading the input: {records:,} records so far")

        index = build_index(files, self.shard_size(), tell, self.columns)
        if not index.records:
            raise InputError(f"{self.source.shown}: has no records")
        if extra := index.extra_keys:
            names = [shortened(name, 60) for name in extra]
            self.say(f"keys that are not read but copied to the output: {', '.join(names)}")
            for hint in filter(None, map(hint_of, names)):
                self.say(hint)
        if time.monotonic() - started >= TELL_SECONDS:
            self.say(
                f"{counted(index.records, 'record')} read in {time.monotonic() - started:.0f} s"
            )
        options = self.options
        return Workload(files, index, options.params, options.chat, options.prompt_token_ids)

    def open_folder(self, index: RecordIndex, identity: Identity) -> ShardFolder:
        self.folder = ShardFolder(
            self.output.folder,
            identity,
            index.shards,
            file=self.output.file,
            overwrite=self.options.overwrite,
        )
        return self.folder

    def finished_status(self, folder: ShardFolder) -> int | None:
        """Reports that the job is already finished, and returns its exit status; otherwise reports
        how many records are kept, and returns None."""
        counts = finished_before(folder)
        if counts:
            # A pipe's copy, or what a killed `finish` left. The file system may be read-only now.
            with folder.owned(), contextlib.suppress(InputError):
                folder.drop_leftovers()
            self.say(
                f"{self.output.shown} is already complete, with {counted(counts.rows, 'record')}"
            )
            return BAD_DATA if counts.all_bad else 0
        if folder.kept_records(folder.shards):
            self.say(f"resuming: {self._kept_records(folder)}")
        return None

    def end(self, folder: ShardFolder, progress: JobProgress) -> int:
        """Finishes the job if all its shards are complete, whichever process decoded them."""
        host = self.options.host
        with folder.owned():  # or what is there may be another job's
            missing = len(folder.shards) - len(folder.finished())
            # After counting: the process that finishes a job writes `STATS` before it removes
            # shards.
            counts = merged_before(folder)
            if counts is not None:
                # Another process finished the job while this one was decoding its last shards.
                folder.drop_leftovers()
        if counts is None and missing:
            who = f"{host} has done its share" if host.count > 1 else "this process is done"
            self.say(
                f"{who}; {missing:,} of {counted(len(folder.shards), 'shard')} still unfinished: "
                "other processes, or another run, will decode them"
            )
            return 0
        if counts is None:
            run = {"host": host.index, "hosts": host.count, **progress.as_json()}
            try:
                counts = finish(folder, run, self.columns)
            except InputError:
                # Another process may have merged and removed the shards at this very moment.
                counts = finished_before(folder)
                folder.check_owner()
                if counts is None:
                    raise
        self.say(self._summary(counts, progress))
        if counts.all_bad and progress.first_bad:
            self.say(
                f"all records are bad, such as {progress.first_bad}; "
                "correct the input, and run the job again with --overwrite"
            )
        return BAD_DATA if counts.all_bad else 0

    def _summary(self, counts: Counts, progress: JobProgress) -> str:
        """Summarizes a finished job in one line: its records, and the speed of its last run."""
        notes = []
        if progress.earlier:
            notes.append(f"{progress.earlier:,} from earlier runs")
        if counts.error_rows:
            notes.append(f"{counts.error_rows:,} bad, with an error instead of a result")
        noted = f" ({', '.join(notes)})" if notes else ""
        return (
            f"{self.output.shown}: {counted(counts.rows, 'record')}{noted}, "
            f"{progress.tokens:,} tokens{' by this run' if progress.earlier else ''} in "
            f"{progress.seconds:.1f} s ({progress.speed()}), "
            f"after {progress.compile_seconds:.1f} s of compiling"
        )

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def shard_size(self) -> int:
        """Returns the number of records per shard: as given, or that of the job in the output."""
        if self.options.shard_size is not None:
            return self.options.shard_size
        found = (read_job(self.output.folder) or {}).get("shard_size")
        return found if isinstance(found, int) and found > 0 else SHARD_SIZE

    def kept(self) -> str:
        if self.folder is None:
            return "nothing was decoded yet"
        return f"{self._kept_records(self.folder)}; the same command continues from there"

    def _kept_records(self, folder: ShardFolder) -> str:
        kept = folder.kept_records(folder.shards)
        return f"{kept:,} of {folder.identity['rows']:,} records are kept in {folder.folder}"

    def _drop_spool(self) -> None:
        """Removes the copy of a pipe that a refused job has made."""
        if self._spooled is not None:
            self._spooled.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.output.folder.rmdir()


def finish(folder: ShardFolder, run: dict[str, Any], columns: Columns | None = None) -> Counts:
    """Finishes a job with complete shards: merges them into its file, if it has one, writes
    `STATS`, and returns the sums over all records. It may run twice.

    Args:
      run: the entry in `STATS` about the run that finished the job.
      columns: as in `write_results`; None for JSONL.

    Raises:
      InputError: a shard does not match its manifest, or the output cannot be written.
    """
    manifests = list(folder.manifests())
    counts = _sum(manifests)
    folder.make_parts()
    stats: dict[str, Any] = {
        **counts.as_json(),
        "tokens_per_forward": round(counts.tokens_per_forward, 4),
        "p_cache": round(counts.p_cache, 4),
        "shards": len(manifests),
        "last_run": run,
    }
    if folder.file is not None:
        stats["output"] = _merged(folder, manifests, folder.file, columns)
    with folder.owned():
        write_json(folder.folder / STATS, stats, folder.folder)
        folder.drop_leftovers()
    return counts


def finished_before(folder: ShardFolder) -> Counts | None:
    """Returns the sums over all records if the job is finished and its output is still there."""
    counts = _counts_in_stats(folder)
    if counts is None or folder.file is not None:
        return counts
    if len(folder.finished()) < len(folder.shards):
        return None
    return counts if _sum(folder.manifests()) == counts else None


def merged_before(folder: ShardFolder) -> Counts | None:
    """Returns the sums over all records if the shards have been merged into one file."""
    return None if folder.file is None else _counts_in_stats(folder)


def _counts_in_stats(folder: ShardFolder) -> Counts | None:
    """Returns the sums that `STATS` holds; None without it, or if the output file is not the one
    that it describes."""
    try:
        stats = json.loads((folder.folder / STATS).read_bytes())
        if folder.file is None or folder.file.stat().st_size == stats["output"]["bytes"]:
            return Counts.from_json(stats)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # then the records are decoded again
    return None


def _sum(manifests: Iterable[dict[str, Any]]) -> Counts:
    return sum((Counts(**manifest["counts"]) for manifest in manifests), Counts())


def _merged(
    folder: ShardFolder,
    manifests: list[dict[str, Any]],
    output: Path,
    columns: Columns | None,
) -> dict[str, Any]:
    """Writes all records to one file; returns its name, size and digest."""
    with written_beside(output, folder.parts) as out:
        digested, lines = _Digested(out), _lines(folder, manifests)
        if columns is None:
            for line in lines:
                digested.write(line)
        else:
            write_results(digested, lines, columns)
    whole = digested.digest.hexdigest()
    return {"name": writable(output.name), "bytes": digested.size, "sha256": whole}


def _lines(folder: ShardFolder, manifests: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yields the records of the shards in order."""
    for shard, manifest in zip(folder.shards, manifests, strict=True):
        path = folder.data_path(shard)
        with naming(path), path.open("rb") as records:
            if hashlib.file_digest(records, "sha256").hexdigest() != manifest["sha256"]:
                raise InputError(
                    f"{path}: does not match {folder.manifest_path(shard).name}; remove both, and "
                    "run the same command again"
                )
            records.seek(0)
            yield from records


class _Digested(io.RawIOBase):
    """Computes size and digest of a file while it is written."""

    def __init__(self, file: IO[bytes]):
        self._file, self.size, self.digest = file, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        self.size += self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size
