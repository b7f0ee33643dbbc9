"""Decoding without a model: texts easier or harder to draft, and a device of given costs."""

import dataclasses

import numpy as np

from wedlm_jax.completion import Drafts
from wedlm_jax.engine.interface import Admission, Burst, NewTokens, Report, Request
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.params import SamplingParams

PROMPT = 30
CHUNK = 256
OVERHEAD = 4e-4
RESIZING = 1.5 * OVERHEAD
"""Seconds that it takes to change between the programs with windows and without."""
CPU_COSTS = {
    1: 0.15,
    2: 0.17,
    4: 0.21,
    8: 0.30,
    12: 0.40,
    16: 0.50,
    20: 0.60,
    24: 0.70,
    32: 0.90,
    48: 1.2,
    64: 1.5,
    96: 2.1,
    128: 2.6,
    192: 3.3,
    256: 4.0,
    384: 5.7,
    512: 7.5,
    768: 11.2,
    1024: 15.0,
    2048: 29.0,
    4096: 58.0,
    8192: 116.0,
}
"""Milliseconds of a forward, on a CPU."""
TPU_COSTS = {size: 8.0 + 0.0004 * size for size in CPU_COSTS}


@dataclasses.dataclass(frozen=True)
class Text:
    """How well a text can be drafted.

    Attributes:
      right: how probable the draft next to known text is right.
      fading: what is left of that one place further.
      sure: how probable a place adds nothing to the entropies of a window's drafts; else it adds
        1 nat of 2.
      length: tokens of a completion on average.
      copied: how probable a token copied from the text is right, if those before it are; 0 if
        there is nothing to copy.
      copyable: how probable there is something to copy at a place.
    """

    right: float
    fading: float
    sure: float
    length: int
    copied: float = 0.0
    copyable: float = 1.0


LOW_ENTROPY = Text(0.997, 0.997, 0.95, 37)
REASONING = Text(0.999, 0.995, 0.97, 60)
PROSE = Text(0.88, 0.97, 0.55, 70)
HARD = Text(0.3, 0.9, 0.3, 80)
ESSAY = Text(0.96, 0.995, 0.85, 400)
"""Neither easy nor hard, and long."""
COPIED = Text(0.85, 0.9, 0.9, 80, copied=0.95)
"""A text whose tokens are easier to copy than to draft."""
COPIES = 15


class Script:
    """A completion that is to come: for each place what makes a draft of it right, and sure.

    The same script for every decoder, so that only the windows differ.
    """

    def __init__(self, text, rng):
        self.length = int(np.clip(text.length * rng.lognormal(0, 0.4), 4, 1000))
        self.text = text
        self._hard = rng.random(self.length + 200)
        self._nats = np.where(rng.random(self.length + 200) < text.sure, 0.01, 1.0)
        self._copyable = np.random.default_rng(self.length).random(self.length + 200)

    def drafts(self, place, window):
        """Drafts behind ``place``, whose token is known."""
        spent = np.cumsum(self._nats[place + 1 : place + window])
        return int(np.searchsorted(spent, 2.0))

    def accepted(self, place, drafts):
        here = self._hard[place + 1 : place + 1 + drafts]
        right = here < self.text.right * self.text.fading ** np.arange(drafts)
        return drafts if right.all() else int(right.argmin())

    def can_copy(self, place):
        return bool(self.text.copied and self._copyable[place] < self.text.copyable)

    def copied(self, place):
        """How many of the COPIES behind ``place`` are right."""
        right = self._hard[place + 1 : place + 1 + COPIES] < self.text.copied
        return COPIES if right.all() else int(right.argmin())


