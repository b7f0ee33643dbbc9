"""Which backend runs where, and attention over pages whose heads are cut over devices; the TPU
kernel, interpreted, against a loop over queries and heads, and an engine with it."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.examples.decode import TINY
from tests.examples.ragged import LAYER, LAYERS, assert_attended, make_example
from tests.tpu_interpreter import interpreted_kernel
from wedlm_jax.attention.pages import Int8Rows
from wedlm_jax.attention.ragged import (
    allocate_pages,
    attend_pages,
    attention_plan,
    check_ragged_backend,
    token_places,
    write_pages,
)
from wedlm_jax.engine import settings
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh, on_replicas

WIDE = dataclasses.replace(TINY, head_dim=128)


def test_platforms_have_their_own_backend():
    assert check_ragged_backend(None, "cpu", WIDE) == "xla"
    assert check_ragged_backend(None, "tpu", WIDE) == "rpa"
    assert check_ragged_backend(None, "tpu", TINY) == "xla"
    assert check_ragged_backend(None, "tpu", WIDE, int8=True) == "xla"
    assert check_ragged_backend("xla", "tpu", WIDE) == "xla"
    assert check_ragged_backend(None, "gpu", WIDE, int8=True) == "gather"


@pytest.mark.parametrize(
    ("name", "platform", "config", "int8", "message"),
    [
        ("dense", "cpu", WIDE, False, "expected one of xla, gather, rpa, not 'dense'"),
        ("rpa", "cpu", WIDE, False, "'rpa' is for TPUs, not for 'cpu'"),
        ("rpa", "tpu", WIDE, True, "'rpa' cannot read an int8 cache"),
        ("rpa", "tpu", TINY, False, "head_dim that is a multiple of 128, not"),
    ],
)
def test_backends_that_cannot_run_are_refused(name, platform, config, int8, message):
    with pytest.raises(InputError, match=message):
        check_ragged_backend(name, platform, config, int8=int8)


def test_pages_of_a_model():
    pages = allocate_pages(TINY, 5, 8, jnp.bfloat16, replicas=2)
    rows = 2 * TINY.num_hidden_layers * 5
    shape = (rows, 8, 2 * TINY.num_key_value_heads, TINY.head_dim)
    assert (pages.shape, pages.dtype) == (shape, jnp.bfloat16)
    rounded = allocate_pages(TINY, 5, 8, jnp.int8)
    assert isinstance(rounded, Int8Rows)
    assert rounded.scales.shape == (rows // 2, *shape[1:3])


def forward(spans, pages, q, k, v, *, num_pages):
    """All layers, one after the other."""
    size, page_size = q.shape[0], pages.shape[1]
    places = token_places(spans, size, page_size)
    plan = attention_plan(spans, size, page_size, implementation="xla")

    def layer(number, carry):
        q, pages = carry
        pages = write_pages(pages, k, v, places, number, num_pages)
        return attend_pages(q, pages, plan, number, num_pages), pages

    return jax.lax.fori_loop(0, LAYERS, layer, (q, pages))


def test_heads_are_cut_over_devices():
    example = make_example(3, [1, 20, 0, 1], [30, 40, 0, 7], kv_heads=8, padding=2)
    given = example.arguments()
    run = partial(forward, num_pages=example.num_pages)
    expected, expected_pages = jax.jit(run)(*given)
    replicas = 2
    mesh = make_mesh({"data": replicas, "tensor": 4})
    pool_spec, token_spec = PartitionSpec("data", None, "tensor"), PartitionSpec("data", "tensor")
    specs = (PartitionSpec("data"), pool_spec, token_spec, token_spec, token_spec)
    tree = jax.tree.map(lambda x: jnp.concatenate([x] * replicas), given)
    with jax.set_mesh(mesh):
        placed = jax.device_put(tree, tuple(NamedSharding(mesh, spec) for spec in specs))
        compiled = jax.jit(on_replicas(run, whole=()), donate_argnums=1).lower(*placed).compile()
        out, pages = compiled(*placed)
    for replica in range(replicas):
        own = slice(replica * len(expected), (replica + 1) * len(expected))
        np.testing.assert_allclose(np.array(out)[own], expected, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(np.array(pages)[: len(expected_pages)], expected_pages)
    # Nothing is exchanged: neither a pool nor anything else.
    text = compiled.as_text()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text)


def test_one_pool_is_updated_in_place():
    example = make_example(3, [1, 20], [30, 40], padding=2, columns=16)
    pool = jnp.zeros((LAYERS * 2048, *example.pool.shape[1:]))
    spans, _, *qkv = example.arguments()
    step = jax.jit(partial(forward, num_pages=2048), donate_argnums=1)
    compiled = step.lower(spans, pool, *qkv).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes / 4
    assert not re.findall(r"= f32\[6144,\S+ copy\(", compiled.as_text())


# --- the kernel --------------------------------------------------------------------------

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
def test_heads_of_the_kernel_are_cut_over_devices():
    example = example_of([(0, 0), (17, 40), (0, 0), (20, 70), (1, 9)], kv_heads=8)
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    token = PartitionSpec(None, "tensor")
    specs = (PartitionSpec(), PartitionSpec(None, None, "tensor"), token, token, token)
    with jax.set_mesh(mesh):
        places = tuple(NamedSharding(mesh, spec) for spec in specs)
        placed = jax.device_put(example.arguments(), places)
        of_replica = partial(run, num_pages=NUM_PAGES)
        check(example, *jax.jit(on_replicas(of_replica, whole=()))(*placed), 2e-5)


@pytest.mark.full
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("backup", [0, 3])
def test_an_engine_decodes_as_with_the_plain_backend(monkeypatch, backup):
    """Four places for three prompts: one place is empty from the start, and more become so, while a
    prompt of several chunks is computed beside windows."""
    model = Transformer(dataclasses.replace(WIDE, num_key_value_heads=2), rngs=nnx.Rngs(0))
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
