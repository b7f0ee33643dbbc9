"""Plans which tokens a forward runs: a span of each sequence, one after another.

A span is the next chunk of a prompt, a window, or both: the last chunk of a prompt and the first
window run in the same forward. To the model each is a causal prefill chunk: its keys and values are
written after those that the sequence has computed, and the next forward overwrites those that were
not committed.

Four sequences in a forward of T = 16 (``c`` chunk, ``f`` filled slot, ``m`` mask, ``.`` padding)::

    sequence   0 0 0 0 0 0  1 1 1 1  2  3 3 3  .  .
    token      c c c c m m  f f m m  f  c c c  .  .
               end of a     window   AR start of a
               prompt                   long prompt
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.ragged import Spans
from wedlm_jax.decode.backup import backup_pages, room_needed
from wedlm_jax.decode.state import DecodeState, num_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Allowance:
    """The host's limits for one replica's burst of forwards.

    Attributes:
      page_table: int32 ``[N, max_pages]``, pages of each sequence in order; 0 where it has none.
      capacity: int32 ``[N]``, tokens that these pages hold.
      arrival: int32 ``[N]``, the order of arrival: the lowest is served first.
      chunk_tokens: int32, maximum prompt tokens that a forward computes in addition to the windows;
        0 pauses all prompts.
      max_forwards: int32, maximum forwards of the burst.
      until_finished: int32 ``[1]``; the replica's burst ends when this many of its sequences have
        finished.
      seconds: float32 ``[1, S]``, the cost of a forward of each static size, from which programs
        with trait "lookup" choose the number of drafts; None for others.
    """

    page_table: Array
    capacity: Array
    arrival: Array
    chunk_tokens: Array
    max_forwards: Array
    until_finished: Array
    seconds: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpanPlan:
    """The spans of one forward.

    Attributes:
      starts: int32 ``[N+1]``, the flat index where each span starts; the last is the total length.
      chunk: int32 ``[N]``, how many tokens of each prompt the forward computes.
      window: bool ``[N]``, whether it also runs the window.
      place: int32 ``[N, P]``, the physical place of each slot in its window: filled slots first,
        then masks, each in logical order.
      order: int32 ``[N, P]``, the slot at each physical place: the inverse of ``place``.
    """

    starts: Array
    chunk: Array
    window: Array
    place: Array
    order: Array

    @property
    def num_tokens(self) -> Array:
        """int32, the number of real tokens in the forward."""
        return self.starts[-1]


def plan_spans(
    state: DecodeState, allowance: Allowance, sizes: ForwardSizes, page_size: int
) -> SpanPlan:
    """Plans a forward: windows first, then prompt chunks, both in order of arrival.

    Prompts also use the padding up to the forward's static size, which would be computed anyway.
    """
    most = sizes.total
    ready = state.running & has_room(state, allowance, page_size)
    earlier = allowance.arrival[None, :] < allowance.arrival[:, None]

    def before(tokens: Array) -> Array:
        return jnp.where(earlier, tokens[None, :], 0).sum(axis=1)

    # Room is reserved for the windows of sequences still in prefill, since their prompt may end in
    # this forward.
    slots = jnp.where(ready, state.active + state.backup.count, 0)
    ready &= before(slots) + slots <= most
    slots = jnp.where(ready, slots, 0)
    left = jnp.where(ready, state.window_start - state.num_computed, 0)
    ahead = before(left)

    def granted(budget: Array) -> tuple[Array, Array]:
        chunk = jnp.clip(budget - ahead, 0, left)
        # A window needs its whole prompt: it runs with the prompt's last chunk, or after it.
        window = ready & (chunk == left)
        return chunk, window

    # Granted twice: first to find the forward's size, then again with the padding up to that size.
    free = most - slots.sum()
    chunk, window = granted(jnp.minimum(allowance.chunk_tokens, free))
    size = jnp.minimum(sizes.filled_up(chunk.sum() + slots.sum()), most)
    padded = (left.sum() > 0) & (allowance.chunk_tokens > 0)
    chunk, window = granted(jnp.where(padded, size - slots.sum(), 0))
    lengths = chunk + jnp.where(window, slots, 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
    # starts[i] is where sequence i begins in the flat array, starts[N] the number of tokens.
    place = physical_place(state.filled, state.active)
    return SpanPlan(starts, chunk, window, place, inverse(place))


def has_room(state: DecodeState, allowance: Allowance, page_size: int) -> Array:
    """Returns whether the pages of each sequence hold its prompt and its next window, bool
    ``[N]``."""
    return room_needed(state, page_size) <= allowance.capacity


def physical_place(filled: Array, active: Array) -> Array:
    """Returns the topological reordering of windows, int32 ``[N, P]``: each slot's physical place.

    Filled slots come first, then masks, each in logical order. Under a causal mask, every masked
    slot then sees every filled slot on either side, and a filled slot never sees a masked one::

        slot       0  1  2  3  4
        holds      f  m  f  m  m
        place      0  2  1  3  4        physical order: slots 0 2 1 3 4

    Inactive slots stay where they are, after all others.
    """
    slot = jnp.arange(filled.shape[1], dtype=jnp.int32)
    if filled.shape[1] == 1:
        return jnp.zeros_like(filled, jnp.int32)
    # A stable partition by counting is cheaper than sorting.
    active_slot = slot < active[:, None]
    first = filled & active_slot
    before = jnp.cumsum(first, axis=1, dtype=jnp.int32)
    after = before[:, -1:] + slot - before  # after all filled slots and the masks before this one
    return jnp.where(first, before - 1, jnp.where(active_slot, after, slot))


def inverse(place: Array) -> Array:
    """Returns the slot at each place, int32 ``[N, P]``."""
    slot = jnp.arange(place.shape[1], dtype=jnp.int32)
    if place.shape[1] == 1:
        return place
    at = place[:, None, :] == slot[None, :, None]
    return jnp.where(at, slot, 0).sum(axis=2, dtype=jnp.int32)


def attention_spans(
    plan: SpanPlan,
    state: DecodeState,
    allowance: Allowance,
    start: Array,
    size: int,
    page_size: int | None = None,
) -> Spans:
    """Returns the parts of the spans in ``size`` flat places from ``start`` on, for attention.

    Args:
      page_size: tokens per page if sequences may have backup masks, so that each has two spans;
        else None.
    """
    bounds, before, table = plan.starts, state.num_computed, allowance.page_table
    if page_size is not None:
        backup = bounds[:-1] + plan.chunk + jnp.where(plan.window, state.active, 0)
        bounds = jnp.append(_in_turn(bounds[:-1], backup), bounds[-1])
        before = _in_turn(before, state.window_start + state.backup.start)
        table = _in_turn(table, backup_pages(state, table, page_size))
    starts = jnp.clip(bounds - start, 0, size)
    end = jnp.minimum(start + size, bounds[1:])
    lengths = starts[1:] - starts[:-1]
    return Spans(starts, jnp.where(lengths > 0, before + end - bounds[:-1], 0), table)


def _in_turn(first: Array, second: Array) -> Array:
    """Returns ``[2 N, ..]``: the rows of two arrays ``[N, ..]``, interleaved."""
    return jnp.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatTokens:
    """The model's input, ``[T]`` each: token ids, logical positions for RoPE, and masks."""

    tokens: Array
    positions: Array
    is_mask: Array


