"""Streaming decode as one `lax.while_loop`: the window, and what a forward does to it.

Per row: n committed tokens stand in the cache; behind them an open window of slots, some
filled, the others masked. A forward runs the filled slots first and the masks after
them, so the leading filled run sees exactly the committed context and is committed by
writing the window's keys and values at n and moving n past the run. Then masks are
filled by the fill rule, and the window refills. Source: WeDLM section 5.

Variants share the loop. Block-wise decoding, the paper's baseline, refills only when the
whole window is committed. A row with a window of 0 is decoded autoregressively: its window is
its last token, whose row predicts the next. A verified row has that token in front too, and
behind it drafts that are committed only where they are what it would have predicted; see
`wedlm_jax.verification`. Rows of all kinds run together, but for block-wise ones,
whose loop is another program.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.cache import KVCache, write
from wedlm_jax.decode_state import (
    DecodeState,
    commit_run,
    keep_finished,
    leading_run,
    num_slots,
    open_next,
    physical_order,
    shift,
    with_slots,
)
from wedlm_jax.masks import CachedMask, CausalMask
from wedlm_jax.model import KeyValues, Transformer
from wedlm_jax.penalties import TokenUse, token_use, with_committed
from wedlm_jax.predictions import Guesses, fill, guess, head_rows, verify
from wedlm_jax.sampling import RowParams
from wedlm_jax.verification import rejected

REFILLS = ("streaming", "blockwise")


class Shape(NamedTuple):
    """A size at which a forward is compiled: slots of a row, and rows of the head (masks)."""

    slots: int
    masks: int


def forward_shapes(windows: tuple[int, ...], *, verified: bool = False) -> tuple[Shape, ...]:
    """The sizes at which a forward is compiled, smallest first, for rows with these windows.

    A window has 2W slots only after all W masks were filled out of order; it mostly has few
    more than W. So there is one size with a quarter of the room that filled slots may take,
    one with half, one with all of it.

    Args:
      verified: whether some rows are. Their filled slots pass the head too.
    """
    sizes = {
        (window + -(-window * quarters // 4), window)
        for window in windows
        for quarters in (1, 2, 4)
        if window
    }
    shapes = {Shape(slots, slots if verified else masks) for slots, masks in sizes}
    if 0 in windows:
        shapes.add(Shape(1, 1))
    # A wider head costs less than one more program; of equal slots the widest head stays.
    widest = {shape.slots: shape for shape in sorted(shapes)}
    return tuple(widest.values())


def prefill(
    model: Transformer,
    prompts: Array,
    starts: Array,
    counts: Array,
    before: KVCache | None = None,
    *,
    int8_kv: bool = False,
) -> tuple[KeyValues, Array]:
    """Keys and values ``[num_hidden_layers, B, K, T, head_dim]`` of prompts, or of a piece of
    them, and the final hidden state ``[B, D]`` of each one's last token; no logits are computed.

    Args:
      prompts: int32 ``[B, T]``, padded behind.
      starts: int32 ``[B]``, tokens of each prompt that stand in the cache already.
      counts: int32 ``[B]``, tokens of each that are given here.
      before: that cache; None where ``starts`` are 0.
      int8_kv: whether the cache holds `wedlm_jax.int8.Int8Rows`, so that these must be such.
    """
    positions = starts[:, None] + jnp.arange(prompts.shape[1])
    if before is None:
        hidden, kv = model(prompts, positions, CausalMask(), return_kv=True, int8_kv=int8_kv)
    else:
        hidden, kv = model(
            prompts, positions, CachedMask(starts), cache=before.layers(), return_kv=True,
            int8_kv=int8_kv,
        )  # fmt: skip
    assert kv is not None
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    return kv, jnp.take_along_axis(hidden, last, axis=1)[:, 0]


def decode(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    *,
    windows: tuple[int, ...],
    refill: str = "streaming",
    live: int | None = None,
    attention: str = "dense",
    max_forwards: Array | int,
    until_done: Array | int = 2**31 - 1,
) -> DecodeState:
    """Runs forwards until every row is done, ``max_forwards`` at most.

    Args:
      windows: what ``params.window`` may hold; static.
      refill: "streaming" or "blockwise".
      live: cache rows that attention reads; static, by default all. The loop ends when a row
        has committed more.
      attention: a name in `wedlm_jax.attention.WINDOW_IMPLEMENTATIONS`.
      until_done: it also ends when so many rows are done.
    """
    size = state.cache.size if live is None else live
    if windows == (0,) and params.verified is not None:
        # There is nothing to verify, and its absence makes a smaller program.
        params = dataclasses.replace(params, verified=None, draft_budget=None)

    def unfinished(carry: Carry) -> Array:
        now, forwards, _ = carry
        fits = (now.done | (now.lengths <= size)).all()
        done = now.done.sum()
        more = (done < now.done.shape[0]) & (done < until_done)
        return more & fits & (forwards < max_forwards)

    def body(carry: Carry) -> Carry:
        before, forwards, use = carry
        after = forward_step(
            model, before, params, use, windows=windows, refill=refill, live=size,
            attention=attention,
        )  # fmt: skip
        after = keep_finished(before, after)
        return after, forwards + 1, with_committed(use, before, after)

    use = token_use(state, params, model.config.vocab_size)
    allocated = state.tokens.shape[1]
    start = with_slots(state, num_slots(windows[-1])), jnp.int32(0), use
    return with_slots(jax.lax.while_loop(unfinished, body, start)[0], allocated)


Carry = tuple[DecodeState, Array, TokenUse | None]


class Predicted(NamedTuple):
    """What a forward says.

    Attributes:
      kv: keys and values of its slots, in physical order.
      fill: bool ``[B, P]``, slots to fill.
      slots: with what ``[B, P]``.
      run: int32 ``[B]``, slots in front to commit.
      following: the token ``[B]`` behind them, of anchored rows.
    """

    kv: KeyValues
    fill: Array
    slots: Guesses
    run: Array
    following: Guesses


def forward_step(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    use: TokenUse | None,
    *,
    windows: tuple[int, ...],
    refill: str,
    live: int,
    attention: str,
) -> DecodeState:
    """One forward: reorder, run, commit, fill, stop, shift and refill."""
    state = dataclasses.replace(
        state,
        num_forwards=state.num_forwards + 1,
        num_token_instances=state.num_token_instances + state.active,
    )
    shapes = forward_shapes(windows, verified=params.verified is not None)
    predicted = _predict(model, state, params, use, shapes, live, attention)
    cache = write(state.cache, predicted.kv, state.lengths)
    filled = state.filled
    if params.verified is not None:
        filled &= ~rejected(filled, predicted.run, params.verified)

    def put(new: Array, old: Array) -> Array:
        return jnp.where(
            predicted.fill.reshape(*predicted.fill.shape, *[1] * (old.ndim - 2)), new, old
        )

    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=put(predicted.slots.tokens, state.tokens),
        logprobs=jax.tree.map(put, predicted.slots.logprobs, state.logprobs),
        filled=filled | predicted.fill,
    )
    state = commit_run(state, params, predicted.run)
    state = shift(state, predicted.run, params, refill)
    if 0 in windows or params.verified is not None:
        state = open_next(state, params, *predicted.following)
    return state


def _predict(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    use: TokenUse | None,
    shapes: tuple[Shape, ...],
    live: int,
    attention: str,
) -> Predicted:
    """The model and the fill rule, at the smallest compiled size that holds every row's active
    slots and masks."""
    exists = jnp.arange(state.tokens.shape[1]) < state.active[:, None]
    masks = (exists & ~state.filled).sum(axis=-1)
    slots = jnp.where(state.done, 0, state.active).max()
    if params.verified is not None:
        masks = jnp.where(params.verified, state.active, masks)
    heads = jnp.where(state.done, 0, masks).max()
    holds = jnp.array([(shape.slots >= slots) & (shape.masks >= heads) for shape in shapes])
    widest = shapes[-1].slots
    at = [
        partial(_predict_at, model, state, params, use, shape, widest, live, attention)
        for shape in shapes
    ]
    return jax.lax.switch(jnp.argmax(holds), at)


def _predict_at(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    use: TokenUse | None,
    shape: Shape,
    widest: int,
    live: int,
    attention: str,
) -> Predicted:
    """What is left out of the ``shape`` is inactive, and stands as zeros in what returns."""
    total = state.tokens.shape[1]
    order = physical_order(state.filled, state.active)
    # An AR window has no masks, so a model without a mask token can still use it.
    tokens = jnp.where(state.filled, state.tokens, model.config.mask_token_id or 0)
    tokens = jnp.take_along_axis(tokens, order, axis=1)[:, : shape.slots]
    positions = (state.lengths[:, None] + order)[:, : shape.slots]
    # What a row that is done would see is of no use: it looks at nothing.
    seen = CachedMask(jnp.where(state.done, 0, state.lengths))
    hidden, kv = model(
        tokens, positions, seen, cache=state.cache.layers(), live=live, attention=attention,
        return_kv=True, int8_kv=state.cache.is_int8,
    )  # fmt: skip
    assert kv is not None
    head = head_rows(state, params, order, slots=shape.slots, count=shape.masks)
    hidden = jnp.take_along_axis(hidden, head.places[..., None], axis=1)
    guesses, entropies = guess(model, state, params, use, hidden, head.slots)
    chosen = fill(state, params, head, guesses.tokens, entropies)
    run, last = leading_run(state.filled, state.active), jnp.zeros_like(state.active)
    if params.verified is not None:
        chosen, run, last = verify(state, params, head, guesses.tokens, entropies, chosen, run)
    slots = jnp.where(chosen, head.slots, total)
    rows = jnp.arange(order.shape[0])[:, None]
    empty = jnp.zeros((order.shape[0], total), bool)

    def at_slots(x: Array) -> Array:
        return jnp.zeros((*empty.shape, *x.shape[2:]), x.dtype).at[rows, slots].set(x, mode="drop")

    return Predicted(
        kv=jax.tree.map(partial(_pad, size=widest, axis=3), kv),
        fill=empty.at[rows, slots].set(True, mode="drop"),
        slots=jax.tree.map(at_slots, guesses),
        run=run,
        following=jax.tree.map(lambda x: x[rows[:, 0], last], guesses),
    )


def _pad(x: Array, size: int, *, axis: int) -> Array:
    missing = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, missing)
