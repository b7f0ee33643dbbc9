"""Converts the layout of a model's layers: stacked, or apart.

* Stacked: every parameter has a leading axis of layers, through which a scan runs. This is for
  training, and for decoding where the compiler reads a layer of the stack in place (TPUs).
* Apart: each layer has its own arrays. This is for CPUs, where a scan copies each layer out of the
  stack.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.model.lora import with_adapters
from wedlm_jax.model.transformer import Transformer

Path = tuple[Any, ...]


def are_stacked(model: Transformer) -> bool:
    """Returns whether the parameters of a model's layers have a leading axis of layers."""
    return not isinstance(model.layers, nnx.List)


def with_layers_apart(
    model: Transformer, *, columns: bool | None = None, consume: bool = False
) -> Transformer:
    """Converts a model with stacked layers into one whose layers are apart.

    Works under `jax.jit`, `jax.eval_shape` and on a mesh, and with quantized matrices.

    Args:
      model: returned unchanged if its layers are apart already.
      columns: passed to `Transformer`.
      consume: delete each stacked array as soon as its layers are extracted, so that at most one
        parameter is in memory twice. ``model`` cannot be used afterwards.
    """
    if not are_stacked(model):
        return model
    state: dict[Path, Any] = {}
    for path, parameter in nnx.state(model).flat_state():
        if path[0] != "layers":
            state[path] = parameter
            continue
        leaves, structure = jax.tree.flatten(parameter)
        cut = [_placed(_layers_of, lambda spec: spec[1:], leaf) for leaf in leaves]
        if consume:
            _delete(leaves, cut)
        for number, parts in enumerate(zip(*cut, strict=True)):
            state["layers", number, *path[1:]] = jax.tree.unflatten(structure, parts)
    dtype = model.embed_tokens[...].dtype
    graph = _graph(model, dtype=dtype, stacked=False, columns=columns)
    return nnx.merge(graph, nnx.State.from_flat_path(state))


def with_layers_stacked(model: Transformer, *, consume: bool = False) -> Transformer:
    """Converts a model whose layers are apart into one with stacked layers; see
    `with_layers_apart`."""
    if are_stacked(model):
        return model
    parameters, state = dict(nnx.state(model).flat_state()), {}
    for path in list(parameters):
        if path[0] != "layers":
            state[path] = parameters.pop(path)
        elif path[1] == 0:
            numbers = range(model.config.num_hidden_layers)
            parts = [parameters.pop(("layers", i, *path[2:])) for i in numbers]
            leaves = [jax.tree.leaves(parameter) for parameter in parts]
            joined = [
                _placed(_stack_of, lambda spec: (None, *spec), *some)
                for some in zip(*leaves, strict=True)
            ]
            state["layers", *path[2:]] = jax.tree.unflatten(jax.tree.structure(parts[0]), joined)
            if consume:
                _delete([leaf for some in leaves for leaf in some], joined)
    return nnx.merge(_graph(model), nnx.State.from_flat_path(state))


def _graph(model: Transformer, **how: Any) -> nnx.GraphDef[Transformer]:
    """Returns the graph of the same model, adapters included, in another layout."""

    def made() -> Transformer:
        rngs = nnx.Rngs(0)
        made = Transformer(model.config, rngs=rngs, **how)
        return made if model.lora is None else with_adapters(made, model.lora, rngs)

    return nnx.graphdef(nnx.eval_shape(made))


def _layers_of(array: Array) -> list[Array]:
    return list(array)


def _stack_of(*arrays: Array) -> Array:
    return jnp.stack(arrays)


def _placed(function: Any, new_spec: Any, *arrays: Array) -> Any:
    """Runs ``function`` so that its results stay on the devices of their values. ``function`` must
    be one of this module's, and not a new one per call, so that JAX compiles it once per shape."""
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return function(*arrays)
    sharding = arrays[0].sharding
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec) + (None,) * (arrays[0].ndim - len(sharding.spec))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*new_spec(spec)))
    return jax.jit(function, out_shardings=sharding)(*arrays)


def _delete(old: list[Array], new: Any) -> None:
    jax.block_until_ready(new)
    for leaf in old:
        leaf.delete()
