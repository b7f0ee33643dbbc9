"""Finishes a job: puts the shards together into one file if asked to, and writes `stats.json`."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from infer.job.counts import Counts
from infer.job.input import COPY_BYTES
from infer.job.parquet_file import write_results
from infer.job.result_record import writable
from infer.job.shard_folder import STATS, ShardFolder
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import naming, write_json, written_beside
from wedlm_jax.records.columns import Columns


def finish(
    folder: ShardFolder,
    output: Path | None,
    run: dict[str, Any],
    columns: Columns | None = None,
) -> Counts:
    """Finishes a job whose shards are all there. Doing it twice does no harm.

    Args:
      output: a file for all records, which replaces the shards; None keeps them.
      run: what `STATS` says about the run that finished the job.
      columns: of ids and own keys where the file is Parquet; None for JSONL.

    Returns:
      sums over all records.

    Raises:
      InputError: a shard is not what its manifest says, or the output cannot be written.
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
    if output is not None:
        stats["output"] = _put_together(folder, manifests, output, columns)
    write_json(folder.folder / STATS, stats, folder.folder)
    if output is not None:
        folder.drop_shards()
    else:
        folder.drop_parts()
    return counts


def shards_finished(folder: ShardFolder) -> Counts | None:
    """Returns the sums over all records if a job without an output file is finished.

    Raises:
      InputError: a shard is not what its manifest says.
    """
    try:
        stats = json.loads((folder.folder / STATS).read_bytes())
        before = {name: stats[name] for name in Counts().as_json()}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(folder.finished()) < len(folder.shards):
        return None
    counts = _sum(folder.manifests())
    return counts if counts.as_json() == before else None


def _sum(manifests: Iterable[dict[str, Any]]) -> Counts:
    return sum((Counts(**manifest["counts"]) for manifest in manifests), Counts())


def finished_before(folder: ShardFolder, output: Path | None) -> Counts | None:
    """Returns the sums over all records if the job is finished and its output file is still
    there."""
    try:
        stats = json.loads((folder.folder / STATS).read_bytes())
        if output is not None and output.stat().st_size == stats["output"]["bytes"]:
            return Counts(**{name: stats[name] for name in Counts().as_json()})
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not finished, or its files are gone: then the records are decoded again
    return None


def _put_together(
    folder: ShardFolder,
    manifests: list[dict[str, Any]],
    output: Path,
    columns: Columns | None,
) -> dict[str, Any]:
    """Writes all records into one file; returns its name, size and digest."""
    with written_beside(output, folder.parts) as out:
        digested, blocks = _Digested(out), _blocks(folder, manifests)
        if columns is None:
            for block in blocks:
                digested.write(block)
        else:
            write_results(digested, blocks, columns)
    whole = digested.digest.hexdigest()
    return {"name": writable(output.name), "bytes": digested.size, "sha256": whole}


def _blocks(folder: ShardFolder, manifests: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yields the shards' contents in order, each ending with a newline.

    Raises:
      InputError: one is not what its manifest says.
    """
    for shard, manifest in zip(folder.shards, manifests, strict=True):
        path, digest = folder.data_path(shard), hashlib.sha256()
        with naming(path), path.open("rb") as records:
            while block := records.read(COPY_BYTES):
                digest.update(block)
                yield block
        if digest.hexdigest() != manifest["sha256"]:
            raise InputError(
                f"{path}: does not match {folder.manifest_path(shard).name}; remove both, and "
                "run the same command again"
            )


class _Digested(io.RawIOBase):
    """A file of which size and digest are taken while it is written."""

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
