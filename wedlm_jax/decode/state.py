"""The state of the sequences that decode together, between two forwards.

A sequence has a text (prompt and committed completion), a count of the tokens that are in the
cache, and a window. The window is counted in logical slots: slot s is logical position
``window_start + s``. The filled slots at its front, which the next forward commits, are the
*leading run*.

An *anchored* sequence chooses every token as autoregressive decoding would (modes "ar" and
"verified"). The last token of its text is known but not in the cache yet: it stands in slot 0,
and its row predicts the next token. So ``num_computed`` is the length of the text for a
sequence in mode "paper", and one less for an anchored one.

In numbers: a text of 10 tokens, W = 4, in mode "verified" with two drafts::

    position   9      10     11     12    13    14    15
    slot       0      1      2      3     4     5     6        window_start = num_computed = 9
    holds      text   draft  draft  mask  mask  mask  mask     active = 7 = W + the 3 filled
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.logprobs import Logprobs, empty_logprobs
from wedlm_jax.decode.lookup import Lookup, no_lookup
from wedlm_jax.params import MOST_LOGPROBS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """The tokens committed since the host last fetched them, at most E per sequence.

    Attributes:
      tokens: int32 ``[N, E]``.
      forwards, instances: int32 ``[N, E]``, the sequence's ``num_forwards`` and
        ``num_token_instances`` after the forward that committed each token. With these the counts
        stay exact when a completion is cut at a stop string afterwards.
      drafts: uint32 ``[N, E]``, the drafts that this forward checked, at the first token that it
        committed (see `wedlm_jax.decode.loop.draft_code`); 0 at other tokens.
      logprobs: ``[N, E]``; None where no sequence asks for them.
      count: int32 ``[N]``, the number of tokens.
    """

    tokens: Array
    forwards: Array
    instances: Array
    drafts: Array
    logprobs: Logprobs | None
    count: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backup:
    """A second group of masks of anchored sequences, int32 ``[N]`` each; see
    `wedlm_jax.decode.backup`.

    Attributes:
      start: the slot of the first of them, which is also the number of slots that they see: those
        before the draft that is likeliest to be wrong.
      count: how many there are; 0 for none.
    """

    start: Array
    count: Array


def no_backup(sequences: int) -> Backup:
    """Returns the value of N sequences without backup masks."""
    # Two arrays: a state's buffers are donated, each once.
    return Backup(jnp.zeros(sequences, jnp.int32), jnp.zeros(sequences, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes while sequences are decoded, except their pages.

    There are N sequences, P slots per window, and room for S tokens of text per sequence.

    Attributes:
      text: int32 ``[N, S]``, prompt and committed completion.
      text_length: int32 ``[N]``.
      prompt_length: int32 ``[N]``, where the completion begins.
      prefill_length: int32 ``[N]``, how much of the text is computed in chunks before the window
        opens: the prompt, or everything committed before the sequence was preempted.
      num_computed: int32 ``[N]``, n: tokens whose final keys and values are in the cache.
      tokens: int32 ``[N, P]``, the token of each filled slot.
      filled: bool ``[N, P]``, whether each slot holds a token.
      logprobs: ``[N, P]``, log-probabilities of filled slots; None where no sequence asks.
      active: int32 ``[N]``, how many slots the next forward runs; later ones are not open yet.
      backup: the masks that the next forward runs in addition to the window.
      running: bool ``[N]``, False where there is no sequence, or a finished one.
      stopped: bool ``[N]``, whether it was finished by a stop token.
      num_forwards, num_token_instances: int32 ``[N]``, decode forwards (those that ran the
        sequence's window), and the active slots and backup masks that they ran; prefill chunks are
        not counted.
      emitted: committed tokens that the host has not fetched yet.
      lookup: drafts from each sequence's own text; None if no drafts are copied from texts.
    """

    text: Array
    text_length: Array
    prompt_length: Array
    prefill_length: Array
    num_computed: Array
    tokens: Array
    filled: Array
    logprobs: Logprobs | None
    active: Array
    backup: Backup
    running: Array
    stopped: Array
    num_forwards: Array
    num_token_instances: Array
    emitted: Emitted
    lookup: Lookup | None = None

    @property
    def window_start(self) -> Array:
        """int32 ``[N]``: the logical position of slot 0, right after the prefill."""
        return jnp.maximum(self.num_computed, self.prefill_length)

    @property
    def known(self) -> Array:
        """int32 ``[N]``: leading slots whose token is in the text already: 1 for anchored
        sequences, 0 for others."""
        return self.text_length - self.window_start

    @property
    def num_output(self) -> Array:
        """int32 ``[N]``: tokens of the completion."""
        return self.text_length - self.prompt_length

    @property
    def first_index(self) -> Array:
        """int32 ``[N]``: the index in the completion, from 0, of the token in slot 0; −1 if that is
        the last token of the prompt."""
        return self.window_start - self.prompt_length


def num_slots(window: int, lookup: int = 0) -> int:
    """Returns P: room for W masks after at most W filled slots, or after the last token of the text
    and the copied drafts; one slot if there are neither masks nor drafts."""
    return max(2 * window, window + 1 + lookup if lookup else 1)


