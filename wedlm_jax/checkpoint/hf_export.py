"""Safetensors files from parameters, a tensor at a time, host by host.

What a file holds is known before a value is read, so each is written from its start to its
end and nothing waits in memory: beyond the parameters themselves, a host holds one tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from wedlm_jax.checkpoint.dtypes import bits
from wedlm_jax.checkpoint.hf_folder import INDEX, WEIGHTS
from wedlm_jax.checkpoint.safetensors_file import Header, write_safetensors
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.processes import ALONE, Processes
from wedlm_jax.model.lora import adapter_of, merged_kernel

if TYPE_CHECKING:
    from wedlm_jax.checkpoint.names import Entry

SHARD_BYTES = 5 * 1000**3

PIECE_BYTES = 2**28
"""What each device holds for a moment, beside its own, of an array that several hosts share."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is going to be written.

    Attributes:
      name: Hugging Face's.
      shape: there.
      dtype: of the file; values are cast to it when they are written.
      read: gives the values; where they lie on several hosts, these do it together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def model_tensors(
    entries: Sequence[Entry],
    values: Mapping[str, jax.Array],
    dtype: Any = None,
    lora_scale: float = 0.0,
) -> list[Tensor]:
    """Returns a model's parameters as Hugging Face's tensors, what adapters add included.

    Args:
      entries: the table, from `wedlm_jax.checkpoint.hf.parameter_entries`.
      values: the parameters by dotted path, however they are sharded.
      dtype: of the tensors; that of the parameters by default.
      lora_scale: of the adapters, if there are some.
    """

    def tensor(entry: Entry, layer: int | None, name: str) -> Tensor:
        value = values[entry.path]
        a, b = (values.get(path) for path in adapter_of(entry.path))

        def read() -> np.ndarray:
            whole = gathered(value, layer)
            if a is not None and b is not None:
                whole = merged_kernel(whole, gathered(a, layer), gathered(b, layer), lora_scale)
            return whole.T if entry.transposed else whole

        return Tensor(name, entry.hf_shape, np.dtype(dtype or value.dtype), read)

    return [
        tensor(entry, layer if entry.stacked else None, name)
        for entry in entries
        for layer, name in enumerate(entry.hf_names)
    ]


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


def largest_dtype(tensors: Sequence[Tensor]) -> str:
    """Returns the name of the dtype that most bytes have."""
    size: Counter[str] = Counter()
    for tensor in tensors:
        size[tensor.dtype.name] += tensor.nbytes
    return size.most_common(1)[0][0]


def plan_files(
    tensors: Sequence[Tensor], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[Tensor]]:
    """Plans which tensors go to which file: one file, or several of at most ``shard_bytes`` each
    (more only for a tensor that alone has more)."""
    groups: list[list[Tensor]] = [[]]
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
    files: Mapping[str, Sequence[Tensor]], folder: Path, processes: Processes = ALONE
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
                write_safetensors(folder / name, headers(tensors), values)
            except (OSError, InputError, StorageFailure) as error:
                failure = error
        if processes.count > 1:
            for _ in values:
                pass
    if failure is not None:
        raise failure
    if len(files) > 1 and processes.index == 0:
        _write_index(files, folder)


def headers(tensors: Sequence[Tensor]) -> dict[str, Header]:
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}


def _write_index(files: Mapping[str, Sequence[Tensor]], folder: Path) -> None:
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
