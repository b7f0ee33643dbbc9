"""What the last forward of traced sequences saw and did, from the device's arrays."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import numpy as np

from wedlm_jax.decode.state import NOTHING, LastForward
from wedlm_jax.engine.burst import WindowForward


def window_forwards(
    last: LastForward, indices: Iterable[int], started: float
) -> dict[int, WindowForward]:
    """Returns the last forward of each of the sequences at ``indices`` whose window it ran.

    Args:
      last: fetched from the device.
      started: when the burst began, as `time.perf_counter` says it.
    """
    ended = time.perf_counter()
    return {
        index: _window_forward(last, index, ended - started, ended)
        for index in indices
        if last.ran[index]
    }


def _window_forward(last: LastForward, index: int, seconds: float, ended: float) -> WindowForward:
    active = int(last.active[index])
    entropies = np.asarray(last.entropies[index])[: active + 1].tolist()
    return WindowForward(
        start=int(last.start[index]),
        held=_tokens(last.held[index], active),
        entropies=[None if math.isnan(one) else one for one in entropies],
        drafted=_tokens(last.drafted[index], active),
        rejected=np.flatnonzero(last.rejected[index]).tolist(),
        seconds=seconds,
        ended=ended,
    )


def _tokens(row: object, active: int) -> list[int | None]:
    return [None if one == NOTHING else one for one in np.asarray(row)[:active].tolist()]
