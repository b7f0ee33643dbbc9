"""Layers stacked or apart, times rows or columns: the same model, and the same forward."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.checkpoints import assert_placed
from tests.examples.training import TINY
from wedlm_jax.attention import attend
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked, with_layers_apart
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


@both_ways
def test_on_a_mesh_each_layer_lies_as_the_rules_say(columns):
    config = dataclasses.replace(TINY, vocab_size=96, mask_token_id=95)
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    graph, state = nnx.split(stacked_model(config))
    placed = nnx.merge(graph, jax.device_put(state, tree_shardings(mesh, state)))
    apart = with_layers_apart(placed, columns=columns)
    assert_placed(apart, mesh)
    assert_same_leaves(apart, with_layers_apart(stacked_model(config), columns=columns))


# --- flat tokens -------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="dtype")
def run_flat(model, dtype=None):
    """Hidden states of the first text as flat tokens; how many layers attended, and which last."""

    def attend_densely(carry, layer, q, k, v):
        k, v = (x[None].swapaxes(1, 2) for x in (k, v))
        attended = attend(q[None], k, v, CausalMask(), implementation="dense")[0]
        return attended, (carry[0] + 1, jnp.int32(layer))

    start = jnp.int32(0), jnp.int32(0)
    return model.run(TOKENS[0], POSITIONS[0], attend_densely, start, dtype=dtype)


@pytest.mark.parametrize(
    ("config", "layout"), [(TINY, "stacked"), (TIED, "rows"), (TINY, "columns")]
)
def test_flat_tokens_are_computed_as_those_of_a_batch(config, layout):
    stacked, apart = models(config, layout == "columns")
    hidden, (count, last) = run_flat(stacked if layout == "stacked" else apart)
    assert (count, last) == (config.num_hidden_layers, config.num_hidden_layers - 1)
    expected = jax.jit(lambda model: model(TOKENS, POSITIONS, CausalMask()))(stacked)
    np.testing.assert_allclose(hidden, expected[0], atol=1e-5)


def test_flat_tokens_in_bfloat16_stay_so():
    stacked, apart = models(TINY, columns=True)
    rounded, exact = run_flat(apart, jnp.bfloat16)[0], run_flat(stacked)[0]
    assert (rounded.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
    assert 0 < float(jnp.abs(rounded.astype(jnp.float32) - exact).mean()) < 0.05
    assert stacked.logits(rounded).dtype == apart.logits(rounded).dtype == jnp.float32
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
