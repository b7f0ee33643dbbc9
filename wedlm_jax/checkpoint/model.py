"""Reads models from checkpoints and writes them, however their arrays are sharded.

Each host reads its own rows once: tensor by tensor, whole rows at a time, straight into the slices
that its devices hold. Apart from what is on the devices, a host's memory holds the slices of one
parameter, and each of these is freed as soon as its device has it. Hosts take turns writing, tensor
by tensor; apart from the parameters, a host holds one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wedlm_jax.checkpoint.hf import (
    SHARD_BYTES,
    Checkpoint,
    copy_tokenizer,
    require_replaceable,
    values_by_dtype,
    write_config,
    write_stop_tokens,
    write_weights,
)
from wedlm_jax.checkpoint.names import (
    Entry,
    arrays_from_model,
    check_tensors,
    gathered,
    model_from_arrays,
    parameter_entries,
)
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.checkpoint.safetensors import DeferredArray, bits, cast, numpy_dtype
from wedlm_jax.config import ModelConfig, config_to_hf
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import Processes, jax_processes, replacing_together
from wedlm_jax.host.storage import as_path
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked
from wedlm_jax.model.lora import adapter_of, merged_weight
from wedlm_jax.model.quantization import check_quantization, rounded_alone
from wedlm_jax.sharding import parameter_axes, spec

Span = tuple[int, int]
"""Start and exclusive end."""
Index = tuple[Span, ...]
"""A slice of an array: a span per axis."""


def load_checkpoint(
    folder: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    stacked: bool = True,
    quantization: str | None = None,
) -> Transformer:
    """Reads a checkpoint (of a type in `wedlm_jax.config.FAMILIES`) into a model.

    Names, shapes and sizes are checked before any values are read. Apart from the parameters, a
    host holds its slices of one parameter at a time; see `wedlm_jax.checkpoint.model`.

    Args:
      folder: a folder in Hugging Face format, from `wedlm convert` or of a training run, or a GGUF
        file. From orbax files, each host reads whole parameters, one at a time.
      dtype: dtype of the parameters; by default the file's.
      mesh: mesh over which `wedlm_jax.sharding` lays out each parameter; each host reads only the
        slices that its devices hold. None for the default device.
      stacked: whether the model's layers are stacked; otherwise each is read separately.
      quantization: a name in `wedlm_jax.model.quantization.QUANTIZATIONS`: each matrix is rounded
        as soon as it is read, so that at most one unrounded matrix is in memory.

    Raises:
      InputError: a tensor is missing, extra, misshapen or truncated, or the mesh does not divide a
        parameter; the message names it.
    """
    check_quantization(quantization)
    checkpoint = open_checkpoint(folder)
    entries = check_tensors(checkpoint, stacked=stacked)
    if mesh is not None:
        for entry in entries:
            parameter_sharding(mesh, entry)

    def load(entry: Entry) -> Any:
        value = load_parameter(checkpoint, entry, dtype, mesh)
        name = entry.path.rpartition(".")[2]
        return value if quantization is None else rounded_alone(value, name)

    values = {entry.path: load(entry) for entry in entries}
    return model_from_arrays(checkpoint.config, values, stacked=stacked)


def load_parameter(
    checkpoint: Checkpoint, entry: Entry, dtype: Any, mesh: Mesh | None
) -> jax.Array:
    """Reads one parameter onto the devices of a mesh, or the default device."""
    if mesh is None:
        return jnp.asarray(read_parameter(checkpoint, entry, dtype))
    sharding = parameter_sharding(mesh, entry)
    if not spans_processes(mesh):
        return _read_onto(checkpoint, entry, dtype, sharding)
    by_rows = _read_onto(checkpoint, entry, dtype, rows_first(sharding, entry))
    return jax.device_put(by_rows, sharding, donate=True)


def spans_processes(mesh: Mesh) -> bool:
    """Returns whether the devices of a mesh belong to several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def rows_first(sharding: NamedSharding, entry: Entry) -> NamedSharding:
    """Returns a layout of a parameter that cuts the Hugging Face tensor along its rows alone, over
    as many devices as divide them.

    Each process then reads its own rows, whole and once, and the devices exchange what belongs
    elsewhere. If a tensor were cut along its columns, every process would read all of it.
    """
    if len(entry.hf_shape) < 2:
        return sharding
    axes = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in sharding.spec]
    axes += [()] * (len(entry.shape) - len(axes))
    others = [axis for place in axes[:-2] for axis in place]  # what cuts the layers stays
    candidates = dict.fromkeys([*axes[-2], *axes[-1], *sharding.mesh.axis_names])
    chosen: list[str] = []
    for axis in [axis for axis in candidates if axis not in others]:
        shards = math.prod(sharding.mesh.shape[name] for name in [*chosen, axis])
        if entry.shape[-2] % shards == 0:
            chosen.append(axis)
    return NamedSharding(sharding.mesh, PartitionSpec(*axes[:-2], tuple(chosen), ()))


