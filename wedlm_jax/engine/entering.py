"""Sequences that enter the state of a device, as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from wedlm_jax.decode.logprobs import Logprobs, empty_logprobs
from wedlm_jax.decode.options import Traits
from wedlm_jax.decode.state import Entrants, num_slots
from wedlm_jax.engine.burst import Admission
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.params import MOST_LOGPROBS

ENTRANTS_AT_ONCE = 16
"""The most sequences that enter in one call, padded up to so that the call has one shape."""


@dataclasses.dataclass(frozen=True)
class SavedWindow:
    """The window of a preempted sequence.

    Attributes:
      tokens, filled: of its active slots, ``[active]``.
      logprobs: of the filled ones, ``[active]``, with as many alternatives as the request asks
        for; None where it asks for none.
      window: W.
    """

    tokens: np.ndarray
    filled: np.ndarray
    logprobs: Logprobs | None
    window: int


def make_entrants(
    settings: EngineSettings,
    traits: Traits,
    admissions: Sequence[Admission],
    windows: np.ndarray,
) -> Entrants:
    """Returns up to `ENTRANTS_AT_ONCE` admissions as a program with these traits takes them.

    Args:
      windows: int ``[N]``, W of every sequence.
    """
    slots = num_slots(traits.window, traits.lookup)
    count = min(ENTRANTS_AT_ONCE, settings.sequences)
    index = np.full(count, settings.sequences, np.int32)
    text = np.zeros((count, settings.max_text), np.int32)
    numbers = np.zeros((count, 7), np.int32)
    tokens, filled = np.zeros((count, slots), np.int32), np.zeros((count, slots), bool)
    logprobs = None
    if traits.logprobs:
        logprobs = jax.tree.map(np.array, empty_logprobs((count, slots), MOST_LOGPROBS))
    for i, admission in enumerate(admissions):
        index[i] = admission.index
        text[i, : len(admission.text)] = admission.text
        window = int(windows[admission.index])
        numbers[i], own_tokens, own_filled = _window_of(
            admission, window, anchored=_is_anchored(admission, window)
        )
        tokens[i, : len(own_tokens)], filled[i, : len(own_filled)] = own_tokens, own_filled
        if admission.resume is not None and logprobs is not None:
            _put(logprobs, i, admission.resume.logprobs)
    return Entrants(index, text, numbers, tokens, filled, logprobs)  # type: ignore[arg-type]


def _is_anchored(admission: Admission, window: int) -> bool:
    return window == 0 or admission.request.params.mode != "paper"


def _window_of(
    admission: Admission, window: int, *, anchored: bool
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns what `Entrants` needs of a sequence: its numbers, its window's tokens, and which of
    the slots are filled."""
    length, prompt = len(admission.text), len(admission.request.prompt)
    prefill = length - anchored
    computed = min(admission.num_cached, prefill)
    saved: SavedWindow | None = admission.resume
    if saved is not None:
        tokens, filled, active = saved.tokens, saved.filled, len(saved.tokens)
    elif anchored:
        tokens, filled, active = admission.text[-1:], np.ones(1, bool), 1 + window
    else:
        tokens, filled, active = np.zeros(0, np.int32), np.zeros(0, bool), window
    counts = admission.num_forwards, admission.num_token_instances
    return [length, prompt, prefill, computed, active, *counts], np.asarray(tokens), filled


def _put(logprobs: Logprobs, index: int, saved: Logprobs | None) -> None:
    if saved is None:
        return
    for new, old in zip(jax.tree.leaves(logprobs), jax.tree.leaves(saved), strict=True):
        new[index][tuple(map(slice, old.shape))] = old