def flat_tokens(
    plan: SpanPlan, state: DecodeState, start: Array, size: int, mask_token_id: int
) -> FlatTokens:
    """Returns the tokens in ``size`` flat places from ``start`` on, padded after the last."""
    sequence, offset = owner(plan.starts, size, start)
    in_slots = offset - plan.chunk[sequence]  # negative within the prompt's chunk
    computed = state.num_computed[sequence]
    in_text = jnp.minimum(computed + offset, state.text.shape[1] - 1)
    slot = plan.order[sequence, jnp.clip(in_slots, 0, plan.order.shape[1] - 1)]
    in_backup = in_slots - state.active[sequence]  # negative before the backup masks
    filled = state.filled[sequence, slot] & (in_backup < 0)
    in_window = jnp.where(filled, state.tokens[sequence, slot], mask_token_id)
    is_window = in_slots >= 0
    real = start + jnp.arange(size) < plan.num_tokens
    tokens = jnp.where(is_window, in_window, state.text[sequence, in_text])
    # A window's token has the logical position of its slot, wherever it stands in the flat array.
    slot = jnp.where(in_backup < 0, slot, state.backup.start[sequence] + in_backup)
    positions = computed + jnp.where(is_window, plan.chunk[sequence] + slot, offset)
    is_mask = real & is_window & ~filled
    return FlatTokens(jnp.where(real, tokens, 0), jnp.where(real, positions, 0), is_mask)


