"""Cross entropy by chunks: losses and gradients of whole logits, at the cost of tokens with a
target; on a mesh those of one device, the head gathered once for all chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jaxpr_shapes import equations_in, shapes_in
from tests.reference.training import cross_entropy, cross_entropy_gradients
from wedlm_jax.aot.cost import program_cost
from wedlm_jax.model.cross_entropy import weighted_cross_entropy
from wedlm_jax.sharding import make_mesh

ROWS, LENGTH, WIDTH, VOCAB = 2, 12, 6, 30


@partial(jax.jit, static_argnames="chunk")
def losses_and_gradients(*given, chunk):
    """Gradients of three times the sum, so that the cotangent is seen to count."""

    def total(*given):
        losses = weighted_cross_entropy(*given, chunk=chunk)
        return 3 * losses[0], losses

    return jax.grad(total, argnums=(0, 1), has_aux=True)(*given)


def example(seed, share):
    random = np.random.default_rng(seed)
    return (
        random.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32),
        random.normal(size=(VOCAB, WIDTH)).astype(np.float32) * 3,
        random.integers(0, VOCAB, (ROWS, LENGTH)),
        random.uniform(0.1, 2, (ROWS, LENGTH)).astype(np.float32),
        random.uniform(size=(ROWS, LENGTH)) < share,
    )


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_losses_and_gradients_equal_those_of_whole_logits(chunk, share):
    hidden, head, targets, weights, has_target = example(0, share)
    (by_hidden, by_head), (total, nll, hit) = losses_and_gradients(
        hidden, head, targets, weights, has_target, chunk=chunk
    )
    flat, flat_targets = hidden.reshape(-1, WIDTH), targets.reshape(-1)
    counted, weight = has_target.reshape(-1), (weights * has_target).reshape(-1)
    exact = cross_entropy(flat.astype(np.float64) @ head.T, flat_targets)
    np.testing.assert_allclose(nll.reshape(-1), exact * counted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, (exact * weight).sum(), rtol=1e-5)
    is_hit = (flat @ head.T).argmax(-1) == flat_targets
    np.testing.assert_array_equal(hit.reshape(-1), is_hit & counted)
    wanted_gradients = cross_entropy_gradients(flat, head, flat_targets, 3 * weight)
    for ours, theirs in zip((by_hidden.reshape(-1, WIDTH), by_head), wanted_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_losses_are_the_same_without_gradients():
    given = example(1, 0.5)
    _, with_gradients = losses_and_gradients(*given, chunk=5)
    alone = jax.jit(partial(weighted_cross_entropy, chunk=5))(*given)
    for ours, theirs in zip(alone, with_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_the_head_gradient_in_bfloat16_is_summed_in_float32():
    """8,192 tokens in 32 chunks, against float32 sums over the same rounded states and head."""
    tokens, width, vocab = 8192, 32, 64
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, width)).astype(jnp.bfloat16)
    head = jax.random.normal(keys[1], (vocab, width)) / 4
    targets = jax.random.categorical(keys[2], jnp.linspace(0, 3, vocab), shape=(1, tokens))
    weights, has_target = jnp.full((1, tokens), 1 / tokens), jnp.ones((1, tokens), bool)
    (_, ours), _ = losses_and_gradients(hidden, head, targets, weights, has_target, chunk=256)
    assert ours.dtype == jnp.float32
    states = np.asarray(hidden[0], np.float64)
    rounded = np.asarray(head.astype(jnp.bfloat16), np.float64)
    _, exact = cross_entropy_gradients(states, rounded, targets[0], np.asarray(3 * weights[0]))
    error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
    assert error < 1e-4


def products_in(traced):
    return [e for e in equations_in(traced.jaxpr) if e.primitive.name == "dot_general"]


def test_the_head_takes_three_products_and_logits_of_one_chunk():
    given = map(jnp.asarray, example(2, 1.0))
    traced = jax.make_jaxpr(partial(losses_and_gradients, chunk=4))(*given)
    assert len(products_in(traced)) == 3
    sizes = [s[:-1] for s in shapes_in(traced.jaxpr) if s[-1:] == (VOCAB,)]
    assert max(int(np.prod(size)) for size in sizes) == 4


def test_a_head_that_is_not_trained_costs_no_gradient():
    hidden, *rest = map(jnp.asarray, example(2, 0.5))
    by_hidden = jax.grad(lambda x: 3 * weighted_cross_entropy(x, *rest, chunk=4)[0])
    assert len(products_in(jax.make_jaxpr(by_hidden)(hidden))) == 2
    both, _ = losses_and_gradients(hidden, *rest, chunk=4)
    # Two programs round the summands otherwise, and sums are smaller than their summands.
    rounding = 1e-6 * np.abs(both[0]).max()
    np.testing.assert_allclose(jax.jit(by_hidden)(hidden), both[0], rtol=0, atol=rounding)


@pytest.mark.parametrize(("has_target", "turns"), [(0, 0), (1, 1), (8, 2), (9, 3), (24, 6)])
def test_the_loop_runs_over_chunks_with_targets_only(has_target, turns):
    """Tokens behind the last chunk with a target may hold anything, even what is not a number."""
    hidden, head, targets, weights, _ = example(3, 1.0)
    flags = np.zeros(ROWS * LENGTH, bool)
    flags[np.random.default_rng(has_target).permutation(len(flags))[:has_target]] = True
    unmet = np.flatnonzero(~flags)[max(4 * turns - has_target, 0) :]
    hidden.reshape(-1, WIDTH)[unmet] = np.nan
    gradients, (total, nll, _) = losses_and_gradients(
        hidden, head, targets, weights, flags.reshape(ROWS, LENGTH), chunk=4
    )
    assert all(np.isfinite(x).all() for x in (*gradients, total, nll))
    assert (np.abs(nll).sum() > 0) == (has_target > 0)


def test_logits_of_bfloat16_states_are_float32():
    random = np.random.default_rng(1)
    hidden = jnp.asarray(random.normal(size=(1, 5, 64)), jnp.bfloat16)
    head = jnp.asarray(random.normal(size=(30, 64)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 30, (1, 5)))
    ones = jnp.ones((1, 5))
    _, nll, _ = weighted_cross_entropy(hidden, head, targets, ones, ones > 0, chunk=5)
    assert nll.dtype == jnp.float32
    rounded = np.asarray(head.astype(jnp.bfloat16), np.float64)
    exact = cross_entropy(np.asarray(hidden[0], np.float64) @ rounded.T, np.asarray(targets[0]))
    # Logits in bfloat16 would be off by about 0.05 here.
    np.testing.assert_allclose(nll[0], exact, atol=1e-4)


# --- on a mesh ---------------------------------------------------------------------------


MESH_ROWS, MESH_LENGTH, MESH_WIDTH, MESH_VOCAB = 8, 32, 16, 104
HIDDEN = jax.random.normal(jax.random.key(0), (MESH_ROWS, MESH_LENGTH, MESH_WIDTH))
HEAD = jax.random.normal(jax.random.key(1), (MESH_VOCAB, MESH_WIDTH)) / 4
TARGETS = jax.random.randint(jax.random.key(2), (MESH_ROWS, MESH_LENGTH), 0, MESH_VOCAB)
# Devices hold from none to all of their tokens' targets, and so run loops of other lengths.
WANTED = (
    jax.random.uniform(jax.random.key(3), (MESH_ROWS, MESH_LENGTH))
    < jnp.arange(MESH_ROWS)[:, None] / 7
)
WEIGHTS = jax.random.uniform(jax.random.key(4), (MESH_ROWS, MESH_LENGTH)) / MESH_LENGTH


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


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "sequence": 4}])
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