def _read_onto(
    checkpoint: Checkpoint, entry: Entry, dtype: Any, sharding: NamedSharding
) -> jax.Array:
    indices = {
        device: _spans(index, entry.shape)
        for device, index in sharding.addressable_devices_indices_map(entry.shape).items()
    }
    slices = read_slices(checkpoint, entry, dtype, set(indices.values()))
    arrays = []
    # Replicas of a slice follow one another, so that each slice is freed after its last.
    for device, index in sorted(indices.items(), key=lambda item: item[1]):
        for other in [i for i in slices if i < index]:
            del slices[other]
        arrays.append(jax.device_put(slices[index], device).block_until_ready())
    return jax.make_array_from_single_device_arrays(entry.shape, sharding, arrays)


def parameter_sharding(mesh: Mesh, entry: Entry) -> NamedSharding:
    """Returns how a parameter is laid out on a mesh.

    Raises:
      InputError: the mesh does not divide its shape.
    """
    axes = parameter_axes(entry.path.replace(".", "/"))
    assert axes is not None, f"no rule names the axes of {entry.path}"
    sharding = NamedSharding(mesh, spec(axes))
    try:
        sharding.shard_shape(entry.shape)
    except ValueError:
        sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        raise InputError(
            f"mesh: {sizes} does not divide parameter {entry.path!r} of shape {list(entry.shape)}"
        ) from None
    return sharding


def read_parameter(checkpoint: Checkpoint, entry: Entry, dtype: Any = None) -> np.ndarray:
    """Reads a whole parameter into host memory; see `read_slices`."""
    whole = tuple((0, size) for size in entry.shape)
    return read_slices(checkpoint, entry, dtype, [whole])[whole]


def read_slices(
    checkpoint: Checkpoint, entry: Entry, dtype: Any, indices: Iterable[Index]
) -> dict[Index, np.ndarray]:
    """Reads slices of a parameter, in our shape, each value once.

    Args:
      checkpoint: an open checkpoint whose tensors were checked.
      dtype: dtype of the result; see `entry_dtype`.
      indices: the slices: all or some pieces of a grid over the parameter's shape.

    Raises:
      InputError: values do not fit ``dtype``.
    """
    target = entry_dtype(checkpoint, entry, dtype)
    slices = {index: np.empty([end - start for start, end in index], target) for index in indices}
    for layer, name in enumerate(entry.hf_names):
        parts = []
        for index, values in slices.items():
            if not entry.stacked:
                parts.append((index, values))
            elif index[0][0] <= layer < index[0][1]:
                parts.append((index[1:], values[layer - index[0][0]]))
        _read_tensor(checkpoint.tensors[name], parts)
    return slices


def stored_parameters(checkpoint: Checkpoint, dtype: Any = None) -> list[DeferredArray]:
    """Returns a checkpoint's parameters in our layout, with stacked layers, checked by
    `check_tensors`; see `wedlm_jax.checkpoint.names.stored_tensors` for the tensors."""
    return [
        DeferredArray(
            entry.path,
            entry.shape,
            entry_dtype(checkpoint, entry, dtype),
            partial(read_parameter, checkpoint, entry, dtype),
        )
        for entry in check_tensors(checkpoint)
    ]