def owner(starts: Array, size: int, start: Array | int = 0) -> tuple[Array, Array]:
    """Returns the sequence of each of ``size`` flat places from ``start`` on, and its offset from
    that sequence's start, int32 ``[size]`` each.

    Args:
      starts: int32 ``[N+1]``, where each sequence's part starts. Places after the last part belong
        to the last sequence.
    """
    place = jnp.arange(size, dtype=jnp.int32) + start
    if starts.shape[0] == 2:
        return jnp.zeros_like(place), place
    sequence = (starts[1:-1][None, :] <= place[:, None]).sum(axis=1, dtype=jnp.int32)
    return sequence, place - starts[sequence]


# --- The static sizes of a forward -----------------------------------------------------------
#
# Compiled shapes are static, but the number of tokens in a forward is not. So the layers and the
# head are compiled at a few sizes; each forward runs at the smallest size that holds its tokens,
# and is padded to it.

Carry = TypeVar("Carry")

SMALLEST_COARSE = 16
LARGEST_HEAD = 256
"""Maximum rows whose logits are in memory at once."""


@dataclasses.dataclass(frozen=True)
class ForwardSizes:
    """The sizes at which the parts of a forward are compiled, smallest first.

    A forward of more tokens than the largest size goes through the layers in several parts, each of
    which sees the keys and values of those before it.

    Attributes:
      tokens: T, how many tokens go through the layers at once.
      head: R, how many rows go through the head at once.
      total: maximum tokens of a forward.
    """

    tokens: tuple[int, ...]
    head: tuple[int, ...]
    total: int

    def runs(self, tokens: Array) -> Array:
        """Returns how often a forward of ``tokens`` runs the layers at each size, int32 ``[S]``."""
        largest, sizes = self.tokens[-1], jnp.array(self.tokens)
        whole = jnp.maximum(tokens - 1, 0) // largest
        # After the whole parts at least one token is left, so one more part runs.
        last = (sizes < tokens - whole * largest).sum()
        part = (jnp.arange(len(self.tokens)) == last) & (tokens > 0)
        return part + whole * (sizes == largest)

    def filled_up(self, tokens: Array) -> Array:
        """Returns how many tokens a forward of ``tokens`` computes, padding included, int32."""
        return (self.runs(tokens) * jnp.array(self.tokens)).sum()


def forward_sizes(
    sequences: int,
    window: int,
    chunk_tokens: int,
    largest: int,
    *,
    narrower: bool = False,
    coarse: bool = False,
    one_size: bool = False,
    whole: int = 4,
    lookup: int = 0,
    backup: int = 0,
) -> ForwardSizes:
    """Chooses sizes for N sequences with windows of at most W, and for prompt chunks.

    Args:
      largest: maximum tokens that go through the layers at once.
      narrower: whether some sequences have narrower windows.
      coarse: choose sizes four times apart, for accelerators: a small forward there takes as long
        as one four times its size, since its time goes into reading the weights.
      one_size: use a single size for all forwards, for a deterministic engine.
      whole: tokens that a CPU's matrix product computes together: 4, or 16 with matrices stored by
        column.
      lookup: maximum drafts copied from a text.
    """
    spans = sequences * (num_slots(window, lookup) + backup)
    total = spans + chunk_tokens
    most = min(total, largest)
    tokens = (
        _coarse_grid(most)
        if coarse
        else _grid(sequences, window, most, narrower, whole, lookup, backup)
    )
    rows = min(next((size for size in tokens if size >= spans), spans), LARGEST_HEAD)
    head = [*(size for size in tokens if size < rows), rows]
    if one_size:
        usual = [size for size in tokens if size >= sequences * (window + 1)] or tokens[-1:]
        return ForwardSizes((usual[0],), (head[-1],), total)
    return ForwardSizes(tuple(tokens), tuple(head), total)


