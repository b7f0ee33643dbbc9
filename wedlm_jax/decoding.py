"""Streaming decode as one `lax.while_loop`: the window, and what a forward does to it.

Per row: n committed tokens stand in the cache; behind them an open window of slots, some
filled, the others masked. A forward runs the filled slots first and the masks after
them, so the leading filled run sees exactly the committed context and is committed by
writing the window's keys and values at n and moving n past the run. Then masks are
filled by the fill rule, and the window refills. Source: WeDLM section 5; DESIGN
"Streaming decode".

Two variants share the loop. Block-wise decoding, the paper's baseline, refills only when
the whole window is committed. With a window of 0 it is plain autoregressive decoding:
the single slot holds the last token, and its row predicts the next.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.cache import KVCache, write
from wedlm_jax.masks import CachedMask, CausalMask
from wedlm_jax.model import KeyValues, Transformer
from wedlm_jax.sampling import RowParams, choose_tokens, entropy, fill_rule
from wedlm_jax.sharding import constrain

REFILLS = ("streaming", "blockwise")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes while a batch is decoded.

    P is the number of physical slots (see `num_slots`); slots are in logical order, slot s
    being logical position ``lengths + s``.

    Attributes:
      cache: keys and values, the first ``lengths`` rows of each sequence live.
      lengths: int32 ``[B]``, n: rows committed to the cache.
      tokens: int32 ``[B, P]``, the token of each filled slot.
      filled: bool ``[B, P]``.
      active: int32 ``[B]``, slots the next forward runs; the rest do not exist yet.
      output: int32 ``[B, M]``, committed completion tokens.
      output_forwards, output_instances: int32 ``[B, M]``, the value of ``num_forwards`` and
        ``num_token_instances`` after the forward that committed each of them. With these a
        completion can be cut short afterwards and still be counted exactly.
      num_output: int32 ``[B]``, how many of them.
      done: bool ``[B]``.
      num_forwards, num_token_instances: int32 ``[B]``, decode forwards of this row and the
        active slots they ran.
    """

    cache: KVCache
    lengths: Array
    tokens: Array
    filled: Array
    active: Array
    output: Array
    output_forwards: Array
    output_instances: Array
    num_output: Array
    done: Array
    num_forwards: Array
    num_token_instances: Array


def num_slots(window: int) -> int:
    """P: a window of W masks behind at most W filled slots; one slot where W = 0."""
    return max(2 * window, 1)


