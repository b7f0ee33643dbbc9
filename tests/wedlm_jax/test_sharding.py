"""Every array has a place on the mesh, and what does not fit is refused by name."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.examples.training import tiny_transformer
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import (
    AXIS_RULES,
    MESH_AXES,
    PARAMETER_AXES,
    constrain,
    make_mesh,
    parameter_axes,
    spec,
    tree_shardings,
)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_name_for_each_of_its_axes(tied):
    model = tiny_transformer(tie_word_embeddings=tied)
    found = set()
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = parameter_axes(name)
        assert axes is not None, name
        assert len(axes) == leaf.ndim, name
        found.add(axes)
    assert ("layers", "heads", "hidden") in found


def test_what_is_no_parameter_has_no_axes():
    assert parameter_axes("optimizer/1/0/count") is None
    assert parameter_axes("step") is None
    moment = parameter_axes("optimizer/1/0/mu/layers/mlp/up_proj/weight/value")
    assert moment == ("layers", "mlp", "hidden")


def test_tables_name_only_what_the_other_knows():
    used = {axis for axes in PARAMETER_AXES.values() for axis in axes}
    assert used <= set(AXIS_RULES)
    assert {axis for axes in AXIS_RULES.values() for axis in axes} == set(MESH_AXES)


def test_the_rest_of_the_devices_goes_to_the_axis_given_as_minus_one():
    mesh = make_mesh({"fsdp": -1, "tensor": 2})
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2, "sequence": 1}
    assert make_mesh({}, jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 3}, "fsdp 3, .* does not multiply to 8 devices"),
        ({"fsdp": -1, "tensor": 3}, "does not multiply to 8 devices"),
        ({"fsdp": -1, "tensor": -1}, "one of them may be -1"),
        ({"fsdp": 0}, "at least 1"),
        ({"pipeline": 8}, "unknown axis 'pipeline'; .* data, fsdp, tensor, sequence"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        make_mesh(sizes)


def test_a_tree_is_placed_leaf_by_leaf():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    tree = {"lm_head": jnp.ones((8, 4)), "norm": {"scale": jnp.ones(8)}, "count": jnp.int32(0)}
    layout = tree_shardings(mesh, tree)
    assert layout["lm_head"].spec in (P("tensor", "fsdp"), P(("tensor",), ("fsdp",)))
    assert layout["norm"]["scale"].is_fully_replicated
    assert layout["count"].is_fully_replicated


def test_constraining_does_nothing_without_a_mesh_and_places_under_one():
    x = jnp.ones((8, 4, 2))
    assert constrain(x, "batch", "length") is x
    mesh = make_mesh({"fsdp": 4, "sequence": 2})
    with jax.set_mesh(mesh):
        placed = jax.jit(lambda x: constrain(x * 1.0, "batch", "length"))(x)
    expected = jax.sharding.NamedSharding(mesh, spec(("batch", "length")))
    assert placed.sharding.is_equivalent_to(expected, 3)
