"""Engines whose compiled programs are kept on the disk."""

import contextlib
import dataclasses

import jax
import pytest
from flax import nnx

from tests.examples.decode import TINY, on_mesh, small_engine
from tests.examples.jax_cache import without_jax_cache
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


def decode(folder, model, **options):
    """The tokens of a new engine, and how many programs it compiled."""
    engine = small_engine(model, [GREEDY], store=ProgramStore(folder), **options)
    busy_with = []
    engine.device.programs.while_busy = lambda what: contextlib.nullcontext(busy_with.append(what))
    (result,) = engine.decode([Request(0, (5, 9, 3), GREEDY)])
    return result.token_ids, busy_with.count(COMPILING)


def test_a_second_engine_loads_what_the_first_compiled(tmp_path, tiny_model):
    tokens, compiled = decode(tmp_path, tiny_model)
    assert compiled == 2  # a burst, and sequences that enter
    assert decode(tmp_path, tiny_model) == (tokens, 0)


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


def test_what_cannot_be_read_or_written_is_compiled_again(tmp_path, tiny_model):
    folder, blocked = tmp_path / "programs", tmp_path / "file"
    tokens, _ = decode(folder, tiny_model)
    burst, entering = folder.iterdir()
    burst.write_bytes(burst.read_bytes()[:-100])
    entering.write_bytes(b"\x80" * 500)
    assert decode(folder, tiny_model) == (tokens, 2)
    assert decode(folder, tiny_model) == (tokens, 0)
    blocked.write_text("no folder")
    assert decode(blocked, tiny_model) == (tokens, 2)


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


def test_what_forwards_cost_is_measured_once(tmp_path, tiny_model, monkeypatch):
    measured = []
    measure = probe.measured
    monkeypatch.setattr(probe, "measured", lambda device: measured.append(1) or measure(device))
    first = decode(tmp_path, tiny_model, window_size=0, lookup=3)
    assert measured == [1]
    assert decode(tmp_path, tiny_model, window_size=0, lookup=3) == (first[0], 0)
    assert measured == [1]
    decode(tmp_path / "other", tiny_model, window_size=0, lookup=3)
    assert measured == [1, 1]
