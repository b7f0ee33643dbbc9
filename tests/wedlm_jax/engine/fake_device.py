"""A device in plain Python that knows what every place of its pages ought to hold, and a scheduler
over it.

A token is a function of all the text before it (and, in mode "paper", of the window it was filled
in), so a wrong prefix or a lost window gives other tokens. Each place remembers the text that its
keys and values were computed on; every forward reads all places of a sequence and refuses what
was computed on another text, or not for good.
"""

import dataclasses
import random
from collections import Counter

import numpy as np

from tests.wedlm_jax.engine.accounts import check_accounts
from wedlm_jax.engine.interface import Finished, NewTokens, Report, Request
from wedlm_jax.engine.scheduler import Scheduler
from wedlm_jax.engine.settings import SchedulerSizes
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.params import SamplingParams

VOCAB = 50
WINDOW = 3
STOP = 0
NOT_FINAL = -1


def mixed(*numbers):
    """A number of 0 or more that depends on all of these."""
    return hash(numbers) & 0x7FFFFFFF


@dataclasses.dataclass
class FakeSequence:
    """One sequence; `forward` is all that decoding is here.

    ``contexts[i]`` names the text up to and with token i. ``n`` tokens are computed. ``filled`` is
    the leading run of the window in mode "paper".
    """

    request: Request
    window: int
    text: list[int]
    n: int = 0
    filled: list[int] = dataclasses.field(default_factory=list)
    num_forwards: int = 0
    num_instances: int = 0
    finished: bool = False
    stopped: bool = False
    new: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    contexts: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        # The last token of an anchored sequence's text is computed in its window.
        self.prefill = len(self.text) - self.is_anchored
        self.seed = self.request.params.seed
        text, self.text = self.text, []
        for token in text:
            self.extend(token)

    @property
    def is_anchored(self):
        return self.window == 0 or self.request.params.mode != "paper"

    @property
    def num_output(self):
        return len(self.text) - len(self.request.prompt)

    @property
    def active(self):
        """Slots of the next forward."""
        if self.is_anchored:
            return 1 + mixed(self.seed, self.num_forwards) % max(2 * self.window, 1)
        return self.window + len(self.filled)

    def extend(self, token):
        self.text.append(token)
        self.contexts.append(mixed(self.contexts[-1] if self.contexts else 0, token))

    def forward(self):
        """Runs the window once: computes the text in it, commits, fills."""
        self.num_instances += self.active
        self.num_forwards += 1
        if self.is_anchored:
            self.n = len(self.text)
            for _ in range(1 + mixed(self.num_forwards) % max(self.window, 1)):
                self.commit(mixed(self.contexts[-1], self.seed) % VOCAB)
            self.n = len(self.text) - 1
            return
        for token in self.filled:
            self.commit(token)
        self.n = len(self.text)
        fills = 1 + mixed(self.contexts[-1], self.num_forwards) % self.window
        self.filled = [
            mixed(self.contexts[-1], slot, self.num_forwards, self.seed) % VOCAB
            for slot in range(fills)
        ]

    def commit(self, token):
        if self.finished:
            return
        self.extend(token)
        self.new.append((token, self.num_forwards, self.num_instances))
        params = self.request.params
        ends = token == STOP and not params.ignore_eos and self.num_output >= params.min_tokens
        self.stopped |= ends
        self.finished = self.stopped or self.num_output >= params.max_tokens


def decode_alone(request, window):
    """Tokens, finish reason, forwards and instances of a request by itself, without any pages."""
    sequence = FakeSequence(request, window, list(request.prompt))
    while not sequence.finished:
        sequence.forward()
    reason = "stop" if sequence.stopped else "length"
    tokens = sequence.text[len(request.prompt) :]
    return tokens, reason, sequence.num_forwards, sequence.num_instances


