"""Who gets a row, and when: continuous batching over the rows of one batch.

The device decodes while the host works: a turn sends off a slice of forwards, deals with the
rows that the slice before has finished, and only then waits. Finished rows are given to
waiting prompts, whose beginnings are copied from rows that hold them already.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from wedlm_jax.batch import UNTIL_DONE, Batch, Piece, Standing
from wedlm_jax.batch_sizes import LONGEST_PIECE, BatchSizes, cache_needed
from wedlm_jax.buckets import bucket
from wedlm_jax.engine import Engine
from wedlm_jax.length_classes import class_of, engine_classes
from wedlm_jax.prefix import PrefixIndex
from wedlm_jax.row_result import RowResult
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.waiting import Request, Waiting

FORWARDS_PER_SLICE = 64
"""Forwards between two looks at a batch: long enough to hide the look."""
FORWARDS_BESIDE_PREFILL = 8
"""The same while a long prompt is prefilled piece by piece: neither waits for the other."""
PIECES_PER_TURN = 8
"""Rounds of prefill between two slices, at most."""
LOOKAHEAD = 1024
"""Prompts read ahead of the rows: the longest of them goes first, and so no straggler is left."""

Row = tuple[Sequence[int], SamplingParams]
"""A checked prompt: its token ids, and how it is decoded."""

Finished = list[tuple[int, RowResult]]
"""Numbers of requests, in the order they came, and what became of them."""


@dataclasses.dataclass(frozen=True)
class Running:
    """What the rows that are decoding have so far, summed over them."""

    tokens: int
    forwards: int
    instances: int


class Scheduler:
    """Decodes requests as they come.

    Args:
      engine: the model.
      requests: checked prompts, read only as far ahead as `LOOKAHEAD`.
      rows: prompts that decode together, at most.
      is_over: whether a row whose request has stop strings is over, from its result so far.
      on_turn: told between slices where the running rows stand.
      reuse_prefixes: whether beginnings that prompts share are computed once.
      window_of: the window of a request, from its number; the engine's by default.
      stopping: asked before a request gets a row: once it says so, those in rows are finished and
        no others begun.
      max_cache_tokens: rows of cache of a batch, over all its prompts: then short and long ones
        decode in batches of their own (`wedlm_jax.length_classes`); None for one kind of batch.
      sizes: of batches, one for each length class, used where the requests that are known fit; by
        default just large enough.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterable[Row],
        *,
        rows: int,
        is_over: Callable[[RowResult, SamplingParams], bool] | None = None,
        on_turn: Callable[[Running], None] | None = None,
        reuse_prefixes: bool = True,
        window_of: Callable[[int], int] | None = None,
        stopping: Callable[[], bool] | None = None,
        max_cache_tokens: int | None = None,
        sizes: Sequence[BatchSizes] = (),
    ):
        self._engine = engine
        self._classes = engine_classes(engine, rows, max_cache_tokens)
        self._source = enumerate(iter(requests))
        self._is_over, self._on_turn, self._reuse = is_over, on_turn, reuse_prefixes
        self._window_of = window_of
        self._sizes = sizes
        self._stopping = stopping or (lambda: False)
        self.waiting = Waiting(self._classes, LOOKAHEAD)
        self.prefilled_tokens = self.reused_tokens = 0

    def run(self) -> Iterator[Finished]:
        """Yields requests as they finish, some at a time, in no order to rely on."""
        length: int | None = None
        while self.read_ahead():
            length = self.waiting.next_class(length)
            yield from _BatchRun(self, self._open(length), length).run()

    def read_ahead(self) -> bool:
        """Fills the queues of waiting requests; whether there are any to begin."""
        if self._stopping():
            return False
        for number, (prompt, params) in itertools.islice(
            self._source, max(LOOKAHEAD - len(self.waiting), 0)
        ):
            length = class_of(cache_needed(self._engine, prompt, params), self._classes)
            self.waiting.put(Request(number, np.asarray(prompt, np.int32), params, length))
        return bool(self.waiting)

    def _open(self, length: int) -> Batch:
        known = [(r.prompt, r.params) for r in self.waiting.up_to(length)]
        if self._sizes and all(self._sizes[length].holds(self._engine, *row) for row in known):
            return self._engine.open(self._sizes[length])
        kind, count = self._classes[length], bucket(len(known), 1)
        # A class has its cache size whoever is known so far: few sizes, all of them foreseen.
        sizes = BatchSizes.for_rows(
            self._engine, known, count=min(kind.rows, count), cache_size=kind.cache_size
        )
        return self._engine.open(sizes)


