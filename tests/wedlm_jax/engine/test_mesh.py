"""Decoding on a mesh of eight devices gives the tokens of one, and the cache stays cut."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.examples.decode import (
    Case,
    assert_same,
    on_mesh,
    run,
    small_engine,
)
from tests.examples.training import DIVIDED, tiny_transformer
from tests.wedlm_jax.engine.accounts import check_accounts
from wedlm_jax.completion import total_drafts
from wedlm_jax.engine.interface import Finished, Request, TokenDelta
from wedlm_jax.model.quantization import quantize_weights
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh

MODEL = tiny_transformer(**DIVIDED)
HEADER = list(range(20, 56))
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15], [3, 4]]
PROMPTS += [*([*HEADER, 60 + i] for i in range(6)), HEADER[:7], [*HEADER, 60]]
PARAMS = [
    SamplingParams(seed=i, entropy_threshold=4.0, draft_budget=50.0, logprobs=1, **options)
    for i, options in enumerate(
        [
            {"mode": "paper", "max_tokens": 9},
            {"draft": "masks", "max_tokens": 12, "temperature": 0.8},
            {"mode": "ar", "max_tokens": 5},
            {"draft": "lookup", "max_tokens": 8},
        ]
    )
]
CASES = [Case(tuple(prompt), PARAMS[i % 4], 2) for i, prompt in enumerate(PROMPTS)]
MESHES = [
    {"data": 2, "tensor": 4},
    *(
        pytest.param(sizes, marks=pytest.mark.full)
        for sizes in ({"data": 4}, {"tensor": 2}, {"data": 2, "tensor": 2})
    ),
]


def mesh_of(sizes):
    count = int(np.prod(list(sizes.values())))
    return make_mesh(sizes, jax.devices()[:count])


def engine_of(model, mesh=None, **options):
    """Two sequences a replica, so that all come and go; one size, so that little is compiled."""
    usual = {
        "window_size": 2,
        "max_batch_size": 2,
        "page_size": 8,
        "chunk_tokens": 16,
        "max_model_len": 64,
        "deterministic": True,
    }
    return small_engine(model, PARAMS, mesh=mesh, **{**usual, **options})


def drafting_engine(mesh=None):
    model = MODEL if mesh is None else on_mesh(MODEL, mesh)
    return engine_of(model, mesh, lookup=3, backup_masks=2)


@pytest.fixture(scope="module")
def on_eight():
    return drafting_engine(mesh_of({"data": 2, "tensor": 4}))


def without_logprobs(results):
    return [dataclasses.replace(result, logprobs=None) for result in results]


@pytest.fixture(scope="module")
def expected():
    return run(drafting_engine(), CASES)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_tokens_and_counts_equal_those_of_one_device(sizes, expected, on_eight):
    """Each replica takes over what its own sequences hold."""
    engine = on_eight if sizes == MESHES[0] else drafting_engine(mesh_of(sizes))
    engine.scheduler = engine._new_scheduler()  # what is cached is counted
    assert engine.settings.replicas == sizes.get("data", 1)
    results = run(engine, CASES)
    assert total_drafts(results).masks > 0
    assert total_drafts(results).lookup > 0
    for ours, theirs in zip(results, expected, strict=True):
        assert_same(ours, theirs)
    counters = engine.counters
    assert counters.pages_used == 0
    # The seven with the header share its four full pages, computed once a replica at most.
    replicas = sizes.get("data", 1)
    assert counters.prefix_tokens >= (7 - replicas) * 32
    # Again, from where others have been: the same, and everything is found.
    again = run(engine, CASES)
    assert without_logprobs(again) == without_logprobs(expected)
    check_accounts(engine.scheduler)


def test_each_device_holds_its_own_part_of_the_cache(on_eight):
    run(on_eight, CASES[:3])
    pages = on_eight.device._pages
    total, size, heads, width = pages.shape
    layers, each = MODEL.config.num_hidden_layers, on_eight.settings.num_pages
    assert (total, heads) == (2 * layers * each, 2 * 4)
    shards = {shard.data.shape for shard in pages.addressable_shards}
    assert shards == {(layers * each, size, 2, width)}
    state = on_eight.device._state
    assert state is not None
    assert {shard.data.shape[0] for shard in state.text.addressable_shards} == {2}


@pytest.mark.full
def test_rounded_weights_and_caches_on_a_mesh():
    rounded = engine_of(quantize_weights(MODEL), kv_cache_dtype="int8")
    mesh = mesh_of({"data": 2, "tensor": 2})
    sharded = engine_of(quantize_weights(on_mesh(MODEL, mesh)), mesh, kv_cache_dtype="int8")
    assert without_logprobs(run(sharded, CASES)) == without_logprobs(run(rounded, CASES))


def asking(lengths):
    """Requests for completions of these lengths."""
    options = {"mode": "ar", "ignore_eos": True}
    return [
        Request(i, (7, 70 + i), SamplingParams(max_tokens=most, **options))
        for i, most in enumerate(lengths)
    ]


def test_forwards_are_those_of_the_busiest_replica_and_tokens_those_of_all(on_eight):
    """Replicas run at the same time: a forward takes as long on two as on one."""
    lengths = (6, 3)
    requests = asking(lengths)
    before = on_eight.device.counters.copy()
    events = on_eight.step(requests)
    running = {event.number for event in events if isinstance(event, TokenDelta)}
    assert running == {0, 1}
    assert not on_eight.has_work
    forwards, tokens, computed = (on_eight.device.counters - before).tolist()
    assert forwards == max(lengths)
    assert tokens == sum(1 + most for most in lengths)
    assert (
        computed == sum(lengths) * on_eight.settings.program(on_eight.device.traits).sizes.tokens[0]
    )


@pytest.mark.full
def test_a_burst_ends_once_each_replica_has_finished_its_share():
    """A quarter of its own sequences, not as many as a quarter of all, which is all of its own."""
    mesh = mesh_of({"data": 4})
    engine = engine_of(on_mesh(MODEL, mesh), mesh, window_size=0)
    requests = asking([3] * 4 + [40] * 4)
    engine.step(requests, max_forwards=0)
    assert [one.index // 2 for one in engine.scheduler.sequences] == [0, 1, 2, 3] * 2
    done = [e.number for e in engine.step(max_forwards=30) if isinstance(e, Finished)]
    assert sorted(done) == [0, 1, 2, 3]
    assert engine.device.counters[0] == 3
