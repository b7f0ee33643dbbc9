"""The embedding is gathered in the compute dtype, and its gradient summed in its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxpr_shapes import arrays_in
from wedlm_jax.model.embedding import looked_up
from wedlm_jax.sharding import make_mesh

TABLE = jax.random.normal(jax.random.key(0), (8, 16))
# One token stands 4,000 times, so that a sum in bfloat16 would stop growing at 256.
TOKENS = jnp.where(jnp.arange(4096) < 4000, 3, jnp.arange(4096) % 8).reshape(8, 512)


@jax.jit
def gradient_of_ones(table):
    return jax.grad(lambda x: looked_up(x, TOKENS, jnp.dtype("bfloat16")).sum())(table)


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4, "tensor": 2}])
def test_the_gradient_counts_every_token(sizes):
    counts = np.bincount(TOKENS.reshape(-1), minlength=8)
    if sizes:
        with jax.set_mesh(make_mesh(sizes)):
            found = gradient_of_ones(TABLE)
    else:
        found = gradient_of_ones(TABLE)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.broadcast_to(counts[:, None], TABLE.shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_those_of_the_table(dtype):
    found = looked_up(TABLE, TOKENS, jnp.dtype(dtype))
    np.testing.assert_array_equal(found, TABLE[TOKENS].astype(dtype))


def test_rows_are_gathered_after_the_cast():
    traced = jax.make_jaxpr(lambda x: looked_up(x, TOKENS, jnp.dtype("bfloat16")))(TABLE)
    rows = [x.dtype for x in arrays_in(traced.jaxpr) if x.shape == (*TOKENS.shape, 16)]
    assert set(rows) == {jnp.dtype("bfloat16")}
