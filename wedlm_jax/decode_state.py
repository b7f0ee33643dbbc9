"""What a batch of rows knows between two forwards, and the moves of its windows.

A row's window is counted in logical slots: slot s is logical position ``lengths + s``. In
front stand the filled slots that the next forward commits, the leading run. The window of an
anchored row begins with the last token of its text, whose row predicts the next one: that is
all of it where the row is decoded autoregressively; where it is verified, drafts and masks
follow (see `wedlm_jax.verification`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.cache import KVCache, allocate, laid_out
from wedlm_jax.config import ModelConfig
from wedlm_jax.logprobs import Logprobs, empty_logprobs
from wedlm_jax.sampling import RowParams
from wedlm_jax.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes while a batch is decoded.

    P is the number of physical slots (see `num_slots`); slots are in logical order, slot s
    being logical position ``lengths + s``.

    Attributes:
      cache: keys and values, the first ``lengths`` rows of each sequence live.
      lengths: int32 ``[B]``, n: rows committed to the cache.
      last: int32 ``[B]``, the last token of the text.
      prompt_end: ``[B, D]``, the final hidden state of the prompt's last token: what prefill
        says of the first token behind it.
      tokens: int32 ``[B, P]``, the token of each filled slot.
      filled: bool ``[B, P]``.
      known: bool ``[B]``, the token of slot 0 stands in the text already, only its keys and
        values are missing.
      active: int32 ``[B]``, slots the next forward runs; the rest do not exist yet.
      output: int32 ``[B, M]``, committed completion tokens.
      output_forwards, output_instances: int32 ``[B, M]``, the value of ``num_forwards`` and
        ``num_token_instances`` after the forward that committed each of them. With these a
        completion can be cut short afterwards and still be counted exactly.
      num_output: int32 ``[B]``, how many of them.
      done: bool ``[B]``.
      num_forwards, num_token_instances: int32 ``[B]``, decode forwards of this row and the
        active slots they ran.
      logprobs: ``[B, P]``, of each filled slot's token; None where no row asks for them.
      output_logprobs: ``[B, M]``, of the committed ones; likewise.
    """

    cache: KVCache
    lengths: Array
    last: Array
    prompt_end: Array
    tokens: Array
    filled: Array
    known: Array
    active: Array
    output: Array
    output_forwards: Array
    output_instances: Array
    num_output: Array
    done: Array
    num_forwards: Array
    num_token_instances: Array
    logprobs: Logprobs | None = None
    output_logprobs: Logprobs | None = None

    def rows(self) -> dict[str, Any]:
        """All but the cache: arrays, or trees of them, whose first axis is the rows."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name != "cache"}


def num_slots(window: int) -> int:
    """P: a window of W masks behind at most W filled slots; one slot where W = 0."""
    return max(2 * window, 1)


def with_slots(state: DecodeState, slots: int) -> DecodeState:
    """The state with so many slots a row: of fewer, none that is active is left out."""

    def fit(x: Array) -> Array:
        kept = x[:, :slots]
        missing = [(0, slots - n if axis == 1 else 0) for axis, n in enumerate(kept.shape)]
        return jnp.pad(kept, missing)

    return dataclasses.replace(
        state,
        tokens=fit(state.tokens),
        filled=fit(state.filled),
        logprobs=jax.tree.map(fit, state.logprobs),
    )


def idle_state(
    config: ModelConfig,
    dtype: Any,
    *,
    rows: int,
    window: int,
    max_output: int,
    cache_size: int,
    num_logprobs: int | None = None,
    kv_cache_dtype: str | None = None,
) -> DecodeState:
    """Rows that hold nothing and are done.

    Args:
      rows: B.
      window: W, the largest that a row may get.
      max_output: M.
      cache_size: S.
      num_logprobs: alternatives beside each token's log-probability; None for neither.
      kv_cache_dtype: None for ``dtype``.
    """

    def logprobs(width: int) -> Logprobs | None:
        if num_logprobs is None:
            return None
        return empty_logprobs((rows, width), min(num_logprobs, config.vocab_size))

    zeros = jnp.zeros((rows,), jnp.int32)
    slots = jnp.zeros((rows, num_slots(window)), jnp.int32)
    output = jnp.zeros((rows, max_output), jnp.int32)
    return DecodeState(
        cache=allocate(config, rows, cache_size, kv_cache_dtype or dtype),
        lengths=zeros,
        last=zeros,
        prompt_end=jnp.zeros((rows, config.hidden_size), dtype),
        tokens=slots,
        filled=slots > 0,
        known=zeros > 0,
        active=zeros,
        output=output,
        output_forwards=output,
        output_instances=output,
        num_output=zeros,
        done=zeros == 0,
        num_forwards=zeros,
        num_token_instances=zeros,
        logprobs=logprobs(slots.shape[1]),
        output_logprobs=logprobs(max_output),
    )


def placed(state: DecodeState) -> DecodeState:
    """The state laid out on the mesh as every program takes and returns it: cache by rows and
    heads, the rest by rows. The state itself where no mesh is set."""
    rows = {
        name: jax.tree.map(lambda x: constrain(x, "batch"), value)
        for name, value in state.rows().items()
    }
    return DecodeState(cache=laid_out(state.cache), **rows)


def first_index(state: DecodeState) -> Array:
    """int32 ``[B]``: which token of the completion, from 0, slot 0 holds or will hold; −1 where
    it is the prompt's last."""
    return state.num_output - state.known.astype(jnp.int32)


def leading_run(filled: Array, active: Array) -> Array:
    """int32 ``[B]``: how many slots in front are filled."""
    exists = jnp.arange(filled.shape[1]) < active[:, None]
    return jnp.cumprod(filled & exists, axis=-1).sum(axis=-1).astype(jnp.int32)


