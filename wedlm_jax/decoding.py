"""Streaming decode as one `lax.while_loop`: the window, and what a forward does to it.

Per row: n committed tokens stand in the cache; behind them an open window of slots, some
filled, the others masked. A forward runs the filled slots first and the masks after
them, so the leading filled run sees exactly the committed context and is committed by
writing the window's keys and values at n and moving n past the run. Then masks are
filled by the fill rule, and the window refills. Source: WeDLM section 5; DESIGN
"Streaming decode".

Variants share the loop. Block-wise decoding, the paper's baseline, refills only when the
whole window is committed. A row with a window of 0 is decoded autoregressively: its window is
its last token, whose row predicts the next. A verified row has that token in front too, and
behind it drafts that are committed only where they are what it would have predicted; see
`wedlm_jax.verification`. Rows of all kinds run together.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.bad_words import keep_apart, text_around
from wedlm_jax.cache import KVCache, write
from wedlm_jax.decode_state import (
    DecodeState,
    commit_run,
    first_index,
    keep_finished,
    leading_run,
    num_slots,
    open_next,
    physical_order,
    shift,
    with_slots,
)
from wedlm_jax.logit_options import adjusted_logits
from wedlm_jax.logprobs import Logprobs, token_logprobs
from wedlm_jax.masks import CachedMask, CausalMask
from wedlm_jax.model import KeyValues, Transformer
from wedlm_jax.penalties import TokenUse, token_use, with_committed
from wedlm_jax.sampling import RowParams, choose_tokens, entropy, fill_rule
from wedlm_jax.sharding import constrain
from wedlm_jax.verification import accepted, draft_rule, rejected

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


class Guesses(NamedTuple):
    """Tokens to fill, and their log-probabilities where some row asks for them."""

    tokens: Array
    logprobs: Logprobs | None


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

    def fill(new: Array, old: Array) -> Array:
        return jnp.where(
            predicted.fill.reshape(*predicted.fill.shape, *[1] * (old.ndim - 2)), new, old
        )

    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=fill(predicted.slots.tokens, state.tokens),
        logprobs=jax.tree.map(fill, predicted.slots.logprobs, state.logprobs),
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
    head = _head_rows(state, params, order, shape)
    hidden = jnp.take_along_axis(hidden, head.places[..., None], axis=1)
    guesses, entropies = _guess(model, state, params, use, hidden, head.slots)
    chosen = _fill(state, params, head, guesses.tokens, entropies)
    run, last = leading_run(state.filled, state.active), jnp.zeros_like(state.active)
    if params.verified is not None:
        chosen, run, last = _verify(state, params, head, guesses.tokens, entropies, chosen, run)
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


class _HeadRows(NamedTuple):
    """The rows of a window that pass the head, ``[B, N]`` each, and what they predict.

    Masks stand behind the filled slots, at most W of them, so the head runs on so many rows
    only. A row of a filled slot predicts the next one: that of an autoregressive row's last
    one is wanted too, and those of all of a verified row's, which stand in order.

    Attributes:
      places: int32, physical places.
      slots: int32, the slot whose token each of them predicts.
      is_mask: bool, it is a mask and predicts itself.
      is_draft: bool, a filled slot's row, and the slot behind holds a draft.
    """

    places: Array
    slots: Array
    is_mask: Array
    is_draft: Array


def _head_rows(state: DecodeState, params: RowParams, order: Array, shape: Shape) -> _HeadRows:
    exists = jnp.arange(order.shape[1]) < state.active[:, None]
    num_filled = (state.filled & exists).sum(axis=-1)[:, None]
    first = num_filled - (params.window == 0)[:, None]
    if params.verified is not None:
        first = jnp.where(params.verified[:, None], 0, first)
    place = first + jnp.arange(shape.masks)
    is_mask = (place >= num_filled) & (place < state.active[:, None])
    follows = params.anchored[:, None] & (place < num_filled)
    place = jnp.clip(place, 0, shape.slots - 1)
    slots = jnp.take_along_axis(order, place, axis=1) + follows
    return _HeadRows(place, slots, is_mask, follows & (slots < num_filled))


def _guess(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    use: TokenUse | None,
    hidden: Array,
    slots: Array,
) -> tuple[Guesses, Array]:
    """Tokens for ``slots [B, N]`` from the hidden states ``[B, N, D]`` that predict them, and
    how uncertain each is: entropies ``[B, N]``."""
    raw = token_logits(model, hidden)
    # Positions count from the committed length before this forward's commit.
    logits = adjusted_logits(raw, state, params, slots, use)
    tokens = choose_tokens(logits, *_streams(state, params, slots), params)
    logprobs = state.logprobs and token_logprobs(raw, tokens, state.logprobs.top.shape[-1])
    return Guesses(tokens, logprobs), entropy(logits)


def first_token(model: Transformer, state: DecodeState, params: RowParams) -> Guesses:
    """What the last token of the prompt predicts, ``[B]``: the first of an anchored row. Nothing
    of the rows has been decoded yet."""
    use = token_use(state, params, model.config.vocab_size)
    slots = jnp.zeros_like(state.lengths)[:, None]
    guesses, _ = _guess(model, state, params, use, state.prompt_end[:, None], slots)
    return jax.tree.map(lambda x: x[:, 0], guesses)


def _fill(
    state: DecodeState, params: RowParams, head: _HeadRows, tokens: Array, entropies: Array
) -> Array:
    """Which of the head's rows fill a mask with their ``tokens``, bool ``[B, N]``."""
    chosen = fill_rule(
        entropies, head.slots, head.is_mask, params.entropy_threshold, params.position_penalty
    )
    if params.bad_words is None:
        return chosen
    text = text_around(state, params.bad_words)
    return keep_apart(text, params.bad_words, head.slots, chosen, tokens)


