"""Converts the layout of a model's layers, from stacked to apart.

* Stacked: every parameter has a leading axis of layers, through which a scan runs. This is for
  training, and for decoding where the compiler reads a layer of the stack in place (TPUs).
* Apart: each layer has its own arrays. This is for CPUs, where a scan copies each layer out of the
  stack.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.model.lora import with_adapters
from wedlm_jax.model.transformer import Transformer

Path = tuple[Any, ...]


def are_stacked(model: Transformer) -> bool:
    """Returns whether the parameters of a model's layers have a leading axis of layers."""
    return not isinstance(model.layers, nnx.List)


def with_layers_apart(model: Transformer, *, columns: bool | None = None) -> Transformer:
    """Converts a model with stacked layers into one whose layers are apart.

    Works under `jax.jit`, `jax.eval_shape` and on a mesh, and with quantized matrices.

    Args:
      model: returned unchanged if its layers are apart already.
      columns: passed to `Transformer`.
    """
    if not are_stacked(model):
        return model
    state: dict[Path, Any] = {}
    for path, parameter in nnx.state(model).flat_state():
        if path[0] != "layers":
            state[path] = parameter
            continue
        leaves, structure = jax.tree.flatten(parameter)
        for number, parts in enumerate(zip(*map(_cut, leaves), strict=True)):
            state["layers", number, *path[1:]] = jax.tree.unflatten(structure, parts)

    def made() -> Transformer:
        rngs, dtype = nnx.Rngs(0), model.embed_tokens[...].dtype
        made = Transformer(model.config, rngs=rngs, dtype=dtype, stacked=False, columns=columns)
        return made if model.lora is None else with_adapters(made, model.lora, rngs)

    graph = nnx.graphdef(nnx.eval_shape(made))
    return nnx.merge(graph, nnx.State.from_flat_path(state))


def _layers_of(array: Array) -> list[Array]:
    return list(array)


def _cut(stack: Array) -> list[Array]:
    """Returns the layers of a stack, each on the devices of its values."""
    if isinstance(stack, jax.core.Tracer):
        return _layers_of(stack)
    sharding = stack.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    # Not a new function per call, so that JAX compiles it once per shape.
    return jax.jit(_layers_of, out_shardings=sharding)(stack)  # type: ignore[no-any-return]
