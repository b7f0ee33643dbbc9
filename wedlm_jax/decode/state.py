"""What the device knows of the sequences that decode together, between two forwards.

A sequence is its text, how much of it stands in the cache, and its window. The window is
counted in logical slots: slot s is logical position ``window_start + s``. In front stand the
filled slots that the next forward commits, the leading run.

An *anchored* sequence chooses every token as autoregressive decoding would (modes "ar" and
"verified"). The last token of its text is known but not in the cache yet: it stands in slot 0,
and its row predicts the next token. So ``num_computed`` is the length of the text for a
sequence in mode "paper", and one less for an anchored one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.logprobs import Logprobs, empty_logprobs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """What was committed since the host last looked, at most E tokens a sequence.

    Attributes:
      tokens: int32 ``[N, E]``.
      forwards, instances: int32 ``[N, E]``, the sequence's ``num_forwards`` and
        ``num_token_instances`` after the forward that committed each token. With these a
        completion can be cut at a stop string afterwards and still be counted exactly.
      logprobs: ``[N, E]``; None where no sequence asks for them.
      count: int32 ``[N]``, how many.
    """

    tokens: Array
    forwards: Array
    instances: Array
    logprobs: Logprobs | None
    count: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes while sequences are decoded, but for their pages.

    N sequences, P slots of a window, S places for a text.

    Attributes:
      text: int32 ``[N, S]``, prompt and committed completion.
      text_length: int32 ``[N]``.
      prompt_length: int32 ``[N]``, where the completion begins.
      prefill_length: int32 ``[N]``, how much of the text is computed in chunks before the window
        opens: the prompt, or all that was committed before the sequence was put back.
      num_computed: int32 ``[N]``, n: tokens whose keys and values are in the cache, for good.
      tokens: int32 ``[N, P]``, the token of each filled slot.
      filled: bool ``[N, P]``.
      logprobs: ``[N, P]``, of each filled slot's token; None where no sequence asks for them.
      active: int32 ``[N]``, slots that the next forward runs; the rest do not exist yet.
      running: bool ``[N]``, False where there is no sequence, or one that is finished.
      stopped: bool ``[N]``, finished by a stop token.
      num_forwards, num_token_instances: int32 ``[N]``, decode forwards of the sequence and the
        active slots that they ran; chunks of prompts are not counted.
      emitted: what the host has not seen yet.
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
    running: Array
    stopped: Array
    num_forwards: Array
    num_token_instances: Array
    emitted: Emitted

    @property
    def window_start(self) -> Array:
        """int32 ``[N]``: the logical position of slot 0, behind what chunks compute before it."""
        return jnp.maximum(self.num_computed, self.prefill_length)

    @property
    def known(self) -> Array:
        """int32 ``[N]``: slots in front whose token stands in the text already: 1 of anchored
        sequences, 0 of others."""
        return self.text_length - self.window_start

    @property
    def num_output(self) -> Array:
        """int32 ``[N]``: tokens of the completion."""
        return self.text_length - self.prompt_length

    @property
    def first_index(self) -> Array:
        """int32 ``[N]``: which token of the completion, from 0, slot 0 holds or will hold; −1
        where it is the prompt's last."""
        return self.window_start - self.prompt_length


def num_slots(window: int) -> int:
    """P: a window of W masks behind at most W filled slots; one slot where W = 0."""
    return max(2 * window, 1)


def idle_state(
    sequences: int, *, window: int, text: int, emitted: int, num_logprobs: int | None
) -> DecodeState:
    """Room for sequences, none of which is there yet.

    Args:
      sequences: N.
      window: W, the widest that a sequence may get.
      text: S, prompt and completion together at most.
      emitted: E, tokens a sequence may commit between two looks of the host.
      num_logprobs: alternatives beside each token's log-probability; None for neither.
    """

    def logprobs(width: int) -> Logprobs | None:
        return None if num_logprobs is None else empty_logprobs((sequences, width), num_logprobs)

    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((sequences, *shape), dtype)

    slots = num_slots(window)
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
        running=zeros(dtype=bool),
        stopped=zeros(dtype=bool),
        num_forwards=zeros(),
        num_token_instances=zeros(),
        emitted=Emitted(zeros(emitted), zeros(emitted), zeros(emitted), logprobs(emitted), zeros()),
    )


def exists(state: DecodeState) -> Array:
    """bool ``[N, P]``: the active slots."""
    return jnp.arange(state.filled.shape[1]) < state.active[:, None]


def is_filled(state: DecodeState) -> Array:
    """bool ``[N, P]``: the active slots that hold a token."""
    return state.filled & exists(state)


def is_mask(state: DecodeState) -> Array:
    """bool ``[N, P]``: the active slots that hold none."""
    return ~state.filled & exists(state)
