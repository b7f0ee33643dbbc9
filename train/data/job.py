"""`wedlm tokenize` without its command line: files into a folder of packed rows.

Worker processes read and tokenise chunks; this process packs the samples in the order of the
input and writes. So the output is the same, byte for byte, for any number of workers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any, Protocol

from train.data.chunks import RecordChunk, chunks, find_input, input_size
from train.data.manifest import (
    AddedTokens,
    DataShard,
    Manifest,
    read_manifest,
    tokenizer_fingerprint,
)
from train.data.parts import MALFORMED, PART, PartCounts, PartFolders, cut_into_parts
from train.data.samples import ChunkSamples, SampleMaker, SampleOptions, load_tokenizer
from train.data.shards import ShardWriter, encode_row
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import replacing, write_json
from wedlm_jax.host.processes import Host
from wedlm_jax.host.storage import folder_of_this_machine
from wedlm_jax.packing import TokenisedSample, blocks_to_predict, pack
from wedlm_jax.records.files import RecordFile

SORTED_SAMPLES = 1024
"""So many samples at a time are packed longest first, which fills rows better than their own
order: 99 % against 96 to 98 % of documents' rows. A run reads rows shuffled, anyway."""

OPEN_ROWS = 512
"""Rows that packing keeps open at a time: memory and time against fill."""


@dataclasses.dataclass(frozen=True)
class TokeniseOptions:
    """Input, output and options of a tokenising job.

    Attributes:
      inputs: files and folders.
      output: folder to make; must not exist, or be empty.
      block_size: B; samples begin at multiples of it.
      samples: what decides the samples, the row length among it.
      workers: processes that read and tokenise; 0: this one does.
      fail_fast: stop at the first malformed record.
      shard_rows: rows in a file of the output.
      host: which of several hosts, that see the same files, this is.
    """

    inputs: tuple[str, ...]
    output: str
    block_size: int
    samples: SampleOptions
    workers: int = 0
    fail_fast: bool = False
    shard_rows: int = 32_768
    host: Host = dataclasses.field(default_factory=Host)


class Watcher(Protocol):
    """Is told how far the job is, after each chunk."""

    def progress(self, bytes_read: int, bytes_total: int, tokens: int) -> None: ...


class Progress:
    """Reports how far this host is, over all of its parts.

    Args:
      watcher: informed of progress.
      total: bytes of the parts.
    """

    def __init__(self, watcher: Watcher, total: int):
        self._watcher, self._total = watcher, total
        self._bytes = self._tokens = 0

    def add(self, bytes_read: int, tokens: int = 0) -> None:
        self._bytes, self._tokens = self._bytes + bytes_read, self._tokens + tokens
        self._watcher.progress(self._bytes, self._total, self._tokens)


def tokenise(options: TokeniseOptions, watcher: Watcher) -> Manifest | None:
    """Makes the folder of packed rows, whole or not at all, and goes on with what an earlier
    attempt, or another host, has made of it.

    Returns:
      what its `dataset.json` says; None on a host other than the first, which has made its parts.

    Raises:
      InputError: options that do not fit, an input or tokenizer that cannot be read, no usable
        record, or, with ``fail_fast``, the first malformed one.
    """
    check_options(options)
    files = find_input(options.inputs).files
    tokenizer = load_tokenizer(Path(options.samples.tokenizer))
    fingerprint = tokenizer_fingerprint(tokenizer)
    parts = cut_into_parts(files)
    folders = PartFolders(Path(options.output), _plan(options, parts, fingerprint), len(parts))
    host = options.host
    own = range(host.index, len(parts), host.count)
    progress = Progress(watcher, sum(input_size(file) for n in own for file in parts[n]))
    try:
        for number in own:
            if number in folders.missing():
                added = AddedTokens(tokenizer)
                _make_part(options, parts[number], folders.part(number), added, progress)
            else:
                progress.add(sum(map(input_size, parts[number])))
    except BaseException:
        if host.count == 1:
            folders.remove_if_empty()
        raise
    if host.index:
        return None
    folders.wait(print)
    try:
        folders.finish(functools.partial(_manifest, options, fingerprint))
    except NoRows:
        shutil.rmtree(folders.folder, ignore_errors=True)
        raise
    return read_manifest(Path(options.output))


class NoRows(InputError):
    """Raised when the input has no usable record."""


def _make_part(
    options: TokeniseOptions,
    files: Sequence[RecordFile],
    part: Path,
    added: AddedTokens,
    progress: Progress,
) -> None:
    """Tokenises and packs some files into a folder of shards, `MALFORMED` and `PART`."""
    counts, row_length = PartCounts(), options.samples.row_length
    with replacing(part) as folder:
        writer = ShardWriter(folder, options.shard_rows)
        with (folder / MALFORMED).open("w", encoding="utf-8") as named:
            samples = _longest_first(_samples(options, files, counts, named, progress))
            for members in pack(
                samples, row_length=row_length, block_size=options.block_size, open_rows=OPEN_ROWS
            ):
                writer.write(encode_row(members))
                counts.note_row(blocks_to_predict(members, options.block_size))
                for sample in members:
                    added.count(sample.tokens)
        counts.added_tokens = added.by_id()
        shards, counts.content = writer.finish()
        counts.shards = [dataclasses.asdict(shard) for shard in shards]
        write_json(folder / PART, dataclasses.asdict(counts))


