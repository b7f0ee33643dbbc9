"""The rotation of rotary embeddings. Frequencies: `checkpoint/test_hf_parity.py`."""

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.config import ModelConfig, RopeConfig
from wedlm_jax.model.rope import apply_rope, rope_tables

HEAD_DIM = 16
DEFAULT = [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278]

CONFIG = ModelConfig(
    vocab_size=8,
    hidden_size=64,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
    rope=RopeConfig(10000.0),
)


@jax.jit
def rotated(x, positions):
    """Returns one head of ``x [T, head_dim]`` rotated to ``positions``."""
    return apply_rope(x[None, :, None], rope_tables(CONFIG, positions[None]))[0, :, 0]


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
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 1, HEAD_DIM)), jnp.bfloat16)
    tables = rope_tables(CONFIG, jnp.array([[1001]]))
    assert tables[0].dtype == jnp.float32
    ours = apply_rope(x, tables)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        ours, apply_rope(x.astype(jnp.float32), tables).astype(ours.dtype)
    )
