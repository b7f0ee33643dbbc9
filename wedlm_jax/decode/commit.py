"""Commits what a forward decided: tokens are appended to the texts, and windows move on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.logprobs import Logprobs
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState, Emitted, is_filled


def append(
    state: DecodeState,
    options: Options,
    tokens: Array,
    logprobs: Logprobs | None,
    count: Array,
    drafts: Array,
) -> DecodeState:
    """Appends the first ``count [N]`` of ``tokens [N, C]`` to the texts, up to the first stop
    token or ``max_tokens``; a sequence that reaches either stops running.

    Args:
      drafts: int32 ``[N]``, how many the forward checked. One of the committed tokens counts as a
        row's own choice, the others as accepted drafts.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == options.stop_ids[:, None, :]).any(axis=-1)
    is_stop &= index < count[:, None]
    stops = is_stop.any(axis=1)
    # The stop token itself is taken; what follows it is not.
    through = jnp.where(stops, jnp.argmax(is_stop, axis=1) + 1, count)
    taken = jnp.clip(options.max_tokens - state.num_output, 0, through)
    # max_tokens may cut before the stop token: then the sequence ends by length.
    stopped = stops & (taken == through)
    here = index < taken[:, None]

    def put(old: Array, start: Array, values: Array) -> Array:
        return _put(old, start, values, here)

    was = state.emitted
    copied = jnp.zeros_like(stops) if state.lookup is None else state.lookup.copied > 0
    code = jnp.where(index == 0, draft_code(drafts, taken - 1, copied)[:, None], jnp.uint32(0))
    emitted = Emitted(
        tokens=put(was.tokens, was.count, tokens),
        forwards=put(was.forwards, was.count, _as_wide(state.num_forwards, tokens)),
        instances=put(was.instances, was.count, _as_wide(state.num_token_instances, tokens)),
        drafts=put(was.drafts, was.count, code),
        logprobs=jax.tree.map(lambda old, new: put(old, was.count, new), was.logprobs, logprobs),
        count=was.count + taken,
    )
    num_output = state.num_output + taken
    finished = state.running & (stopped | (num_output >= options.max_tokens))
    return dataclasses.replace(
        state,
        text=put(state.text, state.text_length, tokens),
        text_length=state.text_length + taken,
        running=state.running & ~finished,
        stopped=state.stopped | (state.running & stopped),
        emitted=emitted,
    )


def draft_code(drafts: Array, accepted: Array, copied: Array) -> Array:
    """Packs the drafts of a forward into one number, uint32 ``[N]``, to be read by
    `wedlm_jax.completion.Drafts`: from the lowest bits on, 12 each for those of masks, checked and
    accepted, then 4 each for copied ones.

    Args:
      drafts, accepted: int32 ``[N]``.
      copied: bool ``[N]``, whether they were copied from the text.
    """
    accepted = jnp.clip(accepted, 0, drafts).astype(jnp.uint32)
    drafts = drafts.astype(jnp.uint32)
    return jnp.where(copied, drafts << 24 | accepted << 28, drafts | accepted << 12)


def _as_wide(values: Array, like: Array) -> Array:
    return jnp.broadcast_to(values[:, None], like.shape)


def _put(old: Array, start: Array, values: Array, here: Array) -> Array:
    """Writes those of ``values [N, C, ..]`` that are ``here [N, C]`` into ``old [N, E, ..]``, from
    column ``start [N]`` on."""
    # The others go to a column that does not exist, and are dropped: shapes stay static.
    place = jnp.where(here, start[:, None] + jnp.arange(here.shape[1]), old.shape[1])
    rows = jnp.arange(old.shape[0])[:, None]
    return old.at[rows, place].set(values, mode="drop")


def move_windows(state: DecodeState, options: Options, run: Array, refill: str) -> DecodeState:
    """Drops the run ``[N]`` from the front of each window and opens new masks after it."""
    slots = state.tokens.shape[1]
    if slots == 1:
        return dataclasses.replace(state, filled=state.filled & (run == 0)[:, None])
    # Slot s takes what slot s + run held: the window slides, nothing else changes place.
    source = jnp.arange(slots) + run[:, None]
    inside = source < state.active[:, None]
    source = jnp.minimum(source, slots - 1)
    rows = jnp.arange(source.shape[0])[:, None]
    filled = state.filled[rows, source] & inside
    if refill == "streaming":
        # Always W uncommitted slots after what the next forward commits (WeDLM section 5).
        active = options.window + leading(filled)
    else:
        # The paper's baseline: a block is finished before the next one opens.
        left = state.active - run
        active = jnp.where(left == 0, options.window, left)
    return dataclasses.replace(
        state,
        tokens=state.tokens[rows, source],
        logprobs=jax.tree.map(lambda x: x[rows, source], state.logprobs),
        filled=filled,
        active=active.astype(jnp.int32),
    )


def put_in_front(state: DecodeState, sequences: Array, options: Options) -> DecodeState:
    """Puts the last token of the text into slot 0 of ``sequences [N]``. The token is known; the
    next forward computes its keys and values."""
    token = jnp.take_along_axis(state.text, jnp.maximum(state.text_length - 1, 0)[:, None], axis=1)
    here = sequences[:, None] & (jnp.arange(state.tokens.shape[1]) == 0)
    filled = state.filled | here
    active = options.window + leading(filled)
    return dataclasses.replace(
        state,
        tokens=jnp.where(here, token, state.tokens),
        filled=filled,
        active=jnp.where(sequences, active, state.active).astype(jnp.int32),
    )


def leading(filled: Array) -> Array:
    """Counts the filled slots at the front of each window, int32 ``[N]``."""
    return jnp.cumprod(filled, axis=1).sum(axis=1, dtype=jnp.int32)


def with_windows(state: DecodeState, options: Options, changed: Array) -> DecodeState:
    """Gives the sequences that are ``changed [N]`` the windows of ``options``, whatever they had.

    A narrower window drops what was filled beyond its end, and the part of the leading run that
    does not fit beside its masks (see `wedlm_jax.decode.state.num_slots`). The window of an
    anchored sequence starts with the last token of its text; a sequence that was not anchored
    before computes that token again.
    """
    changed &= state.running
    again = changed & options.anchored & (state.known == 0)
    most = state.text_length - again
    filled = is_filled(state) & ~again[:, None]
    whole = leading(filled)
    run = jnp.minimum(whole, jnp.maximum(options.window, 1))
    active = (options.window + run).astype(jnp.int32)
    # A run that is cut keeps no drafts after it: the last draft would have no mask after it, and
    # the forward that accepts a draft fills the slot after it.
    end = jnp.where(options.anchored & (run < whole), run, active)
    filled &= jnp.arange(filled.shape[1]) < end[:, None]
    narrowed = dataclasses.replace(
        state,
        filled=jnp.where(changed[:, None], filled, state.filled),
        active=jnp.where(changed, active, state.active),
        num_computed=jnp.minimum(state.num_computed, most),
        prefill_length=jnp.minimum(state.prefill_length, most),
    )
    return put_in_front(narrowed, again, options)
