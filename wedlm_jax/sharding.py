"""Which axis of which array lies on which axis of the mesh: the one place that says so.

Three steps, each a table or a small function: a parameter's name gives the names of its axes
(`PARAMETER_AXES`), an axis name gives mesh axes (`AXIS_RULES`), and the compiler does the
rest. The mesh has four axes:

* ``data``: whole replicas of the parameters; gradients are summed over it.
* ``fsdp``: the batch again, and the parameters and optimizer state cut along their hidden axis.
* ``tensor``: heads, the MLP's inner axis and the vocabulary.
* ``sequence``: the rows of a text between attentions; within attention, heads. For rows so
  long that one does not fit, and where heads suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError

MESH_AXES = ("data", "fsdp", "tensor", "sequence")

AXIS_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Activations.
        "batch": ("data", "fsdp"),
        "length": ("sequence",),
        "attention_heads": ("tensor", "sequence"),
        "vocab": ("tensor",),
        # Each replica has its own sequences, and of these the flat tokens whole.
        "sequences": ("data",),
        "tokens": (),
        # Parameters.
        "hidden": ("fsdp",),
        "heads": ("tensor",),
        "mlp": ("tensor",),
        # Whole on every device.
        "layers": (),
        "features": (),
    }
)

PARAMETER_AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed_tokens": ("vocab", "hidden"),
        "lm_head": ("hidden", "vocab"),
        "q_proj/kernel": ("hidden", "heads"),
        "k_proj/kernel": ("hidden", "heads"),
        "v_proj/kernel": ("hidden", "heads"),
        "q_proj/bias": ("heads",),
        "k_proj/bias": ("heads",),
        "v_proj/bias": ("heads",),
        "o_proj/kernel": ("heads", "hidden"),
        "gate_proj/kernel": ("hidden", "mlp"),
        "up_proj/kernel": ("hidden", "mlp"),
        "down_proj/kernel": ("mlp", "hidden"),
        # Of layers that compute on columns, and the head where layers are apart.
        "q_proj/weight": ("heads", "hidden"),
        "k_proj/weight": ("heads", "hidden"),
        "v_proj/weight": ("heads", "hidden"),
        "o_proj/weight": ("hidden", "heads"),
        "gate_proj/weight": ("mlp", "hidden"),
        "up_proj/weight": ("mlp", "hidden"),
        "down_proj/weight": ("hidden", "mlp"),
        "head_weight": ("vocab", "hidden"),
        "scale": ("features",),
    }
)
"""By the end of a parameter's path; under ``layers`` an axis of layers stands before, unless
the layers are apart, numbered."""


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all devices, laid out so that neighbours on it are neighbours in hardware.

    Args:
      sizes: a size for some of `MESH_AXES`; others are 1. One may be -1: what is left.
      devices: default: all of this job. Where they are several slices of TPUs, ``data`` goes
        over the slices first: the slow network between them carries sums of gradients alone.

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
        wanted = ", ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise InputError(f"mesh: {wanted} does not make {len(devices)} devices")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        return Mesh(_over_slices(shape, slices, devices), MESH_AXES, axis_types=_AXIS_TYPES)
    return jax.make_mesh(tuple(shape), MESH_AXES, devices=devices, axis_types=_AXIS_TYPES)


_AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)


def _over_slices(shape: Sequence[int], slices: int, devices: Sequence[Any]) -> np.ndarray:
    data, *others = shape
    if data % slices:
        raise InputError(f"mesh: data {data} is not divisible by the {slices} slices")
    within, across = (data // slices, *others), (slices, *[1] * len(others))
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The mesh axes of an array whose axes have these names (None: whole)."""
    return PartitionSpec(*((AXIS_RULES[axis] or None) if axis else None for axis in axes))


def parameter_axes(path: str) -> tuple[str, ...] | None:
    """Names of the axes of the parameter at ``path`` (parts joined by ``/``), or of an
    optimizer moment of it; None for what is no parameter, such as a step count."""
    parts = [part for part in path.split("/") if part != "value"]
    # A matrix of 8-bit integers has a scale for each output, `wedlm_jax.quantization`.
    matrix = next((name for name in parts[-2:-1] if name in _INPUT), None)
    rounded = parts.pop() if matrix else None
    for ending, axes in PARAMETER_AXES.items():
        wanted = ending.split("/")
        if parts[-len(wanted) :] == wanted:
            if matrix and rounded == "scale":
                axes = ("features", axes[1]) if _INPUT[matrix] == 0 else (axes[0], "features")
            return ("layers", *axes) if _are_stacked(parts) else axes
    return None


_INPUT = {"kernel": 0, "lm_head": 0, "weight": 1, "head_weight": 1}
"""Which axis of a matrix is the one that a product sums over."""


