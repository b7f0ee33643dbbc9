"""Converts the layout of a model's layers: stacked, or apart, on rows or on columns.

* Stacked: every parameter has a leading axis of layers, and a scan runs through them. For training,
  and for decoding where the compiler reads a layer of the stack in place (TPUs).
* Apart: each layer has its own arrays. For CPUs, where a scan copies them out of the stack.
* On columns: hidden states are ``[D, T]``, and matrices are stored ``[out, in]`` and are the left
  operand of a product. A CPU's matrix product repacks its right operand at each call. For a matrix
  that does not fit into the caches this takes longer than the product with a few tokens. For a
  smaller one it costs little, and rows are faster unless the number of tokens is a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.config import ModelConfig
from wedlm_jax.model.layers import COLUMNS, columns_are_faster
from wedlm_jax.model.transformer import Transformer

Path = tuple[Any, ...]

TURNED = {"kernel": "weight", "lm_head": "head_weight"}
"""Names of a matrix ``[in, out]`` and of the same ``[out, in]``."""
_TURNED_BACK = {new: old for old, new in TURNED.items()}


def are_stacked(model: Transformer) -> bool:
    """Tells whether the parameters of a model's layers have a leading axis of layers."""
    return not isinstance(model.layers, nnx.List)


def with_layers_apart(
    model: Transformer, *, columns: bool | None = None, consume: bool = False
) -> Transformer:
    """Converts a model with stacked layers into one whose layers lie apart.

    Works under `jax.jit`, `jax.eval_shape` and on a mesh, and with quantized matrices.

    Args:
      model: returned unchanged if its layers lie apart already.
      columns: whether layers compute on columns; by default if
        `wedlm_jax.model.layers.columns_are_faster`.
      consume: whether each stacked array is deleted as soon as its layers are extracted, so that at
        most one parameter of all layers is in memory twice. ``model`` cannot be used afterwards.
    """
    if not are_stacked(model):
        return model
    if columns is None:
        columns = columns_are_faster(model.config, model.embed_tokens[...].dtype)
    state: dict[Path, Any] = {}
    for path, parameter in _parameters(model).items():
        turned = path == ("lm_head",) or (columns and path[-1] == "kernel")
        count = model.config.num_hidden_layers if path[0] == "layers" else None
        path = (*path[:-1], TURNED[path[-1]]) if turned else path
        if count is None and not turned:
            state[path] = parameter
            continue
        leaves, structure = jax.tree.flatten(parameter)
        cut = [_cut(leaf, count, turned) for leaf in leaves]
        if consume:
            _delete(leaves, cut)
        own = [jax.tree.unflatten(structure, some) for some in zip(*cut, strict=True)]
        if count is None:
            [state[path]] = own
        else:
            state |= {("layers", i, *path[1:]): layer for i, layer in enumerate(own)}
    return _merged(model.config, state, stacked=False, columns=columns)


def with_layers_stacked(model: Transformer, *, consume: bool = False) -> Transformer:
    """Converts a model whose layers lie apart into one with stacked layers; see
    `with_layers_apart`."""
    if are_stacked(model):
        return model
    parameters, state = _parameters(model), {}
    for path in [path for path in parameters if path[0] != "layers" or path[1] == 0]:
        turned = path[-1] in _TURNED_BACK
        new = (*path[:-1], _TURNED_BACK[path[-1]]) if turned else path
        if path[0] == "layers":
            new = ("layers", *new[2:])
            numbers = range(model.config.num_hidden_layers)
            own = [parameters.pop(("layers", i, *path[2:])) for i in numbers]
        elif turned:
            own = [parameters.pop(path)]
        else:
            state[path] = parameters.pop(path)
            continue
        leaves = [jax.tree.leaves(parameter) for parameter in own]
        joined = [_join(some, path[0] == "layers", turned) for some in zip(*leaves, strict=True)]
        state[new] = jax.tree.unflatten(jax.tree.structure(own[0]), joined)
        if consume:
            _delete([leaf for some in leaves for leaf in some], joined)
    return _merged(model.config, state, stacked=True, columns=False)


def is_on_columns(model: Transformer) -> bool:
    """Tells whether the layers compute on columns ``[D, T]``."""
    return model.axis == COLUMNS


def _parameters(model: Transformer) -> dict[Path, Any]:
    return dict(nnx.state(model).flat_state())


def _merged(
    config: ModelConfig, state: dict[Path, Any], *, stacked: bool, columns: bool
) -> Transformer:
    shapes = nnx.eval_shape(
        lambda: Transformer(config, rngs=nnx.Rngs(0), stacked=stacked, columns=columns)
    )
    return nnx.merge(nnx.graphdef(shapes), nnx.State.from_flat_path(state))


def _cut(array: Array, count: int | None, turned: bool) -> list[Array]:
    """Cuts ``[count, ...]`` into its layers, each with the sharding that it had, transposed if
    ``turned``. With ``count`` None the array belongs to no layer, and is kept whole."""

    def own_spec(spec: tuple[Any, ...]) -> tuple[Any, ...]:
        spec = spec if count is None else spec[1:]
        return spec[::-1] if turned else spec

    return _placed(_layers_of, own_spec, array, layers=count, turned=turned)  # type: ignore[no-any-return]


def _layers_of(array: Array, *, layers: int | None, turned: bool) -> list[Array]:
    own = [array] if layers is None else [array[index] for index in range(layers)]
    return [x.T for x in own] if turned else own


def _join(arrays: tuple[Array, ...], layers: bool, turned: bool) -> Array:
    """Inverts `_cut`."""

    def joined_spec(spec: tuple[Any, ...]) -> tuple[Any, ...]:
        spec = spec[::-1] if turned else spec
        return (None, *spec) if layers else spec

    return _placed(_stack_of, joined_spec, *arrays, layers=layers, turned=turned)  # type: ignore[no-any-return]


def _stack_of(*arrays: Array, layers: bool, turned: bool) -> Array:
    own = [x.T for x in arrays] if turned else arrays
    return jnp.stack(own) if layers else own[0]


def _placed(function: Any, new_spec: Any, *arrays: Array, **how: Any) -> Any:
    """Runs ``function`` so that its results stay on the devices of their values. It is one of this
    module's, so that JAX knows it again and compiles it once for arrays of a shape."""
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return function(*arrays, **how)
    sharding = arrays[0].sharding
    if isinstance(sharding, NamedSharding):
        spec = tuple(sharding.spec) + (None,) * (arrays[0].ndim - len(sharding.spec))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*new_spec(spec)))
    jitted = jax.jit(function, static_argnames=tuple(how), out_shardings=sharding)
    return jitted(*arrays, **how)


def _delete(old: list[Array], new: Any) -> None:
    jax.block_until_ready(new)
    for leaf in old:
        leaf.delete()
