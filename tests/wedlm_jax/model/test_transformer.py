"""The transformer: positions, causality, precision, rematerialisation, the embedding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.training import TINY, MatrixMask, tiny_transformer
from tests.jaxpr_shapes import arrays_in, equations_in
from wedlm_jax.masks import CausalMask, DualStreamMask
from wedlm_jax.model import Transformer
from wedlm_jax.model.layers import KEPT, POLICIES, looked_up
from wedlm_jax.model.rope import apply_rope, rope_tables
from wedlm_jax.sharding import make_mesh

LENGTH = 8
TOKENS = jnp.array([[5, 17, 96, 3, 3, 41, 60, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
POSITIONS = jnp.tile(jnp.arange(LENGTH), (2, 1))


@pytest.fixture(scope="module")
def parts():
    return nnx.split(tiny_transformer())


def test_physical_order_is_free_where_positions_and_mask_go_along(parts):
    order = jnp.array([4, 0, 7, 2, 1, 6, 3, 5])
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    run = jax.jit(nnx.merge(*parts))
    straight = run(TOKENS, POSITIONS, MatrixMask(matrix=jnp.stack([causal] * 2)))
    moved = MatrixMask(matrix=jnp.stack([causal[order][:, order]] * 2))
    shuffled = run(TOKENS[:, order], POSITIONS[:, order], moved)
    np.testing.assert_allclose(shuffled, straight[:, order], atol=2e-5)


def test_bfloat16_computes_on_float32_parameters(parts):
    graph, parameters = parts
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters)} == {jnp.dtype("float32")}

    def run(parameters):
        model = nnx.merge(graph, parameters)
        return model(TOKENS, POSITIONS, CausalMask(), dtype=jnp.bfloat16)

    traced = jax.make_jaxpr(run)(parameters)
    inputs = [
        {v.aval.dtype for v in equation.invars}
        for equation in equations_in(traced.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert inputs
    assert all(dtypes == {jnp.dtype("bfloat16")} for dtypes in inputs)
    assert traced.out_avals[0].dtype == jnp.bfloat16


def test_a_seed_names_the_parameters_and_layers_differ(parts):
    weight = nnx.merge(*parts).layers.mlp.up_proj.weight[...]
    assert weight.shape == (TINY.num_hidden_layers, TINY.intermediate_size, TINY.hidden_size)
    assert not np.allclose(weight[0], weight[1])
    first, again, other = (nnx.state(Transformer(TINY, rngs=nnx.Rngs(n))) for n in (5, 5, 6))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first["embed_tokens"][...], other["embed_tokens"][...])


# --- the embedding -----------------------------------------------------------------------


TABLE = jax.random.normal(jax.random.key(0), (8, 16))
# One token stands 4,000 times, so that a sum in bfloat16 would stop growing at 256.
REPEATED = jnp.where(jnp.arange(4096) < 4000, 3, jnp.arange(4096) % 8).reshape(8, 512)


@jax.jit
def gradient_of_ones(table):
    return jax.grad(lambda x: looked_up(x, REPEATED, jnp.dtype("bfloat16")).sum())(table)


@pytest.mark.parametrize("sizes", [{"fsdp": 1}, {"fsdp": 4, "tensor": 2}])
def test_the_gradient_counts_every_token(sizes):
    counts = np.bincount(REPEATED.reshape(-1), minlength=8)
    with jax.set_mesh(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])):
        found = gradient_of_ones(TABLE)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.broadcast_to(counts[:, None], TABLE.shape))


def test_rows_are_gathered_after_the_cast():
    traced = jax.make_jaxpr(lambda x: looked_up(x, REPEATED, jnp.dtype("bfloat16")))(TABLE)
    rows = [x.dtype for x in arrays_in(traced.jaxpr) if x.shape == (*REPEATED.shape, 16)]
    assert set(rows) == {jnp.dtype("bfloat16")}


# --- RoPE; what it computes: `checkpoint/test_hf_parity.py` --------------------------------


def test_low_precision_is_rotated_in_float32_and_returned_as_it_came():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 1, TINY.head_dim)), jnp.bfloat16)
    tables = rope_tables(TINY, jnp.array([[1001]]))
    ours = apply_rope(x, tables)
    assert ours.dtype == jnp.bfloat16
    exact = apply_rope(x.astype(jnp.float32), tables)
    np.testing.assert_array_equal(ours, exact.astype(ours.dtype))


# --- what policies keep: traced, not run -------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_kernel_runs_again_only_where_its_output_is_not_kept(policy):
    tile = 128
    tokens = jnp.zeros((2, 2 * tile), jnp.int32)
    mask = DualStreamMask(jnp.ones((2, tile), jnp.int32), 32)
    graph, parameters = nnx.split(tiny_transformer(head_dim=128))

    def total(parameters):
        model = nnx.merge(graph, parameters)
        return model(tokens, tokens, mask, remat=policy, attention="splash").sum()

    traced = jax.make_jaxpr(jax.grad(total))(parameters).jaxpr
    kernels = [e for e in equations_in(traced) if e.primitive.name == "pallas_call"]
    again = policy != "none" and "attended" not in KEPT[policy]
    assert len(kernels) == 2 + again


def test_each_policy_keeps_less_than_the_one_before(parts):
    graph, parameters = parts

    def bytes_kept(policy):
        """Size of what the forward scan over the layers stacks up for the backward one."""

        def total(parameters):
            model = nnx.merge(graph, parameters)
            hidden = model(TOKENS, POSITIONS, CausalMask(), remat=policy)
            return (model.logits(hidden) ** 2).mean()

        traced = jax.make_jaxpr(jax.grad(total))(parameters)
        scan = next(e for e in traced.jaxpr.eqns if e.primitive.name == "scan")
        return sum(v.aval.size * v.aval.dtype.itemsize for v in scan.outvars)

    sizes = [bytes_kept(policy) for policy in POLICIES]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(POLICIES) - 1  # full and offload differ in where it lies
