"""The TPU kernel, interpreted, against a loop over queries and heads; and an engine with it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.examples.decode import TINY
from tests.examples.ragged import LAYER, assert_attended, make_example
from tests.tpu_interpreter import interpreted_kernel
from wedlm_jax.attention.ragged import attend_pages, attention_plan, token_places, write_pages
from wedlm_jax.engine import settings
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh, on_replicas

SIZE, PAGE_SIZE, COLUMNS, NUM_PAGES, SEQUENCES = 112, 16, 12, 64, 5
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 3e-2}


@pytest.fixture
def kernel(monkeypatch):
    with interpreted_kernel(monkeypatch):
        yield


def example_of(spans, kv_heads=2):
    """All of one shape, which compiles once."""
    lengths, before = zip(*spans, strict=True)
    return make_example(
        len(spans),
        lengths,
        before,
        page_size=PAGE_SIZE,
        kv_heads=kv_heads,
        head_dim=128,
        padding=SIZE - sum(lengths),
        columns=COLUMNS,
        num_pages=NUM_PAGES,
    )


@partial(jax.jit, static_argnames="num_pages")
def run(spans, pool, q, k, v, *, num_pages):
    places = token_places(spans, q.shape[0], PAGE_SIZE)
    plan = attention_plan(spans, q.shape[0], PAGE_SIZE, implementation="rpa")
    pages = write_pages(pool, k, v, places, LAYER, num_pages)
    return attend_pages(q, pages, plan, LAYER, num_pages), pages


def check(example, out, pages, limit):
    assert_attended(example, out, pages, limit)
    np.testing.assert_array_equal(out[int(example.spans.query_starts[-1]) :], 0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_spans_attend_to_what_they_see(dtype):
    """Empty spans stand first, last, between, everywhere but in one place, and nowhere; others are
    AR tokens, windows, and chunks longer than a block of queries."""
    for spans in (
        [(0, 0), (17, 40), (1, 90), (40, 0), (17, 3)],
        [(1, 150), (17, 40), (40, 70), (0, 0), (0, 0)],
        [(17, 20), (0, 0), (0, 0), (1, 5), (33, 31)],
        [(0, 0), (0, 0), (0, 0), (17, 64), (0, 0)],
        [(17, 1), (17, 100), (17, 15), (17, 16), (17, 47)],
        [(1, 0), (1, 63), (1, 64), (0, 0), (1, 180)],
    ):
        example = example_of(spans)
        check(example, *run(*example.arguments(dtype), num_pages=NUM_PAGES), TOLERANCE[dtype])


@pytest.mark.usefixtures("kernel")
def test_heads_are_cut_over_devices():
    example = example_of([(0, 0), (17, 40), (0, 0), (20, 70), (1, 9)], kv_heads=8)
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    token = PartitionSpec(None, "tensor")
    specs = (PartitionSpec(), PartitionSpec(None, None, "tensor"), token, token, token)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(part, NamedSharding(mesh, spec))
            for part, spec in zip(example.arguments(), specs, strict=True)
        ]
        of_replica = partial(run, num_pages=NUM_PAGES)
        check(example, *jax.jit(on_replicas(of_replica, whole=()))(*placed), 2e-5)


WIDE = dataclasses.replace(TINY, head_dim=128, num_key_value_heads=2)


@pytest.mark.full
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("backup", [0, 3])
def test_an_engine_decodes_as_with_the_plain_backend(monkeypatch, backup):
    """Four places for three prompts: one place is empty from the start, and more become so, while a
    prompt of several chunks is computed beside windows."""
    model = Transformer(WIDE, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    requests = [
        Request(i, tuple(rng.integers(2, 22, length).tolist()), params, 4)
        for i, (length, params) in enumerate(
            [
                (3, SamplingParams(mode="verified", max_tokens=4, ignore_eos=True)),
                (21, SamplingParams(mode="paper", max_tokens=9, ignore_eos=True)),
                (6, SamplingParams(mode="ar", max_tokens=12, ignore_eos=True)),
            ]
        )
    ]

    sizes = {"max_batch_size": 4, "page_size": 4, "chunk_tokens": 8}
    config = EngineConfig(window_size=4, lookup=0, backup_masks=backup, **sizes)

    def decoded():
        engine = Engine(model, config)
        engine.expect([request.params for request in requests])
        results = engine.decode(requests)
        return [(result.token_ids, result.num_forwards) for result in results]

    expected = decoded()
    monkeypatch.setattr(settings, "check_ragged_backend", lambda *_, **__: "rpa")
    assert decoded() == expected
