"""The sequences, their pages and the compiled programs on the device, as the scheduler drives
them: a burst in, a report out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.attention.ragged_pages import allocate_pages
from wedlm_jax.decode.admission import Entrants
from wedlm_jax.decode.logprobs import Logprobs, as_list, empty_logprobs
from wedlm_jax.decode.options import HostOptions, Traits
from wedlm_jax.decode.spans import Allowance
from wedlm_jax.decode.state import DecodeState, num_slots
from wedlm_jax.engine import programs
from wedlm_jax.engine.arguments import empty_state, lower_burst
from wedlm_jax.engine.burst import Admission, Burst, NewTokens, Report
from wedlm_jax.engine.results import WindowView
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import constrain

ENTRANTS_AT_ONCE = 16
"""Sequences that enter in one call, at most: so the call has one shape."""


@dataclasses.dataclass(frozen=True)
class SavedWindow:
    """The window of a sequence that was put back, and its counts.

    Attributes:
      tokens, filled: ``[P]``.
      logprobs: of the filled slots, ``[P]``; None where no sequence asks for them.
      active, num_forwards, num_token_instances: as in `wedlm_jax.decode.state.DecodeState`.
      window: W.
    """

    tokens: np.ndarray
    filled: np.ndarray
    logprobs: Logprobs | None
    active: int
    num_forwards: int
    num_token_instances: int
    window: int


class Device:
    """Runs bursts.

    Args:
      model: on its device or mesh, its layers as they run fastest there.
      settings: sizes, all checked.
      mesh: where the model lies; None for one device.
    """

    def __init__(self, model: Transformer, settings: EngineSettings, mesh: Mesh | None = None):
        self.settings, self._mesh = settings, mesh
        self.config = model.config
        self._graph, self._parameters = nnx.split(model)
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self.compile_seconds = 0.0
        self.traits = Traits()
        self._state: DecodeState | None = None
        self._pages: Any = None
        self._options = HostOptions(settings.sequences, self.traits)
        self._windows = np.full(settings.sequences, -1, np.int32)
        self._num_logprobs: dict[int, int] = {}
        self.counters = np.zeros(3, np.int64)
        """Forwards, real tokens and computed tokens so far, all replicas together."""

    # --- weights and programs -----------------------------------------------------------

    def update(self, model: Transformer) -> None:
        """Decodes with other weights of the same shapes from now on; nothing is compiled anew."""
        self._parameters = nnx.state(model)

    def release(self) -> None:
        """Lets weights and pages go; the programs are kept for the weights of `update`."""
        self._parameters = nnx.State({})
        self._state = self._pages = None

    @property
    def parameters(self) -> nnx.State:
        return self._parameters

    @property
    def num_programs(self) -> int:
        return len(self._compiled)

    def forget_programs(self) -> None:
        """Lets compiled programs go; they are compiled again when they are wanted."""
        self._compiled.clear()

    def compiled(self, function: Any, *arguments: Any, **static: Any) -> jax.stages.Compiled:
        """A jitted function for arguments of these shapes, compiled where they are new.

        Compilation is kept apart so that its time is known and never counted as decoding.
        """
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(arguments))
        key = (function, shapes, jax.tree.structure(arguments), tuple(static.items()))
        if key not in self._compiled:
            started = time.monotonic()
            first = [static.pop("graph")] if "graph" in static else []
            self._compiled[key] = function.lower(*first, *arguments, **static).compile()
            self.compile_seconds += time.monotonic() - started
        return self._compiled[key]

    def run_model(self, function: Any, *arguments: Any, **static: Any) -> Any:
        """Calls a jitted function of graph, parameters and these arguments."""
        compiled = self.compiled(function, self._graph, self._parameters, *arguments, **static)
        return compiled(self._parameters, *arguments)

    # --- the scheduler's device ---------------------------------------------------------

    def prepare(self, traits: Traits) -> None:
        """Makes room for sequences with these traits; those that run keep what they have."""
        if self._state is not None and traits == self.traits:
            return
        self.traits = traits
        self._options = self._options.with_traits(traits)
        if self._state is None:
            self._state = self._laid_out(empty_state(self.settings, traits))
            self._pages = self._empty_pages()
        else:
            self._state = programs.resize(
                self._state, window=traits.window, num_logprobs=traits.num_logprobs
            )

    def compile(self) -> Iterator[tuple[int, int]]:
        """Compiles the programs that `prepare` has made room for; yields how many are there, of how
        many."""
        nobody = np.zeros(self.settings.sequences, bool)
        self.compiled(programs.enter, self._state, self._entrants([]), nobody)
        yield 1, 2
        self._compiled_burst()
        yield 2, 2

    def run(self, burst: Burst) -> Report:
        """Runs a burst of forwards and says what became of every sequence."""
        assert self._state is not None
        for gone in burst.released:
            self._options.clear(gone)
        for admission in burst.admissions:
            self._options.set(
                admission.index,
                admission.request.params,
                window=int(burst.windows[admission.index]),
                stops=self.settings.stop_ids(admission.request.params),
            )
            self._num_logprobs[admission.index] = admission.request.params.logprobs or 0
        self._enter(burst)
        changed = burst.windows != self._windows
        self._windows = np.array(burst.windows, np.int32)
        self._options.set_windows(self._windows)
        allowance = _allowance(burst, self.settings.chunk_tokens)
        result = self._compiled_burst()(
            self._parameters, self._state, self._pages, self._options.options(), allowance, changed
        )
        self._state, self._pages = result.state, result.pages
        numbers, logprobs, counters = jax.device_get(
            (result.numbers, result.logprobs, result.counters)
        )
        self.counters += [int(x.sum()) for x in jax.tree.leaves(counters)]
        report = self._report(numbers, logprobs, int(counters.forwards.max()))
        for index in np.flatnonzero(report.finished):
            self._options.clear(int(index))
        return report

    def save(self, index: int) -> SavedWindow:
        """The window of a sequence, for `Admission.resume`."""
        state = self._state
        assert state is not None
        row = jax.device_get(
            jax.tree.map(
                lambda x: x[index],
                (
                    state.tokens,
                    state.filled,
                    state.logprobs,
                    state.active,
                    state.num_forwards,
                    state.num_token_instances,
                ),
            )
        )
        tokens, filled, logprobs, *counts = row
        active, num_forwards, instances = map(int, counts)
        window = int(self._windows[index])
        return SavedWindow(tokens, filled, logprobs, active, num_forwards, instances, window)

    def window(self, index: int) -> WindowView:
        """The window of a sequence as its next forward will see it."""
        state = self._state
        assert state is not None
        start, active, tokens, filled = jax.device_get(
            (
                state.window_start[index],
                state.active[index],
                state.tokens[index],
                state.filled[index],
            )
        )
        slots = range(int(active))
        held = [int(tokens[slot]) if filled[slot] else None for slot in slots]
        order = sorted(slots, key=lambda slot: (held[slot] is None, slot))
        return WindowView(int(start), held, order)

    # --- what it does -------------------------------------------------------------------

    def _compiled_burst(self) -> jax.stages.Compiled:
        key = (programs.burst, self.traits)
        if key not in self._compiled:
            started = time.monotonic()
            lowered = lower_burst(
                self._graph, self._parameters, self.config, self.settings, self.traits, self._mesh
            )
            self._compiled[key] = lowered.compile()
            self.compile_seconds += time.monotonic() - started
        return self._compiled[key]

    def _enter(self, burst: Burst) -> None:
        released = np.zeros(self.settings.sequences, bool)
        released[list(burst.released)] = True
        todo = list(burst.admissions)
        while todo or released.any():
            some, todo = todo[:ENTRANTS_AT_ONCE], todo[ENTRANTS_AT_ONCE:]
            for admission in some:
                saved: SavedWindow | None = admission.resume
                own = burst.windows[admission.index] if saved is None else saved.window
                self._windows[admission.index] = own
            entrants = self._entrants(some)
            compiled = self.compiled(programs.enter, self._state, entrants, released)
            self._state = compiled(self._state, entrants, released)
            released = np.zeros_like(released)

    def _entrants(self, admissions: Sequence[Admission]) -> Entrants:
        settings, slots = self.settings, num_slots(self.traits.window)
        count = min(ENTRANTS_AT_ONCE, settings.sequences)
        index = np.full(count, settings.sequences, np.int32)
        text = np.zeros((count, settings.max_text), np.int32)
        numbers = np.zeros((count, 7), np.int32)
        tokens, filled = np.zeros((count, slots), np.int32), np.zeros((count, slots), bool)
        k = self.traits.num_logprobs
        logprobs = None
        if k is not None:
            logprobs = jax.tree.map(np.array, empty_logprobs((count, slots), k))
        for i, admission in enumerate(admissions):
            index[i] = admission.index
            text[i, : len(admission.text)] = admission.text
            window = int(self._windows[admission.index])
            numbers[i], own_tokens, own_filled = _window_of(
                admission, window, anchored=_is_anchored(admission, window)
            )
            tokens[i, : len(own_tokens)], filled[i, : len(own_filled)] = own_tokens, own_filled
            if admission.resume is not None and logprobs is not None:
                _put(logprobs, i, admission.resume.logprobs)
        return Entrants(index, text, numbers, tokens, filled, logprobs)  # type: ignore[arg-type]

    def _report(self, numbers: np.ndarray, logprobs: Logprobs | None, num_run: int) -> Report:
        computed, output, running, stopped, forwards, instances, count = numbers[:, :7].T
        emitted = np.split(numbers[:, 7:], 3, axis=1)
        tokens: list[NewTokens | None] = [None] * len(numbers)
        for index in np.flatnonzero(count):
            new = int(count[index])
            own = None
            if logprobs is not None:
                own = as_list(logprobs, int(index), new, self._num_logprobs[int(index)])
            ids, forwards_at, instances_at = (array[index, :new].tolist() for array in emitted)
            tokens[index] = NewTokens(ids, forwards_at, instances_at, own)
        return Report(
            num_computed=computed,
            num_output=output,
            finished=running == 0,
            stopped=stopped > 0,
            num_forwards=forwards,
            num_token_instances=instances,
            tokens=tokens,
            num_run=num_run,
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


def _allowance(burst: Burst, most_chunk_tokens: int) -> Allowance:
    return Allowance(
        page_table=np.asarray(burst.page_table, np.int32),  # type: ignore[arg-type]
        capacity=np.asarray(burst.capacity, np.int32),  # type: ignore[arg-type]
        arrival=np.asarray(burst.arrival, np.int32),  # type: ignore[arg-type]
        chunk_tokens=np.int32(min(burst.chunk_tokens, most_chunk_tokens)),  # type: ignore[arg-type]
        max_forwards=np.int32(burst.max_forwards),  # type: ignore[arg-type]
        until_finished=np.int32(burst.until_finished),  # type: ignore[arg-type]
    )


def _is_anchored(admission: Admission, window: int) -> bool:
    return window == 0 or admission.request.params.mode != "paper"


def _window_of(
    admission: Admission, window: int, *, anchored: bool
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """What `Entrants` needs of a sequence: its numbers, its window's tokens, what is filled."""
    length, prompt = len(admission.text), len(admission.request.prompt)
    prefill = length - anchored
    computed = min(admission.num_cached, prefill)
    saved: SavedWindow | None = admission.resume
    counts = [0, 0] if saved is None else [saved.num_forwards, saved.num_token_instances]
    if saved is not None:
        tokens, filled, active = saved.tokens, saved.filled, saved.active
    elif anchored:
        tokens, filled, active = admission.text[-1:], np.ones(1, bool), 1 + window
    else:
        tokens, filled, active = np.zeros(0, np.int32), np.zeros(0, bool), window
    numbers = [length, prompt, prefill, computed, active, *counts]
    return numbers, np.asarray(tokens), filled


def _put(logprobs: Logprobs, index: int, saved: Logprobs | None) -> None:
    if saved is None:
        return
    for new, old in zip(jax.tree.leaves(logprobs), jax.tree.leaves(saved), strict=True):
        new[index][tuple(map(slice, old.shape))] = old