def _grid(
    sequences: int,
    window: int,
    largest: int,
    narrower: bool,
    whole: int,
    lookup: int = 0,
    backup: int = 0,
) -> list[int]:
    """Lists powers of two and, from 64 on, one size between each two of them; for one sequence, the
    sizes of its windows.

    More sizes cost compile time; fewer cost padding, which waiting prompts fill.
    """
    if sequences == 1:
        # A forward is one token, a window with few, half or all slots filled, or a chunk.
        widths = [window] if window else []
        if narrower:
            widths += [2**i for i in range(1, window.bit_length()) if 2**i < window]
        spans = [slots for w in widths for slots in (w + 1, num_slots(w))]
        spans += [3 * w // 2 for w in widths if w >= 8]
        spans += [window + 2**i for i in range(1, (1 + lookup).bit_length())]
        spans += [min(backup, w) + slots for w in widths if backup for slots in (3 * w // 2, 2 * w)]
        widest = num_slots(window) + backup
        chunks = [2**i for i in range(5, largest.bit_length()) if 2**i >= widest]
        sizes = {1, *chunks, *(_filled(span, whole) for span in spans)}
    else:
        least = window if window and not narrower else 1
        powers = [2**i for i in range(least.bit_length() - 1, largest.bit_length())]
        sizes = {*powers, *(3 * power // 2 for power in powers if power >= 64)}
    return [*sorted(size for size in sizes if size < largest), largest]


def _filled(tokens: int, whole: int) -> int:
    """Rounds up to a multiple of ``whole``, and 28 to 32, which is faster."""
    rounded = -(-tokens // whole) * whole
    return 32 if rounded == 28 else rounded


def _coarse_grid(largest: int) -> list[int]:
    sizes = [SMALLEST_COARSE * 4**i for i in range(largest.bit_length())]
    return [*(size for size in sizes if size < largest), largest]


def at_size(
    sizes: tuple[int, ...],
    needed: Array,
    run: Callable[[int, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Runs ``run(size, carry)`` at the smallest of ``sizes`` that holds ``needed``; not at all if
    ``needed`` is 0.

    Each size is a loop that runs once or not at all. `jax.lax.switch` would be simpler, but on CPUs
    it copies its operands, which here include the whole cache, in every forward. A loop's carry is
    updated in place on all platforms.
    """
    smaller = 0
    for size in sizes:
        due = (needed > smaller) & (needed <= size)
        smaller = size

        def step(turn: tuple[Array, Carry], size: int = size) -> tuple[Array, Carry]:
            return jnp.bool_(False), run(size, turn[1])

        _, carry = jax.lax.while_loop(_is_due, step, (due, carry))
    return carry


def _is_due(turn: tuple[Array, Carry]) -> Array:
    return turn[0]


def in_parts(
    sizes: tuple[int, ...],
    needed: Array,
    run: Callable[[int, Array, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Runs ``run(size, start, carry)`` over ``needed`` rows: in parts of the largest size, and the
    rest at the smallest size that holds it."""
    largest = sizes[-1]

    def more(turn: tuple[Array, Carry]) -> Array:
        return needed - turn[0] > 0

    def part(turn: tuple[Array, Carry]) -> tuple[Array, Carry]:
        start, carry = turn
        left = jnp.minimum(needed - start, largest)
        carry = at_size(sizes, left, partial(_at, run, start), carry)
        return start + largest, carry

    return jax.lax.while_loop(more, part, (jnp.int32(0), carry))[1]


def _at(run: Callable[[int, Array, Carry], Carry], start: Array, size: int, carry: Carry) -> Carry:
    return run(size, start, carry)
