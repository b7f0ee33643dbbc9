"""Compiled programs that are kept on the disk, or choose how parameters lie in memory."""

import contextlib
import dataclasses

import jax
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout

from tests.examples.decode import TINY, on_mesh, random_cases, run, small_engine
from tests.examples.jax_cache import without_jax_cache
from wedlm_jax.engine import engine as engine_module
from wedlm_jax.engine import probe
from wedlm_jax.engine.interface import Request
from wedlm_jax.host.compiled_cache import ProgramStore
from wedlm_jax.host.progress import COMPILING
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh


@pytest.fixture(autouse=True)
def _no_cache():
    """XLA cannot write what came out of JAX's cache, so a store stands alone."""
    with without_jax_cache():
        yield


GREEDY = SamplingParams(mode="verified", max_tokens=6)
DRAFTS = {"window_size": 0, "lookup": 3}
"""Costs of forwards are measured where drafts are copied."""


def decode(folder, model, **options):
    """The tokens of a new engine, and how many programs it compiled."""
    engine = small_engine(model, [GREEDY], store=ProgramStore(folder), **options)
    busy_with = []
    engine.device.programs.while_busy = lambda what: contextlib.nullcontext(busy_with.append(what))
    (result,) = engine.decode([Request(0, (5, 9, 3), GREEDY)])
    return result.token_ids, busy_with.count(COMPILING)


def test_a_second_engine_loads_what_the_first_compiled_and_measured(
    tmp_path, tiny_model, monkeypatch
):
    """What cannot be read or written is compiled again."""
    measured, measure = [], probe.measured
    monkeypatch.setattr(probe, "measured", lambda device: measured.append(1) or measure(device))
    folder, blocked = tmp_path / "programs", tmp_path / "file"
    tokens, compiled = decode(folder, tiny_model, **DRAFTS)
    assert (compiled, len(measured)) == (2, 1)  # a burst, and sequences that enter
    assert decode(folder, tiny_model, **DRAFTS) == (tokens, 0)
    burst, entering = (path for path in folder.iterdir() if path.suffix != ".json")
    burst.write_bytes(burst.read_bytes()[:-100])
    entering.write_bytes(b"\x80" * 500)
    assert decode(folder, tiny_model, **DRAFTS) == (tokens, 2)
    assert decode(folder, tiny_model, **DRAFTS) == (tokens, 0)
    assert len(measured) == 1
    blocked.write_text("no folder")
    assert decode(blocked, tiny_model, **DRAFTS) == (tokens, 2)
    assert len(measured) == 2


@pytest.mark.full
def test_other_weights_take_the_same_programs_and_other_shapes_do_not(tmp_path, tiny_model):
    expected, _ = decode(tmp_path / "a", tiny_model)
    other = Transformer(TINY, rngs=nnx.Rngs(9))
    alone, _ = decode(tmp_path / "b", other)
    assert decode(tmp_path / "a", other) == (alone, 0)
    assert decode(tmp_path / "a", tiny_model, window_size=3)[1] > 0
    assert decode(tmp_path / "a", tiny_model, num_pages=99)[1] > 0
    wide = Transformer(dataclasses.replace(TINY, intermediate_size=32), rngs=nnx.Rngs(0))
    assert decode(tmp_path / "a", wide)[1] > 0
    # Of the same shapes, but another function of them.
    turned = Transformer(dataclasses.replace(TINY, rms_norm_eps=0.5), rngs=nnx.Rngs(0))
    assert decode(tmp_path / "a", turned)[1] > 0
    assert decode(tmp_path / "a", tiny_model) == (expected, 0)


@pytest.mark.full
def test_a_program_for_a_mesh_is_loaded_onto_it(tmp_path, tiny_model):
    mesh = make_mesh({"data": 2}, jax.devices()[2:4])
    placed = on_mesh(tiny_model, mesh)
    tokens, compiled = decode(tmp_path, placed, mesh=mesh)
    assert compiled == 2
    assert decode(tmp_path, placed, mesh=mesh) == (tokens, 0)
    assert decode(tmp_path, tiny_model)[1] == 2


@pytest.mark.full
def test_what_was_not_used_for_longest_leaves_first(tmp_path, tiny_model):
    decode(tmp_path, tiny_model)
    sizes = {path: path.stat().st_size for path in tmp_path.iterdir()}
    largest = max(sizes, key=lambda path: sizes[path])
    limit = sizes[largest] * 3 // 2
    small = ProgramStore(tmp_path, limit)
    engine = small_engine(tiny_model, [GREEDY], store=small, window_size=3)
    engine.decode([Request(0, (5, 9, 3), GREEDY)])
    left = list(tmp_path.iterdir())
    assert sum(path.stat().st_size for path in left) <= limit
    assert not largest.exists()
    assert max(path.stat().st_size for path in left) > limit // 2, "the newest burst stays"


# --- layouts ------------------------------------------------------------------------------


def turned(x):
    """A format in which the axes of ``x`` lie in reverse order in memory."""
    return Format(Layout(tuple(reversed(range(x.ndim)))), x.sharding)


def orders(parameters):
    return [x.format.layout.major_to_minor for x in jax.tree.leaves(parameters)]


@pytest.mark.full
def test_tokens_are_the_same_however_parameters_lie(tiny_model, monkeypatch):
    planned = engine_module.plan_engine

    def plan(*args, **kwargs):
        """Has the compiler choose layouts, as on TPUs."""
        settings, memory = planned(*args, **kwargs)
        return dataclasses.replace(settings, compiler_lays_out=True), memory

    monkeypatch.setattr(engine_module, "plan_engine", plan)
    engine, cases = small_engine(tiny_model, deterministic=True), random_cases(2, 1)
    expected = run(engine, cases)
    programs, parameters = engine.device.programs, engine.device.parameters
    assert programs.formats is not None
    # A CPU's compiler leaves all as it is: choose otherwise, as a TPU's does, and compile again.
    programs.clear()
    programs.formats = jax.tree.map(turned, parameters)
    assert run(engine, cases) == expected
    assert orders(engine.device.parameters) == [x[::-1] for x in orders(parameters)]
    engine.update(nnx.merge(programs._graph, parameters))
    assert run(engine, cases) == expected
    assert orders(engine.device.parameters) == [x[::-1] for x in orders(parameters)]
