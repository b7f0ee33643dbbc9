"""The transformer: positions, causality, precision, rematerialisation, the embedding."""

import dataclasses
import math
from functools import partial
from itertools import pairwise

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


@pytest.fixture(scope="module")
def hidden_states(parts):
    """The hidden states, compiled once for each kind of mask and each option."""
    graph, parameters = parts

    @partial(jax.jit, static_argnames=("attention", "dtype"))
    def run(tokens, positions, mask, **options):
        return nnx.merge(graph, parameters)(tokens, positions, mask, **options)

    return run


def test_physical_order_is_free_where_positions_and_mask_go_along(hidden_states):
    order = jnp.array([4, 0, 7, 2, 1, 6, 3, 5])
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    plain = MatrixMask(matrix=jnp.stack([causal] * 2))
    moved = MatrixMask(matrix=jnp.stack([causal[order][:, order]] * 2))
    straight = hidden_states(TOKENS, POSITIONS, plain)
    shuffled = hidden_states(TOKENS[:, order], POSITIONS[:, order], moved)
    np.testing.assert_allclose(shuffled, straight[:, order], atol=2e-5)


@pytest.mark.full
def test_rematerialisation_changes_memory_not_gradients(parts):
    graph, parameters = parts

    def gradient(policy):
        def total(parameters):
            model = nnx.merge(graph, parameters)
            hidden = model(TOKENS, POSITIONS, CausalMask(), remat=policy)
            return (model.logits(hidden) ** 2).mean()

        return jax.jit(jax.grad(total)).trace(parameters)

    traced = {policy: gradient(policy) for policy in POLICIES}
    found = {policy: traced[policy].lower().compile()(parameters) for policy in POLICIES}
    kept = {}
    for policy in POLICIES:
        pair = (jax.tree.leaves(found[name]) for name in (policy, "none"))
        for a, b in zip(*pair, strict=True):
            scale = float(jnp.abs(b).max())
            np.testing.assert_allclose(a / scale, b / scale, atol=1e-5, err_msg=policy)
        kept[policy] = bytes_kept_for_backward(traced[policy])
    sizes = [kept[policy] for policy in POLICIES]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(POLICIES) - 1  # full and offload differ in where it lies


def bytes_kept_for_backward(traced):
    """Size of what the forward scan over the layers stacks up for the backward one."""
    forward = next(e for e in traced.jaxpr.eqns if e.primitive.name == "scan")
    return sum(v.aval.size * v.aval.dtype.itemsize for v in forward.outvars)


def test_bfloat16_computes_on_float32_parameters(parts, hidden_states):
    exact = hidden_states(TOKENS, POSITIONS, CausalMask(), dtype="float32")
    rounded = hidden_states(TOKENS, POSITIONS, CausalMask(), dtype="bfloat16")
    assert exact.dtype == jnp.float32
    assert rounded.dtype == jnp.bfloat16
    difference = np.abs(np.asarray(rounded, np.float32) - np.asarray(exact))
    assert 0 < difference.mean() < 0.05
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


def test_logits_are_float32_whatever_the_states(parts):
    model = nnx.merge(*parts)
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = model.logits(jnp.ones((1, 2, TINY.hidden_size), dtype))
        assert logits.dtype == jnp.float32
        assert logits.shape == (1, 2, TINY.vocab_size)


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


# --- RoPE; its frequencies: `checkpoint/test_hf_parity.py` ---------------------------------

HEAD_DIM = 16
DEFAULT = [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]


@jax.jit
def rotated(x, positions):
    """Returns one head of ``x [T, head_dim]`` rotated to ``positions``."""
    tables = rope_tables(dataclasses.replace(TINY, head_dim=HEAD_DIM), positions[None])
    return apply_rope(x[None, :, None], tables)[0, :, 0]


def test_each_pair_is_a_complex_number_turned_by_position_times_frequency():
    x = np.random.default_rng(0).normal(size=(3, HEAD_DIM)).astype(np.float32)
    positions = [0, 7, 300]
    # Half-split: number i has its real part in the first half, its imaginary in the second.
    turned = (x[:, :8] + 1j * x[:, 8:]) * np.exp(1j * np.outer(positions, DEFAULT))
    expected = np.concatenate([turned.real, turned.imag], axis=1)
    found = rotated(x, np.array(positions))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_array_equal(found[0], x[0])


def test_low_precision_is_rotated_in_float32_and_returned_as_it_came():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, HEAD_DIM)), jnp.bfloat16)
    positions = jnp.array([1001])
    ours = rotated(x, positions)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        ours, rotated(x.astype(jnp.float32), positions).astype(ours.dtype)
    )


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


def test_each_policy_keeps_less_than_the_one_before():
    kept = [set(names) for names in KEPT.values()]
    assert all(later <= earlier for earlier, later in pairwise(kept))
