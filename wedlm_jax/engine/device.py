"""Runs the scheduler's bursts on the device and reports their results. Holds the sequences' state,
their pages and the compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.attention.ragged import allocate_pages
from wedlm_jax.completion import Drafts
from wedlm_jax.decode.logprobs import Logprobs, as_list
from wedlm_jax.decode.options import HostOptions, Traits
from wedlm_jax.decode.spans import Allowance
from wedlm_jax.decode.state import NOTHING, DecodeState, LastForward
from wedlm_jax.engine.costs import CostTable
from wedlm_jax.engine.interface import (
    Admission,
    Burst,
    Member,
    NewTokens,
    Report,
    Request,
    WindowForward,
)
from wedlm_jax.engine.programs import (
    ENTRANTS_AT_ONCE,
    CompiledPrograms,
    SavedWindow,
    empty_state,
    make_entrants,
    slot_sizes,
)
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.grammar.masks import GrammarMasks, Grammars
from wedlm_jax.host.compiled_cache import ProgramStore
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import constrain

FIRST_CHECK, CHECK, CHECK_FORWARDS = 8, 512, 8
"""Now and then a burst of `CHECK_FORWARDS` forwards copies no drafts, to measure the baseline cost:
if only some forwards of a burst have copies, it only shows what they take together. The first
check comes after `FIRST_CHECK` forwards, each later one when the number of forwards has doubled or
after `CHECK` more, whichever is sooner."""


@dataclasses.dataclass
class Ticket:
    """A burst that the device is running or has run.

    Attributes:
      number: the burst's number.
      fetched: the results that the host fetches; empty while only the layers have been submitted.
      program: the traits of its program.
      sizes: the static sizes at which the program runs forwards.
      members: its sequences.
      started: when it was submitted.
      windowless: whether the program has no room for windows, though the engine's others have.
      alone: whether no other burst was in flight when it was submitted.
      resized: whether the state had to be resized for its program first.
    """

    number: int
    fetched: tuple[Any, ...]
    program: Traits
    sizes: tuple[int, ...]
    members: Sequence[Member]
    started: float
    windowless: bool
    alone: bool
    resized: bool


class Device:
    """Runs bursts of forwards.

    Args:
      model: the model, on its device or mesh, with the layer layout that runs fastest there.
      settings: the engine's settings.
      mesh: the model's mesh; None for a single device.
      windows_vary: whether windows are chosen for each burst. If so, bursts in which no sequence
        has a window use a second, faster program without room for windows.
      grammars: compiles the grammars of requests; None if requests have none.
      store: where compiled programs are stored for the next process.
    """

    def __init__(
        self,
        model: Transformer,
        settings: EngineSettings,
        mesh: Mesh | None = None,
        *,
        windows_vary: bool = False,
        grammars: Grammars | None = None,
        store: ProgramStore | None = None,
    ):
        self.settings, self._windows_vary = settings, windows_vary
        self.config = model.config
        graph, self._parameters = nnx.split(model)
        self._leaves = jax.tree.leaves(self._parameters)
        self._formats: nnx.State | None = None
        """The memory layouts of the parameters; None for the layouts they came in."""
        self.programs = CompiledPrograms(graph, model.config, settings, mesh, store)
        # Needed for every burst, and slow to compute.
        self._sizes = functools.cache(lambda traits: settings.program(traits).sizes.tokens)
        self.traits = Traits()
        self._room = Traits()
        """The traits that the state has room for: `traits`, or the same without windows."""
        self._state: DecodeState | None = None
        self._pages: Any = None
        self._options = HostOptions(settings.sequences, self.traits)
        self._windows = np.full(settings.sequences, -1, np.int32)
        self._grammars = GrammarMasks(grammars, settings.sequences, model.config.vocab_size)
        self._failed: list[int] = []
        """Indices of sequences that failed in a report; the next burst frees their state."""
        self._complete: Callable[[], None] | None = None
        """Submits the rest of a forward whose layers are submitted; it needs the report of the
        burst before."""
        self._num_submitted = self._num_collected = 0
        self._have_run: dict[Traits, np.ndarray] = {}
        """For each program, the sizes at which it has run forwards, bool ``[S]``."""
        self._ended, self._observed = 0.0, True
        """The latest time at which the last collected burst can have ended; whether it is exact."""
        self.counters = np.zeros(3, np.int64)
        """Forwards, real tokens and computed tokens so far. Replicas run their forwards at the same
        time and the device waits for the slowest, so each burst counts the forwards of the replica
        that ran the most: seconds divided by forwards is then the time of one forward. Tokens are
        summed over replicas."""
        self.drafts = Drafts()
        """The drafts checked so far, over all replicas."""
        self.costs: CostTable | None = None
        """The costs of forwards, which decide whether drafts are copied from texts. None until they
        are known; assumed costs are used until then."""
        self._next_check = FIRST_CHECK
        """The number of forwards after which the next check without copies takes place."""

    # --- weights and programs -----------------------------------------------------------

    def update(self, model: Transformer) -> None:
        """Replaces the weights with others of the same shapes; nothing is recompiled."""
        self._parameters, self._formats = nnx.state(model), None
        self._leaves = jax.tree.leaves(self._parameters)

    def release(self) -> None:
        """Frees weights and pages, but keeps the compiled programs for a later `update`."""
        self._parameters, self._leaves = nnx.State({}), []
        self.forget_sequences()

    def forget_sequences(self) -> None:
        """Drops all sequences and pages, whatever their state."""
        self._state = self._pages = None
        self._options = HostOptions(self.settings.sequences, self.traits)
        self._windows[:] = -1
        self._grammars.clear()
        self._failed, self._complete = [], None

    @property
    def parameters(self) -> nnx.State:
        return self._parameters

    def run_model(self, function: Any, *arguments: Any, **static: Any) -> Any:
        """Calls a jitted function with the model's graph, its parameters and these arguments."""
        self._lay_out()
        compiled = self.programs.of_model(function, self._parameters, *arguments, **static)
        return compiled(self._parameters, *arguments)

    # --- the scheduler's device ---------------------------------------------------------

    def prepare(self, traits: Traits) -> None:
        """Makes room for sequences with these traits; running sequences keep their state."""
        if self._state is not None and traits == self.traits:
            return
        self.traits = traits
        self._options = self._options.with_traits(traits)
        if self._state is None:
            self._state = self._laid_out(empty_state(self.settings, traits))
            self._pages = self._empty_pages()
            self._room = traits
        else:
            self._make_room(traits)

    def compile(self, traits: Traits) -> None:
        """Compiles the programs for sequences with these traits. May be called from any thread."""
        kinds = [traits]
        if self._windows_vary and traits.window and traits.autoregressive:
            kinds = [traits.without_windows, traits]
        self.programs.compile(self._parameters, kinds)

    def run(self, burst: Burst) -> Report:
        """Runs a burst of forwards and returns its report."""
        return self.collect(self.submit(burst))

    def submit(self, burst: Burst) -> Ticket:
        """Submits a burst of forwards without waiting for it. The next burst may be submitted
        before this one ends; the device then runs it right after this one."""
        assert self._state is not None
        self._num_submitted += 1
        for gone in burst.released:
            self._forget(gone)
        for admission in burst.admissions:
            self._expect(admission, int(burst.windows[admission.index]))
        resized = self._make_room(self._traits_for(burst))
        self._enter(burst)
        changed = burst.windows != self._windows
        self._windows = np.array(burst.windows, np.int32)
        self._options.set_windows(self._windows)
        if checks := self._goes_without_copies():
            burst = dataclasses.replace(burst, max_forwards=min(burst.max_forwards, CHECK_FORWARDS))
        seconds = self._seconds(without_copies=checks)
        allowance = _allowance(burst, self.settings.chunk_tokens, seconds)
        arguments = self._options.options(self._room), allowance, changed
        program = self.programs.burst(self._parameters, self._room)
        layers = None
        if self._room.grammar:
            layers = self.programs.layers(self._parameters, self._room)
        self._lay_out()
        ticket = Ticket(
            self._num_submitted,
            (),
            self._room,
            self._sizes(self._room),
            burst.members,
            time.perf_counter(),
            windowless=self._windows_vary and not self._room.window,
            alone=self._num_collected == self._num_submitted - 1,
            resized=resized,
        )
        if layers is None:
            ticket.fetched = self._run(program, *arguments)
            return ticket
        # The layers run while the host reads the report of the burst before and computes which
        # tokens grammars allow next.
        hidden, self._pages = layers(self._leaves, self._state, self._pages, *arguments)

        def complete() -> None:
            allowed: Any = self._grammars.allowed(self._room.checked_rows, self._drafts)
            options, *others = arguments
            options = dataclasses.replace(options, allowed=allowed)
            ticket.fetched = self._run(program, options, *others, hidden)

        if ticket.alone:
            complete()
        else:
            self._complete = complete
        return ticket

    def _run(self, program: Any, *arguments: Any) -> tuple[Any, ...]:
        result = program(self._leaves, self._state, self._pages, *arguments)
        self._state, self._pages = result.state, result.pages
        return result.numbers, result.logprobs, result.counters, result.last

    def collect(self, ticket: Ticket) -> Report:
        """Waits for a ticket's burst, which must be the oldest one not collected yet, and returns
        its report."""
        begun = max(ticket.started, self._ended)
        timed = ticket.alone or (self._observed and not ticket.fetched[0].is_ready())
        numbers, logprobs, counters, last = jax.device_get(ticket.fetched)
        self._ended, self._observed = time.perf_counter(), timed
        seconds = self._ended - begun
        self._num_collected = ticket.number
        num_run, sizes = int(counters.forwards.max()), np.array(ticket.sizes)
        runs = counters.by_size.any(axis=0)
        have_run = self._have_run.setdefault(ticket.program, np.zeros_like(runs))
        first = bool((runs & ~have_run).any())
        have_run |= runs
        self.counters += [num_run, counters.tokens.sum(), (counters.by_size * sizes).sum()]
        present = {one.index: one.request for one in ticket.members if one.is_present}
        watched = [index for index, request in present.items() if request.traced]
        traced = {} if last is None else window_forwards(last, watched, begun)
        report = dataclasses.replace(
            self._report(present, numbers, logprobs),
            num_run=num_run,
            traced=traced,
            seconds=seconds,
            timed=timed and not (ticket.resized or first),
            sizes=ticket.sizes,
            by_size=counters.by_size[counters.forwards.argmax()],
            windowless=ticket.windowless,
        )
        finished = [index for index in present if report.finished[index]]
        for index in [*finished, *report.errors]:
            self._forget(index)
        self._failed += report.errors
        if self._complete is not None:
            complete, self._complete = self._complete, None
            complete()
        return report

    def save(self, index: int, request: Request) -> SavedWindow:
        """Returns the window of a preempted sequence in mode "paper", for `Admission.resume`. Its
        size depends only on the sequence, so any program that can decode the sequence has room for
        it."""
        state, asked = self._state, request.params.logprobs
        assert state is not None
        logprobs = None if asked is None else state.logprobs
        row = state.tokens, state.filled, logprobs, state.active
        tokens, filled, logprobs, active = jax.device_get(jax.tree.map(lambda x: x[index], row))
        tokens, filled, logprobs = jax.tree.map(
            lambda x: x[:active] if x.ndim == 1 else x[:active, :asked],
            (tokens, filled, logprobs),
        )
        return SavedWindow(tokens, filled, logprobs, int(self._windows[index]))

    # --- parts of a burst ---------------------------------------------------------------

    def _lay_out(self) -> None:
        """Moves the parameters into the memory layouts of the compiled programs."""
        if self._formats is not self.programs.formats:
            self._formats = self.programs.formats
            self._parameters = jax.tree.map(jax.device_put, self._parameters, self._formats)
            self._leaves = jax.tree.leaves(self._parameters)

    def _expect(self, admission: Admission, window: int) -> None:
        """Records the options and the grammar of a sequence that enters."""
        index, params = admission.index, admission.request.params
        stops = self.settings.stop_ids(params)
        self._options.set(index, params, window=window, stops=stops, lookup=admission.lookup)
        completion = admission.text[len(admission.request.prompt) :]
        self._grammars.enter(index, params, completion.tolist())

    def _forget(self, index: int) -> None:
        self._options.clear(index)
        self._grammars.leave(index)

    def _drafts(self) -> list[list[int]]:
        """Returns the drafts in the window of each sequence in mode "verified"."""
        state = self._state
        assert state is not None
        tokens, filled, active = jax.device_get((state.tokens, state.filled, state.active))
        runs = np.cumprod(filled, axis=1).sum(axis=1)
        return [
            row[1:length].tolist()
            for row, length in zip(tokens, np.minimum(runs, active), strict=True)
        ]

    def _traits_for(self, burst: Burst) -> Traits:
        """Returns the traits of the program for a burst: without windows if no sequence has a
        window or resumes with one. Drafts in earlier windows are then dropped."""
        if not (self._windows_vary and self.traits.window):
            return self.traits
        resumed = any(one.resume is not None and one.resume.window for one in burst.admissions)
        windowless = not (burst.windows[burst.capacity > 0].any() or resumed)
        return self.traits.without_windows if windowless else self.traits

    def _make_room(self, traits: Traits) -> bool:
        """Resizes the slot arrays for a program with these traits; returns whether they changed."""
        changes = slot_sizes(traits) != slot_sizes(self._room)
        if changes:
            self._state = self.programs.resize(self._room, traits)(self._state)
        self._room = traits
        return changes

    def _goes_without_copies(self) -> bool:
        """Returns whether the next burst measures forwards without copied drafts; if so, schedules
        the next such check."""
        if not self._room.lookup or self.costs is None:
            return False
        done = int(self.counters[0])
        if done < self._next_check:
            return False
        self._next_check = done + min(done, CHECK)
        return True

    def _seconds(self, *, without_copies: bool) -> np.ndarray | None:
        """Returns the cost of a forward of each size, as `Allowance` takes it."""
        if not self._room.lookup:
            return None
        sizes = self._sizes(self._room)
        if without_copies:
            seconds = np.square(sizes)  # so expensive that copied drafts never pay
        elif self.costs is None:
            seconds = 1 + np.array(sizes) / self.settings.balanced_tokens
        else:
            windowless = self._windows_vary and not self._room.window
            seconds = self.costs.of_sizes(sizes, windowless=windowless)
        return np.tile(seconds.astype(np.float32), (self.settings.replicas, 1))

    def _enter(self, burst: Burst) -> None:
        released = np.zeros(self.settings.sequences, bool)
        released[[*burst.released, *self._failed]] = True
        todo = list(burst.admissions)
        while todo or released.any():
            some, todo = todo[:ENTRANTS_AT_ONCE], todo[ENTRANTS_AT_ONCE:]
            for admission in some:
                saved: SavedWindow | None = admission.resume
                window = burst.windows[admission.index] if saved is None else saved.window
                self._windows[admission.index] = window
            entrants = make_entrants(self.settings, self._room, some, self._windows)
            self._state = self.programs.entry(self._room)(self._state, entrants, released)
            released = np.zeros_like(released)
        self._failed = []

    def _report(
        self,
        present: Mapping[int, Request],
        numbers: np.ndarray,
        logprobs: Logprobs | None,
    ) -> Report:
        computed, output, running, stopped, forwards, instances, count = numbers[:, :7].T
        *emitted, drafts = np.split(numbers[:, 7:], 4, axis=1)
        drafts = drafts.view(np.uint32)
        tokens: list[NewTokens | None] = [None] * len(numbers)
        errors: dict[int, Exception] = {}
        for index, request in present.items():
            if not (new := int(count[index])):
                continue
            token_logprobs, asked = None, request.params.logprobs
            if asked is not None:
                assert logprobs is not None, "the program has what its sequences ask for"
                token_logprobs = as_list(logprobs, index, new, asked)
            ids, forwards_at, instances_at = (array[index, :new].tolist() for array in emitted)
            drafts_at = drafts[index, :new].tolist()
            tokens[index] = NewTokens(ids, forwards_at, instances_at, token_logprobs, drafts_at)
            error = self._grammars.commit(index, ids, stopped=bool(stopped[index]))
            if error is not None:
                errors[index] = error
        here = np.zeros((len(numbers), 1), bool)
        here[list(present)] = True
        checked = drafts[(np.arange(drafts.shape[1]) < count[:, None]) & here]
        if checked.any():
            self.drafts = self.drafts.plus(Drafts.read(checked))
        return Report(
            num_computed=computed,
            num_output=output,
            finished=running == 0,
            stopped=stopped > 0,
            num_forwards=forwards,
            num_token_instances=instances,
            tokens=tokens,
            errors=errors,
        )

    def _laid_out(self, state: DecodeState) -> DecodeState:
        return jax.jit(
            lambda state: jax.tree.map(lambda x: constrain(x, "sequences"), state),
            donate_argnums=0,
        )(state)  # type: ignore[no-any-return]

    def _empty_pages(self) -> Any:
        settings = self.settings
        return allocate_pages(
            self.config,
            settings.num_pages,
            settings.page_size,
            settings.cache_dtype,
            replicas=settings.replicas,
        )


def _allowance(burst: Burst, most_chunk_tokens: int, seconds: np.ndarray | None) -> Allowance:
    return Allowance(
        page_table=np.asarray(burst.page_table, np.int32),  # type: ignore[arg-type]
        capacity=np.asarray(burst.capacity, np.int32),  # type: ignore[arg-type]
        arrival=np.asarray(burst.arrival, np.int32),  # type: ignore[arg-type]
        chunk_tokens=np.int32(min(burst.chunk_tokens, most_chunk_tokens)),  # type: ignore[arg-type]
        max_forwards=np.int32(burst.max_forwards),  # type: ignore[arg-type]
        until_finished=np.asarray(burst.until_finished, np.int32),  # type: ignore[arg-type]
        seconds=seconds,  # type: ignore[arg-type]
    )


# --- Traces ----------------------------------------------------------------------------------


def window_forwards(
    last: LastForward, indices: Iterable[int], started: float
) -> dict[int, WindowForward]:
    """Returns, by index, what the last forward did in those windows at ``indices`` that it ran.

    Args:
      last: the last forward, fetched from the device.
      started: when the burst began, by `time.perf_counter`.
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
