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
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from train.data.chunks import Malformed, RecordChunk, chunks, find_input
from train.data.manifest import Manifest, tokenizer_fingerprint, write_manifest
from train.data.row_codec import encode_row
from train.data.samples import ChunkSamples, SampleMaker, SampleOptions, load_tokenizer
from train.data.shards import ShardWriter
from wedlm_jax.atomic import replacing
from wedlm_jax.errors import InputError
from wedlm_jax.packing import TokenisedSample, pack
from wedlm_jax.records.files import RecordFile, file_size
from wedlm_jax.storage import folder_of_this_machine

MALFORMED = "malformed.jsonl"
SORTED_SAMPLES = 1024
"""So many samples at a time are packed longest first, which fills rows better than their own
order: 99 % against 96 to 98 % of documents' rows. A run reads rows shuffled, anyway."""

OPEN_ROWS = 512
"""Rows that packing keeps open at a time: memory and time against fill."""

FIRST_NAMED = 5
"""Malformed records that the manifest names for each reason."""


@dataclasses.dataclass(frozen=True)
class TokeniseOptions:
    """What to make of what.

    Attributes:
      inputs: files and folders.
      output: folder to make; must not exist, or be empty.
      block_size: B; samples begin at multiples of it.
      samples: what decides the samples, the row length among it.
      workers: processes that read and tokenise; 0: this one does.
      fail_fast: stop at the first malformed record.
      shard_rows: rows in a file of the output.
    """

    inputs: tuple[str, ...]
    output: str
    block_size: int
    samples: SampleOptions
    workers: int = 0
    fail_fast: bool = False
    shard_rows: int = 32_768


class Watcher(Protocol):
    """Is told how far the job is, after each chunk."""

    def progress(self, bytes_read: int, bytes_total: int, tokens: int) -> None: ...


class AddedTokens:
    """Counts the tokens that ordinary text is not made of: those added to a tokenizer, and ids that
    it does not have."""

    def __init__(self, tokenizer: Tokenizer):
        ordinary = set(tokenizer.get_vocab(with_added_tokens=True).values())
        ordinary -= set(tokenizer.get_added_tokens_decoder())
        self._ordinary = np.zeros(max(ordinary, default=0) + 2, bool)  # the last: ids beyond
        self._ordinary[list(ordinary)] = True
        self._counts: collections.Counter[int] = collections.Counter()

    def count(self, tokens: np.ndarray) -> None:
        """Takes in the tokens ``[L]`` of a sample."""
        ordinary = self._ordinary[np.minimum(tokens, len(self._ordinary) - 1)]
        self._counts.update(tokens[~ordinary].tolist())

    def by_id(self) -> dict[str, int]:
        """Returns the counts, the smallest id first."""
        return {str(token): count for token, count in sorted(self._counts.items())}


@dataclasses.dataclass
class _RunningCounts:
    """Grows while samples stream into rows."""

    added: AddedTokens
    records: int = 0
    samples: int = 0
    rows: int = 0
    tokens: int = 0
    trainable: int = 0
    malformed: int = 0
    bytes_read: int = 0
    reasons: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def tokenise(options: TokeniseOptions, watcher: Watcher) -> Manifest:
    """Makes the folder of packed rows, whole or not at all.

    Returns:
      what its `dataset.json` says.

    Raises:
      InputError: options that do not fit, an input or tokenizer that cannot be read, no usable
        record, or, with ``fail_fast``, the first malformed one.
    """
    check_options(options)
    files = find_input(options.inputs).files
    tokenizer = load_tokenizer(Path(options.samples.tokenizer))
    fingerprint = tokenizer_fingerprint(tokenizer)
    counts, row_length = _RunningCounts(AddedTokens(tokenizer)), options.samples.row_length
    with replacing(options.output) as folder:
        writer = ShardWriter(folder, options.shard_rows)
        with (folder / MALFORMED).open("w", encoding="utf-8") as named:
            samples = _longest_first(_samples(options, files, counts, named, watcher))
            for members in pack(
                samples, row_length=row_length, block_size=options.block_size, open_rows=OPEN_ROWS
            ):
                writer.write(encode_row(members))
                counts.rows += 1
        if not counts.rows:
            raise InputError(_nothing(counts))
        shards, content = writer.finish()
        manifest = Manifest(
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
            added_tokens=counts.added.by_id(),
            content=content,
            shards=shards,
        )
        write_manifest(manifest, folder)
    return manifest


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
    counts: _RunningCounts,
    named: IO[str],
    watcher: Watcher,
) -> Iterator[TokenisedSample]:
    """Yields all samples in order, and writes down what is malformed on the way."""
    total = sum(map(file_size, files))
    stream = (chunk for file in files for chunk in chunks(file))
    for chunk, result in _results(options, stream):
        for what in result.malformed:
            if options.fail_fast:
                raise InputError(str(what))
            _note(what, counts, named)
        counts.records += result.records
        for sample in result.samples:
            counts.samples += 1
            counts.tokens += len(sample.tokens)
            counts.trainable += int(sample.trainable.sum())
            counts.added.count(sample.tokens)
            yield sample
        counts.bytes_read += chunk.bytes_read
        watcher.progress(counts.bytes_read, total, counts.tokens)


def _longest_first(samples: Iterator[TokenisedSample]) -> Iterator[TokenisedSample]:
    while window := list(itertools.islice(samples, SORTED_SAMPLES)):
        yield from sorted(window, key=lambda sample: -len(sample.tokens))


def _results(
    options: TokeniseOptions, stream: Iterator[RecordChunk]
) -> Iterator[tuple[RecordChunk, ChunkSamples]]:
    """Yields each chunk with its samples, in order; few chunks are under way at a time."""
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


def _note(what: Malformed, counts: _RunningCounts, named: IO[str]) -> None:
    named.write(json.dumps(dataclasses.asdict(what), ensure_ascii=False) + "\n")
    counts.malformed += 1
    reason = counts.reasons.setdefault(what.reason, {"records": 0, "first": []})
    reason["records"] += 1
    if len(reason["first"]) < FIRST_NAMED:
        reason["first"].append(f"{what.file}:{what.line}" if what.line else what.file)


def _nothing(counts: _RunningCounts) -> str:
    if not counts.malformed:
        return "the input has no records"
    worst = max(counts.reasons, key=lambda reason: counts.reasons[reason]["records"])
    return (
        f"none of the {counts.records} records can be used; most often: {worst}, "
        f"as in {counts.reasons[worst]['first'][0]}"
    )


def _made_with(options: TokeniseOptions) -> dict[str, Any]:
    """Returns the settings that decided the rows; not the folders' names, which may change."""
    settings = dataclasses.asdict(options.samples)
    for name in ("tokenizer", "row_length"):
        del settings[name]
    return settings
