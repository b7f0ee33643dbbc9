"""Sharding: the single place that maps array axes to mesh axes.

A parameter's name determines the names of its axes (`PARAMETER_AXES`), an axis name determines mesh
axes (`AXIS_RULES`), and the compiler does the rest. The mesh has four axes:

* ``data``: whole replicas of the parameters; gradients are summed over it.
* ``fsdp``: also shards the batch; parameters and optimizer state are sharded along their hidden
  axis.
* ``tensor``: heads, the MLP's inner axis and the vocabulary.
* ``sequence``: the positions of an example outside attention, heads within it (Ulysses). For
  examples too long for one device, if there are enough heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError, counted

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
DECODING_AXES = ("data", "tensor")

AXIS_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Activations.
        "batch": ("data", "fsdp"),
        "length": ("sequence",),
        "attention_heads": ("tensor", "sequence"),
        "vocab": ("tensor",),
        # Each replica has its own sequences, whose flat tokens are replicated on its devices.
        "sequences": ("data",),
        "tokens": (),
        # Parameters.
        "hidden": ("fsdp",),
        "heads": ("tensor",),
        "mlp": ("tensor",),
        # Replicated.
        "layers": (),
        "features": (),
    }
)

PARAMETER_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed_tokens": ("vocab", "hidden"),
        "lm_head": ("vocab", "hidden"),
        "q_proj/weight": ("heads", "hidden"),
        "k_proj/weight": ("heads", "hidden"),
        "v_proj/weight": ("heads", "hidden"),
        "o_proj/weight": ("hidden", "heads"),
        "gate_proj/weight": ("mlp", "hidden"),
        "up_proj/weight": ("mlp", "hidden"),
        "down_proj/weight": ("hidden", "mlp"),
        "q_proj/bias": ("heads",),
        "k_proj/bias": ("heads",),
        "v_proj/bias": ("heads",),
        "o_proj/bias": ("features",),
        "gate_proj/bias": ("mlp",),
        "up_proj/bias": ("mlp",),
        "down_proj/bias": ("features",),
        "scale": ("features",),
        "mask_embedding": ("features",),
        "previous_token/state": ("features", "hidden"),
        "previous_token/token": ("features", "hidden"),
        "previous_token/out": ("hidden", "features"),
    }
)
"""Axis names by the end of a parameter's path. Under ``layers`` an axis of layers comes first,
unless the layers are apart and numbered."""


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh of all devices, laid out so that neighbours on it are neighbours in hardware.

    Args:
      sizes: sizes of some of `MESH_AXES`; others are 1. One may be -1: the remaining devices.
      devices: the devices; by default all of this job. If they form several TPU slices, ``data``
        goes over the slices first, so that the slow network between them carries only sums of
        gradients.

    Raises:
      InputError: an unknown axis, a size below 1, a product that is not the device count, or
        slices that do not divide ``data``.
    """
    devices = list(jax.devices() if devices is None else devices)
    if unknown := sorted(set(sizes) - set(MESH_AXES)):
        raise InputError(f"mesh: unknown axis {unknown[0]!r}; the axes are {', '.join(MESH_AXES)}")
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    if any(size < 1 and size != -1 for size in shape) or shape.count(-1) > 1:
        raise InputError(f"mesh: sizes must be at least 1, one of them may be -1, not {shape}")
    known = math.prod(size for size in shape if size != -1)
    if len(devices) % known == 0:
        shape = [len(devices) // known if size == -1 else size for size in shape]
    if math.prod(shape) != len(devices):
        given = ", ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise InputError(f"mesh: {given} does not multiply to {counted(len(devices), 'device')}")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    if slices > 1:
        return Mesh(_over_slices(shape, slices, devices), MESH_AXES, axis_types=axis_types)
    return jax.make_mesh(tuple(shape), MESH_AXES, devices=devices, axis_types=axis_types)


def make_local_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of some devices of this process, for decoding, from the sizes of some of
    `DECODING_AXES`.

    Raises:
      InputError: another axis, or more devices than there are.
    """
    if unknown := sorted(set(sizes) - set(DECODING_AXES)):
        raise InputError(f"mesh: expected {' and '.join(DECODING_AXES)}, not {unknown[0]!r}")
    devices, count = jax.local_devices(), math.prod(sizes.values())
    if not 0 < count <= len(devices):
        raise InputError(f"mesh: {dict(sizes)} needs {count} devices, but there are {len(devices)}")
    return make_mesh(sizes, devices[:count])


def _over_slices(shape: Sequence[int], slices: int, devices: Sequence[Any]) -> np.ndarray:
    data, *others = shape
    if data % slices:
        raise InputError(f"mesh: data {data} is not divisible by the {slices} slices")
    within, across = (data // slices, *others), (slices, *[1] * len(others))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Returns the mesh axes of an array by the names of its axes; None for an unsharded axis."""
    return PartitionSpec(*((AXIS_RULES[axis] or None) if axis else None for axis in axes))


def parameter_axes(path: str) -> tuple[str, ...] | None:
    """Returns the axis names of the parameter at ``path`` (parts joined by ``/``), or of an
    optimizer moment of it; None for anything else, such as a step count."""
    parts = [part for part in path.split("/") if part != "value"]
    # A matrix of 8-bit integers has a scale for each output (`wedlm_jax.model.quantization`).
    rounded = parts.pop() if parts[-2:-1] in (["weight"], ["lm_head"]) else None
    if parts[-2:-1] == ["adapter"]:  # the axes of its matrix, with an unsharded rank
        n_out, n_in = PARAMETER_AXES[f"{parts[-3]}/weight"]
        axes: tuple[str, ...] = ("features", n_in) if parts[-1] == "a" else (n_out, "features")
    else:
        axes = PARAMETER_AXES.get("/".join(parts[-2:])) or PARAMETER_AXES.get(parts[-1], ())
    if rounded == "scale":
        axes = (axes[0], "features")
    # A parameter of all layers, not of a numbered layer.
    stacked = "layers" in parts and not parts[parts.index("layers") + 1].isdigit()
    return ("layers", *axes) if axes and stacked else axes or None


def tree_specs(tree: Any) -> Any:
    """Returns a `PartitionSpec` for each leaf of a tree of parameters, moments and counts."""

    def of_leaf(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        axes = parameter_axes(jax.tree_util.keystr(path, simple=True, separator="/"))
        return PartitionSpec() if axes is None else spec(axes)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def tree_shardings(mesh: Mesh, tree: Any) -> Any:
    """Returns `tree_specs` as shardings on a mesh."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf), tree_specs(tree))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the arrays ``[A, R, L]`` of a global batch: R over ``data`` and
    ``fsdp``. Packed examples are not cut; the dual stream is built from them, and then sharded, on
    the device."""
    return NamedSharding(mesh, spec((None, "batch")))


def constrain(x: Array, *axes: str | None) -> Array:
    """Shards ``x`` by `AXIS_RULES`; returns ``x`` itself without a current mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))


def constrain_tree(tree: Any) -> Any:
    """Shards a tree of parameters, gradients or moments by the rules; returns the tree itself
    without a current mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, tree_specs(tree))


def shards(axis: str) -> int:
    """Returns the number of shards of an axis on the current mesh; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in AXIS_RULES[axis])


def on_own_shard(
    function: Callable[..., Array], arguments: Sequence[Sequence[str | None]]
) -> Callable[..., Array]:
    """Makes each device run ``function`` on its own shard of arguments with these axes; the result
    has the axes of the first. Returns ``function`` itself without a current mesh."""
    specs = tuple(map(spec, arguments))
    return _on_shards(function, specs, specs[0], MESH_AXES)


def on_own_tokens(
    function: Callable[..., Any],
    arguments: Sequence[Sequence[str | None]],
    results: Sequence[Sequence[str | None]],
) -> Callable[..., Any]:
    """Makes each device run ``function`` on its own tokens of the batch; the compiler still shards
    the other axes of the mesh. Returns ``function`` itself without a current mesh.

    An argument without a "batch" or "length" axis is gathered once in advance, even if ``function``
    contains loops. Within ``function``, `constrain` must not use the axes of `_TOKEN_AXES`, and
    sums over all tokens need `sum_over_tokens`.

    Args:
      arguments, results: the axis names of each argument and each result.
    """

    def over_tokens(axes: Sequence[str | None]) -> PartitionSpec:
        names = ([n for n in AXIS_RULES[axis or "features"] if n in _TOKEN_AXES] for axis in axes)
        return PartitionSpec(*(tuple(some) or None for some in names))

    given, found = (tuple(map(over_tokens, some)) for some in (arguments, results))
    return _on_shards(function, given, found, _TOKEN_AXES)


_TOKEN_AXES = ("data", "fsdp", "sequence")


def _on_shards(function: Any, given: Any, found: Any, over: Sequence[str]) -> Callable[..., Any]:
    if jax.sharding.get_abstract_mesh().empty:
        return function  # type: ignore[no-any-return]
    return jax.shard_map(
        function, in_specs=given, out_specs=found, axis_names=frozenset(over), check_vma=False
    )


def sum_over_tokens(x: Array, axis: str, dimension: int) -> Array:
    """Sums ``x`` over devices, in its dtype, within `on_own_tokens`; ``dimension``, whose axis name
    is ``axis``, is sharded by `AXIS_RULES`. Returns ``x`` itself without a current mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    scattered = AXIS_RULES[axis]
    x = jax.lax.psum_scatter(x, scattered, scatter_dimension=dimension, tiled=True)
    return jax.lax.psum(x, tuple(name for name in _TOKEN_AXES if name not in scattered))


def check_fits(mesh: Mesh, config: ModelConfig, *, rows: int = 0, row_tokens: int = 0) -> None:
    """Refuses sizes that the mesh does not divide.

    Args:
      rows: packed examples in a micro-batch, over all devices; 0 if there are none.
      row_tokens: tokens of one row, all streams included.

    Raises:
      InputError: a size is not divisible; the message names it and the mesh axes.
    """
    sizes = {
        "rows": (rows, "batch"),
        "tokens of a row's streams": (row_tokens, "length"),
        "num_attention_heads": (config.num_attention_heads, "attention_heads"),
        "num_key_value_heads": (config.num_key_value_heads, "attention_heads"),
        "hidden_size": (config.hidden_size, "hidden"),
        "intermediate_size": (config.intermediate_size, "mlp"),
        "vocab_size": (config.vocab_size, "vocab"),
    }
    for name, (size, axis) in sizes.items():
        over = {mesh_axis: mesh.shape[mesh_axis] for mesh_axis in AXIS_RULES[axis]}
        if size % math.prod(over.values()):
            named = " x ".join(f"{mesh_axis} {count}" for mesh_axis, count in over.items())
            raise InputError(f"mesh: {name} = {size} is not divisible by {named}")


def on_replicas(function: Callable[..., Any], *, whole: Sequence[int] = (0,)) -> Callable[..., Any]:
    """Makes each replica of the ``data`` axis run ``function`` on its own shard of the first axis
    of every array. Scalars, and the arguments whose numbers are in ``whole``, are the same for all.
    The compiler still shards the other axes of the mesh. Returns ``function`` itself for a single
    replica.

    Replicas may run different numbers of iterations, since no collective crosses them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["data"] == 1:
        return function

    def run(*arguments: Any) -> Any:
        def spec_of(number: int, leaf: Any) -> PartitionSpec:
            cut = number not in whole and leaf.ndim > 0
            return PartitionSpec("data") if cut else PartitionSpec()

        specs = tuple(
            jax.tree.map(partial(spec_of, number), argument)
            for number, argument in enumerate(arguments)
        )
        return _on_shards(function, specs, PartitionSpec("data"), ("data",))(*arguments)

    return run


def local_bytes(tree: Any) -> int:
    """Returns how many bytes of a tree of arrays, or of their shapes, one device holds."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
