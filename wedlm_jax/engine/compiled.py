"""Compiled programs of a device, each for some traits, and kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

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
from wedlm_jax.host.signals import compiled
from wedlm_jax.model import Transformer


class CompiledPrograms:
    """Compiles programs when they are first wanted, in any thread.

    Compilation is kept apart from running so that its time is known and never counted as decoding.

    Args:
      graph: of the model.
      mesh: of the model; None for one device.

    Attributes:
      formats: how the parameters must lie in memory, as the first burst to be compiled wants them;
        None before that, and where the compiler does not choose.
      seconds: spent on compiling so far.
      on_compile: called before a program is compiled, with its number, from 1.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Transformer],
        config: ModelConfig,
        settings: EngineSettings,
        mesh: Mesh | None,
    ):
        self._graph, self._config, self._settings, self._mesh = graph, config, settings, mesh
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._choosing = threading.Lock()
        self.formats: nnx.State | None = None
        self.seconds = 0.0
        self.on_compile: Callable[[int], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._compiled)

    def clear(self) -> None:
        """Drops compiled programs; they are compiled again on demand."""
        self._compiled.clear()

    @property
    def traits(self) -> list[Traits]:
        """Those whose sequences can be decoded without compiling."""
        return [key[1] for key in list(self._compiled) if key[0] is device_programs.burst]

    def compile(self, parameters: Any, kinds: list[Traits]) -> Iterator[tuple[int, int]]:
        """Compiles all that sequences of these kinds need, which may follow one another; yields how
        many programs are done, of how many.

        Args:
          parameters: of the model, or their shapes.
        """
        for old, new in permutations(dict.fromkeys([*kinds, *self.traits]), 2):
            if slot_sizes(old) != slot_sizes(new):
                self.resize(old, new)
        for number, traits in enumerate(kinds):
            self.entry(traits)
            yield 2 * number + 1, 2 * len(kinds)
            self.burst(parameters, traits)
            yield 2 * number + 2, 2 * len(kinds)

    def burst(self, parameters: Any, traits: Traits) -> jax.stages.Compiled:
        """Returns the program of a burst of forwards, which takes parameters that lie as `formats`
        says."""

        def lower(parameters: Any, *, choose: bool = False) -> jax.stages.Lowered:
            arguments = (self._graph, parameters, self._config, self._settings, traits, self._mesh)
            return lower_burst(*arguments, choose_layouts=choose)

        key = (device_programs.burst, traits)
        with self._choosing:
            if self._settings.compiler_lays_out and self.formats is None:
                chosen = self._kept(key, lambda: lower(parameters, choose=True))
                self.formats = chosen.input_formats[0][0]

        def lower_laid_out() -> jax.stages.Lowered:
            if self.formats is None:
                return lower(parameters)
            return lower(jax.tree.map(_abstract, parameters, self.formats))

        return self._kept(key, lower_laid_out)

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
            key, lambda: function.lower(self._graph, parameters, *arguments, **static)
        )

    def _kept(self, key: Any, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        if key not in self._compiled:
            self.on_compile(len(self._compiled) + 1)
            started = time.monotonic()
            self._compiled[key] = compiled(lower().compile)
            self.seconds += time.monotonic() - started
        return self._compiled[key]


def _abstract(x: Any, wanted: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)


def slot_sizes(traits: Traits) -> dict[str, Any]:
    """Returns the traits on which the shape of a state depends."""
    return {"window": traits.window, "num_logprobs": traits.num_logprobs}