class FakeDevice:
    """Runs bursts, and asserts whatever a burst must fulfil.

    Args:
      sizes: of the device.
      seed: ends bursts early by chance; None never does.
    """

    def __init__(self, sizes, seed=None):
        self.sizes = sizes
        self.sequences = {}
        self.bursts = []
        self.admitted = []
        shape = sizes.replicas, sizes.num_pages, sizes.page_size
        self._places = np.full(shape, NOT_FINAL, np.int64)
        self._random = None if seed is None else random.Random(seed)
        self._left = {}
        """How each released sequence stood, should it come back."""
        self._tickets = []

    def submit(self, burst):
        """Runs the burst at once; nobody knows before its report is collected."""
        assert len(self._tickets) < 2, "more than one burst ahead"
        self.bursts.append(burst)
        for index in burst.released:
            gone = self.sequences.pop(index, None)
            if gone is not None:
                stood = (list(gone.filled), list(gone.text), gone.num_forwards, gone.num_instances)
                self._left[gone.request.number] = stood
        for admission in burst.admissions:
            self._admit(admission, int(burst.windows[admission.index]))
        for index, sequence in self.sequences.items():
            # A window of 0 in mode "paper" would be another mode.
            if sequence.request.params.mode == "verified":
                sequence.window = int(burst.windows[index])
            assert sequence.window == burst.windows[index]
        self._check(burst)
        self._forwards(burst)
        self._tickets.append(self._report())
        return self._tickets[-1]

    def collect(self, ticket):
        assert self._tickets.pop(0) is ticket, "collected out of order"
        return ticket

    def save(self, index, request):
        assert not self._tickets, "saved while a burst runs"
        sequence = self.sequences[index]
        assert request is sequence.request
        assert request.params.mode == "paper"
        return list(sequence.filled)

    def _admit(self, admission, window):
        request, text = admission.request, admission.text.tolist()
        assert admission.index not in self.sequences
        assert 0 <= admission.num_cached < len(text)
        sequence = FakeSequence(request, window, text, n=admission.num_cached)
        counts = (admission.num_forwards, admission.num_token_instances)
        filled, *before = self._left.pop(request.number, ([], []))
        if [text, *counts] == before:
            assert admission.resume == (filled if request.params.mode == "paper" else None)
            sequence.filled = admission.resume or []
            sequence.num_forwards, sequence.num_instances = counts
        else:
            assert admission.resume is None
            assert (text, counts) == (list(request.prompt), (0, 0))
            self.admitted.append(request.number)
        self.sequences[admission.index] = sequence

    def _check(self, burst):
        """Asserts that pages are there, and that nobody writes into another's."""
        size, count = self.sizes.page_size, self.sizes.sequences_each
        assert burst.max_forwards >= 0
        assert burst.until_finished.shape == (self.sizes.replicas,)
        readers = Counter()
        for index in range(count * self.sizes.replicas):
            row, capacity = burst.page_table[index], int(burst.capacity[index])
            assert (row[: capacity // size] > 0).all()
            assert not row[capacity // size :].any()
            assert capacity % size == 0
            # What has finished in a burst that is not collected yet is still planned for.
            assert capacity > 0 or index not in self.sequences
            assert capacity == 0 or index in self.sequences or self._tickets
            readers.update((index // count, page) for page in row[: capacity // size].tolist())
        for index, sequence in self.sequences.items():
            needed = max(sequence.n, sequence.prefill) + sequence.active
            assert needed <= burst.capacity[index], "no room for the next forward"
            for page in burst.page_table[index, sequence.n // size :].tolist():
                assert not page or readers[index // count, page] == 1, "would write into another's"
        for replica in range(self.sizes.replicas):
            numbers = {i: self.sequences[i].request.number for i in self._of(replica)}
            ranks = [burst.arrival[i] for i in sorted(numbers, key=lambda i: numbers[i])]
            assert ranks == sorted(set(ranks))
            own = burst.arrival[replica * count : (replica + 1) * count]
            assert all(rank < sum(own < count) for rank in ranks)
            assert self._tickets or ranks == [*range(len(ranks))]

    def _of(self, replica):
        """Where its sequences are."""
        return [i for i in self.sequences if i // self.sizes.sequences_each == replica]

    def _forwards(self, burst):
        self.num_run = 0
        going = set(range(self.sizes.replicas))
        for _ in range(burst.max_forwards):
            ran = {replica for replica in going if self._forward(burst, replica)}
            self.num_run += bool(ran)
            going = {r for r in ran if self._finished_in(r) < burst.until_finished[r]}
            if not going:
                break
            if self._random is not None and self._random.random() < 0.1:
                break

    def _finished_in(self, replica):
        return sum(self.sequences[i].finished for i in self._of(replica))

    def _forward(self, burst, replica):
        """One forward of one replica; whether it had anything to do."""
        left, ran = burst.chunk_tokens, False
        for index in sorted(self._of(replica), key=lambda i: int(burst.arrival[i])):
            sequence = self.sequences[index]
            if sequence.finished:
                continue
            span = max(sequence.n, sequence.prefill) + sequence.active
            if span > burst.capacity[index]:
                continue
            row = burst.page_table[index]
            self._read(replica, row, sequence)
            chunk = min(max(sequence.prefill - sequence.n, 0), left)
            left, start = left - chunk, sequence.n
            sequence.n += chunk
            ran |= chunk > 0
            if sequence.n >= sequence.prefill:
                ran, end = True, sequence.n + sequence.active
                sequence.forward()
                self._write(replica, row, range(sequence.n, end), None)
            self._write(replica, row, range(start, sequence.n), sequence)
        return ran

    def _read(self, replica, row, sequence):
        size = self.sizes.page_size
        place = np.arange(sequence.n)
        there = self._places[replica, row[place // size], place % size]
        assert there.tolist() == sequence.contexts[: sequence.n], "read what is not its own text"

    def _write(self, replica, row, places, sequence):
        """Writes keys and values, for good those of a sequence's text."""
        size = self.sizes.page_size
        for place in places:
            page = row[place // size]
            assert page > 0
            final = NOT_FINAL if sequence is None else sequence.contexts[place]
            self._places[replica, page, place % size] = final

    def _report(self):
        count = self.sizes.sequences_each * self.sizes.replicas
        # Rows: what is computed, the length of the completion, forwards, slots.
        numbers, flags = np.zeros((4, count), np.int32), np.zeros((2, count), bool)
        tokens = [None] * count
        for index, one in list(self.sequences.items()):
            numbers[:, index] = one.n, one.num_output, one.num_forwards, one.num_instances
            flags[:, index] = one.finished, one.stopped
            if one.new:
                tokens[index] = NewTokens(*zip(*one.new, strict=True))
                one.new = []
            if one.finished:
                del self.sequences[index]
        seconds = 1e-3 * max(self.num_run, 1)
        return Report(
            *numbers[:2], *flags, *numbers[2:], tokens, num_run=self.num_run, seconds=seconds
        )


def small_sizes(**changes):
    """Sizes for tests; by default ``max_pages`` holds the longest text."""
    sizes = SchedulerSizes(
        replicas=1,
        sequences_each=4,
        num_pages=40,
        page_size=4,
        max_pages=0,
        chunk_tokens=16,
        max_text=100,
        longest_burst=8,
    )
    sizes = dataclasses.replace(sizes, **changes)
    pages = sizes.max_pages or sizes.max_text // sizes.page_size + 8
    return dataclasses.replace(sizes, max_pages=pages)


def drain(scheduler, submitted=(), **options):
    """Steps until nothing is left to do; returns all events."""
    events = scheduler.step(submitted, **options)
    for _ in range(10_000):
        check_accounts(scheduler)
        if not scheduler.has_work:
            return events
        events += scheduler.step(**options)
    raise AssertionError("not done in time")


def numbers_of(events, kind):
    """The requests that had events of a kind, in their order."""
    return [event.number for event in events if isinstance(event, kind)]


def new(window=WINDOW, **changes):
    sizes = small_sizes(**changes)
    device = FakeDevice(sizes)
    return Scheduler(device, sizes, WindowChoice(window)), device


def request(number, prompt, *, max_tokens=10, mode="ar", window=None, **options):
    options = {"ignore_eos": True, **options}
    params = SamplingParams(max_tokens=max_tokens, mode=mode, **options)
    return Request(number, prompt, params, window)


def results(events):
    return {event.number: event.result for event in events if isinstance(event, Finished)}