def _manifest(
    options: TokeniseOptions, fingerprint: str, counts: PartCounts, shards: list[DataShard]
) -> Manifest:
    if not counts.rows:
        raise NoRows(_nothing(counts))
    row_length = options.samples.row_length
    return Manifest(
        row_length=row_length,
        block_size=options.block_size,
        tokenizer=fingerprint,
        records=counts.records,
        samples=counts.samples,
        rows=counts.rows,
        tokens=counts.tokens,
        trainable_tokens=counts.trainable,
        fill=round(counts.tokens / (counts.rows * row_length), 6),
        malformed=counts.malformed,
        reasons=dict(sorted(counts.reasons.items())),
        made_with=_made_with(options),
        trainable_blocks=counts.trainable_blocks,
        most_trainable_blocks=counts.most_trainable_blocks,
        added_tokens=counts.added_tokens,
        unread_keys=counts.unread_keys,
        turns=counts.turns,
        changed_turns=counts.changed_turns,
        first_changed=counts.first_changed,
        typed=counts.typed,
        turn_end=SampleMaker(options.samples).chat.turn_end if counts.turns else None,
        content=counts.content,
        shards=shards,
    )


def _plan(
    options: TokeniseOptions, parts: Sequence[Sequence[RecordFile]], fingerprint: str
) -> dict[str, Any]:
    """Returns all that decides what the parts hold."""
    return {
        "tokenizer": fingerprint,
        "row_length": options.samples.row_length,
        "block_size": options.block_size,
        "shard_rows": options.shard_rows,
        "made_with": _made_with(options),
        # A part that an earlier version left has not counted all that is counted now.
        "counts": [field.name for field in dataclasses.fields(PartCounts)],
        "parts": [[[file.shown, input_size(file)] for file in files] for files in parts],
    }


def check_options(options: TokeniseOptions) -> None:
    """Refuses sizes that do not fit together, and an output that is there already."""
    least = {
        "--row-length": (options.samples.row_length, 1),
        "--block-size": (options.block_size, 1),
        "--end-tokens": (options.samples.end_tokens, 0),
        "--workers": (options.workers, 0),
        "--rows-per-shard": (options.shard_rows, 1),
    }
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise InputError(f"{name} must be at least {smallest}, not {value}")
    if options.samples.row_length % options.block_size:
        raise InputError(
            f"--row-length {options.samples.row_length} is not a multiple of "
            f"--block-size {options.block_size}"
        )
    output = folder_of_this_machine(options.output, "what is tokenised")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: is there already; remove it, or name another folder")


def _samples(
    options: TokeniseOptions,
    files: Sequence[RecordFile],
    counts: PartCounts,
    named: IO[str],
    progress: Progress,
) -> Iterator[TokenisedSample]:
    """Yields all samples in order, and writes down what is malformed on the way."""
    stream = (chunk for file in files for chunk in chunks(file))
    for chunk, result in _results(options, stream):
        for what in result.malformed:
            if options.fail_fast:
                raise InputError(str(what))
            named.write(json.dumps(dataclasses.asdict(what), ensure_ascii=False) + "\n")
            counts.note(what)
        counts.records += result.records
        counts.note_unread(result.unread)
        counts.turns += result.turns
        counts.changed_turns += result.changed_turns
        counts.typed += result.typed
        counts.first_changed = counts.first_changed or result.first_changed
        for sample in result.samples:
            counts.samples += 1
            counts.tokens += len(sample.tokens)
            counts.trainable += int(sample.trainable.sum())
            yield sample
        progress.add(chunk.bytes_read, sum(len(sample.tokens) for sample in result.samples))


def _longest_first(samples: Iterator[TokenisedSample]) -> Iterator[TokenisedSample]:
    while window := list(itertools.islice(samples, SORTED_SAMPLES)):
        yield from sorted(window, key=lambda sample: -len(sample.tokens))


def _results(
    options: TokeniseOptions, stream: Iterator[RecordChunk]
) -> Iterator[tuple[RecordChunk, ChunkSamples]]:
    """Yields each chunk with its samples, in order; only a few chunks are in progress at a time."""
    if not options.workers:
        maker = SampleMaker(options.samples)
        for chunk in stream:
            yield chunk, maker.make(chunk)
        return
    # Spawned, not forked: the tokenizer has threads of its own.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, context, initializer=_start_worker)
    waiting: collections.deque[tuple[RecordChunk, Future[ChunkSamples]]] = collections.deque()
    try:
        for chunk in stream:
            waiting.append((chunk, pool.submit(_make, options.samples, chunk)))
            if len(waiting) > 4 * options.workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        shown = waiting[0][0].file.shown if waiting else "input"
        raise InputError(
            f"{shown}: a worker process died, perhaps out of memory; use fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@functools.cache
def _maker(options: SampleOptions) -> SampleMaker:
    return SampleMaker(options)


def _make(options: SampleOptions, chunk: RecordChunk) -> ChunkSamples:
    """Makes samples in a worker process, which makes its tokenizer once."""
    return _maker(options).make(chunk)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the job
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _nothing(counts: PartCounts) -> str:
    if not counts.malformed:
        return "the input has no records"
    worst = max(counts.reasons, key=lambda reason: counts.reasons[reason]["records"])
    return (
        f"no record of {counts.records:,} can be used; most often: {worst}, "
        f"as in {counts.reasons[worst]['first'][0]}"
    )


def _made_with(options: TokeniseOptions) -> dict[str, Any]:
    """Returns the settings that decided the rows; not the folders' names, which may change."""
    settings = dataclasses.asdict(options.samples)
    for name in ("tokenizer", "row_length"):
        del settings[name]
    return settings
