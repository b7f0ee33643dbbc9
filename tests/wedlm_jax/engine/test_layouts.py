"""Parameters that the compiler lays out: the same tokens, from every program of an engine."""

import dataclasses

import jax
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout

from tests.examples.decode import Case, run, small_engine
from wedlm_jax.engine import engine as engine_module
from wedlm_jax.params import SamplingParams

CASES = [
    Case((5, 6, 7), SamplingParams(max_tokens=8, seed=1), 4),
    Case((9,), SamplingParams(max_tokens=6, seed=2, temperature=0.8), 4),
]


@pytest.fixture
def laid_out_engine(tiny_model, monkeypatch):
    """An engine whose compiler chooses layouts, as on TPUs."""
    planned = engine_module.plan_engine

    def plan(*args, **kwargs):
        settings, memory = planned(*args, **kwargs)
        return dataclasses.replace(settings, compiler_lays_out=True), memory

    monkeypatch.setattr(engine_module, "plan_engine", plan)
    return small_engine(tiny_model, deterministic=True)


def turned(x):
    """A format in which the axes of ``x`` lie in reverse order in memory."""
    return Format(Layout(tuple(reversed(range(x.ndim)))), x.sharding)


def orders(parameters):
    return [x.format.layout.major_to_minor for x in jax.tree.leaves(parameters)]


@pytest.mark.full
def test_tokens_are_the_same_however_parameters_lie(laid_out_engine):
    expected = run(laid_out_engine, CASES)
    programs, parameters = laid_out_engine.device.programs, laid_out_engine.device.parameters
    assert programs.formats is not None
    # A CPU's compiler leaves all as it is: choose otherwise, as a TPU's does, and compile again.
    programs.clear()
    programs.formats = jax.tree.map(turned, parameters)
    assert run(laid_out_engine, CASES) == expected
    assert orders(laid_out_engine.device.parameters) == [x[::-1] for x in orders(parameters)]
    laid_out_engine.update(nnx.merge(programs._graph, parameters))
    assert run(laid_out_engine, CASES) == expected
    assert orders(laid_out_engine.device.parameters) == [x[::-1] for x in orders(parameters)]
