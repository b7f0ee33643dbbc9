"""Writes a model as a Hugging Face checkpoint, a tensor at a time, host by host.

What a file holds is known before a value is read, so each is written from its start to its
end and nothing waits in memory: beyond the parameters themselves, a host holds one tensor.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from wedlm_jax.checkpoint.hf_folder import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    copy_tokenizer,
    write_config,
    write_stop_tokens,
)
from wedlm_jax.checkpoint.names import Entry, arrays_from_model, check_tensors, parameter_entries
from wedlm_jax.checkpoint.safetensors_file import (
    DeferredArray,
    bits,
    numpy_dtype,
    write_safetensors,
)
from wedlm_jax.config import ModelConfig, config_to_hf
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.atomic import part_folder
from wedlm_jax.host.processes import ALONE, Processes, jax_processes, replacing_together
from wedlm_jax.host.storage import as_path, is_remote
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked
from wedlm_jax.model.lora import adapter_of, merged_weight

SHARD_BYTES = 5 * 1000**3

PIECE_BYTES = 2**28
"""What each device holds for a moment, beside its own, of an array that several hosts share."""


def save_checkpoint(
    model: Transformer,
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: str | None = None,
    tokenizer_from: str | Path | None = None,
    raw_config: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes | None = None,
) -> None:
    """Writes a Hugging Face checkpoint folder: weights, ``config.json``, tokenizer files.

    The folder appears whole or not at all: files are written to one beside it, which
    then takes its name.

    Beyond the parameters a host holds one tensor. In a job of several processes all of them
    call this: each writes some of the files, process 0 the rest of the folder, and parameters
    that lie on several hosts are gathered tensor by tensor.

    Args:
      model: what to write, however it is sharded; adapters are merged.
      config: written as ``config.json``; normally ``model.config``.
      folder: must not exist, or hold an earlier checkpoint, which is replaced.
      dtype: "float32", "bfloat16" or "float16"; that of the parameters by default.
      tokenizer_from: a folder whose tokenizer files are copied.
      raw_config: written as ``config.json`` instead, as it stands.
      shard_bytes: a file holds at most this, but for a tensor that alone has more.
      processes: of the job; those of JAX by default.

    Raises:
      InputError: ``folder`` holds something else, the values do not fit ``dtype``, or the
        model's matrices are rounded.
    """
    np_dtype = numpy_dtype(dtype)
    require_replaceable(as_path(folder))
    processes = processes or jax_processes()
    entries = parameter_entries(model.config, stacked=are_stacked(model))
    arrays = arrays_from_model(model)
    if any(entry.path not in arrays for entry in entries):
        raise InputError(f"{folder}: the model's matrices are rounded; export it as it was before")
    scale = 0.0 if model.lora is None else model.lora.scale
    tensors = model_tensors(entries, arrays, np_dtype, scale)
    with replacing_together(folder, processes) as beside:
        write_weights(plan_files(tensors, shard_bytes), beside, processes)
        if processes.index == 0:
            written = dtype or largest_dtype(tensors)
            write_config(beside, raw_config or config_to_hf(config, dtype=written))
            if tokenizer_from is not None:
                copy_tokenizer(as_path(tokenizer_from), beside)
                if raw_config is None:
                    write_stop_tokens(beside, config.eos_token_ids)


def require_replaceable(folder: Path) -> None:
    """Refuses a folder that holds anything but a checkpoint, or what a killed call left of one."""
    if is_remote(folder) and part_folder(folder).exists():
        return
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise InputError(f"{folder}: not empty, and not a checkpoint that could be replaced")


def model_tensors(
    entries: Sequence[Entry],
    values: Mapping[str, jax.Array],
    dtype: Any = None,
    lora_scale: float = 0.0,
) -> list[DeferredArray]:
    """Returns a model's parameters as Hugging Face's tensors, what adapters add included.

    Args:
      entries: the table, from `parameter_entries`.
      values: the parameters by dotted path, however they are sharded.
      dtype: of the tensors; that of the parameters by default.
      lora_scale: of the adapters, if there are some.
    """

    def tensor(entry: Entry, layer: int | None, name: str) -> DeferredArray:
        value = values[entry.path]
        a, b = (values.get(path) for path in adapter_of(entry.path))

        def read() -> np.ndarray:
            whole = gathered(value, layer)
            if a is not None and b is not None:
                whole = merged_weight(whole, gathered(a, layer), gathered(b, layer), lora_scale)
            return whole

        return DeferredArray(name, entry.hf_shape, np.dtype(dtype or value.dtype), read)

    return [
        tensor(entry, layer if entry.stacked else None, name)
        for entry in entries
        for layer, name in enumerate(entry.hf_names)
    ]


def stored_tensors(checkpoint: Checkpoint, dtype: np.dtype | None = None) -> list[DeferredArray]:
    """Returns the tensors of an opened checkpoint, once they are found to be those of its model.

    Args:
      dtype: to write them in; each in its own by default.
    """

    def tensor(name: str, shape: tuple[int, ...]) -> DeferredArray:
        stored = dtype or np.dtype(checkpoint.tensors[name].dtype(name))
        return DeferredArray(name, shape, stored, lambda: checkpoint.read(name))

    entries = check_tensors(checkpoint)
    return [tensor(name, entry.hf_shape) for entry in entries for name in entry.hf_names]


def gathered(array: jax.Array, layer: int | None = None) -> np.ndarray:
    """Returns an array, or one layer of a stacked one, in host memory; not to be changed.

    Where its slices lie on several hosts, all of them have to call this in the same order,
    and each gets all of it.
    """
    if not array.is_fully_addressable:
        return _from_all_hosts(array if layer is None else _layer(array, layer))
    shape = array.shape if layer is None else array.shape[1:]
    whole = None
    for shard in array.addressable_shards:
        index = shard.index
        if layer is not None:
            start, end, _ = index[0].indices(array.shape[0])
            if not start <= layer < end:
                continue
            index = index[1:]
        if shard.replica_id:
            continue
        values = _on_host(shard.data, None if layer is None else layer - start)
        if values.shape == shape:
            return values
        whole = np.empty(shape, array.dtype) if whole is None else whole
        bits(whole)[index] = bits(values)
    assert whole is not None
    return whole


def _from_all_hosts(array: jax.Array) -> np.ndarray:
    """Returns all of an array in host memory; it goes through every device in chunks."""
    if array.ndim == 0 or array.nbytes <= PIECE_BYTES:
        return _from_hosts(array)
    whole = np.empty(array.shape, array.dtype)
    rows = max(PIECE_BYTES * len(array) // array.nbytes, 1)
    for start in range(0, len(array), rows):
        # The last piece begins where a whole one still fits, so that one program serves all.
        start = min(start, len(array) - rows)
        piece = _from_hosts(_rows(array, start, rows))
        bits(whole)[start : start + rows] = bits(piece)
    return whole


def _from_hosts(array: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


@partial(jax.jit, static_argnums=2)
def _rows(array: jax.Array, start: int, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, count)


def _on_host(data: jax.Array, layer: int | None) -> np.ndarray:
    [device] = data.devices()
    if device.platform == "cpu":
        values = np.asarray(data)  # the memory of the array itself
        return values if layer is None else values[layer]
    # From elsewhere values are copied, and an array keeps such a copy while it lives: so one
    # that is dropped at once is copied.
    return np.asarray(data.copy() if layer is None else _layer(data, layer))


@jax.jit
def _layer(stacked: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def largest_dtype(tensors: Sequence[DeferredArray]) -> str:
    """Returns the name of the dtype that most bytes have."""
    size: Counter[str] = Counter()
    for tensor in tensors:
        size[tensor.dtype.name] += tensor.nbytes
    return size.most_common(1)[0][0]


def plan_files(
    tensors: Sequence[DeferredArray], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[DeferredArray]]:
    """Plans which tensors go to which file: one file, or several of at most ``shard_bytes`` each
    (more only for a tensor that alone has more)."""
    groups: list[list[DeferredArray]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    for group in groups:
        group.sort(key=lambda tensor: -tensor.dtype.itemsize)  # keeps every offset aligned
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    count = len(groups)
    return {
        f"model-{i + 1:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups)
    }


def write_weights(
    files: Mapping[str, Sequence[DeferredArray]], folder: Path, processes: Processes = ALONE
) -> None:
    """Writes the files of a plan, with an index where there are several.

    Each file is written by one process, in turn; all read every tensor, since several may
    be needed to gather it. A process whose disk fails still takes part in that, so that the
    others do not wait for it, and fails at the end.

    Args:
      files: from `plan_files`, the same in all processes.
      folder: to write in; all processes see it.
      processes: this one among the others.
    """
    failure: Exception | None = None
    for number, (name, tensors) in enumerate(files.items()):
        values = (tensor.read() for tensor in tensors)
        if number % processes.count == processes.index and failure is None:
            try:
                write_safetensors(folder / name, tensors, values)
            except (OSError, InputError, StorageFailure) as error:
                failure = error
        if processes.count > 1:
            for _ in values:
                pass
    if failure is not None:
        raise failure
    if len(files) > 1 and processes.index == 0:
        _write_index(files, folder)


def _write_index(files: Mapping[str, Sequence[DeferredArray]], folder: Path) -> None:
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
