"""The compiled programs of a device, each for certain traits, cached in memory and on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from wedlm_jax.attention.ragged import Pages, allocate_pages
from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.forward import Program, no_hidden_states
from wedlm_jax.decode.logprobs import Logprobs, empty_logprobs
from wedlm_jax.decode.loop import BurstCounters, run_burst, run_layers_ahead
from wedlm_jax.decode.options import Options, Traits, abstract_options
from wedlm_jax.decode.spans import Allowance
from wedlm_jax.decode.state import (
    DecodeState,
    Entrants,
    LastForward,
    admit,
    idle_state,
    num_slots,
    pack_for_host,
    resize_slots,
)
from wedlm_jax.engine.interface import Admission
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.host.compiled_cache import ProgramStore
from wedlm_jax.host.progress import COMPILING, LOADING
from wedlm_jax.host.signals import compiled
from wedlm_jax.model import Transformer
from wedlm_jax.params import MOST_LOGPROBS
from wedlm_jax.sharding import AXIS_RULES, constrain, on_replicas

Busy: TypeAlias = Callable[[str], contextlib.AbstractContextManager[Any]]


class CompiledPrograms:
    """Compiles programs when they are first needed, in any thread.

    Compilation is separate from running so that its time is known and never counted as decoding.

    Args:
      graph: the model's graph definition.
      mesh: the model's mesh; None for a single device.
      store: where programs are stored for the next process; None stores nothing.

    Attributes:
      formats: the memory layouts of the parameters, chosen when the first burst is compiled; None
        before that, and where the compiler does not choose.
      seconds: time spent so far compiling programs and loading stored ones.
      while_busy: given a description of what callers wait for (a program that is compiled or
        loaded, a measurement), returns a context manager that is entered while they wait.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Transformer],
        config: ModelConfig,
        settings: EngineSettings,
        mesh: Mesh | None,
        store: ProgramStore | None = None,
    ):
        self._graph, self._config, self._settings, self._mesh = graph, config, settings, mesh
        self._store = store
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._choosing = threading.Lock()
        self._busy: dict[Any, threading.Lock] = {}
        self.formats: nnx.State | None = None
        self.seconds = 0.0
        self.while_busy: Busy = contextlib.nullcontext

    def __len__(self) -> int:
        return len(self._compiled)

    def clear(self) -> None:
        """Drops compiled programs; they are compiled again on demand."""
        self._compiled.clear()

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Announces what callers wait for in the block, and counts its time as compiling."""
        started = time.monotonic()
        with self.while_busy(what):
            yield
        self.seconds += time.monotonic() - started

    @property
    def traits(self) -> list[Traits]:
        """The traits for which a burst is compiled."""
        return [key[1] for key in list(self._compiled) if key[0] is burst]

    def compile(self, parameters: Any, kinds: list[Traits]) -> None:
        """Compiles all programs for sequences of these kinds, and those that convert between kinds.

        Args:
          parameters: the model's parameters, or their shapes.
        """
        for old, new in permutations(dict.fromkeys([*kinds, *self.traits]), 2):
            if slot_sizes(old) != slot_sizes(new):
                self.resize(old, new)
        for traits in kinds:
            self.entry(traits)
            if traits.grammar:
                self.layers(parameters, traits)
            self.burst(parameters, traits)

    def burst(self, parameters: Any, traits: Traits) -> jax.stages.Compiled:
        """Returns the program of a burst of forwards, which takes a list of the parameters' arrays,
        in the layouts of `formats`. With a grammar, it is what follows `layers`."""
        return self._of_forwards(burst, parameters, traits)

    def layers(self, parameters: Any, traits: Traits) -> jax.stages.Compiled:
        """Returns the program that runs a forward's layers, for sequences with a grammar."""
        return self._of_forwards(layers, parameters, traits)

    def _of_forwards(self, function: Any, parameters: Any, traits: Traits) -> jax.stages.Compiled:
        key = (function, traits)
        if key in self._compiled:
            return self._compiled[key]

        def lower(
            parameters: Any, function: Any, traits: Traits, *, choose: bool = False
        ) -> jax.stages.Lowered:
            arguments = (self._graph, parameters, self._config, self._settings, traits, self._mesh)
            return lower_burst(*arguments, choose_layouts=choose, function=function)

        shapes = _shapes(parameters)
        with self._choosing:
            if self._settings.compiler_lays_out and self.formats is None:
                # Only a burst of whole forwards uses all parameters.
                whole = dataclasses.replace(traits, grammar=False)
                chosen = self._kept(
                    (burst, whole),
                    lambda: lower(parameters, burst, whole, choose=True),
                    self._settings.program(whole),
                    shapes,
                    "layouts are chosen",
                )
                structure = jax.tree.structure(parameters)
                self.formats = jax.tree.unflatten(structure, chosen.input_formats[0][0])

        def lower_laid_out() -> jax.stages.Lowered:
            if self.formats is None:
                return lower(parameters, function, traits)
            laid_out = jax.tree.map(_abstract, parameters, self.formats)
            return lower(laid_out, function, traits)

        depends = self._settings.program(traits), shapes, str(self.formats)
        return self._kept(key, lower_laid_out, *depends)

    def entry(self, traits: Traits) -> jax.stages.Compiled:
        """Returns the program that adds and removes sequences."""

        def lower() -> jax.stages.Lowered:
            settings = self._settings
            state = abstract_state(settings, traits, self._mesh)
            nobody = np.zeros(settings.sequences, bool)
            windows = np.zeros(settings.sequences, np.int32)
            entrants = make_entrants(settings, traits, [], windows)
            return enter.lower(state, entrants, nobody)

        return self._kept((enter, *slot_sizes(traits).values()), lower)

    def resize(self, old: Traits, new: Traits) -> jax.stages.Compiled:
        """Returns the program that resizes the state from ``old``'s slots to ``new``'s."""

        def lower() -> jax.stages.Lowered:
            state = abstract_state(self._settings, old, self._mesh)
            return resize.lower(state, **slot_sizes(new))

        sizes = (*slot_sizes(old).values(), *slot_sizes(new).values())
        return self._kept((resize, *sizes), lower)

    def of_model(
        self, function: Any, parameters: Any, *arguments: Any, **static: Any
    ) -> jax.stages.Compiled:
        """Compiles a jitted function of graph, parameters and arguments for their shapes."""
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves((parameters, arguments)))
        layouts = self.formats is None
        key = (function, shapes, layouts, jax.tree.structure(arguments), tuple(static.items()))
        return self._kept(
            key,
            lambda: function.lower(self._graph, parameters, *arguments, **static),
            _shapes((parameters, arguments)),
        )

    def _kept(
        self, key: Any, lower: Callable[[], jax.stages.Lowered], *depends: Any
    ) -> jax.stages.Compiled:
        """Returns the program with a key: from memory, from the store, or compiled.

        Args:
          key: the function, and what it is compiled for.
          depends: what else the executable depends on, apart from key and engine, for its name in
            the store.
        """
        with self._busy.setdefault(key, threading.Lock()):
            if key not in self._compiled:
                started = time.monotonic()
                self._compiled[key] = self._loaded_or_compiled(key, lower, depends)
                self.seconds += time.monotonic() - started
            return self._compiled[key]

    def _loaded_or_compiled(
        self, key: Any, lower: Callable[[], jax.stages.Lowered], depends: tuple[Any, ...]
    ) -> jax.stages.Compiled:
        function, *of = key
        name = (function.__module__, function.__qualname__, of, *self._engine(), *depends)
        name = tuple(re.sub(" at 0x[0-9a-f]+", "", str(part)) for part in name)
        devices = [jax.devices()[0]] if self._mesh is None else list(self._mesh.devices.flat)
        if self._store is not None:
            with self.while_busy(LOADING):
                loaded = self._store.load(name, devices)
            if loaded is not None:
                return loaded  # type: ignore[no-any-return]
        with self.while_busy(COMPILING):
            made = compiled(lower().compile)
        if self._store is not None:
            self._store.save(name, devices, made)
        return made

    def _engine(self) -> tuple[Any, ...]:
        mesh = None if self._mesh is None else (self._mesh.shape, self._mesh.axis_types)
        return self._config, self._settings, self._graph, mesh


