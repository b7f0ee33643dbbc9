"""Norms by group: every parameter in one, all layers together."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from tests.examples.training import tiny_transformer
from train.watch.norms import group_norms


def test_the_groups_are_all_parameters_and_each_is_its_leaves_norm() -> None:
    parameters = nnx.state(tiny_transformer())
    norms = group_norms(parameters, "parameter")
    groups = ("attention", "embedding", "head", "mlp", "norms")
    assert sorted(norms) == [f"parameter_norm_{group}" for group in groups]
    squares = sum(float(np.square(x).sum()) for x in jax.tree.leaves(parameters))
    assert sum(float(x) ** 2 for x in norms.values()) == pytest.approx(squares, rel=1e-5)
    mlp = [
        parameters["layers"]["mlp"][f"{name}_proj"]["kernel"][...]
        for name in ("gate", "up", "down")
    ]
    expected = np.sqrt(sum(np.square(x).sum() for x in mlp))
    assert float(norms["parameter_norm_mlp"]) == pytest.approx(expected, rel=1e-5)
