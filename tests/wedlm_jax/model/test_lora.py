"""Adapters beside frozen matrices: a model that begins as it was, and its merged twin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.training import run_flat, tiny_transformer
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask
from wedlm_jax.model.layer_layout import with_layers_apart
from wedlm_jax.model.lora import TARGETS, LoraConfig, merged, merged_weight, with_adapters
from wedlm_jax.model.quantization import quantize_weights
from wedlm_jax.sharding import parameter_axes

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 97)


@jax.jit
def hidden(model):
    positions = jnp.tile(jnp.arange(8), (2, 1))
    return model(TOKENS, positions, CausalMask(jnp.ones((2, 8), jnp.int32)))


def trained(lora=LORA):
    """A model whose B is no longer zero; float32 holds what A and B make exactly."""
    graph, adapters, rest = nnx.split(adapted(lora), nnx.LoRAParam, ...)
    random = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(random.integers(-16, 17, x.shape) / 8, x.dtype), adapters
    )
    return nnx.merge(graph, adapters, rest)


def adapted(lora=LORA):
    return with_adapters(tiny_transformer(), lora, nnx.Rngs(params=2))


def test_a_model_with_new_adapters_is_the_model_without():
    np.testing.assert_array_equal(hidden(adapted()), hidden(tiny_transformer()))
    assert np.abs(hidden(trained()) - hidden(adapted())).max() > 0.1


def test_each_target_has_its_adapters_and_nothing_else_has():
    state = nnx.state(adapted(), nnx.LoRAParam)
    shapes = {path[-3:]: leaf.shape for path, leaf in state.flat_state()}
    assert shapes == {
        ("q_proj", "adapter", "a"): (2, 3, 12),
        ("q_proj", "adapter", "b"): (2, 24, 3),
        ("v_proj", "adapter", "a"): (2, 3, 12),
        ("v_proj", "adapter", "b"): (2, 12, 3),
        ("down_proj", "adapter", "a"): (2, 3, 20),
        ("down_proj", "adapter", "b"): (2, 12, 3),
    }
    first = state["layers"]["mlp"]["down_proj"]["adapter"]["a"][...]
    assert np.abs(first).max() < 20**-0.5
    assert first.std() == pytest.approx((3 * 20) ** -0.5, rel=0.2)
    assert np.abs(first[0] - first[1]).min() > 0  # each layer draws its own


def test_the_merged_model_computes_the_same_and_is_a_plain_one():
    model, plain = trained(), merged(trained())
    assert jax.tree.structure(nnx.state(plain)) == jax.tree.structure(nnx.state(tiny_transformer()))
    np.testing.assert_allclose(hidden(plain), hidden(model), rtol=2e-5, atol=2e-5)
    adapter = model.layers.mlp.down_proj.adapter
    expected = np.asarray(model.layers.mlp.down_proj.weight, np.float64) + 2.0 * np.einsum(
        "lri,lor->loi", np.asarray(adapter.a, np.float64), np.asarray(adapter.b, np.float64)
    )
    np.testing.assert_allclose(plain.layers.mlp.down_proj.weight[...], expected, rtol=1e-6)
    assert merged(plain) is plain


def test_what_is_merged_keeps_its_dtype_and_is_summed_in_float32():
    weight, a, b = np.full((1, 1), 256, jnp.bfloat16), np.ones((1, 1), "f4"), np.ones((1, 1), "f4")
    assert merged_weight(weight, a, b, 0.5) == 256.5
    graph, state = nnx.split(trained())
    half = merged(nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("bfloat16")}


def test_a_rank_as_large_as_a_matrix_is_refused():
    with pytest.raises(InputError, match=r"lora\.rank must be below 12, .* q_proj, not 12"):
        adapted(LoraConfig(12, 1.0))


def test_axes_of_adapters_are_those_of_their_matrices():
    for name in TARGETS:
        _, n_out, n_in = parameter_axes(f"layers/mlp/{name}/weight") or ()
        a, b = (parameter_axes(f"mu/layers/mlp/{name}/adapter/{part}/value") for part in "ab")
        assert (a, b) == (("layers", "features", n_in), ("layers", n_out, "features"))


DRAFTER = LoraConfig(rank=3, alpha=6.0, rows="masked")
IS_MASK = jnp.array([False, False, True, False, True, True, False, True])


def flat(model, is_mask):
    return run_flat(model, TOKENS[0], is_mask)


@pytest.mark.parametrize("layout", ["stacked", "rows", "columns"])
def test_adapters_on_masks_leave_every_bit_of_other_rows(layout):
    """In each layout of the layers; rows before the first mask, which see none."""
    text, drafter = tiny_transformer(), trained(DRAFTER)
    if layout != "stacked":
        text, drafter = (with_layers_apart(x, columns=layout == "columns") for x in (text, drafter))
    no_masks = jnp.zeros(8, bool)
    np.testing.assert_array_equal(flat(drafter, no_masks), flat(text, no_masks))
    mixed = flat(drafter, IS_MASK)
    np.testing.assert_array_equal(mixed[:2], flat(text, no_masks)[:2])
    assert (np.abs(mixed - flat(text, no_masks)).max(axis=1)[2:] > 0.1).all()
    np.testing.assert_allclose(mixed, flat(trained(DRAFTER), IS_MASK), atol=1e-4)


def test_where_all_rows_are_masks_they_are_adapters_of_all_rows():
    drafter = trained(DRAFTER)
    same = with_adapters(tiny_transformer(), LoraConfig(rank=3, alpha=6.0), nnx.Rngs(params=2))
    values = dict(nnx.state(drafter, nnx.LoRAParam).flat_state())
    table = jnp.tile(values.pop(("mask_embedding",))[...], (97, 1))
    nnx.update(same, nnx.State.from_flat_path(values))
    same.embed_tokens[...] = table
    is_mask = jnp.ones(8, bool)
    np.testing.assert_allclose(flat(drafter, is_mask), flat(same, ~is_mask), atol=1e-5)


@pytest.mark.parametrize("how", ["stacked", "apart", "int8"])
def test_corrections_of_some_logits_are_those_of_all(how):
    model = trained(dataclasses.replace(DRAFTER, previous_rank=5))
    model = with_layers_apart(model) if how == "apart" else model
    model = quantize_weights(model) if how == "int8" else model
    random = np.random.default_rng(4)
    states = jnp.asarray(random.normal(size=(6, 12)), jnp.float32)
    before, tokens = (jnp.asarray(random.integers(0, 97, shape)) for shape in (6, (6, 9)))
    after = model.logits(states + model.correction(states, before)) - model.logits(states)
    expected = jnp.take_along_axis(after, tokens, axis=1)
    np.testing.assert_allclose(
        model.logit_corrections(states, before, tokens), expected, rtol=1e-4, atol=2e-3
    )


def test_a_new_previous_token_head_corrects_nothing():
    model = adapted(dataclasses.replace(DRAFTER, previous_rank=5))
    np.testing.assert_array_equal(model.correction(jnp.ones((3, 12)), jnp.arange(3)), 0)
