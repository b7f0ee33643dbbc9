"""Logits of a whole text under a plain causal mask, without a cache."""

import jax
import numpy as np
from flax import nnx

from wedlm_jax.masks import CausalMask

STEP = 64
"""Texts are padded to multiples of this, so that few lengths are compiled."""


def full_forward(model):
    """Returns a function of token ids and positions ``[T]`` that gives logits ``[T, V]``."""
    graph, parameters = nnx.split(model)

    @jax.jit
    def padded(parameters, ids, positions):
        model = nnx.merge(graph, parameters)
        return model.logits(model(ids, positions, CausalMask()))

    def forward(ids, positions):
        # Padding stands behind, where nothing sees it.
        behind = 0, -len(ids) % STEP
        rows = (np.pad(np.array([*x], np.int32), behind)[None] for x in (ids, positions))
        return np.asarray(padded(parameters, *rows))[0, : len(ids)]

    return forward
