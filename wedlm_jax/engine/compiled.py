"""Compiled programs of a device, each for some traits, and kept: in memory and on the disk."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.options import Traits
from wedlm_jax.engine import device_programs
from wedlm_jax.engine.device_programs import abstract_state, lower_burst
from wedlm_jax.engine.entering import make_entrants
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.host.compiled_cache import ProgramStore
from wedlm_jax.host.progress import COMPILING, LOADING
from wedlm_jax.host.signals import compiled
from wedlm_jax.model import Transformer

Busy: TypeAlias = Callable[[str], contextlib.AbstractContextManager[Any]]


class CompiledPrograms:
    """Compiles programs when they are first wanted, in any thread.

    Compilation is kept apart from running so that its time is known and never counted as decoding.

    Args:
      graph: of the model.
      mesh: of the model; None for one device.
      store: where programs are kept for the next process; None keeps them nowhere.

    Attributes:
      formats: how the parameters must lie in memory, as the first burst to be compiled wants them;
        None before that, and where the compiler does not choose.
      seconds: spent on compiling so far, and on loading what was compiled before.
      while_busy: makes a context for what callers wait for, which it is told: a program that is
        compiled or loaded, a measurement.
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
        """Says what callers wait for, and counts it as time of compiling."""
        started = time.monotonic()
        with self.while_busy(what):
            yield
        self.seconds += time.monotonic() - started

    @property
    def traits(self) -> list[Traits]:
        """Those whose sequences can be decoded without compiling."""
        return [key[1] for key in list(self._compiled) if key[0] is device_programs.burst]

    def compile(self, parameters: Any, kinds: list[Traits]) -> None:
        """Compiles all that sequences of these kinds need, which may follow one another.

        Args:
          parameters: of the model, or their shapes.
        """
        for old, new in permutations(dict.fromkeys([*kinds, *self.traits]), 2):
            if slot_sizes(old) != slot_sizes(new):
                self.resize(old, new)
        for traits in kinds:
            self.entry(traits)
            self.burst(parameters, traits)

    def burst(self, parameters: Any, traits: Traits) -> jax.stages.Compiled:
        """Returns the program of a burst of forwards, which takes a list of the parameters' arrays
        that lie as `formats` says."""
        key = (device_programs.burst, traits)
        if key in self._compiled:
            return self._compiled[key]

        def lower(parameters: Any, *, choose: bool = False) -> jax.stages.Lowered:
            arguments = (self._graph, parameters, self._config, self._settings, traits, self._mesh)
            return lower_burst(*arguments, choose_layouts=choose)

        depends = (self._settings.program(traits), _shapes(parameters))
        with self._choosing:
            if self._settings.compiler_lays_out and self.formats is None:
                chosen = self._kept(
                    key, lambda: lower(parameters, choose=True), *depends, "layouts are chosen"
                )
                structure = jax.tree.structure(parameters)
                self.formats = jax.tree.unflatten(structure, chosen.input_formats[0][0])

        def lower_laid_out() -> jax.stages.Lowered:
            if self.formats is None:
                return lower(parameters)
            return lower(jax.tree.map(_abstract, parameters, self.formats))

        return self._kept(key, lower_laid_out, *depends, str(self.formats))

    def entry(self, traits: Traits) -> jax.stages.Compiled:
        """Returns the program for sequences that enter and leave."""

        def lower() -> jax.stages.Lowered:
            settings = self._settings
            state = abstract_state(settings, traits, self._mesh)
            nobody = np.zeros(settings.sequences, bool)
            windows = np.zeros(settings.sequences, np.int32)
            entrants = make_entrants(settings, traits, [], windows)
            return device_programs.enter.lower(state, entrants, nobody)

        return self._kept((device_programs.enter, *slot_sizes(traits).values()), lower)

    def resize(self, old: Traits, new: Traits) -> jax.stages.Compiled:
        """Returns the program that gives the state of one kind the slots of another."""

        def lower() -> jax.stages.Lowered:
            state = abstract_state(self._settings, old, self._mesh)
            return device_programs.resize.lower(state, **slot_sizes(new))

        sizes = (*slot_sizes(old).values(), *slot_sizes(new).values())
        return self._kept((device_programs.resize, *sizes), lower)

    def of_model(
        self, function: Any, parameters: Any, *arguments: Any, **static: Any
    ) -> jax.stages.Compiled:
        """Compiles a jitted function of graph, parameters and arguments of these shapes."""
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
        """Returns the program of that key: from memory, from the store, or compiled.

        Args:
          key: the function, and what it is compiled for.
          depends: what else the executable depends on beside the engine, for its name in the store.
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


def _abstract(x: Any, wanted: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)


def slot_sizes(traits: Traits) -> dict[str, Any]:
    """Returns the traits on which the shape of a state depends."""
    return {
        "window": traits.window,
        "with_logprobs": traits.logprobs,
        "lookup": traits.lookup,
    }
