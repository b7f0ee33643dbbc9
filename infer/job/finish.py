"""Finishes a job: merges the shards into one file if asked to, and writes `stats.json`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from infer.job.counts import Counts
from infer.job.input import COPY_BYTES
from infer.job.result_record import writable
from infer.job.shard_folder import STATS, ShardFolder
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import naming, write_json, written_beside


def finish(folder: ShardFolder, output: Path | None, run: dict[str, Any]) -> Counts:
    """Finishes a job whose shards are all there. Doing it twice does no harm.

    Args:
      output: a file for all records, which replaces the shards; None keeps them.
      run: what `STATS` says about the run that finished the job.

    Returns:
      sums over all records.

    Raises:
      InputError: a shard is not what its manifest says, or the output cannot be written.
    """
    manifests = list(folder.manifests())
    counts = sum((Counts(**manifest["counts"]) for manifest in manifests), Counts())
    stats: dict[str, Any] = {
        **counts.as_json(),
        "tokens_per_forward": round(counts.tokens_per_forward, 4),
        "p_cache": round(counts.p_cache, 4),
        "shards": len(manifests),
        "last_run": run,
    }
    if output is not None:
        stats["output"] = _put_together(folder, manifests, output)
    write_json(folder.folder / STATS, stats, folder.folder)
    if output is not None:
        folder.drop_shards()
    else:
        folder.drop_parts()
    return counts


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
    folder: ShardFolder, manifests: list[dict[str, Any]], output: Path
) -> dict[str, Any]:
    """Writes all records into one file; returns its name, size and digest."""
    whole, size = hashlib.sha256(), 0
    with written_beside(output, folder.parts) as out:
        for shard, manifest in zip(folder.shards, manifests, strict=True):
            path, digest = folder.data_path(shard), hashlib.sha256()
            with naming(path), path.open("rb") as records:
                while block := records.read(COPY_BYTES):
                    digest.update(block)
                    whole.update(block)
                    size += out.write(block)
            if digest.hexdigest() != manifest["sha256"]:
                raise InputError(
                    f"{path}: does not match {folder.manifest_path(shard).name}; remove both, and "
                    "run the same command again"
                )
    return {"name": writable(output.name), "bytes": size, "sha256": whole.hexdigest()}
