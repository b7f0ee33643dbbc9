"""Which tokens a forward runs, against the same said in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import WINDOW, Decoding
from tests.examples.windows import state_of as decoding_state
from wedlm_jax.decode.spans import Allowance, ForwardSizes, has_room, plan_spans
from wedlm_jax.decode.state import Backup, num_slots
from wedlm_jax.params import SamplingParams

COUNT, PLENTY, PAGE = 4, 100, 4


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One between two forwards: how much of its text is computed, and how much it computes in
    chunks; the slots of its window; where its backup masks start, and how many there are."""

    length: int
    computed: int
    prefill: int
    window: int
    arrival: int
    capacity: int
    running: bool
    backup: tuple[int, int]

    @property
    def start(self):
        return max(self.computed, self.prefill)

    @property
    def slots(self):
        return self.window + self.backup[1]

    @property
    def room(self):
        """Backup masks use pages after the window's, and start there at the same offset within a
        page as their logical position."""
        end, (first, count) = self.start + self.window, self.backup
        return -(-end // PAGE) * PAGE + (self.start + first) % PAGE + count if count else end


@st.composite
def some_sequences(draw):
    order = draw(st.permutations(range(COUNT)))
    made = []
    for arrival in order:
        length, window = draw(st.integers(1, 20)), draw(st.integers(1, num_slots(WINDOW)))
        computed, prefill = (draw(st.integers(0, length)) for _ in range(2))
        capacity = draw(st.sampled_from([PLENTY, PLENTY, PLENTY, 10]))
        running = draw(st.sampled_from([True, True, True, False]))
        backup = 0, 0
        if draw(st.booleans()):
            backup = draw(st.integers(1, min(window, WINDOW))), draw(st.integers(2, WINDOW))
        made.append(Sequence(length, computed, prefill, window, arrival, capacity, running, backup))
    return made


def state_of(some):
    windows = [
        Decoding((), (0,) * one.length, (None,) * one.window, SamplingParams()) for one in some
    ]
    state = jax.tree.map(lambda x: x[: len(some)], decoding_state(windows))
    backup = np.array([one.backup for one in some], np.int32)
    return dataclasses.replace(
        state,
        prefill_length=jnp.array([one.prefill for one in some], jnp.int32),
        num_computed=jnp.array([one.computed for one in some], jnp.int32),
        running=jnp.array([one.running for one in some]),
        backup=Backup(*map(jnp.array, backup.T)),
    )


def allowance_of(some, chunk_tokens):
    return Allowance(
        page_table=1 + jnp.arange(len(some) * 16, dtype=jnp.int32).reshape(len(some), 16),
        capacity=jnp.array([one.capacity for one in some], jnp.int32),
        arrival=jnp.array([one.arrival for one in some], jnp.int32),
        chunk_tokens=jnp.int32(chunk_tokens),
        max_forwards=jnp.int32(1),
        until_finished=jnp.ones(1, jnp.int32),
    )


LONGEST_CHUNK = 12
TOTAL = COUNT * (num_slots(WINDOW) + WINDOW) + LONGEST_CHUNK
SIZES = ForwardSizes((1, 4, 8, 16, 32, TOTAL), (1,), TOTAL)


def runs(one):
    return one.running and one.room <= one.capacity


plan_compiled = jax.jit(plan_spans, static_argnames=("sizes", "page_size"))


@given(some=some_sequences(), chunk_tokens=st.integers(0, LONGEST_CHUNK))
def test_windows_first_then_prompts_in_order_of_arrival(some, chunk_tokens):
    state, allowance = state_of(some), allowance_of(some, chunk_tokens)
    plan = plan_compiled(state, allowance, sizes=SIZES, page_size=PAGE)
    assert np.asarray(has_room(state, allowance, PAGE)).tolist() == [
        one.room <= one.capacity for one in some
    ]
    reserved = sum(one.slots for one in some if runs(one))
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
    lengths = np.where(plan.window, [one.slots for one in some], 0) + plan.chunk
    assert plan.starts.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert plan.num_tokens <= TOTAL


def test_a_window_has_room_for_as_many_filled_slots_as_masks():
    assert [num_slots(window) for window in (0, 1, 2, 16)] == [1, 2, 4, 32]