def _are_stacked(parts: Sequence[str]) -> bool:
    """Whether a path is that of a parameter of all layers, not of one with a number."""
    return "layers" in parts and not parts[parts.index("layers") + 1].isdigit()


def tree_specs(tree: Any) -> Any:
    """A `PartitionSpec` for each leaf of a tree of parameters, moments and counts."""

    def of_leaf(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        axes = parameter_axes(jax.tree_util.keystr(path, simple=True, separator="/"))
        return PartitionSpec() if axes is None else spec(axes)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def tree_shardings(mesh: Mesh, tree: Any) -> Any:
    """`tree_specs` on a mesh."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf), tree_specs(tree))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For the arrays ``[A, R, L]`` of a global batch: rows over ``data`` and ``fsdp``. Rows stay
    whole: the dual stream is built from them on the device, and cut there."""
    return NamedSharding(mesh, spec((None, "batch")))


def constrain(x: Array, *axes: str | None) -> Array:
    """``x`` laid out as `AXIS_RULES` says; ``x`` itself where no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))


def constrain_tree(tree: Any) -> Any:
    """A tree of parameters, gradients or moments laid out as the rules say; as it is where no
    mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, tree_specs(tree))


def shards(axis: str) -> int:
    """Into how many pieces an axis of this name is cut on the mesh that is set; 1 where none is."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in AXIS_RULES[axis])


def on_own_shard(
    function: Callable[..., Array], arguments: Sequence[Sequence[str | None]]
) -> Callable[..., Array]:
    """``function`` run by each device on its own share of arguments with these axes; its result
    has the axes of the first. ``function`` itself where no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    specs = tuple(spec(axes) for axes in arguments)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)


def on_own_rows(
    function: Callable[..., Any], arguments: Sequence[Sequence[str | None]]
) -> Callable[..., Any]:
    """``function`` run by each device on its own rows of the batch, the other axes of the mesh
    being the compiler's as before. ``function`` itself where no mesh is set.

    What has no "batch" among its axes is gathered before and its gradient summed behind, once
    each, whatever loops ``function`` has. Within it, `constrain` must leave "batch" out.

    Args:
      arguments: the axes of each; only "batch" counts. Results are rows of the batch.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function
    rows = AXIS_RULES["batch"]
    specs = tuple(
        PartitionSpec(*(rows if axis == "batch" else None for axis in axes)) for axes in arguments
    )
    return jax.shard_map(
        function,
        in_specs=specs,
        out_specs=PartitionSpec(rows),
        axis_names=frozenset(rows),
        check_vma=False,
    )


def check_fits(mesh: Mesh, config: ModelConfig, *, rows: int = 0, row_length: int = 0) -> None:
    """Refuses sizes that the mesh does not divide, by name.

    Args:
      mesh: as from `make_mesh`.
      config: of the model.
      rows: packed rows in a micro-batch, all devices together; 0 where there are none.
      row_length: L; the dual stream has 2 L rows.

    Raises:
      InputError: naming the size and the mesh axes.
    """
    sizes = {
        "rows": (rows, "batch"),
        "2 x row_length": (2 * row_length, "length"),
        "num_attention_heads": (config.num_attention_heads, "attention_heads"),
        "num_key_value_heads": (config.num_key_value_heads, "attention_heads"),
        "hidden_size": (config.hidden_size, "hidden"),
        "intermediate_size": (config.intermediate_size, "mlp"),
        "vocab_size": (config.vocab_size, "vocab"),
    }
    for name, (size, axis) in sizes.items():
        axes = AXIS_RULES[axis]
        shards = int(np.prod([mesh.shape[mesh_axis] for mesh_axis in axes]))
        if size % shards:
            over = " x ".join(f"{mesh_axis} {mesh.shape[mesh_axis]}" for mesh_axis in axes)
            raise InputError(f"mesh: {name} = {size} is not divisible by {over}")


def on_replicas(function: Callable[..., Any], *, whole: Sequence[int] = (0,)) -> Callable[..., Any]:
    """``function`` run by each replica of the ``data`` axis on its own share: of every array the
    first axis is cut. Scalars, and the arguments named by ``whole``, are the same for all. The
    other axes of the mesh stay the compiler's. ``function`` itself where there is one replica.

    Replicas may loop differently often: what they exchange, they exchange within themselves.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["data"] == 1:
        return function

    def run(*arguments: Any) -> Any:
        def spec_of(number: int, leaf: Any) -> PartitionSpec:
            cut = number not in whole and leaf.ndim > 0
            return PartitionSpec("data") if cut else PartitionSpec()

        specs = tuple(
            jax.tree.map(lambda leaf, number=number: spec_of(number, leaf), argument)
            for number, argument in enumerate(arguments)
        )
        shares = jax.shard_map(
            function,
            in_specs=specs,
            out_specs=PartitionSpec("data"),
            axis_names=frozenset(("data",)),
            check_vma=False,
        )
        return shares(*arguments)

    return run