def slot_widths(slots: int) -> tuple[int, ...]:
    """The widths at which a window of P slots is compiled: a quarter, half and all of the
    room that filled slots may take, beside the W masks."""
    window = slots // 2
    partial_room = {window + -(-window * part // 4) for part in (1, 2)} if window else set()
    return tuple(sorted({slots, *partial_room}))


def prefill(
    model: Transformer, cache: KVCache, prompts: Array, lengths: Array
) -> tuple[KVCache, Array]:
    """Fills the cache with the prompts; no logits are computed.

    Args:
      cache: empty, at least as long as the prompts.
      prompts: int32 ``[B, T]``, padded behind.
      lengths: int32 ``[B]``.

    Returns:
      The cache, and the last prompt token of each row ``[B]``.
    """
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    _, kv = model(prompts, positions, CausalMask(), return_kv=True)
    assert kv is not None
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    return write(cache, kv, jnp.zeros_like(lengths)), last


def initial_state(
    cache: KVCache, lengths: Array, last: Array, params: RowParams, *, window: int, max_output: int
) -> DecodeState:
    """The state behind a prefill: all masks, or with W = 0 the last prompt token, filled.

    That token's row is computed again by the first forward, for its logits.
    """
    batch, slots = lengths.shape[0], num_slots(window)
    zeros = jnp.zeros((batch,), jnp.int32)
    no_output = jnp.zeros((batch, max_output), jnp.int32)
    autoregressive = window == 0
    return DecodeState(
        cache=cache,
        lengths=lengths - autoregressive,
        tokens=jnp.broadcast_to(last[:, None] * autoregressive, (batch, slots)),
        filled=jnp.full((batch, slots), autoregressive),
        active=zeros + 1 if autoregressive else params.window,
        output=no_output,
        output_forwards=no_output,
        output_instances=no_output,
        num_output=zeros,
        done=params.max_tokens <= 0,
        num_forwards=zeros,
        num_token_instances=zeros,
    )


def decode(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    *,
    window: int,
    refill: str = "streaming",
    max_forwards: Array | int,
) -> DecodeState:
    """Runs forwards until every row is done, ``max_forwards`` at most.

    Args:
      window: W, the largest of ``params.window``; static.
      refill: "streaming" or "blockwise".
    """

    def unfinished(carry: tuple[DecodeState, Array]) -> Array:
        return ~carry[0].done.all() & (carry[1] < max_forwards)

    def body(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        after = forward_step(model, carry[0], params, window=window, refill=refill)
        return _keep_finished(carry[0], after), carry[1] + 1

    return jax.lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def physical_order(filled: Array, active: Array) -> Array:
    """Topological reordering of the window: int32 ``[B, P]``, the slot at each physical place.

    Filled slots first, then masks, each in logical order; inactive slots last, where the
    causal mask keeps them from everything active.
    """
    slot = jnp.arange(filled.shape[1])
    group = jnp.where(slot >= active[:, None], 2, jnp.where(filled, 0, 1))
    return jnp.argsort(group, axis=-1, stable=True)


def forward_step(
    model: Transformer, state: DecodeState, params: RowParams, *, window: int, refill: str
) -> DecodeState:
    """One forward: reorder, run, commit, fill, stop, shift and refill."""
    mask_token_id = model.config.mask_token_id
    order = physical_order(state.filled, state.active)
    # An AR window has no masks, so a model without a mask token can still use it.
    window_tokens = jnp.where(state.filled, state.tokens, mask_token_id or 0)
    hidden, kv = _run_slots(model, state, jnp.take_along_axis(window_tokens, order, axis=1), order)
    cache = write(state.cache, kv, state.lengths)

    slot = jnp.arange(order.shape[1])
    exists = slot < state.active[:, None]
    run = jnp.cumprod(state.filled & exists, axis=-1).sum(axis=-1)
    state = dataclasses.replace(
        state,
        cache=cache,
        num_forwards=state.num_forwards + 1,
        num_token_instances=state.num_token_instances + state.active,
    )
    if window == 0:
        return _advance_autoregressive(model, state, params, hidden)
    state = _commit(state, params, state.tokens, run)
    state = _fill(model, state, params, hidden, order, window)
    return _shift(state, run, params, refill)


def _run_slots(
    model: Transformer, state: DecodeState, tokens: Array, order: Array
) -> tuple[Array, KeyValues]:
    """The model on the window in physical order, at the smallest width that holds every
    row's active slots.

    A window has 2W slots only after all W masks were filled out of order; it mostly has
    few more than W. What is left out is inactive, and stands as zeros in what returns:
    hidden states ``[B, P, D]`` and keys and values ``[num_hidden_layers, B, K, P, head_dim]``.
    """
    slots = order.shape[1]
    widths = slot_widths(slots)

    def at(width: int) -> tuple[Array, KeyValues]:
        hidden, kv = model(
            tokens[:, :width],
            (state.lengths[:, None] + order)[:, :width],
            CachedMask(state.lengths),
            cache=state.cache.layers(),
            return_kv=True,
        )
        assert kv is not None
        return _pad(hidden, slots, axis=1), (_pad(kv[0], slots, axis=3), _pad(kv[1], slots, axis=3))

    needed = jnp.where(state.done, 0, state.active).max()
    smallest = (needed > jnp.array(widths[:-1], jnp.int32)).sum()
    return jax.lax.switch(smallest, [partial(at, width) for width in widths])


def _pad(x: Array, size: int, *, axis: int) -> Array:
    missing = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, missing)


def _commit(state: DecodeState, params: RowParams, tokens: Array, count: Array) -> DecodeState:
    """Appends the first ``count [B]`` of ``tokens [B, N]`` to the output, up to the first
    stop token or ``max_tokens``."""
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == params.stop_ids[:, None, :]).any(axis=-1)
    is_stop &= index < count[:, None]
    through_stop = jnp.where(is_stop.any(axis=-1), jnp.argmax(is_stop, axis=-1) + 1, count)
    take = jnp.minimum(through_stop, params.max_tokens - state.num_output)
    stopped = is_stop.any(axis=-1) & (through_stop <= take)

    end = state.output.shape[1]
    place = jnp.where(index < take[:, None], state.num_output[:, None] + index, end)
    rows = jnp.arange(tokens.shape[0])[:, None]

    def append(output: Array, values: Array) -> Array:
        return output.at[rows, place].set(values, mode="drop")

    num_output = state.num_output + take
    return dataclasses.replace(
        state,
        output=append(state.output, tokens),
        output_forwards=append(state.output_forwards, state.num_forwards[:, None]),
        output_instances=append(state.output_instances, state.num_token_instances[:, None]),
        num_output=num_output,
        lengths=state.lengths + take,
        done=state.done | stopped | (num_output >= params.max_tokens),
    )


def _masked_logits(model: Transformer, hidden: Array) -> Array:
    """float32 logits with the mask token's own at −inf: a mask is never emitted."""
    logits = constrain(model.logits(hidden), "batch", None, "vocab")
    if model.config.mask_token_id is not None:
        logits = logits.at[..., model.config.mask_token_id].set(-jnp.inf)
    return logits


def _fill(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    hidden: Array,
    order: Array,
    window: int,
) -> DecodeState:
    """Fills the masks that the fill rule selects. Masks stand behind the filled slots, at
    most W of them, so the head runs on W rows only."""
    exists = jnp.arange(order.shape[1]) < state.active[:, None]
    num_filled = (state.filled & exists).sum(axis=-1)
    place = num_filled[:, None] + jnp.arange(window)
    is_mask = place < state.active[:, None]
    place = jnp.minimum(place, order.shape[1] - 1)
    logits = _masked_logits(model, jnp.take_along_axis(hidden, place[..., None], axis=1))
    slots = jnp.take_along_axis(order, place, axis=1)

    chosen = fill_rule(
        entropy(logits), slots, is_mask, params.entropy_threshold, params.position_penalty
    )
    # The slots' positions count from the committed length before this forward's commit;
    # any stable name of the position serves the random stream.
    tokens = choose_tokens(logits, slots, state.num_forwards, params)
    target = jnp.where(chosen, slots, order.shape[1])
    rows = jnp.arange(order.shape[0])[:, None]
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, target].set(tokens, mode="drop"),
        filled=state.filled.at[rows, target].set(True, mode="drop"),
    )