def entry_dtype(checkpoint: Checkpoint, entry: Entry, dtype: Any = None) -> np.dtype:
    """Returns the dtype in which a parameter is read: ``dtype``, or by default the file's; if the
    layers' tensors differ, the narrowest that holds all their values."""
    if dtype is not None:
        return np.dtype(dtype)
    kinds = {checkpoint.tensors[name].dtype for name in entry.hf_names}
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def _read_tensor(tensor: DeferredArray, parts: list[tuple[Index, np.ndarray]]) -> None:
    """Fills each part with its slice of a tensor; rows that any part needs are read once."""
    for span in _joined(index[0] for index, _ in parts):
        for start, values in tensor.read_rows(slice(*span)):
            for (rows, *columns), target in parts:
                first, end = max(start, rows[0]), min(start + len(values), rows[1])
                if first < end:
                    part = values[first - start : end - start]
                    if columns:
                        part = part[:, slice(*columns[0])]
                    to = bits(target.reshape(len(target), -1))[first - rows[0] : end - rows[0]]
                    to[:] = bits(cast(tensor.name, part, target.dtype))


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Merges spans that touch or overlap."""
    joined: list[Span] = []
    for start, end in sorted(set(spans)):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _spans(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    assert index is not None
    return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


# --- out of a model -----------------------------------------------------------------------


def save_checkpoint(
    model: Transformer,
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: str | None = None,
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes | None = None,
) -> None:
    """Writes a Hugging Face checkpoint folder: weights, ``config.json``, tokenizer files.

    The folder appears whole or not at all: files are written to a folder next to it, which is then
    renamed. Apart from the parameters, a host holds one tensor. In a job of several processes, all
    of them must call this: each writes some of the weight files, process 0 the rest of the folder,
    and parameters that are spread over several hosts are gathered tensor by tensor.

    Args:
      model: the model, with any sharding; adapters are merged.
      config: written as ``config.json``; normally ``model.config``.
      folder: must not exist, or hold an earlier checkpoint, which is replaced.
      dtype: "float32", "bfloat16" or "float16"; by default that of the parameters.
      tokenizer_from: a folder whose tokenizer files are copied.
      shard_bytes: maximum size of a file, unless a single tensor is larger.
      processes: the job's processes; by default JAX's.

    Raises:
      InputError: ``folder`` holds something else, the values do not fit ``dtype``, or the
        model is quantized.
    """
    np_dtype = numpy_dtype(dtype)
    require_replaceable(as_path(folder))
    processes = processes or jax_processes()
    entries = parameter_entries(model.config, stacked=are_stacked(model))
    arrays = arrays_from_model(model)
    if any(entry.path not in arrays for entry in entries):
        raise InputError(f"{folder}: the model is quantized; export it before it is quantized")
    scale = 0.0 if model.lora is None else model.lora.scale

    def tensor(entry: Entry, layer: int | None, name: str) -> DeferredArray:
        value = arrays[entry.path]
        a, b = (arrays.get(path) for path in adapter_of(entry.path))

        def read() -> np.ndarray:
            whole = gathered(value, layer)
            if a is None or b is None:
                return whole
            return merged_weight(whole, gathered(a, layer), gathered(b, layer), scale)

        return DeferredArray(name, entry.hf_shape, np.dtype(np_dtype or value.dtype), read)

    tensors = [
        tensor(entry, layer if entry.stacked else None, name)
        for entry in entries
        for layer, name in enumerate(entry.hf_names)
    ]
    with replacing_together(folder, processes) as new_folder:
        write_weights(tensors, new_folder, shard_bytes=shard_bytes, processes=processes)
        if processes.index == 0:
            written = dtype or next(iter(values_by_dtype(tensors)))
            write_config(new_folder, config_to_hf(config, dtype=written))
            if tokenizer_from is not None:
                copy_tokenizer(as_path(tokenizer_from), new_folder)
                write_stop_tokens(new_folder, config.eos_token_ids)
