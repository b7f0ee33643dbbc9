"""Parameters from a Hugging Face folder onto devices: each host reads its own slices.

A parameter is read tensor by tensor and a few rows at a time, straight into the slices that
this host's devices hold of it; the host's memory then holds one parameter's slices beyond
what is on the devices, and a slice is let go as soon as its device has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from wedlm_jax.checkpoint.dtypes import bits, cast
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import parameter_axes, spec

if TYPE_CHECKING:
    from wedlm_jax.checkpoint.names import Entry
    from wedlm_jax.checkpoint.opened import OpenedCheckpoint

Span = tuple[int, int]
"""From the first to before the last."""
Index = tuple[Span, ...]
"""A slice of an array: a span of each axis."""


class Part(NamedTuple):
    """Where a rectangle of a Hugging Face tensor goes: ``target[rows, columns]``."""

    rows: Span
    columns: Span
    target: np.ndarray


def load_parameter(
    checkpoint: OpenedCheckpoint, entry: Entry, dtype: Any, mesh: Mesh | None
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


def read_parameter(checkpoint: OpenedCheckpoint, entry: Entry, dtype: Any = None) -> np.ndarray:
    """Reads one parameter, whole, into host memory; see `read_slices`."""
    whole = tuple((0, size) for size in entry.shape)
    return read_slices(checkpoint, entry, dtype, [whole])[whole]


def read_slices(
    checkpoint: OpenedCheckpoint, entry: Entry, dtype: Any, indices: Iterable[Index]
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


def entry_dtype(checkpoint: OpenedCheckpoint, entry: Entry, dtype: Any = None) -> np.dtype:
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
        elif entry.transposed:
            yield Part(spans[1], spans[0], matrix.T)
        else:
            yield Part(spans[0], spans[1], matrix)


def _read_tensor(checkpoint: OpenedCheckpoint, name: str, parts: Sequence[Part]) -> None:
    """Fills the parts: those of the same rows together, in one reading of their columns."""
    file = checkpoint.tensors[name]
    for rows in sorted({part.rows for part in parts}):
        beside = [part for part in parts if part.rows == rows]
        for left, right in _joined(part.columns for part in beside):
            wanted = [part for part in beside if left <= part.columns[0] < right]
            for start, values in file.read_rows(name, slice(*rows), slice(left, right)):
                for part in wanted:
                    columns = slice(part.columns[0] - left, part.columns[1] - left)
                    fitting = cast(name, values[:, columns], part.target.dtype)
                    at = start - rows[0]
                    bits(part.target)[at : at + len(fitting)] = bits(fitting)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans as few as they can be: those that touch are one."""
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
