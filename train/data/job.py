"""`wedlm tokenize` without its command line: turns files into a folder of packed rows.

Worker processes read and tokenise chunks; this process packs the samples in the order of the input
and writes them. So the output is the same, byte for byte, for any number of workers.

A job is cut into parts, so that it can resume and hosts can share it. The parts depend only on the
input: consecutive files, about `PART_BYTES` together. Each part is tokenised and packed on its own,
in a folder that appears whole, so any host can make any part at any time with the same result.
Until the end all parts are in a hidden folder next to the output.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any

from train.data.chunks import RecordChunk, chunks, find_input, input_size
from train.data.samples import ChunkSamples, SampleMaker, SampleOptions
from train.data.shards import (
    MANIFEST,
    Counts,
    DataShard,
    Manifest,
    ShardWriter,
    encode_row,
    read_manifest,
    tokenizer_fingerprint,
    write_manifest,
)
from train.data.tokenizer import load_tokenizer
from wedlm_jax.errors import InputError, file_error
from wedlm_jax.host.atomic import (
    create_json,
    part_folder,
    replacing,
    sync_path,
    write_json,
    written_beside,
)
from wedlm_jax.host.processes import Host
from wedlm_jax.host.storage import folder_of_this_machine
from wedlm_jax.packing import TokenisedSample, blocks_to_predict, pack
from wedlm_jax.records.files import RecordFile

PART_BYTES = 2**30
MALFORMED = "malformed.jsonl"
PLAN, PART = "plan.json", "part.json"
POLL_S = 2.0

SORTED_SAMPLES = 1024
"""How many samples at a time are packed longest first, which fills rows better than the order of
the input: 99 % against 96 to 98 % for documents. A run shuffles the rows anyway."""

OPEN_ROWS = 512
"""The number of rows that packing keeps open at a time: more cost memory and time, and fill rows
better."""


@dataclasses.dataclass(frozen=True)
class TokeniseOptions:
    """Input, output and options of a tokenising job.

    Attributes:
      inputs: files and folders.
      output: folder to create; it must not exist, or be empty.
      block_size: B; samples begin at multiples of it.
      samples: options that determine the samples, including the row length.
      workers: number of processes that read and tokenise; 0: this process does.
      fail_fast: whether to stop at the first malformed record.
      shard_rows: rows per output file.
      host: which of the hosts that share the job this is; all see the same files.
    """

    inputs: tuple[str, ...]
    output: str
    block_size: int
    samples: SampleOptions
    workers: int = 0
    fail_fast: bool = False
    shard_rows: int = 32_768
    host: Host = dataclasses.field(default_factory=Host)


Progress = Callable[[int, int, int], None]
"""Called after each chunk with the bytes of the input read so far, their total, and the number of
tokens made."""


def tokenise(options: TokeniseOptions, progress: Progress) -> Manifest | None:
    """Makes the folder of packed rows, whole or not at all, from the parts that earlier attempts or
    other hosts have made, and those still missing.

    Returns:
      the content of its `dataset.json`; None on hosts other than the first, when their parts are
      made.

    Raises:
      InputError: options that do not fit, an input or tokenizer that cannot be read, no usable
        record, or, with ``fail_fast``, the first malformed one.
    """
    _check_options(options)
    files = find_input(options.inputs).files
    fingerprint = tokenizer_fingerprint(load_tokenizer(Path(options.samples.tokenizer)))
    parts = cut_into_parts(files)
    folders = PartFolders(Path(options.output), _plan(options, parts, fingerprint), len(parts))
    host = options.host
    own = range(host.index, len(parts), host.count)
    total = sum(input_size(file) for n in own for file in parts[n])
    read = made = 0

    def note(bytes_read: int, tokens: int = 0) -> None:
        nonlocal read, made
        read, made = read + bytes_read, made + tokens
        progress(read, total, made)

    try:
        for number in own:
            if number in folders.missing():
                _make_part(options, parts[number], folders.part(number), note)
            else:
                note(sum(map(input_size, parts[number])))
    except BaseException:
        if host.count == 1:
            folders.remove_if_empty()
        raise
    if host.index:
        return None
    folders.wait(print)
    folders.finish(functools.partial(_manifest, options, fingerprint))
    return read_manifest(Path(options.output))


def _make_part(
    options: TokeniseOptions, files: Sequence[RecordFile], part: Path, note: Callable[..., None]
) -> None:
    """Tokenises and packs some files into a folder of shards, `MALFORMED` and `PART`."""
    counts, row_length = Counts(), options.samples.row_length
    with replacing(part) as folder:
        writer = ShardWriter(folder, options.shard_rows)
        with (folder / MALFORMED).open("w", encoding="utf-8") as named:
            samples = _longest_first(_samples(options, files, counts, named, note))
            for members in pack(
                samples, row_length=row_length, block_size=options.block_size, open_rows=OPEN_ROWS
            ):
                writer.write(encode_row(members))
                blocks = blocks_to_predict(members, options.block_size)
                counts.add(Counts(rows=1, trainable_blocks=blocks, most_trainable_blocks=blocks))
        shards, content = writer.finish()
        described = [dataclasses.asdict(shard) for shard in shards]
        part_of = {"counts": dataclasses.asdict(counts), "content": content, "shards": described}
        write_json(folder / PART, part_of)


def _manifest(
    options: TokeniseOptions,
    fingerprint: str,
    counts: Counts,
    shards: list[DataShard],
    content: str,
) -> Manifest:
    row_length = options.samples.row_length
    counted = dataclasses.asdict(counts)
    counted["reasons"] = dict(sorted(counts.reasons.items()))
    return Manifest(
        row_length=row_length,
        block_size=options.block_size,
        tokenizer=fingerprint,
        fill=round(counts.tokens / (counts.rows * row_length), 6),
        made_with=_made_with(options),
        turn_end=SampleMaker(options.samples).chat.turn_end if counts.turns else None,
        content=content,
        shards=shards,
        **counted,
    )


def _plan(
    options: TokeniseOptions, parts: Sequence[Sequence[RecordFile]], fingerprint: str
) -> dict[str, Any]:
    """Returns everything that determines the content of the parts."""
    return {
        "tokenizer": fingerprint,
        "row_length": options.samples.row_length,
        "block_size": options.block_size,
        "shard_rows": options.shard_rows,
        "made_with": _made_with(options),
        # Parts of an earlier version do not have all of today's counts.
        "counts": [field.name for field in dataclasses.fields(Counts)],
        "parts": [[[file.shown, input_size(file)] for file in files] for files in parts],
    }


def _check_options(options: TokeniseOptions) -> None:
    """Refuses sizes that do not fit together, and an output that already exists."""
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
        raise InputError(f"{output}: already exists; remove it, or name another folder")


def _samples(
    options: TokeniseOptions,
    files: Sequence[RecordFile],
    counts: Counts,
    named: IO[str],
    note: Callable[..., None],
) -> Iterator[TokenisedSample]:
    """Yields all samples in order; writes malformed records to ``named``."""
    stream = (chunk for file in files for chunk in chunks(file))
    for chunk, result in _results(options, stream):
        for what in result.malformed:
            if options.fail_fast:
                raise InputError(str(what))
            named.write(json.dumps(dataclasses.asdict(what), ensure_ascii=False) + "\n")
        counts.add(result.counts)
        yield from result.samples
        note(chunk.bytes_read, result.counts.tokens)


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
    """Makes samples in a worker process, which loads its tokenizer once."""
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


def _made_with(options: TokeniseOptions) -> dict[str, Any]:
    """Returns the settings that determined the rows, without folder names, which may change."""
    settings = dataclasses.asdict(options.samples)
    for name in ("tokenizer", "row_length"):
        del settings[name]
    return settings


def cut_into_parts(files: Sequence[RecordFile]) -> list[list[RecordFile]]:
    """Cuts files, in order, into parts of at least `PART_BYTES`, except for the last."""
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
    """Manages the hidden folder with the parts of one output.

    Args:
      output: the folder to create.
      plan: everything that determines the parts, as JSON values; the same for all hosts and
        attempts.
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
                f"{self.folder}: was begun by a job with other settings or other input; if that "
                "job is no longer running, remove the folder to start over"
            )

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def missing(self) -> list[int]:
        """Lists the parts that are not made yet."""
        if (self.folder / MANIFEST).exists():
            return []
        return [n for n in range(self._count) if not (self.part(n) / PART).exists()]

    def wait(self, say: Callable[[str], None]) -> None:
        """Returns when all parts are there."""
        told = None
        while missing := self.missing():
            if len(missing) != told:
                told = len(missing)
                say(f"waiting for other hosts to make {told} of {self._count} parts")
            time.sleep(POLL_S)

    def remove_if_empty(self) -> None:
        """Removes the folder if no part was made."""
        if len(self.missing()) == self._count:
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, describe: Callable[[Counts, list[DataShard], str], Manifest]) -> None:
        """Makes the output from the parts, which must all be there. If killed halfway, it can be
        called again.

        Raises:
          InputError: the parts have no rows; they are removed.
        """
        if not (self.folder / MANIFEST).exists():
            total, shards, content = self._gather()
            if not shards:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise InputError(_nothing(total))
            write_manifest(describe(total, shards, content), self.folder)
        for number in range(self._count):
            shutil.rmtree(self.part(number), ignore_errors=True)
        (self.folder / PLAN).unlink(missing_ok=True)
        if self._output.exists():
            self._output.rmdir()  # it is empty
        os.rename(self.folder, self._output)
        sync_path(self._output.parent)

    def _gather(self) -> tuple[Counts, list[DataShard], str]:
        parts = [json.loads((self.part(n) / PART).read_text("utf-8")) for n in range(self._count)]
        total = Counts()
        for part in parts:
            total.add(Counts(**part["counts"]))
        digests = [part["content"] for part in parts if part["shards"]]
        whole = hashlib.sha256("".join(digests).encode()).hexdigest()
        content = digests[0] if len(digests) == 1 else whole
        every = [(n, shard) for n, part in enumerate(parts) for shard in part["shards"]]
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
        return total, shards, content


def _nothing(counts: Counts) -> str:
    if not counts.malformed:
        return "the input has no records"
    worst, found = max(counts.reasons.items(), key=lambda item: item[1]["records"])
    detail = f" ({found['detail']})" if found["detail"] else ""
    where = f"{found['first'][0]}{detail}"
    if counts.records == 1:
        return f"the only record cannot be used: {worst}, in {where}"
    return f"none of {counts.records:,} records can be used; most often: {worst}, as in {where}"
