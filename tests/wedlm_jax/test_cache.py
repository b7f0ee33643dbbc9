"""The cache is written where each row stands, and holds what a full forward would compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests.decode_examples import TINY, Row, batches, start
from wedlm_jax.cache import KVCache, allocate, write
from wedlm_jax.decode_state import DecodeState
from wedlm_jax.engine import Engine
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import KeyValues, Transformer

FullKeysAndValues = Callable[[np.ndarray], list[np.ndarray]]

ROUNDING = 1e-5
"""Between float32 programs of different shapes, for keys and values of order one."""


@pytest.fixture(scope="module")
def full_keys_and_values(tiny_model: Transformer) -> FullKeysAndValues:
    """``[layers, B, K, T, head_dim]`` of texts in order, without a cache."""
    graph, parameters = nnx.split(tiny_model)

    @jax.jit
    def forward(parameters: nnx.State, ids: jax.Array) -> KeyValues | None:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return nnx.merge(graph, parameters)(ids, positions, CausalMask(), return_kv=True)[1]

    return lambda ids: [np.asarray(x) for x in forward(parameters, jnp.array(ids)) or ()]


def test_a_new_cache_has_a_row_for_each_layer_head_and_place() -> None:
    cache = allocate(TINY, 3, 10, jnp.bfloat16)
    assert cache.keys.shape == cache.values.shape == (2, 3, 1, 10, 8)
    assert cache.size == 10
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16


@given(starts=st.lists(st.integers(0, 6), min_size=3, max_size=3), seed=st.integers(0, 99))
def test_write_changes_each_row_from_its_start_on_only(starts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.normal(size=(2, 2, 3, 1, 10, 8)).astype(np.float32)
    new = rng.normal(size=(2, 2, 3, 1, 4, 8)).astype(np.float32)
    keys, values = map(jnp.array, new)
    cache = write(KVCache(*map(jnp.array, old)), (keys, values), jnp.array(starts))
    expected = old.copy()
    for row, at in enumerate(starts):
        expected[:, :, row, :, at : at + 4] = new[:, :, row]
    np.testing.assert_array_equal(cache.layers(), expected)


@given(batch=batches(), slices=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_committed_rows_equal_a_full_forward(
    streaming_engine: Engine,
    full_keys_and_values: FullKeysAndValues,
    batch: list[Row],
    slices: list[int],
) -> None:
    running = start(streaming_engine, batch)
    for count in slices:
        running.advance(count)
    state = jax.device_get(running._state)
    ids = np.zeros((len(batch), 64), np.int32)
    for i, row in enumerate(batch):
        text = [*row.prompt, *state.output[i, : state.num_output[i]]]
        assert state.lengths[i] == len(text)
        ids[i, : len(text)] = text
    for cached, full in zip(state.cache.layers(), full_keys_and_values(ids), strict=True):
        for i, length in enumerate(state.lengths):
            np.testing.assert_allclose(
                cached[:, i, :, :length], full[:, i, :, :length], rtol=0, atol=ROUNDING
            )


@given(batch=batches(), forwards=st.integers(1, 8), data=st.data())
def test_what_stands_behind_the_leading_run_never_reaches_committed_rows(
    streaming_engine: Engine, batch: list[Row], forwards: int, data: st.DataObject
) -> None:
    """One forward from a state, and from one whose later slots hold anything else."""
    running = start(streaming_engine, batch)
    running.advance(forwards)
    state = running._state
    lengths = np.asarray(state.lengths)
    filled, tokens = np.array(state.filled), np.array(state.tokens)
    slots = filled.shape[1]
    run = np.cumprod(filled & (np.arange(slots) < np.asarray(state.active)[:, None]), axis=1).sum(1)
    for row, first in enumerate(run):
        # The slot behind the run stays a mask, or the run would be longer.
        for slot in range(first + 1, slots):
            filled[row, slot] = data.draw(st.booleans())
            tokens[row, slot] = data.draw(st.integers(0, 22))
    other = dataclasses.replace(
        jax.tree.map(jnp.copy, state), filled=jnp.array(filled), tokens=jnp.array(tokens)
    )

    def cache_after_a_forward(before: DecodeState) -> np.ndarray:
        running._state = before
        running.advance(1)
        return np.stack(jax.device_get(running._state.cache.layers()))

    plain, changed = cache_after_a_forward(state), cache_after_a_forward(other)
    for row, length in enumerate(lengths + run):
        np.testing.assert_allclose(
            plain[:, :, row, :, :length], changed[:, :, row, :, :length], rtol=0, atol=ROUNDING
        )