def _verify(
    state: DecodeState,
    params: RowParams,
    head: _HeadRows,
    tokens: Array,
    entropies: Array,
    chosen: Array,
    run: Array,
) -> tuple[Array, Array, Array]:
    """``chosen [B, N]`` and ``run [B]`` with those of verified rows in their places, and the head's
    row ``[B]`` that predicts what stands behind the run of these."""
    assert params.verified is not None
    assert params.draft_budget is not None
    at = jnp.minimum(head.slots, state.tokens.shape[1] - 1)
    drafts = jnp.take_along_axis(state.tokens, at, axis=1)
    right = accepted(tokens, drafts, head.is_draft)
    last = jnp.where(params.verified, right.sum(axis=-1), 0)
    run = jnp.where(params.verified, last + 1, run)
    whole = last == head.is_draft.sum(axis=-1)
    new = draft_rule(entropies, head.is_mask & whole[:, None], params.draft_budget)
    return jnp.where(params.verified[:, None], right | new, chosen), run, last


def _streams(state: DecodeState, params: RowParams, slots: Array) -> tuple[Array, Array]:
    """What names the random stream of each of ``slots [B, N]``: any stable name serves.

    For an anchored row it is the place in the completion alone. A draft is then drawn with the
    numbers that choose between it and all other tokens when it is verified.
    """
    forwards = jnp.broadcast_to(state.num_forwards[:, None], slots.shape)
    anchored, index = params.anchored[:, None], first_index(state)[:, None] + slots
    return jnp.where(anchored, 0, slots), jnp.where(anchored, index + 1, forwards)


def token_logits(model: Transformer, hidden: Array) -> Array:
    """float32 logits ``[..., V]`` with the mask token's own at −inf: a mask is never emitted."""
    logits = constrain(model.logits(hidden), "batch", None, "vocab")
    if model.config.mask_token_id is not None:
        logits = logits.at[..., model.config.mask_token_id].set(-jnp.inf)
    return logits


def _pad(x: Array, size: int, *, axis: int) -> Array:
    missing = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, missing)
