"""The static sizes at which forwards are compiled, and how a compiled loop chooses one of them.

Compiled shapes are static, but the number of tokens in a forward is not. So the layers and the head
are compiled at a few sizes, each forward runs at the smallest that holds its tokens, and the rest
of that size is padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.state import num_slots

Carry = TypeVar("Carry")

SMALLEST_COARSE = 16
LARGEST_HEAD = 256
"""The most rows whose logits exist at once."""


@dataclasses.dataclass(frozen=True)
class ForwardSizes:
    """Sizes at which the parts of a forward are compiled, smallest first.

    A forward of more tokens than the largest size passes the layers in several parts, each of which
    sees the keys and values of those before it.

    Attributes:
      tokens: T, tokens that pass the layers at once.
      head: R, rows that pass the head at once.
      total: the most tokens of a forward.
    """

    tokens: tuple[int, ...]
    head: tuple[int, ...]
    total: int

    def runs(self, tokens: Array) -> Array:
        """Returns how often a forward of ``tokens`` runs the layers at each size, int32 ``[S]``."""
        largest, sizes = self.tokens[-1], jnp.array(self.tokens)
        whole = jnp.maximum(tokens - 1, 0) // largest
        # Whole parts leave 1 .. the largest size, so one more part runs.
        last = (sizes < tokens - whole * largest).sum()
        part = (jnp.arange(len(self.tokens)) == last) & (tokens > 0)
        return part + whole * (sizes == largest)

    def filled_up(self, tokens: Array) -> Array:
        """Returns how many tokens, int32, a forward of ``tokens`` computes, padding included."""
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
) -> ForwardSizes:
    """Chooses sizes for N sequences with windows of at most W and prompt chunks beside them.

    Args:
      largest: the most tokens that pass the layers at once.
      narrower: whether some sequences have narrower windows.
      coarse: whether a forward of few tokens takes as long as one of four times as many, as on
        accelerators, whose time goes into reading the weights.
      one_size: whether all forwards are computed at one size, as a deterministic engine does.
      whole: tokens that a CPU's matrix product computes together; 16 on columns.
      lookup: the most drafts that are copied from a text.
    """
    spans = sequences * num_slots(window, lookup)
    total = spans + chunk_tokens
    most = min(total, largest)
    tokens = (
        _coarse_grid(most) if coarse else _grid(sequences, window, most, narrower, whole, lookup)
    )
    rows = min(next((size for size in tokens if size >= spans), spans), LARGEST_HEAD)
    head = [*(size for size in tokens if size < rows), rows]
    if one_size:
        usual = [size for size in tokens if size >= sequences * (window + 1)] or tokens[-1:]
        return ForwardSizes((usual[0],), (head[-1],), total)
    return ForwardSizes(tuple(tokens), tuple(head), total)


def _grid(
    sequences: int, window: int, largest: int, narrower: bool, whole: int, lookup: int = 0
) -> list[int]:
    """Lists powers of two and, from 64 on, one size between each two of them; for one sequence, the
    sizes of its windows.

    Each further size costs compile time; each size less costs padding, which waiting prompts fill.
    """
    if sequences == 1:
        # A forward is a token, a window with few, half or all slots filled, or a chunk.
        widths = [window] if window else []
        if narrower:
            widths += [2**i for i in range(1, window.bit_length()) if 2**i < window]
        spans = [slots for w in widths for slots in (w + 1, num_slots(w))]
        spans += [3 * w // 2 for w in widths if w >= 8]
        spans += [window + 2**i for i in range(1, (1 + lookup).bit_length())]
        chunks = [2**i for i in range(5, largest.bit_length()) if 2**i >= num_slots(window)]
        sizes = {1, *chunks, *(_filled(span, whole) for span in spans)}
    else:
        least = window if window and not narrower else 1
        powers = [2**i for i in range(least.bit_length() - 1, largest.bit_length())]
        sizes = {*powers, *(3 * power // 2 for power in powers if power >= 64)}
    return [*sorted(size for size in sizes if size < largest), largest]


def _filled(tokens: int, whole: int) -> int:
    """Rounds up to a multiple of ``whole``, and 28 to 32, which takes less time."""
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
    """Runs ``run(size, carry)`` at the smallest of ``sizes`` that holds ``needed``; not at all
    where ``needed`` is 0.

    Each size is a loop that runs once or not at all. `jax.lax.switch` would be simpler, but on CPUs
    it copies what it carries, which here is the whole cache, at every forward. A loop's carry is
    updated in place everywhere.
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
    """Runs ``run(size, start, carry)`` over ``needed`` rows: in parts of the largest size, the rest
    at the smallest size that holds it."""
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