def _shift(state: DecodeState, run: Array, params: RowParams, refill: str) -> DecodeState:
    """Drops the committed run from the window and opens the next slots."""
    slots = state.tokens.shape[1]
    source = jnp.arange(slots) + run[:, None]
    inside = (source < slots) & (source < state.active[:, None])
    source = jnp.minimum(source, slots - 1)
    filled = jnp.take_along_axis(state.filled, source, axis=1) & inside
    if refill == "streaming":
        active = params.window + jnp.cumprod(filled, axis=-1).sum(axis=-1)
    else:
        left = state.active - run
        active = jnp.where(left == 0, params.window, left)
    return dataclasses.replace(
        state,
        tokens=jnp.take_along_axis(state.tokens, source, axis=1),
        filled=filled,
        active=active.astype(jnp.int32),
    )


def _advance_autoregressive(
    model: Transformer, state: DecodeState, params: RowParams, hidden: Array
) -> DecodeState:
    """W = 0: the slot's row predicts the next token, which takes the slot."""
    logits = _masked_logits(model, hidden)
    slot = jnp.zeros_like(state.lengths)[:, None]
    token = choose_tokens(logits, slot, state.num_forwards, params)
    state = _commit(state, params, token, jnp.ones_like(state.lengths))
    return dataclasses.replace(state, tokens=token)


def _keep_finished(before: DecodeState, after: DecodeState) -> DecodeState:
    """A finished row changes nothing. (Its cache is written behind its last token, where
    nothing looks.)"""

    def pick(old: Array, new: Array) -> Array:
        return jnp.where(before.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    small = {
        field.name: pick(getattr(before, field.name), getattr(after, field.name))
        for field in dataclasses.fields(DecodeState)
        if field.name != "cache"
    }
    return DecodeState(cache=after.cache, **small)
