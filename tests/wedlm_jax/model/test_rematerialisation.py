"""Policies keep what they say: traced, not run."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.examples.training import tiny_transformer
from tests.jaxpr_shapes import equations_in
from wedlm_jax.masks import DualStreamMask
from wedlm_jax.model.rematerialisation import KEPT, POLICIES

LENGTH = 128
GRAPH, PARAMETERS = nnx.split(tiny_transformer(head_dim=128))


def traced(policy, attention):
    """Equations of the gradient; no kernel is compiled."""
    tokens = jnp.zeros((2, 2 * LENGTH), jnp.int32)
    mask = DualStreamMask(jnp.ones((2, LENGTH), jnp.int32), 32)

    def total(parameters):
        model = nnx.merge(GRAPH, parameters)
        return model(tokens, tokens, mask, remat=policy, attention=attention).sum()

    return list(equations_in(jax.make_jaxpr(jax.grad(total))(PARAMETERS).jaxpr))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_kernel_runs_again_only_where_its_output_is_not_kept(policy):
    kernels = [e for e in traced(policy, "splash") if e.primitive.name == "pallas_call"]
    again = policy != "none" and "attended" not in KEPT[policy]
    assert len(kernels) == 2 + again


def test_each_policy_keeps_less_than_the_one_before():
    kept = [set(names) for names in KEPT.values()]
    assert all(later <= earlier for earlier, later in pairwise(kept))
