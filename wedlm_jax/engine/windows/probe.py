"""Times forwards of a wanted number of tokens, with the engine's own program.

Made-up sequences decode made-up texts: each has its last token and a window of masks, never drafts
(its draft budget is 0), and so runs the same number of tokens in every forward. They write into
arbitrary pages, so this is done before the first real sequence.

Tested by tests/wedlm_jax/engine/windows/test_windowless.py.
"""

from __future__ import annotations

import time

import numpy as np

from wedlm_jax.engine.burst import Admission, Burst, Request
from wedlm_jax.engine.device import Device
from wedlm_jax.params import SamplingParams

TEXT = 160
"""Tokens of the made-up texts, if the engine allows so many."""
FEW, MANY, SOME = 2, 34, 8
"""Forwards of the two bursts whose difference is timed: a burst itself often costs as much as
several small forwards. ``SOME`` instead of ``MANY`` if forwards are slow."""
SLOW = 0.03
"""Seconds of the first burst above which forwards count as slow."""


class ForwardProbe:
    """Times forwards on a device that is not in use yet.

    Args:
      device: prepared for all traits that its programs will have.
      params: of a sequence that drafts; its mode is "verified" or "paper".
    """

    def __init__(self, device: Device, params: SamplingParams):
        self._device, self._settings = device, device.settings
        # A program that copies drafts has room for as many masks instead, which run as they do.
        self._widest = max(device.traits.window, device.traits.lookup)
        length = min(TEXT, self._settings.max_text // 2)
        self._text = np.zeros(max(length, 1), np.int32)
        self._params = params
        self._overheads: list[float] = []

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest forward that can be timed."""
        return self._settings.sequences_each * (1 + self._widest)

    def time_forward(self, tokens: int, *, windowless: bool = False) -> float:
        """Returns the seconds of a forward of so many tokens of each replica, without what a burst
        costs beside its forwards.

        Args:
          windowless: whether no sequence has a window; ``tokens`` are then sequences. Else at least
            one of them has, where there are two tokens or more.
        """
        windows = self._windows(min(tokens, self.most_tokens), windowless)
        settings = self._settings
        running = np.flatnonzero(windows >= 0)
        admissions = [self._admission(int(index)) for index in running]
        prompt = -(-len(self._text) * len(running) // settings.chunk_tokens) + 2
        allowed = np.minimum(windows, self._device.traits.window)
        self._device.run(self._burst(allowed, admissions, prompt))
        short, few = self._time_burst(windows, FEW)
        long, many = self._time_burst(windows, MANY if short < SLOW else SOME)
        self._device.run(self._burst(windows, [], 0, released=running.tolist()))
        if many > few and long > short:
            seconds = (long - short) / (many - few)
            self._overheads.append(max(short - few * seconds, 0.0))
            return seconds
        return long / max(many, 1)  # other work of the machine disturbed the timing

    def overhead(self) -> float:
        """Returns the median seconds that bursts took beside their forwards."""
        return float(np.median(self._overheads)) if self._overheads else 0.0

    def _time_burst(self, windows: np.ndarray, forwards: int) -> tuple[float, int]:
        started = time.perf_counter()
        report = self._device.run(self._burst(windows, [], forwards))
        return time.perf_counter() - started, report.num_run

    def _windows(self, tokens: int, windowless: bool) -> np.ndarray:
        """Returns windows that together run so many tokens, spread over as many sequences as
        possible, because each sequence also costs the attention to its text; −1 for no sequence."""
        each = self._settings.sequences_each
        count = min(max(tokens - (not windowless), 1), each)
        own = np.full(each, -1, np.int32)
        base, more = divmod(tokens, count)
        own[:count] = base - 1
        own[:more] += 1
        return np.tile(own, self._settings.replicas)

    def _admission(self, index: int) -> Admission:
        request = Request(-1 - index, self._text.tolist(), self._params)
        return Admission(index, request, self._text, 0, None)

    def _burst(
        self,
        windows: np.ndarray,
        admissions: list[Admission],
        forwards: int,
        released: list[int] | None = None,
    ) -> Burst:
        settings = self._settings
        count, columns = settings.sequences, settings.max_pages
        numbers = 1 + np.arange(count * columns) % (settings.num_pages - 1)
        return Burst(
            released=released or [],
            admissions=admissions,
            page_table=numbers.reshape(count, columns).astype(np.int32),
            capacity=np.full(count, columns * settings.page_size, np.int32),
            arrival=np.tile(np.arange(settings.sequences_each, dtype=np.int32), settings.replicas),
            windows=np.maximum(windows, 0),
            chunk_tokens=settings.chunk_tokens,
            max_forwards=forwards,
            until_finished=np.full(settings.replicas, count + 1),
        )
