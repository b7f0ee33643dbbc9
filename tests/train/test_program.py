"""What a recipe's program computes, as it is lowered."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import pytest

from tests.examples.tiny_run import tiny_recipe
from tests.examples.training import PLAIN as MODEL
from train.program import make_program
from train.recipe.config import LoraSection
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import make_mesh


def integer_products(config):
    """How many products of 8-bit integers the step has; a scan's layers count once."""
    mesh = make_mesh({}, jax.devices()[:1])
    with jax.set_mesh(mesh):
        text = make_program(config, MODEL, mesh).lower().as_text()
    return sum("dot_general" in line and "xi8>, tensor" in line for line in text.splitlines())


@pytest.mark.full
def test_a_recipe_says_whether_products_are_of_integers():
    config = tiny_recipe(Path("unused"), None)
    int8 = dataclasses.replace(config, quantized_training="int8")
    assert integer_products(config) == 0
    assert integer_products(int8) == 3 * 7
    # What is frozen takes part in no product for its own gradient.
    adapters = dataclasses.replace(int8, lora=LoraSection(rank=2))
    assert integer_products(adapters) >= 2 * 7


def test_without_qwix_it_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "qwix" else real(name)
    )
    config = tiny_recipe(Path("unused"), None, quantized_training="int8")
    with pytest.raises(InputError, match=r'quantized_training .*qwix.*"wedlm-jax\[int8\]"'):
        make_program(config, MODEL, make_mesh({}, jax.devices()[:1]))
