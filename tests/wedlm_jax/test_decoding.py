"""The compiled loop against the plain Python one, and what a forward may not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.decode_examples import SAFE_MARGIN, TINY, Row, batches, reference, run, start
from tests.reference.decode_loop import FullForward
from wedlm_jax import decoding
from wedlm_jax.batch import UNTIL_DONE
from wedlm_jax.decode_state import DecodeState, num_slots, physical_order
from wedlm_jax.decoding import Shape, decode, forward_shapes
from wedlm_jax.engine.engine import Engine
from wedlm_jax.model import Transformer
from wedlm_jax.row_result import RowResult
from wedlm_jax.params import RowParams

RunBatch = Callable[[list[Row]], list[RowResult]]


def assert_equals_reference(
    engine: Engine, full_forward: FullForward, batch: list[Row], refill: str
) -> None:
    expected = [reference(full_forward, TINY, row, refill) for row in batch]
    compared = 0
    for result, answer in zip(run(engine, batch), expected, strict=True):
        if answer.margin > SAFE_MARGIN:
            compared += 1
            known = {name: getattr(answer, name) for name in dataclasses.asdict(result)}
            assert dataclasses.asdict(result) == known
    assume(compared)


@given(batch=batches())
def test_streaming_equals_the_python_loop(
    streaming_engine: Engine, full_forward: FullForward, batch: list[Row]
) -> None:
    assert_equals_reference(streaming_engine, full_forward, batch, "streaming")


@given(batch=batches())
def test_blockwise_equals_the_python_loop(
    blockwise_engine: Engine, full_forward: FullForward, batch: list[Row]
) -> None:
    assert_equals_reference(blockwise_engine, full_forward, batch, "blockwise")


@given(batch=batches(window=0))
def test_a_window_of_0_equals_full_forwards_token_by_token(
    autoregressive_engine: Engine, full_forward: FullForward, batch: list[Row]
) -> None:
    assert_equals_reference(autoregressive_engine, full_forward, batch, "streaming")


@pytest.fixture(scope="module")
def run_at_full_width(tiny_model: Transformer, streaming_engine: Engine) -> RunBatch:
    """Decodes a batch with a window that always runs at all its slots."""
    graph, parameters = nnx.split(tiny_model)

    @jax.jit
    def compiled(parameters: nnx.State, state: DecodeState, params: RowParams) -> DecodeState:
        model = nnx.merge(graph, parameters)
        return decode(model, state, params, windows=(4,), max_forwards=UNTIL_DONE)

    def finish(batch: list[Row]) -> list[RowResult]:
        running = start(streaming_engine, batch)
        with pytest.MonkeyPatch.context() as patch:  # read while tracing, in the first call
            patch.setattr(decoding, "forward_shapes", lambda windows, **_: (Shape(8, 4),))
            running._state = compiled(parameters, running._state, running._params)
        return running.results()

    return finish


@given(batch=batches())
def test_the_sizes_a_window_runs_at_change_nothing(
    streaming_engine: Engine, run_at_full_width: RunBatch, batch: list[Row]
) -> None:
    assert run_at_full_width(batch) == run(streaming_engine, batch)


@given(data=st.data())
def test_physical_order_is_filled_then_masked_then_inactive(data: st.DataObject) -> None:
    slots = 6
    filled = data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    active = data.draw(st.integers(0, slots))
    expected = [s for s in range(active) if filled[s]]
    expected += [s for s in range(active) if not filled[s]]
    expected += range(active, slots)
    order = physical_order(jnp.array([filled]), jnp.array([active]))
    assert np.asarray(order)[0].tolist() == expected


def test_a_window_has_room_for_as_many_filled_slots_as_masks() -> None:
    assert [num_slots(window) for window in (0, 1, 2, 16)] == [1, 2, 4, 32]


def test_compiled_sizes_begin_above_the_masks_and_end_with_every_slot() -> None:
    assert forward_shapes((16,)) == ((20, 16), (24, 16), (32, 16))
    assert forward_shapes((4,)) == ((5, 4), (6, 4), (8, 4))
    assert forward_shapes((1,)) == ((2, 1),)
    assert forward_shapes((0,)) == ((1, 1),)


def test_of_two_compiled_sizes_with_equal_slots_the_wider_head_stays() -> None:
    # W = 4 needs 5, 6 and 8 slots, W = 6 needs 8, 9 and 12.
    assert forward_shapes((0, 4, 6)) == ((1, 1), (5, 4), (6, 4), (8, 6), (9, 6), (12, 6))
