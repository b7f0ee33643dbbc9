"""Which tokens a forward runs, against the same said in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import WINDOW, Decoding
from tests.examples.windows import state_of as decoding_state
from wedlm_jax.decode.spans import (
    Allowance,
    ForwardSizes,
    attention_spans,
    flat_tokens,
    has_room,
    plan_spans,
)
from wedlm_jax.decode.state import num_slots
from wedlm_jax.params import SamplingParams

COUNT, MASK = 4, 99
PLENTY = 100


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One between two forwards: what of its text is computed, what it computes in chunks, and its
    window, None where it is masked."""

    text: tuple[int, ...]
    computed: int
    prefill: int
    window: tuple[int | None, ...]
    arrival: int = 0
    capacity: int = PLENTY
    running: bool = True

    @property
    def start(self):
        return max(self.computed, self.prefill)


@st.composite
def some_sequences(draw):
    order = draw(st.permutations(range(COUNT)))
    made = []
    for arrival in order:
        text = tuple(draw(st.lists(st.integers(0, 22), min_size=1, max_size=20)))
        prefill = draw(st.integers(0, len(text)))
        computed = draw(st.integers(0, len(text)))
        slots = draw(st.integers(1, num_slots(WINDOW)))
        window = tuple(
            draw(st.lists(st.none() | st.integers(0, 22), min_size=slots, max_size=slots))
        )
        capacity = draw(st.sampled_from([PLENTY, PLENTY, PLENTY, 10]))
        running = draw(st.sampled_from([True, True, True, False]))
        made.append(Sequence(text, computed, prefill, window, arrival, capacity, running))
    return made


def state_of(some):
    windows = [Decoding((), one.text, one.window, SamplingParams()) for one in some]
    state = jax.tree.map(lambda x: x[: len(some)], decoding_state(windows))
    return dataclasses.replace(
        state,
        prefill_length=jnp.array([one.prefill for one in some], jnp.int32),
        num_computed=jnp.array([one.computed for one in some], jnp.int32),
        running=jnp.array([one.running for one in some]),
    )


def allowance_of(some, chunk_tokens):
    return Allowance(
        page_table=jnp.zeros((len(some), 4), jnp.int32),
        capacity=jnp.array([one.capacity for one in some], jnp.int32),
        arrival=jnp.array([one.arrival for one in some], jnp.int32),
        chunk_tokens=jnp.int32(chunk_tokens),
        max_forwards=jnp.int32(1),
        until_finished=jnp.ones(1, jnp.int32),
    )


LONGEST_CHUNK = 12
TOTAL = COUNT * num_slots(WINDOW) + LONGEST_CHUNK
SIZES = ForwardSizes((1, 4, 8, 16, 32, TOTAL), (1,), TOTAL)


def runs(one):
    return one.running and one.start + len(one.window) <= one.capacity


plan_compiled = jax.jit(plan_spans, static_argnames="sizes")
flat_compiled = jax.jit(flat_tokens, static_argnums=(3, 4))
attention_compiled = jax.jit(attention_spans, static_argnums=4)


@given(some=some_sequences(), chunk_tokens=st.integers(0, LONGEST_CHUNK))
def test_windows_first_then_prompts_in_order_of_arrival(some, chunk_tokens):
    state, allowance = state_of(some), allowance_of(some, chunk_tokens)
    plan = plan_compiled(state, allowance, sizes=SIZES)
    assert np.asarray(has_room(state, allowance)).tolist() == [
        one.start + len(one.window) <= one.capacity for one in some
    ]
    reserved = sum(len(one.window) for one in some if runs(one))
    wanted = sum(one.start - one.computed for one in some if runs(one))
    granted = int(plan.chunk.sum())
    # The budget is used, and padding beyond it is not left idle; nothing else is computed. A budget
    # of 0 pauses prompts, padding or not.
    assert granted >= min(chunk_tokens, wanted)
    assert granted <= wanted
    if not chunk_tokens:
        assert granted == 0
    elif wanted:
        filled_up = int(SIZES.filled_up(jnp.int32(min(chunk_tokens, wanted) + reserved)))
        assert granted == min(wanted, filled_up - reserved)
    short = False  # whether somebody who came before did not get the whole of a prompt
    for i in sorted(range(len(some)), key=lambda i: some[i].arrival):
        one, chunk = some[i], int(plan.chunk[i])
        left = one.start - one.computed
        if not runs(one):
            assert (chunk, bool(plan.window[i])) == (0, False)
            continue
        assert 0 <= chunk <= left
        assert not (short and chunk), "a later prompt overtakes"
        short |= chunk < left
        assert bool(plan.window[i]) == (chunk == left)
    lengths = np.where(plan.window, [len(one.window) for one in some], 0) + plan.chunk
    assert plan.starts.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert plan.num_tokens <= TOTAL


def span_of(one, chunk, window):
    """Tokens and logical positions, in physical order."""
    places = range(one.computed, one.computed + chunk)
    span = [(one.text[place], place) for place in places]
    if window:
        filled = [slot for slot, token in enumerate(one.window) if token is not None]
        masks = [slot for slot, token in enumerate(one.window) if token is None]
        start = one.computed + chunk
        for slot in filled + masks:
            token = one.window[slot]
            span.append((MASK if token is None else token, start + slot))
    return span


@given(
    some=some_sequences(), chunk_tokens=st.integers(1, LONGEST_CHUNK), size=st.sampled_from([8, 64])
)
def test_flat_tokens_are_the_spans_one_behind_the_other(some, chunk_tokens, size):
    """In parts of ``size``, each with its own spans of attention."""
    state, allowance = state_of(some), allowance_of(some, chunk_tokens)
    plan = plan_compiled(state, allowance, sizes=SIZES)
    spans = [span_of(one, int(plan.chunk[i]), bool(plan.window[i])) for i, one in enumerate(some)]
    expected = [token for span in spans for token in span]
    assert len(expected) == int(plan.num_tokens)
    for start in range(0, max(len(expected), 1), size):
        flat = flat_compiled(plan, state, jnp.int32(start), size, MASK)
        here = expected[start : start + size]
        padded = [*here, *[(0, 0)] * (size - len(here))]
        assert list(zip(flat.tokens.tolist(), flat.positions.tolist(), strict=True)) == padded
        own = attention_compiled(plan, state, allowance, jnp.int32(start), size)
        for i, one in enumerate(some):
            first, behind = int(plan.starts[i]), int(plan.starts[i + 1])
            begin, end = max(first, start), min(behind, start + size)
            length = max(end - begin, 0)
            assert int(own.query_starts[i + 1] - own.query_starts[i]) == length
            # What it attends to ends with this part's last token of it.
            seen = one.computed + end - first if length else 0
            assert int(own.kv_lengths[i]) == seen


def test_a_window_has_room_for_as_many_filled_slots_as_masks():
    assert [num_slots(window) for window in (0, 1, 2, 16)] == [1, 2, 4, 32]
