"""Layers stacked or apart, times rows or columns: the same model, and the same forward."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.training import TINY
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked, with_layers_apart
from wedlm_jax.model.layers import columns_are_faster
from wedlm_jax.model.quantization import quantize_weights
from wedlm_jax.sharding import make_mesh, tree_shardings

TIED = dataclasses.replace(TINY, tie_word_embeddings=True, attention_bias=False, qk_norm=False)
TOKENS = jnp.array([[5, 17, 96, 3, 3, 41, 60, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
POSITIONS = jnp.array([[0, 1, 2, 3, 6, 4, 7, 5], [3, 4, 5, 6, 7, 8, 9, 10]])

both_ways = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


@functools.cache
def stacked_model(config):
    return Transformer(config, rngs=nnx.Rngs(5))


def models(config, columns):
    """The same weights stacked and apart."""
    stacked = stacked_model(config)
    return stacked, with_layers_apart(stacked, columns=columns)


def assert_same_leaves(one, other):
    a, b = (jax.tree_util.tree_leaves_with_path(nnx.state(model)) for model in (one, other))
    for (path, x), (other_path, y) in zip(a, b, strict=True):
        assert path == other_path
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y, err_msg=str(path))


# --- one made of the other ---------------------------------------------------------------


@pytest.mark.parametrize(("config", "columns"), [(TINY, False), (TIED, True)])
def test_taken_apart_it_is_the_model_that_was_made_so(config, columns):
    stacked, apart = models(config, columns)
    assert (are_stacked(stacked), are_stacked(apart)) == (True, False)
    assert (stacked.layers.mlp.up_proj.columns, apart.layers[0].mlp.up_proj.columns) == (
        False,
        columns,
    )
    assert with_layers_apart(apart) is apart
    made_so = Transformer(config, rngs=nnx.Rngs(5), stacked=False, columns=columns)
    assert_same_leaves(apart, made_so)


def test_large_matrices_go_to_columns():
    large = dataclasses.replace(TINY, hidden_size=1024, intermediate_size=1024)
    assert [columns_are_faster(c, "float32") for c in (TINY, large)] == [False, True]
    assert not columns_are_faster(large, "bfloat16")


@both_ways
def test_rounded_matrices_move_along(columns):
    stacked, apart = models(TINY, columns)
    moved = with_layers_apart(quantize_weights(stacked), columns=columns)
    assert_same_leaves(moved, quantize_weights(apart))


@both_ways
def test_on_a_mesh_each_layer_lies_as_the_rules_say(columns):
    config = dataclasses.replace(TINY, vocab_size=96, mask_token_id=95)
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    graph, state = nnx.split(stacked_model(config))
    placed = nnx.merge(graph, jax.device_put(state, tree_shardings(mesh, state)))
    apart = with_layers_apart(placed, columns=columns)
    state = nnx.state(apart)
    wanted = jax.tree.leaves(tree_shardings(mesh, state))
    for leaf, sharding in zip(jax.tree.leaves(state), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.shape, sharding)
    assert_same_leaves(apart, with_layers_apart(stacked_model(config), columns=columns))


# --- flat tokens -------------------------------------------------------------------------

LENGTHS = (5, 1, 7)
SPANS = (slice(0, 5), slice(5, 6), slice(6, 13))


def flat_example():
    """Three sequences behind one another, and padding; positions are not places."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, TIED.vocab_size, sum(LENGTHS) + 3)
    positions = [random.permutation(length) + 2 for length in LENGTHS] + [np.zeros(3, int)]
    return jnp.array(tokens), jnp.array(np.concatenate(positions))


def dense(kept, layer, q, k, v):
    """Causal attention within each sequence, by a matrix over all flat tokens. ``kept [2, T]``
    counts the layers and notes which came last."""
    size, group = q.shape[0], q.shape[1] // k.shape[1]
    owner = np.repeat(np.arange(len(LENGTHS) + 1), (*LENGTHS, 3))
    seen = (owner[:, None] == owner) & np.tri(size, dtype=bool)
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    after = jnp.stack([kept[0] + 1, jnp.full_like(kept[1], layer)])
    return jnp.einsum("hqk,khd->qhd", weights, v), after


@jax.jit
def each_alone(model):
    """A row a sequence, with padding behind, which nothing before it sees."""
    flat = flat_example()
    rows = (jnp.stack([jnp.pad(x[own], (0, 7 - x[own].size)) for own in SPANS]) for x in flat)
    return model(*rows, CausalMask())


@pytest.mark.parametrize(
    ("config", "layout"), [(TINY, "stacked"), (TIED, "rows"), (TINY, "columns")]
)
def test_flat_tokens_are_computed_as_each_sequence_alone(config, layout):
    stacked, apart = models(config, layout == "columns")
    model = stacked if layout == "stacked" else apart
    tokens, positions = flat_example()
    start = jnp.zeros((2, len(tokens)), jnp.int32)
    hidden, kept = jax.jit(lambda model: model.run(tokens, positions, dense, start))(model)
    alone = each_alone(stacked)
    assert hidden.shape == (len(tokens), config.hidden_size)
    np.testing.assert_array_equal(kept[0], config.num_hidden_layers)
    np.testing.assert_array_equal(kept[1], config.num_hidden_layers - 1)
    for row, own in zip(alone, SPANS, strict=True):
        np.testing.assert_allclose(hidden[own], row[: own.stop - own.start], atol=1e-5)


def test_flat_tokens_in_bfloat16_stay_so():
    stacked, apart = models(TINY, columns=True)
    tokens, positions = flat_example()
    start = jnp.zeros((2, len(tokens)), jnp.int32)

    @functools.partial(jax.jit, static_argnames="dtype")
    def run(model, dtype):
        return model.run(tokens, positions, dense, start, dtype=dtype)[0]

    rounded = run(apart, jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    difference = jnp.abs(rounded.astype(jnp.float32) - run(stacked, jnp.float32))
    assert 0 < float(difference.mean()) < 0.05
    assert apart.logits(rounded).dtype == jnp.float32
    alone = apart.logits(rounded[:1])
    np.testing.assert_allclose(alone, apart.logits(rounded)[:1], atol=1e-5)


@pytest.mark.parametrize(("columns", "count"), [(False, 16), (True, 1), (True, 16)])
def test_matrices_are_multiplied_as_they_are_stored(columns, count):
    """As compiled for bfloat16 on a CPU: no product is turned round, so that a matrix would be
    packed, and no matrix is cast. Rows show that the test sees both."""
    config = dataclasses.replace(TINY, hidden_size=64, intermediate_size=80)
    _, apart = models(config, columns)
    apart = jax.tree.map(lambda x: x.astype(jnp.bfloat16), apart)
    tokens = jnp.arange(count)

    def same(_, layer, q, k, v):
        return q + jnp.concatenate([k, v], axis=1), None

    @jax.jit
    def logits(model):
        return model.logits(model.run(tokens, tokens, same, None)[0])

    text = logits.lower(apart).compile().as_text()
    shapes = set(re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", text))
    cast = re.findall(r"= f32\[(?:97,64|80,64|64,80)\]\S* convert\(", text)
    width = max(count, 4)
    assert f"97,{width}" in shapes
    assert (f"80,{width}" in shapes) == columns
    assert (f"{count},80" in shapes) == (not columns)
    # Older XLA computes no product in bfloat16 on a CPU.
    assert not cast or not columns or jax.__version_info__ < (0, 11)
