"""What a request gets back from the engine, whatever else runs and however it is run."""

import dataclasses
import threading

import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import (
    DRAWN,
    SAFE_MARGIN,
    TINY,
    Case,
    as_if_first,
    assert_same,
    batches,
    events_of,
    in_mode,
    reference,
    requests_of,
    run,
    small_engine,
)
from wedlm_jax.engine.interface import Failed, Finished, Request
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams

PLAIN = SamplingParams(mode="paper", max_tokens=12, entropy_threshold=1.6)


# --- burst by burst ----------------------------------------------------------------------


def take(events, results):
    for event in events:
        assert not isinstance(event, Failed)
        if isinstance(event, Finished):
            results[event.number] = as_if_first(event.result)


@given(batch=batches(), data=st.data())
def test_a_cut_sequence_is_counted_as_if_it_had_stopped_there(
    streaming_engine, full_forward, batch, data
):
    """Cut at some token's first appearance, against a run with that token as a stop id."""
    cuts, stopping, modes = [], [], st.sampled_from(["paper", "verified"])
    options = {"draft_budget": 2.0, "logprobs": data.draw(st.none() | st.just(1))}
    batch = [in_mode(case, data.draw(modes), **options) for case in batch]
    for case, whole in zip(batch, run(streaming_engine, batch), strict=True):
        end = data.draw(st.integers(1, len(whole.token_ids)))
        token = whole.token_ids[end - 1]
        cuts.append(whole.cut(whole.token_ids.index(token) + 1))
        stopping.append(in_mode(case, case.params.mode, stop_token_ids=(token,)))
    for case, stopped, cut in zip(batch, run(streaming_engine, stopping), cuts, strict=True):
        # In other company a choice that ties may fall the other way.
        backup = None if case.params.mode == "paper" else 0
        if reference(full_forward, TINY, case, backup).margin > SAFE_MARGIN:
            assert_same(stopped, cut)


# --- programs ----------------------------------------------------------------------------


@pytest.mark.full
def test_requests_that_were_aborted_have_no_say_in_the_next_program(tiny_model, streaming_engine):
    """Its traits lack what only they asked for, before the device hears that they are gone."""
    engine = small_engine(tiny_model, [])
    engine.step([Request(0, (3, 4, 5), PLAIN)], max_forwards=1)
    engine.step(aborted=[0], max_forwards=0)
    request = Request(1, (6, 7, 8), dataclasses.replace(PLAIN, mode="verified"))
    (result,) = engine.decode([request])
    assert not engine.device.traits.paper
    (alone,) = streaming_engine.decode([request])
    assert as_if_first(result) == as_if_first(alone)


def test_other_weights_give_other_tokens_and_none_are_left_of_the_old(tiny_model, one_size_engine):
    batch = [Case((3 + i, 9, 4, 5, 6, 7, 8), PLAIN, 4) for i in range(4)]
    before, programs = run(one_size_engine, batch), one_size_engine.num_programs
    one_size_engine.update(Transformer(TINY, rngs=nnx.Rngs(8)))
    assert run(one_size_engine, batch) != before
    one_size_engine.release()
    one_size_engine.update(tiny_model)
    assert one_size_engine.decode(requests_of(batch)) == before, "nothing was cached"
    assert one_size_engine.num_programs == programs


def test_a_program_is_compiled_while_others_decode(tiny_model):
    """What it serves, others may use that want less, for as long as somebody wants it."""
    engine = small_engine(tiny_model, [], window_size=4, deterministic=True)
    plain = Request(0, (3, 9, 4), dataclasses.replace(PLAIN, mode="verified"))
    special = {"temperature": 0.7, "logprobs": 0, "max_tokens": 1}
    drawn = Request(1, (3, 9, 4), dataclasses.replace(plain.params, **special))
    assert engine.compiled_for(engine.traits_with([plain])) is None
    (expected,) = engine.decode([plain])
    narrow = engine.compiled_for(engine.traits_with([plain]))
    assert narrow == engine.traits_with([plain])
    engine.step([dataclasses.replace(plain, number=2)], max_forwards=1)
    assert engine.compiled_for(engine.traits_with([drawn])) is None
    thread = threading.Thread(target=engine.compile_program, args=[engine.traits_with([drawn])])
    thread.start()
    results = {}
    take(events_of(engine), results)
    thread.join()
    assert as_if_first(results[2]) == as_if_first(expected)
    programs = engine.num_programs
    wide = engine.compiled_for(engine.traits_with([drawn]))
    assert wide is not None
    take(engine.step([drawn, plain], program=wide, max_forwards=1), results)
    assert engine.device.traits == wide
    while 1 not in results:
        take(engine.step(max_forwards=1), results)
    take(engine.step(max_forwards=1), results)
    assert 0 not in results
    assert engine.device.traits == narrow
    take(events_of(engine), results)
    assert as_if_first(results[0]) == as_if_first(expected)
    assert engine.num_programs == programs
    assert engine.compiled_for(engine.traits_with([plain])) == narrow


def test_an_engine_begins_anew_after_a_step_that_failed(tiny_model, monkeypatch):
    engine = small_engine(tiny_model, DRAWN, deterministic=True)
    request = Request(0, (3, 9, 4), PLAIN)
    (expected,) = engine.decode([request])
    collect = engine.device.collect

    def failing(*ticket):
        collect(*ticket)
        raise RuntimeError("lost")

    monkeypatch.setattr(engine.device, "collect", failing)
    with pytest.raises(RuntimeError, match="lost"):
        engine.step([request, dataclasses.replace(request, number=1)])
    monkeypatch.undo()
    engine.restart()
    assert not engine.has_work
    assert engine.counters.pages_free == engine.counters.pages
    assert engine.decode([request]) == [expected]
