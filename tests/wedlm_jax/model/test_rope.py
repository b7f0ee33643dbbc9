"""Rotary embeddings: the rotation itself, and the frequencies of every context extension."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.config import ModelConfig, RopeConfig
from wedlm_jax.model.rope import apply_rope, inverse_frequencies, rope_tables

HEAD_DIM = 16
DEFAULT = [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
YARN_SHORT = {"factor": 8.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

# What transformers' own functions return for these settings, seven digits of each.
KNOWN = [
    ("default", {}, DEFAULT, 1.0),
    ("linear", {"factor": 4.0}, [x / 4 for x in DEFAULT], 1.0),
    (
        "yarn",
        YARN,
        [1.0, 0.3162278, 0.08125, 0.01976424, 0.004375, 0.0007905695, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    (
        "yarn",
        {**YARN, "truncate": False},
        [1.0, 0.3162278, 0.08539864, 0.01912678, 0.003556971, 0.0007905695, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    (
        "yarn",
        {**YARN_SHORT, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.4},
        [1.0, 0.2239947, 0.04166666, 0.003952847, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.0575928109100559,
    ),
    (
        "yarn",
        {**YARN_SHORT, "attention_factor": 1.25},
        [1.0, 0.2470529, 0.05625, 0.01087033, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.25,
    ),
    (
        "llama3",
        LLAMA3,
        [1.0, 0.3162278, 0.1, 0.006613107, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.0,
    ),
]


def config_with(rope_type="default", **parameters):
    return ModelConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        rope=RopeConfig(10000.0, rope_type, tuple(parameters.items())),
    )


@partial(jax.jit, static_argnums=0)
def _rotate(config, x, positions):
    return apply_rope(x[None, :, None], rope_tables(config, positions[None]))[0, :, 0]


def rotate(x, positions, **scaling):
    """One head of ``x [T, head_dim]`` rotated to ``positions``."""
    return np.asarray(_rotate(config_with(**scaling), jnp.asarray(x), jnp.array(positions)))


@pytest.mark.parametrize(("rope_type", "parameters", "frequencies", "factor"), KNOWN)
def test_frequencies_are_those_of_transformers(rope_type, parameters, frequencies, factor):
    ours, our_factor = inverse_frequencies(config_with(rope_type, **parameters))
    np.testing.assert_allclose(ours, frequencies, rtol=2e-6)
    assert our_factor == pytest.approx(factor, rel=1e-12)


def test_each_pair_is_a_complex_number_turned_by_position_times_frequency():
    x = np.random.default_rng(0).normal(size=(3, HEAD_DIM)).astype(np.float32)
    positions = [0, 7, 300]
    # Half-split: number i has its real part in the first half, its imaginary in the second.
    turned = (x[:, :8] + 1j * x[:, 8:]) * np.exp(1j * np.outer(positions, DEFAULT))
    expected = np.concatenate([turned.real, turned.imag], axis=1)
    np.testing.assert_allclose(rotate(x, positions), expected, atol=2e-4)
    np.testing.assert_array_equal(rotate(x, positions)[0], x[0])


def test_low_precision_is_rotated_in_float32_and_returned_as_it_came():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 1, HEAD_DIM)), jnp.bfloat16)
    tables = rope_tables(config_with(), jnp.array([[1001]]))
    assert tables[0].dtype == jnp.float32
    ours = apply_rope(x, tables)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        ours, apply_rope(x.astype(jnp.float32), tables).astype(ours.dtype)
    )