class Simulation:
    """Decodes scripts continuously, at most N at a time, as the scheduler and the device do."""

    def __init__(
        self,
        windows,
        costs,
        sequences,
        *,
        noise=lambda seconds: seconds,
        mode="verified",
        windowless=1.0,
        longest_burst=64,
    ):
        self._windows, self._noise, self._mode = windows, noise, mode
        self._windowless, self._program = windowless, None
        self._sizes = np.array(sorted(costs))
        self._costs = np.array([costs[size] for size in self._sizes]) / 1000
        self._n, self._longest = sequences, longest_burst
        self._numbers = 0
        self.seconds = 0.0
        self.tokens = 0
        self.chosen = []

    def decode(self, scripts):
        """Decodes all; returns tokens per second."""
        seconds, tokens = self.seconds, self.tokens
        waiting = list(scripts)[::-1]
        running = []
        while waiting or running:
            free = sorted(set(range(self._n)) - {one.state.index for one in running})
            fresh = [self._sequence(waiting.pop(), place) for place in free[: len(waiting)]]
            running += fresh
            self._burst(running, fresh, bool(waiting))
            running = [one for one in running if not one.finished]
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _sequence(self, script, index):
        self._numbers += 1
        params = SamplingParams(max_tokens=script.length, mode=self._mode)
        state = SequenceState(Request(self._numbers, [1] * PROMPT, params), self._numbers)
        state.index = index
        state.lookup = self._windows.lookup(state.request)
        return _Sequence(script, state)

    def _burst(self, running, fresh, waiting):
        chosen = self._windows.choose([one.state for one in running])
        self.chosen.append(list(chosen))
        for one, window in zip(running, chosen, strict=True):
            one.take(window)
        forwards, until = self._longest, len(running)
        if waiting:
            forwards, until = min(forwards, 32), max(len(running) // 8, 1)
        forwards = min(forwards, self._windows.most_forwards or forwards)
        windows, capacity = np.zeros((2, self._n), np.int32)
        for one in running:
            windows[one.state.index], capacity[one.state.index] = one.state.window, 10_000
        run, by_size = 0, np.zeros(len(self._sizes), np.int64)
        while run < forwards and sum(one.finished for one in running) < until:
            budget, tokens = CHUNK, 0
            for one in running:
                chunk = min(one.prompt, budget)
                budget, one.prompt = budget - chunk, one.prompt - chunk
                tokens += chunk
                if not one.prompt and not one.finished:
                    tokens += one.forward(self._mode)
            by_size[np.searchsorted(self._sizes, tokens)] += 1
            run += 1
        windowless = not windows.any()
        ratio = self._windowless if windowless else 1.0
        resized = self._program not in (None, windowless)
        seconds = OVERHEAD + ratio * float(by_size @ self._costs) + RESIZING * resized
        self._program = windowless
        self.seconds += seconds
        # Rows: what is computed, the length of the completion, forwards, slots.
        numbers, finished = np.zeros((4, self._n), np.int32), np.ones(self._n, bool)
        tokens = [None] * self._n
        for one in running:
            index = one.state.index
            tokens[index] = one.new_tokens()
            numbers[:, index] = one.computed, one.place, one.forwards, one.slots
            finished[index] = one.finished
        report = Report(
            *numbers[:2],
            finished,
            np.zeros(self._n, bool),
            *numbers[2:],
            tokens=tokens,
            num_run=run,
            sizes=tuple(self._sizes.tolist()),
            by_size=by_size,
            windowless=windowless,
        )
        burst = Burst(
            released=[],
            admissions=[
                Admission(one.state.index, one.state.request, np.zeros(PROMPT), 0, None)
                for one in fresh
            ],
            page_table=np.zeros((self._n, 1), np.int32),
            capacity=capacity,
            arrival=np.arange(self._n),
            windows=windows,
            chunk_tokens=CHUNK,
            max_forwards=forwards,
            until_finished=np.array([until]),
        )
        timed = None if resized else self._noise(seconds)
        self._windows.observe([one.state for one in running], burst, report, timed)
        for one in running:
            self.tokens += one.collect()


class _Sequence:
    """A script that is being decoded: the token before ``place`` is known, ``drafts`` stand
    behind it."""

    def __init__(self, script, state):
        self.script, self.state = script, state
        self.place = self.drafts = self.forwards = self.slots = 0
        self.codes = []
        self.prompt = PROMPT

    @property
    def finished(self):
        return self.place >= self.script.length

    @property
    def computed(self):
        return PROMPT - self.prompt + max(self.place - 1, 0)

    def take(self, window):
        self.state.window = window
        self.drafts = min(self.drafts, max(window - 1, 0))

    def forward(self, mode):
        """Runs a forward; returns its tokens."""
        window, script = self.state.window, self.script
        if mode == "paper" and window:
            # Commits what was filled before; fills every sure mask up to the first that is not,
            # or one.
            slots = window + self.drafts
            self.place += self.drafts
            self.drafts = max(1, min(script.accepted(self.place, window - 1) + 1, window))
        else:
            copies = self.state.lookup * (not self.drafts and script.can_copy(self.place))
            slots = window + 1 + self.drafts + copies
            if copies:
                accepted = script.copied(self.place)
                checked = Drafts(lookup=copies, lookup_accepted=accepted)
                self.codes.append(checked.accepting(copies))
            else:
                accepted = script.accepted(self.place, self.drafts)
            self.place += 1 + accepted
            whole = accepted == self.drafts
            self.drafts = script.drafts(self.place, window) if whole else 0
        self.forwards += 1
        self.slots += slots
        self.place = min(self.place, script.length)
        return slots

    def new_tokens(self):
        """What a report says of the drafts since the last one."""
        codes, self.codes = self.codes, []
        return NewTokens([], [], [], None, codes)

    def collect(self):
        """Brings the host's view up to date; returns the new tokens."""
        new = self.place - self.state.num_output
        self.state.text.extend([1] * new)
        self.state.num_forwards, self.state.num_token_instances = self.forwards, self.slots
        self.state.num_computed = self.computed
        return new
