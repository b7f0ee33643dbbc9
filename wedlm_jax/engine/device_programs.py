"""The compiled programs of an engine: a burst of forwards, sequences that enter and leave, resized
slot arrays; and the shapes of their arguments, to compile for present and absent devices.

Each replica of the mesh's ``data`` axis runs them on its own sequences and pages; within a replica
the compiler shards heads, MLP and vocabulary over ``tensor``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from wedlm_jax.attention.ragged import Pages, allocate_pages
from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.forward import Program
from wedlm_jax.decode.logprobs import Logprobs
from wedlm_jax.decode.loop import BurstCounters, run_burst
from wedlm_jax.decode.options import Options, Traits, abstract_options
from wedlm_jax.decode.spans import Allowance
from wedlm_jax.decode.state import (
    DecodeState,
    Entrants,
    LastForward,
    admit,
    idle_state,
    pack_for_host,
    resize_slots,
)
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import AXIS_RULES, constrain, on_replicas

Graph = nnx.GraphDef[Transformer]


class BurstResult(NamedTuple):
    """Holds what a burst returns.

    Attributes:
      state, pages: on the device, for the next burst.
      numbers: int32 ``[N, 7 + 4 E]`` for the host; see `wedlm_jax.decode.state.pack_for_host`.
      logprobs: ``[N, E]`` of the emitted tokens; None where no sequence asks for them.
      counters: int32 ``[R]`` or ``[R, S]``, of each replica.
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
) -> BurstResult:
    """Runs a burst of forwards; see `wedlm_jax.decode.loop.run_burst`."""

    def on_replica(
        parameters: nnx.State,
        state: DecodeState,
        pages: Pages,
        options: Options,
        allowance: Allowance,
        changed: Array,
    ) -> BurstResult:
        model = nnx.merge(graph, parameters)
        after, pages, counters, last = run_burst(
            model, state, pages, options, allowance, changed, program
        )
        counters = jax.tree.map(lambda x: x[None], counters)
        numbers, logprobs = pack_for_host(after), after.emitted.logprobs
        return BurstResult(after, pages, numbers, logprobs, counters, last)

    return on_replicas(on_replica)(parameters, state, pages, options, allowance, changed)


@partial(jax.jit, donate_argnames="state")
def enter(state: DecodeState, entrants: Entrants, released: Array) -> DecodeState:
    """Puts sequences in and out; see `wedlm_jax.decode.state.admit`. Every replica gets all
    entrants, and takes its own."""

    def on_replica(
        state: DecodeState, entrants: Entrants, released: Array, indices: Array
    ) -> DecodeState:
        count = indices.shape[0]
        own = entrants.index - indices[0]
        own = jnp.where((own >= 0) & (own < count), own, count)
        return admit(state, dataclasses.replace(entrants, index=own), released)

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
) -> jax.stages.Lowered:
    """Lowers the burst of an engine, under its mesh.

    Compiled, it takes a list of the parameters' arrays, state, pages, options, allowance and
    changed windows, and overwrites state and pages. A list, because flattening Flax's tree of
    variables takes as long as all else that calls a program.

    Args:
      graph, parameters: of the model; the parameters may be shapes.
      traits: of the sequences.
      mesh: of the devices; None for one device.
      choose_layouts: let the compiler choose how each parameter lies in memory. The compiled
        program's ``input_formats`` say how. Otherwise a TPU program copies each parameter that its
        loop wants to lie differently, in every burst: 0.3 GiB a chip of an 8B model on eight.
    """
    arguments = burst_arguments(config, settings, traits, mesh)
    leaves, structure = jax.tree.flatten(parameters)

    def run(leaves: list[Any], *arguments: Any) -> BurstResult:
        parameters = jax.tree.unflatten(structure, leaves)
        return burst(graph, settings.program(traits), parameters, *arguments)

    wanted: Any = None
    if choose_layouts:
        wanted = [Format(Layout.AUTO, x.sharding) for x in leaves]
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    jitted = jax.jit(run, in_shardings=(wanted, *[None] * len(arguments)), donate_argnums=(1, 2))
    return jitted.lower(leaves, *arguments)


def burst_arguments(
    config: ModelConfig, settings: EngineSettings, traits: Traits, mesh: Mesh | None
) -> tuple[Any, ...]:
    """Returns the shapes of what `burst` takes after the parameters: the state, the pages, the
    options, the allowance, and which windows have changed."""
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
    return state, _placed(mesh, pages, (None, "attention_heads")), options, allowance, changed


def _seconds(settings: EngineSettings, traits: Traits) -> Any:
    if not traits.lookup:
        return None
    sizes = settings.program(traits).sizes.tokens
    return jax.ShapeDtypeStruct((settings.replicas, len(sizes)), jnp.float32)


def abstract_state(settings: EngineSettings, traits: Traits, mesh: Mesh | None) -> Any:
    """Returns the shapes of the state, each where the mesh has it."""
    return _placed(mesh, jax.eval_shape(partial(empty_state, settings, traits)), ())


def empty_state(settings: EngineSettings, traits: Traits) -> Any:
    """Allocates the state of an engine without any sequence."""
    return idle_state(
        settings.sequences,
        window=traits.window,
        text=settings.max_text,
        emitted=settings.emitted,
        with_logprobs=traits.logprobs,
        lookup=traits.lookup,
    )


def _placed(mesh: Mesh | AbstractMesh | None, tree: Any, behind: tuple[str | None, ...]) -> Any:
    """Returns shapes with a sharding: the first axis over replicas, those after it as named."""
    if mesh is None:
        return tree
    axes = [AXIS_RULES[axis] if axis else None for axis in behind]

    def place(leaf: Any) -> Any:
        spec = PartitionSpec("data", *axes) if leaf.ndim else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)
