"""The transformer: positions, causality, precision, rematerialisation, tied heads."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.training import TINY, MatrixMask, tiny_transformer
from tests.jaxpr_shapes import equations_in
from wedlm_jax.masks import CausalMask, DualStreamMask
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import with_layers_apart
from wedlm_jax.model.rematerialisation import POLICIES

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


def test_a_token_changes_no_row_before_it_and_every_row_from_it(hidden_states):
    before = np.asarray(hidden_states(TOKENS, POSITIONS, CausalMask()))
    after = np.asarray(hidden_states(TOKENS.at[0, 3].set(50), POSITIONS, CausalMask()))
    changed = (before != after).any(-1)
    np.testing.assert_array_equal(changed[0], np.arange(LENGTH) >= 3)
    assert not changed[1].any()


def test_only_differences_of_positions_count(hidden_states):
    here = hidden_states(TOKENS, POSITIONS, CausalMask())
    moved = hidden_states(TOKENS, POSITIONS + 100, CausalMask())
    stretched = hidden_states(TOKENS, POSITIONS * 2, CausalMask())
    np.testing.assert_allclose(moved, here, atol=1e-4)
    assert float(jnp.abs(stretched - here).max()) > 0.1


def test_physical_order_is_free_where_positions_and_mask_go_along(hidden_states):
    order = jnp.array([4, 0, 7, 2, 1, 6, 3, 5])
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    plain = MatrixMask(matrix=jnp.stack([causal] * 2))
    moved = MatrixMask(matrix=jnp.stack([causal[order][:, order]] * 2))
    straight = hidden_states(TOKENS, POSITIONS, plain)
    shuffled = hidden_states(TOKENS[:, order], POSITIONS[:, order], moved)
    np.testing.assert_allclose(shuffled, straight[:, order], atol=2e-5)


@pytest.mark.parametrize("stacked", [True, False])
def test_flat_tokens_over_kept_keys_equal_the_whole_forward(parts, stacked):
    """`Transformer.run` in two goes, its keys and values kept by the caller; layers stacked or
    apart."""
    model = nnx.merge(*parts)
    if not stacked:
        model = with_layers_apart(model)
    graph, parameters = nnx.split(model)
    config = model.config
    room = (config.num_hidden_layers, LENGTH, config.num_key_value_heads, config.head_dim)

    @partial(jax.jit, static_argnums=2)
    def run(parameters, kept, bounds):
        here = slice(*bounds)

        def attend(kept, layer, *qkv):
            q, *new = qkv
            start = (layer, bounds[0], 0, 0)
            kept = tuple(
                jax.lax.dynamic_update_slice(old, x[None], start)
                for old, x in zip(kept, new, strict=True)
            )
            k, v = (x[layer, : bounds[1]] for x in kept)
            group = q.shape[1] // k.shape[1]
            scores = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, group, axis=1))
            place = jnp.arange(bounds[1])
            seen = place[None, :] <= place[here][:, None]
            scores = jnp.where(seen, scores / config.head_dim**0.5, -jnp.inf)
            weights = jax.nn.softmax(scores)
            return jnp.einsum("hqk,khd->qhd", weights, jnp.repeat(v, group, axis=1)), kept

        model = nnx.merge(graph, parameters)
        return model.run(TOKENS[0, here], POSITIONS[0, here], attend, kept)

    kept = (jnp.full(room, 9.0), jnp.full(room, 9.0))
    first, kept = run(parameters, kept, (0, 5))
    rest, _ = run(parameters, kept, (5, LENGTH))
    whole = nnx.merge(*parts)(TOKENS, POSITIONS, CausalMask())[0]
    np.testing.assert_allclose(jnp.concatenate([first, rest]), whole, atol=2e-5)


def test_streams_equals_dense_through_all_layers(hidden_states):
    mask = DualStreamMask(jnp.array([[1, 1, 1, 0], [1, 1, 2, 2]]), 2)
    positions = jnp.tile(POSITIONS[:, :4], (1, 2))
    dense = hidden_states(TOKENS, positions, mask, attention="dense")
    streams = hidden_states(TOKENS, positions, mask, attention="streams")
    np.testing.assert_allclose(streams, dense, atol=2e-5)


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
        for a, b in zip(
            jax.tree.leaves(found[policy]), jax.tree.leaves(found["none"]), strict=True
        ):
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": False, "qk_norm": False, "num_key_value_heads": 4},
    ],
)
def test_num_parameters_counts_every_parameter(changes):
    config = dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]
    shapes = jax.eval_shape(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)]
    assert config.num_parameters() == sum(sizes)
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    assert config.num_parameters(embeddings=False) == sum(sizes) - tables


def test_layers_are_stacked_and_differ(parts):
    model = nnx.merge(*parts)
    weight = model.layers.mlp.up_proj.weight[...]
    assert weight.shape == (TINY.num_hidden_layers, TINY.intermediate_size, TINY.hidden_size)
    assert not np.allclose(weight[0], weight[1])


def test_a_tied_head_is_the_embedding():
    model = tiny_transformer(tie_word_embeddings=True)
    assert model.lm_head is None
    np.testing.assert_array_equal(model.head_matrix(), model.embed_tokens[...])
    untied = tiny_transformer()
    assert untied.head_matrix().shape == (TINY.vocab_size, TINY.hidden_size)
    assert not np.array_equal(untied.head_matrix(), untied.embed_tokens[...])


def test_the_same_seed_gives_the_same_parameters():
    first, again = (nnx.state(Transformer(TINY, rngs=nnx.Rngs(5))) for _ in range(2))
    other = nnx.state(Transformer(TINY, rngs=nnx.Rngs(6)))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first["embed_tokens"][...], other["embed_tokens"][...])
