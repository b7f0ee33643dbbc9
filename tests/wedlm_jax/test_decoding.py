"""The compiled loop against the plain Python one, and what a forward may not change."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.decode_examples import SAFE_MARGIN, TINY, Row, batches, reference, run
from wedlm_jax.decoding import num_slots, physical_order, slot_widths
from wedlm_jax.engine import Engine


def assert_equals_reference(engine: Engine, full_forward, batch: list[Row], refill: str) -> None:
    expected = [reference(full_forward, TINY, row, refill) for row in batch]
    compared = 0
    for result, answer in zip(run(engine, batch), expected, strict=True):
        if answer.margin > SAFE_MARGIN:
            compared += 1
            answer = dataclasses.asdict(answer)
            answer.pop("margin")
            assert dataclasses.asdict(result) == answer
    assume(compared)


@given(batch=batches())
def test_streaming_equals_the_python_loop(streaming_engine, full_forward, batch):
    assert_equals_reference(streaming_engine, full_forward, batch, "streaming")


@given(batch=batches())
def test_blockwise_equals_the_python_loop(blockwise_engine, full_forward, batch):
    assert_equals_reference(blockwise_engine, full_forward, batch, "blockwise")


@given(batch=batches(window=0))
def test_a_window_of_0_equals_full_forwards_token_by_token(
    autoregressive_engine, full_forward, batch
):
    assert_equals_reference(autoregressive_engine, full_forward, batch, "streaming")


@given(data=st.data())
def test_physical_order_is_filled_then_masked_then_inactive(data):
    slots = 6
    filled = data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    active = data.draw(st.integers(0, slots))
    expected = [s for s in range(active) if filled[s]]
    expected += [s for s in range(active) if not filled[s]]
    expected += range(active, slots)
    order = physical_order(jnp.array([filled]), jnp.array([active]))
    assert np.asarray(order)[0].tolist() == expected


def test_a_window_has_room_for_as_many_filled_slots_as_masks():
    assert [num_slots(window) for window in (0, 1, 2, 16)] == [1, 2, 4, 32]


def test_compiled_widths_start_above_the_masks_and_end_with_every_slot():
    assert slot_widths(32) == (20, 24, 32)
    assert slot_widths(8) == (5, 6, 8)
    assert slot_widths(2) == (2,)
    assert slot_widths(1) == (1,)