def idle_state(
    sequences: int, *, window: int, text: int, emitted: int, with_logprobs: bool, lookup: int = 0
) -> DecodeState:
    """Allocates the state of N sequences, none of which is running yet.

    Args:
      window: W, the widest window of a sequence.
      text: S, maximum tokens of a prompt and its completion together.
      emitted: E, maximum tokens that a sequence commits between two fetches by the host.
      with_logprobs: whether tokens have log-probabilities, with `MOST_LOGPROBS` alternatives.
      lookup: maximum drafts copied from a text.
    """

    def logprobs(width: int) -> Logprobs | None:
        return empty_logprobs((sequences, width), MOST_LOGPROBS) if with_logprobs else None

    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((sequences, *shape), dtype)

    slots = num_slots(window, lookup)
    return DecodeState(
        text=zeros(text),
        text_length=zeros(),
        prompt_length=zeros(),
        prefill_length=zeros(),
        num_computed=zeros(),
        tokens=zeros(slots),
        filled=zeros(slots, dtype=bool),
        logprobs=logprobs(slots),
        active=zeros(),
        backup=no_backup(sequences),
        running=zeros(dtype=bool),
        stopped=zeros(dtype=bool),
        num_forwards=zeros(),
        num_token_instances=zeros(),
        emitted=Emitted(
            tokens=zeros(emitted),
            forwards=zeros(emitted),
            instances=zeros(emitted),
            drafts=zeros(emitted, dtype=jnp.uint32),
            logprobs=logprobs(emitted),
            count=zeros(),
        ),
        lookup=no_lookup(sequences, lookup) if lookup else None,
    )


def exists(state: DecodeState) -> Array:
    """Returns which slots are active, bool ``[N, P]``."""
    return jnp.arange(state.filled.shape[1]) < state.active[:, None]


def is_filled(state: DecodeState) -> Array:
    """Returns which active slots hold a token, bool ``[N, P]``."""
    return state.filled & exists(state)


def is_mask(state: DecodeState) -> Array:
    """Returns which active slots are masks, bool ``[N, P]``."""
    return ~state.filled & exists(state)


def leading(filled: Array) -> Array:
    """Counts the filled slots at the front of each window, int32 ``[N]``."""
    # A running product of 1, 1, 1, 0, 1 is 1, 1, 1, 0, 0; its sum is the length of the run.
    return jnp.cumprod(filled, axis=1).sum(axis=1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadRows:
    """The rows of a forward that go through the head, of all sequences together, ``[R]`` each.

    Attributes:
      sequence: int32, the row's sequence, 0 .. N-1; 0 for padding.
      slot: int32, the window slot whose token the row predicts.
      is_mask: bool, whether the row is a mask, which predicts its own token; otherwise it is the
        row of the token before the slot, which predicts the next one.
      sees: int32, the row sees the filled slots of its window that are before this one: P for a
        mask of the window, ``slot`` for the row of a token.
    """

    sequence: Array
    slot: Array
    is_mask: Array
    sees: Array


# --- What host and device exchange -----------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entrants:
    """Sequences that start, or resume after preemption; A of them.

    Attributes:
      index: int32 ``[A]``, the index of each in the state; N for unused entries.
      text: int32 ``[A, S]``.
      numbers: int32 ``[A, 7]``: text_length, prompt_length, prefill_length, num_computed, active,
        num_forwards, num_token_instances.
      tokens: int32 ``[A, P]``, tokens of the window's slots.
      filled: bool ``[A, P]``.
      logprobs: log-probabilities of the filled slots; None where no sequence asks for them.
    """

    index: Array
    text: Array
    numbers: Array
    tokens: Array
    filled: Array
    logprobs: Logprobs | None


def admit(state: DecodeState, entrants: Entrants, released: Array) -> DecodeState:
    """Stops the ``released [N]`` sequences and puts the entrants into the state."""
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
        backup=jax.tree.map(lambda x: put(x, jnp.zeros_like(at)), state.backup),
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
        copied=lookup.copied.at[at].set(0, mode="drop"),
    )


def pack_for_host(state: DecodeState) -> Array:
    """Packs what the host fetches after a burst into one array, int32 ``[N, 7 + 4 E]``.

    The columns are num_computed, num_output, running, stopped, num_forwards, num_token_instances,
    the emitted count, then the four emitted arrays. One transfer takes a fraction of the time of
    ten.
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
    """Resizes the slot arrays to windows of W and ``lookup`` copied drafts, with log-probabilities
    or without; their contents are kept as far as they fit. The next forward has no backup masks."""
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
        backup=no_backup(sequences),
        emitted=dataclasses.replace(
            emitted, logprobs=logprobs(emitted.logprobs, emitted.tokens.shape[1])
        ),
        lookup=known,
    )


# --- The last forward, in programs with trait "traced" ---------------------------------------

NOTHING = -1
"""Stands for a token where a slot was a mask, or was not filled."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LastForward:
    """What the last forward of a burst saw and did, by sequence and slot of its window.

    Attributes:
      ran: bool ``[N]``, whether it ran the sequence's window; otherwise the rest is meaningless.
      start: int32 ``[N]``, the logical position of slot 0.
      active: int32 ``[N]``, how many slots it ran.
      held: int32 ``[N, P]``, the token of each slot, or `NOTHING` for a mask.
      entropies: float32 ``[N, P+1]``, entropy in nats of the prediction for each slot and the one
        after the last; NaN where nothing was predicted.
      drafted: int32 ``[N, P]``, the token that the forward filled a mask with, or `NOTHING`.
      rejected: bool ``[N, P]``, whether the slot's draft failed verification.
    """

    ran: Array
    start: Array
    active: Array
    held: Array
    entropies: Array
    drafted: Array
    rejected: Array
