"""Which tokens a forward runs, against the same said in plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import WINDOW, Decoding
from tests.examples.windows import state_of as decoding_state
from wedlm_jax.decode.backup import page_copies
from wedlm_jax.decode.spans import (
    Allowance,
    ForwardSizes,
    attention_spans,
    flat_tokens,
    has_room,
    plan_spans,
)
from wedlm_jax.decode.state import Backup, num_slots
from wedlm_jax.params import SamplingParams

COUNT, MASK = 4, 99
PLENTY, PAGE = 100, 4


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One between two forwards: what of its text is computed, what it computes in chunks, and its
    window, None where it is masked; ``backup`` is where its backup masks start, and how many there
    are."""

    text: tuple[int, ...]
    computed: int
    prefill: int
    window: tuple[int | None, ...]
    arrival: int = 0
    capacity: int = PLENTY
    running: bool = True
    backup: tuple[int, int] = (0, 0)

    @property
    def start(self):
        return max(self.computed, self.prefill)

    @property
    def slots(self):
        return len(self.window) + self.backup[1]

    @property
    def room(self):
        """Backup masks use pages after the window's, and start there at the same offset within a
        page as their logical position."""
        end, (first, count) = self.start + len(self.window), self.backup
        return -(-end // PAGE) * PAGE + (self.start + first) % PAGE + count if count else end


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
        backup = 0, 0
        if draw(st.booleans()):
            backup = draw(st.integers(1, min(slots, WINDOW))), draw(st.integers(2, WINDOW))
        made.append(Sequence(text, computed, prefill, window, arrival, capacity, running, backup))
    return made


def state_of(some):
    windows = [Decoding((), one.text, one.window, SamplingParams()) for one in some]
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
flat_compiled = jax.jit(flat_tokens, static_argnums=(3, 4))
attention_compiled = jax.jit(attention_spans, static_argnums=(4, 5))
copies_compiled = jax.jit(page_copies, static_argnums=2)


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
        span += [(MASK, start + one.backup[0] + i) for i in range(one.backup[1])]
    return span


@given(
    some=some_sequences(),
    chunk_tokens=st.integers(1, LONGEST_CHUNK),
    size=st.sampled_from([8, 128]),
)
def test_backup_masks_see_the_text_and_the_slots_before_them(some, chunk_tokens, size):
    """Follows every flat token into the pages, and each span's pages back to what they hold."""
    state, allowance = state_of(some), allowance_of(some, chunk_tokens)
    plan = plan_compiled(state, allowance, sizes=SIZES, page_size=PAGE)
    copies = copies_compiled(state, allowance.page_table, PAGE, plan.window)
    spans = [span_of(one, int(plan.chunk[i]), bool(plan.window[i])) for i, one in enumerate(some)]
    expected = [token for span in spans for token in span]
    table = np.asarray(allowance.page_table)
    pool = np.full((table.max() + 1) * PAGE, -1)  # what each place holds: a sequence's token
    for i, one in enumerate(some):
        for place in range(one.computed):
            pool[table[i, place // PAGE] * PAGE + place % PAGE] = 1000 * i + place
    for start in range(0, max(len(expected), 1), size):
        flat = flat_compiled(plan, state, jnp.int32(start), size, MASK)
        here = expected[start : start + size]
        assert list(zip(flat.tokens.tolist(), flat.positions.tolist(), strict=True)) == [
            *here,
            *[(0, 0)] * (size - len(here)),
        ]
        own = attention_compiled(plan, state, allowance, jnp.int32(start), size, PAGE)
        starts, lengths, tables = map(
            np.asarray, (own.query_starts, own.kv_lengths, own.page_table)
        )
        for row in range(2 * len(some)):
            number = row // 2
            begin, end = starts[row : row + 2]
            for token in range(begin, end):
                place = lengths[row] - (end - token)
                # A backup mask is 500 and its number; others are known by their place.
                one, offset = some[number], start + token - int(plan.starts[number])
                in_backup = offset - int(plan.chunk[number]) - len(one.window)
                held = 500 + in_backup if in_backup >= 0 else one.computed + offset
                pool[tables[row, place // PAGE] * PAGE + place % PAGE] = 1000 * number + held
        pool[np.asarray(copies.targets)] = pool[np.asarray(copies.sources)]
        for row in range(2 * len(some)):
            if starts[row] == starts[row + 1]:
                continue
            number, backup = divmod(row, 2)
            seen = [
                pool[tables[row, p // PAGE] * PAGE + p % PAGE] - 1000 * number
                for p in range(lengths[row])
            ]
            one = some[number]
            before = one.start + one.backup[0] if backup else lengths[row]
            assert seen == [*range(before), *(500 + i for i in range(lengths[row] - before))]


def test_a_window_has_room_for_as_many_filled_slots_as_masks():
    assert [num_slots(window) for window in (0, 1, 2, 16)] == [1, 2, 4, 32]