class _BatchRun:
    """Requests through one batch, until none is left that it is for, or until enough of another
    length class wait. It ends with the last one of its own class; rows that these leave free go to
    shorter requests until then.
    """

    def __init__(self, scheduler: Scheduler, batch: Batch, length: int):
        self._scheduler, self._batch, self._length = scheduler, batch, length
        self._engine = scheduler._engine
        self._promised = scheduler.waiting.count(length)
        self._closing = False
        rows = batch.sizes.rows
        self._free = list(range(rows))[::-1]
        self._requests: dict[int, Request] = {}
        self._running: set[int] = set()
        self._held = PrefixIndex(rows)
        self._too_large: list[Request] = []
        self._policy = self._engine.policy(batch)
        self._window = -1
        self._tokens, self._forwards = np.zeros((2, rows), np.int64)

    def run(self) -> Iterator[Finished]:
        finished: Callable[[], Finished] = list
        while True:
            timed = self._choose_window()  # what is admitted begins with it
            self._admit()
            if not self._requests:
                break
            if timed:
                self._batch.look()  # so that the device begins with the slice
            compiled, started = self._engine.num_programs, time.perf_counter()
            self._dispatch()
            # A program's first run is slow, not to speak of compiling it.
            timed &= self._engine.num_programs == compiled
            if not timed and (now := finished()):
                yield now
            standing = self._batch.look()
            self._learn(standing, time.perf_counter() - started if timed else None)
            if timed and (now := finished()):
                yield now
            finished = self._collect(standing)
        if now := finished():
            yield now
        for request in self._too_large:
            self._scheduler.waiting.put(request)

    # --- prompts into rows --------------------------------------------------------------

    def _admit(self) -> None:
        """Gives free rows to waiting prompts and prefills them, a bounded amount a turn."""
        for _ in range(PIECES_PER_TURN):
            waiting_for_another = self._assign()
            if not self._prefill_round() and not waiting_for_another:
                break
        ready = [
            row for row, request in self._requests.items()
            if row not in self._running and request.prefilled == len(request.prompt)
        ]  # fmt: skip
        if ready:
            requests = [self._requests[row] for row in ready]
            window_of = self._scheduler._window_of
            self._batch.open(
                ready,
                [request.prompt for request in requests],
                [request.params for request in requests],
                window_of and [window_of(request.number) for request in requests],
            )
            self._running.update(ready)
            self._tokens[ready] = self._forwards[ready] = 0

    def _assign(self) -> bool:
        """Gives rows to waiting prompts; whether some wait for a beginning that is being
        prefilled for another."""
        later: list[Request] = []
        copies: list[tuple[int, int, int]] = []
        while len(self._free) > len(later) and len(self._too_large) < LOOKAHEAD:
            if (request := self._take(held=bool(later))) is None:
                break
            if not self._batch.sizes.holds(self._engine, request.prompt, request.params):
                self._too_large.append(request)
            elif self._is_being_prefilled(request):
                later.append(request)
            else:
                self._place(request, copies)
        for request in later:
            self._scheduler.waiting.put(request)
        self._promised += len(later)
        if copies:
            self._batch.copy_prefix(*zip(*copies, strict=True))
        return bool(later and self._free)

    def _take(self, *, held: bool) -> Request | None:
        """The next request: of its own class those that waited when the batch was opened, and more
        until another class is due; then shorter ones.

        Args:
          held: whether some that were taken will be put back, to wait a turn.
        """
        waiting = self._scheduler.waiting
        if not self._scheduler.read_ahead():
            return None
        if not self._closing:
            if self._promised > 0 or not waiting.another_is_due(self._length):
                self._promised -= 1
                if (request := waiting.take(self._length)) is not None:
                    return request
            if held:
                return None
            self._closing = True
        return waiting.take(self._length, shorter=True) if self._has_own() else None

    def _may_take(self) -> bool:
        """Whether a row that becomes free is likely to get a request."""
        waiting = self._scheduler.waiting
        if not self._closing:
            return waiting.count(self._length) > 0
        return self._has_own() and any(map(waiting.count, range(self._length)))

    def _has_own(self) -> bool:
        """Whether a request of this batch's own class is under way."""
        return any(request.length == self._length for request in self._requests.values())

    def _is_being_prefilled(self, request: Request) -> bool:
        """Whether another row will soon hold more of this prompt than any does now."""
        if not self._scheduler._reuse:
            return False
        unready = self._unready().intersection(self._within_reach())
        _, soon = self._held.longest(request.prompt, unready)
        return soon > self._longest_held(request)[1]

    def _unready(self) -> set[int]:
        return {row for row, r in self._requests.items() if r.prefilled < len(r.prompt)}

    def _within_reach(self) -> list[int]:
        """Rows whose cache a free row can take over: those of its shard."""
        shards = {self._batch.shard_of(row) for row in self._free}
        rows = range(self._batch.sizes.rows)
        return [row for row in rows if self._batch.shard_of(row) in shards]

    def _longest_held(self, request: Request) -> tuple[int, int]:
        """The row that holds the longest beginning of a prompt, and how much can be taken over."""
        if not self._scheduler._reuse:
            return -1, 0
        ready = sorted(set(self._within_reach()) - self._unready())
        row, length = self._held.longest(request.prompt, ready)
        return (row, length) if self._batch.fits(length, len(request.prompt)) else (-1, 0)

    def _place(self, request: Request, copies: list[tuple[int, int, int]]) -> None:
        source, length = self._longest_held(request)
        if length and source in self._free:
            row = source  # its cache holds the beginning already
        else:
            row = self._row_beside(source if length else None)
            if length:
                copies.append((source, row, length))
        self._free.remove(row)
        request.prefilled = length
        self._scheduler.reused_tokens += length
        self._scheduler.prefilled_tokens += len(request.prompt) - length
        self._requests[row] = request
        self._held.hold(row, request.prompt)

    def _row_beside(self, source: int | None) -> int:
        """A free row, in the shard of ``source``."""
        if source is None:
            return self._free[-1]
        shard = self._batch.shard_of(source)
        return next(row for row in reversed(self._free) if self._batch.shard_of(row) == shard)

    def _prefill_round(self) -> bool:
        """The next piece of every prompt that is not all in the cache; whether there was one."""
        pieces: list[Piece] = []
        for row, request in self._requests.items():
            start = request.prefilled
            if start < len(request.prompt):
                pieces.append((row, start, request.prompt[start : start + LONGEST_PIECE]))
                request.prefilled += len(pieces[-1][2])
        if pieces:
            self._batch.prefill(pieces)
        return bool(pieces)

    # --- forwards -----------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Sends a slice of forwards off."""
        batch, prefilling = self._batch, len(self._requests) > len(self._running)
        idle = batch.sizes.rows - len(self._running)
        more = prefilling or self._may_take()
        # A few rows may wait for each other, so that their successors are prefilled together.
        until = idle + max(1, len(self._running) // 8) if more else UNTIL_DONE
        forwards = FORWARDS_BESIDE_PREFILL if prefilling else FORWARDS_PER_SLICE
        if self._policy is not None:
            forwards = self._policy.forwards(forwards)
        batch.dispatch(forwards, until)

    def _choose_window(self) -> bool:
        """Sets the window of the next slice; whether its time is to be taken."""
        if self._policy is None:
            return False
        window = self._policy.choose()
        if window != self._window:
            self._batch.set_windows(window)
            self._window = window
        return self._policy.is_due(window)

    def _learn(self, now: Standing, seconds: float | None) -> None:
        """What the slice says of its window's worth; the seconds it took, if they were taken."""
        if self._policy is None:
            return
        rows = sorted(self._running)
        tokens, forwards = (now.num_output - self._tokens)[rows], now.num_forwards - self._forwards
        most = int(forwards[rows].max(initial=0))
        if most:
            self._policy.observe(
                self._window,
                tokens=int(tokens.sum()),
                row_forwards=int(forwards[rows].sum()),
                forwards=most,
                seconds=seconds,
            )
        self._tokens, self._forwards = now.num_output.copy(), now.num_forwards.copy()

    def _collect(self, standing: Standing) -> Callable[[], Finished]:
        """Frees the rows that are done; returns what fetches their results, for when the device
        is busy again."""
        over = [row for row in self._running if standing.done[row]]
        over += self._stopped_by_text([r for r in self._running if not standing.done[r]], standing)
        self._tell(standing, over)
        if not over:
            return list
        numbers = [self._requests.pop(row).number for row in over]
        self._running.difference_update(over)
        self._free.extend(over)
        gathered = self._batch.gather(over, standing)
        return lambda: list(zip(numbers, gathered.results(), strict=True))

    def _stopped_by_text(self, rows: list[int], standing: Standing) -> list[int]:
        """Rows whose stop string has come, which only the host can see."""
        is_over = self._scheduler._is_over
        watched = [row for row in rows if self._requests[row].params.stop]
        if is_over is None or not watched:
            return []
        results = self._batch.gather(watched, standing).results()
        over = [
            row for row, result in zip(watched, results, strict=True)
            if is_over(result, self._requests[row].params)
        ]  # fmt: skip
        if over:
            self._batch.finish(*over)
        return over

    def _tell(self, standing: Standing, over: list[int]) -> None:
        if self._scheduler._on_turn is None:
            return
        rows = [row for row in self._running if row not in set(over)]
        counts = (standing.num_output, standing.num_forwards, standing.num_token_instances)
        self._scheduler._on_turn(Running(*(int(x[rows].sum()) for x in counts)))
