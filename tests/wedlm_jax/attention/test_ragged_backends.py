"""Which backend runs where, and attention over pages whose heads are cut over devices."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.examples.decode import TINY
from tests.examples.ragged import LAYERS, make_example
from wedlm_jax.attention.pages import Int8Rows
from wedlm_jax.attention.ragged import (
    allocate_pages,
    attend_pages,
    attention_plan,
    check_ragged_backend,
    token_places,
    write_pages,
)
from wedlm_jax.errors import InputError
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
        placed = [
            jax.device_put(part, NamedSharding(mesh, spec))
            for part, spec in zip(tree, specs, strict=True)
        ]
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