def _shapes(tree: Any) -> list[str]:
    leaves, structure = jax.tree.flatten(tree)
    placed = [(x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves]
    return [str(structure), *map(str, placed)]


def _abstract(x: Any, layout: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)


def slot_sizes(traits: Traits) -> dict[str, Any]:
    """Returns the traits that determine the shape of the state."""
    return {
        "window": traits.window,
        "with_logprobs": traits.logprobs,
        "lookup": traits.lookup,
    }


# --- The functions that are compiled ---------------------------------------------------------

Graph = nnx.GraphDef[Transformer]


class BurstResult(NamedTuple):
    """The result of one burst.

    Attributes:
      state, pages: the new state and pages, which stay on the device for the next burst.
      numbers: int32 ``[N, 7 + 4 E]`` for the host; see `wedlm_jax.decode.state.pack_for_host`.
      logprobs: ``[N, E]``, log-probabilities of the emitted tokens; None unless requested.
      counters: int32 ``[R]`` or ``[R, S]``, counters of each replica.
      last: the last forward; None without trait "traced".
    """

    state: DecodeState
    pages: Pages
    numbers: Array
    logprobs: Logprobs | None
    counters: BurstCounters
    last: LastForward | None


def burst(
    graph: Graph,
    program: Program,
    parameters: nnx.State,
    state: DecodeState,
    pages: Pages,
    options: Options,
    allowance: Allowance,
    changed: Array,
    hidden: Array | None = None,
) -> BurstResult:
    """Runs a burst of forwards; see `wedlm_jax.decode.loop.run_burst`."""

    def on_replica(parameters: nnx.State, *arguments: Any) -> BurstResult:
        model = nnx.merge(graph, parameters)
        after, pages, counters, last = run_burst(model, program, *arguments)
        counters = jax.tree.map(lambda x: x[None], counters)
        numbers, logprobs = pack_for_host(after), after.emitted.logprobs
        return BurstResult(after, pages, numbers, logprobs, counters, last)

    return on_replicas(on_replica)(parameters, state, pages, options, allowance, changed, hidden)


def layers(
    graph: Graph, program: Program, parameters: nnx.State, *arguments: Any
) -> tuple[Array, Pages]:
    """Runs `wedlm_jax.decode.loop.run_layers_ahead` on each replica, with the arguments of
    `burst`."""

    def on_replica(parameters: nnx.State, *arguments: Any) -> tuple[Array, Pages]:
        return run_layers_ahead(nnx.merge(graph, parameters), program, *arguments)

    hidden, pages = on_replicas(on_replica)(parameters, *arguments)
    return constrain(hidden, "sequences"), pages


@partial(jax.jit, donate_argnames="state")
def enter(state: DecodeState, entrants: Entrants, released: Array) -> DecodeState:
    """Adds and removes sequences; see `wedlm_jax.decode.state.admit`. Every replica receives all
    entrants and takes its share."""

    def on_replica(
        state: DecodeState, entrants: Entrants, released: Array, indices: Array
    ) -> DecodeState:
        count = indices.shape[0]
        local = entrants.index - indices[0]
        local = jnp.where((local >= 0) & (local < count), local, count)
        return admit(state, dataclasses.replace(entrants, index=local), released)

    indices = jnp.arange(released.shape[0], dtype=jnp.int32)
    return on_replicas(on_replica, whole=(1,))(state, entrants, released, indices)


@partial(jax.jit, static_argnames=("window", "with_logprobs", "lookup"))
def resize(state: DecodeState, *, window: int, with_logprobs: bool, lookup: int) -> DecodeState:
    """Grows or shrinks each sequence's slot arrays; see
    `wedlm_jax.decode.state.resize_slots`."""
    resized = resize_slots(state, window, with_logprobs, lookup)
    return jax.tree.map(lambda x: constrain(x, "sequences"), resized)


# --- shapes of the arguments ----------------------------------------------------------------


def lower_burst(
    graph: nnx.GraphDef[Transformer],
    parameters: Any,
    config: ModelConfig,
    settings: EngineSettings,
    traits: Traits,
    mesh: Mesh | None = None,
    *,
    choose_layouts: bool = False,
    function: Any = burst,
) -> jax.stages.Lowered:
    """Lowers an engine's burst, under its mesh.

    The compiled program takes a list of the parameters' arrays, the state, the pages, the options,
    the allowance, which windows changed and, with a grammar, the hidden states. It overwrites pages
    and state. It takes a list because flattening Flax's tree of variables would double the time of
    a call.

    Args:
      graph, parameters: the model's graph definition and parameters; these may be shapes.
      traits: the traits of the sequences.
      mesh: the mesh of the devices; None for a single device.
      choose_layouts: let the compiler choose the memory layout of each parameter; the compiled
        program's ``input_formats`` has them. Otherwise a TPU program copies, in every burst, each
        parameter whose layout does not suit its loop: 0.3 GiB per chip for an 8B model on eight
        chips.
      function: `burst`, or `layers`, which leaves the state as it is.
    """
    arguments = burst_arguments(config, settings, traits, mesh)
    program = settings.program(traits)
    if function is layers:
        arguments[2] = dataclasses.replace(arguments[2], allowed=None)
    elif traits.grammar:
        each = jax.eval_shape(lambda p: no_hidden_states(nnx.merge(graph, p), program), parameters)
        rows = settings.replicas * each.shape[0]
        hidden = jax.ShapeDtypeStruct((rows, *each.shape[1:]), each.dtype)
        arguments.append(_placed(mesh, hidden, ()))
    leaves, structure = jax.tree.flatten(parameters)

    def run(leaves: list[Any], *arguments: Any) -> Any:
        parameters = jax.tree.unflatten(structure, leaves)
        return function(graph, program, parameters, *arguments)

    formats: Any = None
    if choose_layouts:
        formats = [Format(Layout.AUTO, x.sharding) for x in leaves]
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    overwritten = (2,) if function is layers else (1, 2)
    shardings = (formats, *[None] * len(arguments))
    jitted = jax.jit(run, in_shardings=shardings, donate_argnums=overwritten)
    return jitted.lower(leaves, *arguments)


def burst_arguments(
    config: ModelConfig, settings: EngineSettings, traits: Traits, mesh: Mesh | None
) -> list[Any]:
    """Returns the shapes of the arguments of `burst` after the parameters: the state, the pages,
    the options, the allowance, and which windows have changed."""
    pages = jax.eval_shape(
        partial(
            allocate_pages,
            config,
            settings.num_pages,
            settings.page_size,
            settings.cache_dtype,
            replicas=settings.replicas,
        )
    )
    sequences = settings.sequences

    def integers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    allowance = Allowance(
        integers(sequences, settings.max_pages),
        integers(sequences),
        integers(sequences),
        integers(),
        integers(),
        integers(settings.replicas),
        _seconds(settings, traits),
    )
    changed = jax.ShapeDtypeStruct((sequences,), jnp.bool)
    others = (abstract_options(sequences, traits, config.vocab_size), allowance, changed)
    options, allowance, changed = _placed(mesh, others, ())
    state = abstract_state(settings, traits, mesh)
    return [state, _placed(mesh, pages, (None, "attention_heads")), options, allowance, changed]


def _seconds(settings: EngineSettings, traits: Traits) -> Any:
    if not traits.lookup:
        return None
    sizes = settings.program(traits).sizes.tokens
    return jax.ShapeDtypeStruct((settings.replicas, len(sizes)), jnp.float32)


def abstract_state(settings: EngineSettings, traits: Traits, mesh: Mesh | None) -> Any:
    """Returns the shapes of the state, with their shardings."""
    return _placed(mesh, jax.eval_shape(partial(empty_state, settings, traits)), ())


def empty_state(settings: EngineSettings, traits: Traits) -> Any:
    """Allocates the state of an engine without sequences."""
    return idle_state(
        settings.sequences,
        window=traits.window,
        text=settings.max_text,
        emitted=settings.emitted,
        with_logprobs=traits.logprobs,
        lookup=traits.lookup,
    )


def _placed(mesh: Mesh | AbstractMesh | None, tree: Any, names: tuple[str | None, ...]) -> Any:
    """Returns shapes with shardings: the first axis over replicas, the following axes by name."""
    if mesh is None:
        return tree
    axes = [AXIS_RULES[axis] if axis else None for axis in names]

    def place(leaf: Any) -> Any:
        spec = PartitionSpec("data", *axes) if leaf.ndim else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


# --- Sequences that enter --------------------------------------------------------------------

ENTRANTS_AT_ONCE = 16
"""Maximum sequences that enter in one call. Calls are padded to this, so all have one shape."""


@dataclasses.dataclass(frozen=True)
class SavedWindow:
    """The window of a preempted sequence.

    Attributes:
      tokens, filled: ``[active]``, the tokens of its active slots and whether they are filled.
      logprobs: ``[active]``, log-probabilities of the filled slots, with as many alternatives as
        the request asks for; None if it asks for none.
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
    """Converts up to `ENTRANTS_AT_ONCE` admissions into arguments of a program with these traits.

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
        numbers[i], row, row_filled = _window_of(
            admission, window, anchored=_is_anchored(admission, window)
        )
        tokens[i, : len(row)], filled[i, : len(row_filled)] = row, row_filled
        if admission.resume is not None and logprobs is not None:
            _put(logprobs, i, admission.resume.logprobs)
    return Entrants(index, text, numbers, tokens, filled, logprobs)  # type: ignore[arg-type]


def _is_anchored(admission: Admission, window: int) -> bool:
    return window == 0 or admission.request.params.mode != "paper"


def _window_of(
    admission: Admission, window: int, *, anchored: bool
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns a sequence's row of `Entrants`: numbers, and the window's tokens and filled slots."""
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
