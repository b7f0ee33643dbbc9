"""Loads a checkpoint onto devices: each host reads its own rows, once.

A parameter is read tensor by tensor and whole rows at a time, straight into the slices that
this host's devices hold of it; the host's memory then holds one parameter's slices beyond
what is on the devices, and a slice is let go as soon as its device has it. Where a mesh cuts
columns over several hosts, each reads rows of its own and the devices exchange them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wedlm_jax.checkpoint.hf_folder import Checkpoint
from wedlm_jax.checkpoint.names import Entry, check_tensors, model_from_arrays
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.checkpoint.safetensors_file import bits, cast
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.model.quantization import check_quantization, rounded_alone
from wedlm_jax.sharding import parameter_axes, spec

Span = tuple[int, int]
"""From the first to before the last."""
Index = tuple[Span, ...]
"""A slice of an array: a span of each axis."""


def load_checkpoint(
    folder: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    stacked: bool = True,
    quantization: str | None = None,
) -> Transformer:
    """Reads a checkpoint (of a type in `wedlm_jax.config.FAMILIES`) into a model.

    Names, shapes and sizes are checked before any values are read. Beyond the parameters
    themselves a host holds its slices of one of them; see `wedlm_jax.checkpoint.load`.

    Args:
      folder: in Hugging Face format, or one that `wedlm convert` made, or a training run's, or a
        GGUF file. Of orbax's files each host reads whole parameters, one at a time.
      dtype: of the parameters; that of the file by default.
      mesh: lays each parameter out as `wedlm_jax.sharding` says, and each host reads only the
        slices that its devices hold; the default device holds all without one.
      stacked: whether the model's layers are to lie stacked, or apart, each read by itself.
      quantization: a name in `wedlm_jax.model.quantization.QUANTIZATIONS`: each matrix is rounded
        as soon as it is read, so that no more than one is in memory as it was.

    Raises:
      InputError: naming the file and tensor that is missing, extra, misshapen or truncated,
        or the parameter that the mesh does not divide.
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


class Part(NamedTuple):
    """Says where a rectangle of a Hugging Face tensor goes: ``target[rows, columns]``."""

    rows: Span
    columns: Span
    target: np.ndarray


def load_parameter(
    checkpoint: Checkpoint, entry: Entry, dtype: Any, mesh: Mesh | None
) -> jax.Array:
    """Reads one parameter onto its devices.

    Args:
      checkpoint: an opened folder, its tensors checked.
      entry: the parameter.
      dtype: of the result; see `entry_dtype`.
      mesh: laid out on it as `wedlm_jax.sharding` says; on the default device without one.
    """
    if mesh is None:
        return jnp.asarray(read_parameter(checkpoint, entry, dtype))
    sharding = parameter_sharding(mesh, entry)
    if not spans_processes(mesh):
        return _read_onto(checkpoint, entry, dtype, sharding)
    by_rows = _read_onto(checkpoint, entry, dtype, rows_first(sharding, entry))
    return jax.device_put(by_rows, sharding, donate=True)


def spans_processes(mesh: Mesh) -> bool:
    """Tells whether the devices of a mesh belong to several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def rows_first(sharding: NamedSharding, entry: Entry) -> NamedSharding:
    """Returns a layout of a parameter that cuts the Hugging Face tensor along its rows alone, over
    as many devices as divide them.

    So each process reads its own rows, whole and once, and the devices exchange what belongs
    elsewhere. Of a tensor cut along its columns every process would read all.
    """
    axes = [_axis_names(axis) for axis in sharding.spec]
    axes += [()] * (len(entry.shape) - len(axes))
    if len(entry.hf_shape) < 2:
        return sharding
    others = [axis for place in axes[:-2] for axis in place]  # what cuts the layers stays
    wanted = dict.fromkeys([*axes[-2], *axes[-1], *sharding.mesh.axis_names])
    chosen: list[str] = []
    for axis in [axis for axis in wanted if axis not in others]:
        shards = math.prod(sharding.mesh.shape[name] for name in [*chosen, axis])
        if entry.shape[-2] % shards == 0:
            chosen.append(axis)
    return NamedSharding(sharding.mesh, PartitionSpec(*axes[:-2], tuple(chosen), ()))


def _axis_names(axis: Any) -> tuple[str, ...]:
    """Returns the mesh axes that cut an array's axis, as a tuple."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _read_onto(
    checkpoint: Checkpoint, entry: Entry, dtype: Any, sharding: NamedSharding
) -> jax.Array:
    """Reads one parameter, each process what its own devices hold."""
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
    """Tells where a parameter lies on a mesh.

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
    """Reads one parameter, whole, into host memory; see `read_slices`."""
    whole = tuple((0, size) for size in entry.shape)
    return read_slices(checkpoint, entry, dtype, [whole])[whole]


def read_slices(
    checkpoint: Checkpoint, entry: Entry, dtype: Any, indices: Iterable[Index]
) -> dict[Index, np.ndarray]:
    """Reads some slices of one parameter, in our shape, each value once.

    Args:
      checkpoint: an opened folder, its tensors checked.
      entry: the parameter.
      dtype: of the result; see `entry_dtype`.
      indices: those wanted: the pieces of a grid over the parameter's shape, or some of them.

    Raises:
      InputError: values do not fit ``dtype``.
    """
    target = entry_dtype(checkpoint, entry, dtype)
    slices = {index: np.empty([end - start for start, end in index], target) for index in indices}
    for layer, name in enumerate(entry.hf_names):
        _read_tensor(checkpoint, name, list(_parts(entry, layer, slices)))
    return slices


def entry_dtype(checkpoint: Checkpoint, entry: Entry, dtype: Any = None) -> np.dtype:
    """Returns the dtype that a parameter is read in: ``dtype``; by default that of the file, and
    where the layers' tensors differ, the narrowest that holds all their values."""
    if dtype is not None:
        return np.dtype(dtype)
    kinds = {np.dtype(checkpoint.tensors[name].dtype(name)) for name in entry.hf_names}
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def _parts(entry: Entry, layer: int, slices: dict[Index, np.ndarray]) -> Iterable[Part]:
    """Returns what the slices hold of one Hugging Face tensor, as that is stored."""
    for index, values in slices.items():
        if entry.stacked:
            (start, end), *spans = index
            if not start <= layer < end:
                continue
            matrix = values[layer - start]
        else:
            spans, matrix = list(index), values
        if matrix.ndim == 1:
            yield Part(spans[0], (0, 1), matrix[:, None])
        else:
            yield Part(spans[0], spans[1], matrix)


def _read_tensor(checkpoint: Checkpoint, name: str, parts: Sequence[Part]) -> None:
    """Fills the parts from the rows that any of them wants, each read once."""
    file = checkpoint.tensors[name]
    for wanted in _joined(part.rows for part in parts):
        for start, values in file.read_rows(name, slice(*wanted)):
            for part in parts:
                first = max(start, part.rows[0])
                end = min(start + len(values), part.rows[1])
                if first < end:
                    own = values[first - start : end - start, slice(*part.columns)]
                    to = slice(first - part.rows[0], end - part.rows[0])
                    bits(part.target)[to] = bits(cast(name, own, part.target.dtype))


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
