"""The vocabulary loss on a mesh: that of one device, its head gathered once for all chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wedlm_jax.aot.cost import program_cost
from wedlm_jax.model.cross_entropy import weighted_cross_entropy
from wedlm_jax.sharding import make_mesh

ROWS, LENGTH, WIDTH, VOCAB = 8, 32, 16, 104
HIDDEN = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, WIDTH))
HEAD = jax.random.normal(jax.random.key(1), (VOCAB, WIDTH)) / 4
TARGETS = jax.random.randint(jax.random.key(2), (ROWS, LENGTH), 0, VOCAB)
# Devices hold from none to all of their tokens' targets, and so run loops of other lengths.
WANTED = jax.random.uniform(jax.random.key(3), (ROWS, LENGTH)) < jnp.arange(ROWS)[:, None] / 7
WEIGHTS = jax.random.uniform(jax.random.key(4), (ROWS, LENGTH)) / LENGTH


def compiled(mesh, chunk, dtype="float32"):
    """Loss and gradients with respect to hidden states and head, compiled for the mesh."""

    def loss(hidden, head):
        total, nll, _ = weighted_cross_entropy(
            hidden.astype(dtype), head, TARGETS, WEIGHTS, WANTED, chunk=chunk
        )
        return total, nll

    def place(x, *axes):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*axes)))

    shapes = (place(HIDDEN, ("data", "fsdp"), "sequence"), place(HEAD, "tensor", "fsdp"))
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(*shapes).compile()


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "sequence": 4}]
)
def test_loss_and_gradients_equal_those_of_one_device(sizes):
    mesh = make_mesh(sizes)
    program = compiled(mesh, 8)
    hidden_place, head_place = program.input_shardings[0]
    given = jax.device_put(HIDDEN, hidden_place), jax.device_put(HEAD, head_place)
    found = program(*given)

    def plain(hidden, head):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(hidden @ head.T), TARGETS[..., None], -1)
        nll = jnp.where(WANTED, -chosen[..., 0], 0.0)
        return (WEIGHTS * nll).sum(), nll

    expected = jax.value_and_grad(plain, (0, 1), has_aux=True)(HIDDEN, HEAD)
    for own, one in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-7)


def test_collectives_do_not_grow_with_the_number_of_chunks():
    mesh = make_mesh({"fsdp": 8})
    few, many = (program_cost(compiled(mesh, chunk).as_text() or "") for chunk in (32, 4))
    assert few.collective_bytes
    assert many.collective_bytes == few.collective_bytes


def test_the_head_gradient_is_summed_over_devices_in_float32():
    """States are bfloat16, which a sum over eight devices would round to."""
    mesh = make_mesh({"fsdp": 8})
    program = compiled(mesh, 8, "bfloat16")
    places = program.input_shardings[0]
    (_, _), (_, ours) = program(*map(jax.device_put, (HIDDEN, HEAD), places))
    one = compiled(make_mesh({"fsdp": 1}, jax.devices()[:1]), 8, "bfloat16")
    (_, _), (_, exact) = one(HIDDEN, HEAD)
    np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6 * float(jnp.abs(exact).max()))
