"""A model's layers apart, or stacked: one made of the other, parameter by parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.model import Transformer

Path = tuple[Any, ...]


def are_stacked(model: Transformer) -> bool:
    """Tells whether the parameters of a model's layers have a leading axis of layers."""
    return not isinstance(model.layers, nnx.List)


def with_layers_apart(model: Transformer, *, consume: bool = False) -> Transformer:
    """Makes a model whose layers lie apart, of one in which they are stacked.

    Works under `jax.jit`, `jax.eval_shape` and on a mesh, and with rounded matrices.

    Args:
      model: returned as it is if its layers are apart already.
      consume: whether each stacked array is deleted as soon as its layers are out, so that one
        parameter of all layers is the most that is ever in memory twice. ``model`` is of no
        use then.
    """
    if not are_stacked(model):
        return model
    count = model.config.num_hidden_layers
    state: dict[Path, Any] = {}
    for path, parameter in _parameters(model).items():
        if path[0] != "layers":
            state[path] = parameter
            continue
        leaves, structure = jax.tree.flatten(parameter)
        layers = [_slices(leaf, count) for leaf in leaves]
        for index in range(count):
            own = [slices[index] for slices in layers]
            state[("layers", index, *path[1:])] = jax.tree.unflatten(structure, own)
        if consume:
            _delete(leaves, layers)
    return _merged(model, state, stacked=False)


def with_layers_stacked(model: Transformer, *, consume: bool = False) -> Transformer:
    """Makes a model whose layers are stacked, of one in which they lie apart; see
    `with_layers_apart`."""
    if are_stacked(model):
        return model
    parameters = _parameters(model)
    state = {path: leaf for path, leaf in parameters.items() if path[0] != "layers"}
    for path in [path for path in parameters if path[:2] == ("layers", 0)]:
        own = [
            parameters.pop(("layers", index, *path[2:]))
            for index in range(model.config.num_hidden_layers)
        ]
        leaves = [jax.tree.leaves(parameter) for parameter in own]
        stacked = [_stack(slices) for slices in zip(*leaves, strict=True)]
        state[("layers", *path[2:])] = jax.tree.unflatten(jax.tree.structure(own[0]), stacked)
        if consume:
            _delete([leaf for some in leaves for leaf in some], stacked)
    return _merged(model, state, stacked=True)


def _parameters(model: Transformer) -> dict[Path, Any]:
    return dict(nnx.state(model).flat_state())


def _merged(model: Transformer, state: dict[Path, Any], *, stacked: bool) -> Transformer:
    config = model.config
    graph = nnx.graphdef(
        nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), stacked=stacked))
    )
    return nnx.merge(graph, nnx.State.from_flat_path(state))


def _slices(stacked: Array, count: int) -> list[Array]:
    """Takes the layers out of ``[count, ...]``, each laid out as it was within the stack."""

    def cut(stacked: Array) -> list[Array]:
        return [stacked[index] for index in range(count)]

    if isinstance(stacked, jax.core.Tracer):
        return cut(stacked)
    sharding = stacked.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.jit(cut, out_shardings=sharding)(stacked)  # type: ignore[no-any-return]


def _stack(slices: tuple[Array, ...]) -> Array:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in slices):
        return jnp.stack(slices)
    sharding = slices[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.jit(lambda *own: jnp.stack(own), out_shardings=sharding)(*slices)


def _delete(old: list[Array], new: Any) -> None:
    jax.block_until_ready(new)
    for leaf in old:
        leaf.delete()
