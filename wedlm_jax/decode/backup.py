"""Backup masks: a second group of masks, before the draft that is likeliest to be wrong.

A window's masks draft for the next forward only if all drafts before them are right; after a wrong
one the next forward has no drafts at all. So a forward may run m more masks, which assume that the
draft of one slot, b, is wrong. They see the text and the drafts before it::

    slot     0      1 .. b-1  b .. d   d+1 .. d+W       b .. b+m-1
    holds    known  drafts    drafts   masks            backup masks, which see slots 0 .. b-1

If the run does end before slot b, its last row has chosen the token of slot b, and the backup masks
after the first supply drafts for slots b+1 and on, just as a window's masks would there. The rows
of text and drafts see no masks of either kind, so the text does not depend on them.

To attention, the backup masks are a separate span. It shares the sequence's pages before the one
with slot b; in place of that page and the next ones it has pages after those of the window. The
first of these lacks the tokens before slot b, which each layer copies into it. So no backend needs
to know about backup masks.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.pages import PageCopies
from wedlm_jax.decode.state import Backup, DecodeState

LEAST_CHANCE = 0.2
"""The minimum chance that the assumed draft is the first wrong one. Below it, the included model's
backup masks add a tenth to the tokens that a forward computes, and nothing to those it commits."""


def next_backup(
    fills: Array, entropies: Array, run: Array, window: Array, most: int, eligible: Array
) -> Backup:
    """Plans the backup masks of the next forward, at most ``most`` per sequence.

    Args:
      fills: bool ``[N, P]``, slots of the last window that were filled with drafts.
      entropies: float32 ``[N, P]``, the entropies of these drafts in nats.
      run: int32 ``[N]``, how many slots left the front of the window.
      window: int32 ``[N]``, W.
      eligible: bool ``[N]``, which sequences may have backup masks.
    """
    # exp(-H) estimates the chance that a draft is right (`wedlm_jax.decode.verified.draft_rule`).
    right = jnp.where(fills, jnp.exp(-entropies), 1.0)
    chance = jnp.cumprod(right, axis=1) / right * (1.0 - right)
    first_wrong = jnp.argmax(chance, axis=1).astype(jnp.int32)
    # With fewer than two masks there is no draft, since the first mask's token is known.
    count = jnp.minimum(window, most)
    doubtful = chance.max(axis=1) >= LEAST_CHANCE
    count = jnp.where(eligible & doubtful & (count > 1), count, 0)
    return Backup(jnp.where(count > 0, first_wrong - run, 0), count)


def is_used(state: DecodeState, run: Array) -> Array:
    """Returns which sequences continue with their backup masks after a run ``[N]``, bool ``[N]``:
    those whose first wrong draft was the one that these masks assumed."""
    return (state.backup.count > 0) & (run == state.backup.start)


def backup_rows(state: DecodeState, most: int) -> Array:
    """Returns the backup masks that need the head, bool ``[N, most]``: all but the first, whose
    token is chosen by a row of text."""
    number = jnp.arange(most)
    return (number >= 1) & (number < state.backup.count[:, None])


def by_slot(state: DecodeState, values: Array, used: Array) -> Array:
    """Returns predictions by slot, ``[N, P+1, ..]``: the window's, replaced by those of the backup
    masks after the first where these are ``used [N]``. The ``values [N, P+1+M, ..]`` are
    those of the window's slots and then of the backup masks."""
    slots = state.tokens.shape[1]
    slot = jnp.arange(slots + 1)
    number = slot - state.backup.start[:, None]
    own = used[:, None] & (number >= 1) & (number < state.backup.count[:, None])
    column = jnp.where(own, slots + 1 + number, slot)
    return values[jnp.arange(values.shape[0])[:, None], column]


# --- Pages -----------------------------------------------------------------------------------


def room_needed(state: DecodeState, page_size: int) -> Array:
    """Returns how many tokens the pages of each sequence must hold for its next forward, int32
    ``[N]``."""
    end = state.window_start + state.active
    _, offset, free = _pages(state, page_size)
    return jnp.where(state.backup.count > 0, free * page_size + offset + state.backup.count, end)


def room_for(most: int, page_size: int) -> int:
    """Returns the maximum number of tokens that `room_needed` adds to those of the window."""
    return 2 * (page_size - 1) + most if most else 0


def backup_pages(state: DecodeState, table: Array, page_size: int) -> Array:
    """Returns the page tables of the backup masks' spans, int32 ``[N, max_pages]``, for the
    sequences' own ``table``."""
    page, _, free = _pages(state, page_size)
    column = jnp.arange(table.shape[1])
    moved = jnp.where(column < page[:, None], column, column + (free - page)[:, None])
    return jnp.take_along_axis(table, jnp.minimum(moved, table.shape[1] - 1), axis=1)


def page_copies(state: DecodeState, table: Array, page_size: int, runs: Array) -> PageCopies:
    """Returns what each layer copies for the backup masks of sequences whose window ``runs [N]``,
    after the layer's keys and values are written."""
    page, offset, free = _pages(state, page_size)
    runs = runs & (state.backup.count > 0)
    row = jnp.arange(page_size)
    needed = runs[:, None] & (row < offset[:, None])

    def rows_of(column: Array) -> Array:
        number = jnp.take_along_axis(table, jnp.minimum(column, table.shape[1] - 1)[:, None], 1)
        # Rows that are not needed are copied within the trash page.
        return jnp.where(needed, number * page_size + row, row).reshape(-1)

    return PageCopies(rows_of(page), rows_of(free))


def _pages(state: DecodeState, page_size: int) -> tuple[Array, Array, Array]:
    """Returns, int32 ``[N]``, the column of the page table in which each sequence's backup masks
    start, their place in that page, and the first column after the window."""
    place = state.window_start + state.backup.start
    end = state.window_start + state.active
    return place // page_size, place % page_size, -(-end // page_size)
