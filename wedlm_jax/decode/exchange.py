"""What host and device exchange: sequences that enter the state, results that the host fetches,
and the room that the state has for windows.

Tested by tests/wedlm_jax/engine/test_engine.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.logprobs import Logprobs, empty_logprobs
from wedlm_jax.decode.lookup import Lookup, no_lookup
from wedlm_jax.decode.state import DecodeState, num_slots
from wedlm_jax.params import MOST_LOGPROBS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entrants:
    """Sequences that start, or resume after preemption; A of them.

    Attributes:
      index: int32 ``[A]``, the index of each in the state; N for unused entries.
      text: int32 ``[A, S]``.
      numbers: int32 ``[A, 8]``: text_length, prompt_length, prefill_length, num_computed, active,
        num_forwards, num_token_instances, and how many drafts of the window were copied.
      tokens: int32 ``[A, P]``, of the window's slots.
      filled: bool ``[A, P]``.
      logprobs: of the filled slots; None where no sequence asks for them.
    """

    index: Array
    text: Array
    numbers: Array
    tokens: Array
    filled: Array
    logprobs: Logprobs | None


def admit(state: DecodeState, entrants: Entrants, released: Array) -> DecodeState:
    """Stops the sequences that are ``released [N]`` and puts the entrants into the state."""
    at = entrants.index

    def put(old: Array, new: Array) -> Array:
        return old.at[at].set(new, mode="drop")

    names = (
        "text_length",
        "prompt_length",
        "prefill_length",
        "num_computed",
        "active",
        "num_forwards",
        "num_token_instances",
    )
    numbers: dict[str, Any] = {
        name: put(getattr(state, name), entrants.numbers[:, i]) for i, name in enumerate(names)
    }
    return dataclasses.replace(
        state,
        **numbers,
        text=put(state.text, entrants.text),
        tokens=put(state.tokens, entrants.tokens),
        filled=put(state.filled, entrants.filled),
        logprobs=jax.tree.map(put, state.logprobs, entrants.logprobs),
        running=put(state.running & ~released, jnp.ones_like(at, bool)),
        stopped=put(state.stopped, jnp.zeros_like(at, bool)),
        lookup=_entered(state.lookup, entrants),
    )


def _entered(lookup: Lookup | None, entrants: Entrants) -> Lookup | None:
    if lookup is None:
        return None
    at = entrants.index
    return dataclasses.replace(
        lookup,
        match=lookup.match.at[at].set(0, mode="drop"),
        copied=lookup.copied.at[at].set(entrants.numbers[:, 7], mode="drop"),
    )


def pack_for_host(state: DecodeState) -> Array:
    """Packs what the host fetches after a burst into one array, int32 ``[N, 7 + 4 E]``.

    In order: num_computed, num_output, running, stopped, num_forwards, num_token_instances, the
    emitted count, then the four emitted arrays. One transfer takes a fraction of the time of ten.
    """
    emitted = state.emitted
    columns = [
        state.num_computed,
        state.num_output,
        state.running,
        state.stopped,
        state.num_forwards,
        state.num_token_instances,
        emitted.count,
    ]
    numbers = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)
    drafts = jax.lax.bitcast_convert_type(emitted.drafts, jnp.int32)
    arrays = [numbers, emitted.tokens, emitted.forwards, emitted.instances, drafts]
    return jnp.concatenate(arrays, axis=1)


def resize_slots(
    state: DecodeState, window: int, with_logprobs: bool, lookup: int = 0
) -> DecodeState:
    """Grows or shrinks the slot arrays to windows of W and ``lookup`` copied drafts, with
    log-probabilities or without; what fits of their contents is kept."""
    slots, sequences = num_slots(window, lookup), state.running.shape[0]
    known = state.lookup
    if not lookup:
        known = None
    elif known is None or known.tokens.shape[1] != lookup:
        known = no_lookup(sequences, lookup)

    def fit(x: Array) -> Array:
        kept = x[:, :slots]
        return jnp.pad(kept, [(0, slots - n if i == 1 else 0) for i, n in enumerate(kept.shape)])

    def logprobs(old: Logprobs | None, width: int) -> Logprobs | None:
        if not with_logprobs:
            return None
        if old is None:
            return empty_logprobs((sequences, width), MOST_LOGPROBS)
        return jax.tree.map(fit, old) if old is state.logprobs else old

    emitted = state.emitted
    return dataclasses.replace(
        state,
        tokens=fit(state.tokens),
        filled=fit(state.filled),
        logprobs=logprobs(state.logprobs, slots),
        emitted=dataclasses.replace(
            emitted, logprobs=logprobs(emitted.logprobs, emitted.tokens.shape[1])
        ),
        lookup=known,
    )