def physical_order(filled: Array, active: Array) -> Array:
    """Topological reordering of the window: int32 ``[B, P]``, the slot at each physical place.

    Filled slots first, then masks, each in logical order; inactive slots last, where the
    causal mask keeps them from everything active.
    """
    slot = jnp.arange(filled.shape[1])
    group = jnp.where(slot >= active[:, None], 2, jnp.where(filled, 0, 1))
    return jnp.argsort(group, axis=-1, stable=True)


def set_window(state: DecodeState, params: RowParams) -> DecodeState:
    """The state as rows with the windows of ``params`` need it, whatever they had before.

    A narrower window forgets what was filled behind it, and of the leading run what would not
    fit beside its masks (see `num_slots`). An anchored row needs a filled slot to predict
    from: where there is none, the last token of the text is run again.
    """
    window = params.window
    run = jnp.minimum(leading_run(state.filled, state.active), jnp.maximum(window, 1))
    again = params.anchored & (run == 0)
    run = jnp.where(again, 1, run)
    active = window + run
    slot = jnp.arange(state.tokens.shape[1])
    first = (slot == 0) & again[:, None]
    filled = (state.filled & (slot < jnp.minimum(active, state.active)[:, None])) | first
    return dataclasses.replace(
        state,
        lengths=state.lengths - again,
        tokens=jnp.where(first, state.last[:, None], state.tokens),
        filled=filled,
        known=state.known | again,
        active=active.astype(jnp.int32),
    )


def commit_run(state: DecodeState, params: RowParams, run: Array) -> DecodeState:
    """Appends the leading run ``[B]`` to the output, and moves the committed length past what
    of it belongs to the text."""
    known = state.known.astype(jnp.int32)
    last = jnp.take_along_axis(state.tokens, jnp.maximum(run, 1)[:, None] - 1, axis=1)[:, 0]
    after = append_output(state, params, state.tokens, state.logprobs, known, run)
    return dataclasses.replace(
        after,
        lengths=state.lengths + known + after.num_output - state.num_output,
        last=jnp.where(run > 0, last, state.last),
    )


def append_output(
    state: DecodeState,
    params: RowParams,
    tokens: Array,
    logprobs: Logprobs | None,
    start: Array,
    end: Array,
) -> DecodeState:
    """Appends ``tokens [B, N]`` from ``start [B]`` to ``end [B]`` to the output, and
    ``logprobs [B, N]`` beside them, up to the first stop token or ``max_tokens``."""
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == params.stop_ids[:, None, :]).any(axis=-1)
    is_stop &= (index >= start[:, None]) & (index < end[:, None])
    through_stop = jnp.where(is_stop.any(axis=-1), jnp.argmax(is_stop, axis=-1) + 1, end)
    take = jnp.maximum(through_stop - start, 0)
    room = params.max_tokens - state.num_output
    stopped = is_stop.any(axis=-1) & (take <= room)
    take = jnp.minimum(take, room)

    nowhere = state.output.shape[1]
    here = (index >= start[:, None]) & (index < (start + take)[:, None])
    place = jnp.where(here, state.num_output[:, None] + index - start[:, None], nowhere)
    rows = jnp.arange(tokens.shape[0])[:, None]

    def append(output: Array, values: Array) -> Array:
        return output.at[rows, place].set(values, mode="drop")

    num_output = state.num_output + take
    return dataclasses.replace(
        state,
        output=append(state.output, tokens),
        output_forwards=append(state.output_forwards, state.num_forwards[:, None]),
        output_instances=append(state.output_instances, state.num_token_instances[:, None]),
        output_logprobs=jax.tree.map(append, state.output_logprobs, logprobs),
        num_output=num_output,
        done=state.done | stopped | (num_output >= params.max_tokens),
    )


def shift(state: DecodeState, run: Array, params: RowParams, refill: str) -> DecodeState:
    """Drops the committed run ``[B]`` from the window and opens the next slots."""
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
    rows = jnp.arange(source.shape[0])[:, None]
    return dataclasses.replace(
        state,
        tokens=jnp.take_along_axis(state.tokens, source, axis=1),
        logprobs=jax.tree.map(lambda x: x[rows, source], state.logprobs),
        filled=filled,
        known=jnp.zeros_like(state.known),
        active=active.astype(jnp.int32),
    )


def open_next(
    state: DecodeState, params: RowParams, token: Array, logprobs: Logprobs | None
) -> DecodeState:
    """Anchored rows that are not done: appends the token ``[B]`` that the last one predicted,
    with ``logprobs [B]``, and puts it in front of the window."""
    rows = params.anchored & ~state.done
    here = rows[:, None] & (jnp.arange(state.tokens.shape[1]) == 0)
    filled = state.filled | here
    behind = jnp.cumprod(filled, axis=-1).sum(axis=-1)
    state = dataclasses.replace(
        state,
        last=jnp.where(rows, token, state.last),
        tokens=jnp.where(here, token[:, None], state.tokens),
        filled=filled,
        known=state.known | rows,
        active=jnp.where(rows, params.window + behind, state.active).astype(jnp.int32),
    )
    beside = jax.tree.map(lambda x: x[:, None], logprobs)
    return append_output(
        state, params, token[:, None], beside, jnp.zeros_like(state.active),
        rows.astype(jnp.int32),
    )  # fmt: skip


def keep_finished(before: DecodeState, after: DecodeState) -> DecodeState:
    """A finished row changes nothing. (Its cache is written behind its last token, where
    nothing looks.)"""

    def pick(old: Array, new: Array) -> Array:
        return jnp.where(before.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    new = after.rows()
    kept = {name: jax.tree.map(pick, old, new[name]) for name, old in before.rows().items()}
    return DecodeState(cache=after.cache, **kept)
