"""The compiled programs of an engine: a burst, and letting sequences in.

Both work on every replica of the mesh's ``data`` axis alike, each on its own sequences and its
own pages; within a replica the compiler cuts heads, MLP and vocabulary over ``tensor``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.attention.ragged_pages import Pages
from wedlm_jax.decode.admission import Entrants, admit, look, with_slots
from wedlm_jax.decode.forward import Program
from wedlm_jax.decode.logprobs import Logprobs
from wedlm_jax.decode.loop import BurstCounters, run_burst
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.spans import Allowance
from wedlm_jax.decode.state import DecodeState
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import on_replicas

Graph = nnx.GraphDef[Transformer]


class BurstResult(NamedTuple):
    """What a burst leaves.

    Attributes:
      state, pages: on the device, for the next burst.
      numbers: int32 ``[N, 7 + 3 E]`` for the host; see `wedlm_jax.decode.admission.look`.
      logprobs: ``[N, E]`` of the emitted tokens; None where no sequence asks for them.
      counters: int32 ``[1]`` each, of every replica.
    """

    state: DecodeState
    pages: Pages
    numbers: Array
    logprobs: Logprobs | None
    counters: BurstCounters


@partial(jax.jit, static_argnames=("graph", "program"), donate_argnames=("state", "pages"))
def burst(
    graph: Graph,
    parameters: nnx.State,
    state: DecodeState,
    pages: Pages,
    options: Options,
    allowance: Allowance,
    changed: Array,
    *,
    program: Program,
) -> BurstResult:
    """A burst of forwards; see `wedlm_jax.decode.loop.run_burst`."""

    def on_replica(
        parameters: nnx.State,
        state: DecodeState,
        pages: Pages,
        options: Options,
        allowance: Allowance,
        changed: Array,
    ) -> BurstResult:
        model = nnx.merge(graph, parameters)
        after, pages, counters = run_burst(
            model, state, pages, options, allowance, changed, program
        )
        counters = jax.tree.map(lambda x: x[None], counters)
        return BurstResult(after, pages, look(after), after.emitted.logprobs, counters)

    return on_replicas(on_replica)(parameters, state, pages, options, allowance, changed)


@partial(jax.jit, donate_argnames="state")
def enter(state: DecodeState, entrants: Entrants, released: Array) -> DecodeState:
    """Takes sequences in and out; see `wedlm_jax.decode.admission.admit`. Every replica sees all
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


@partial(jax.jit, static_argnames=("window", "num_logprobs"))
def resize(state: DecodeState, *, window: int, num_logprobs: int | None) -> DecodeState:
    """Makes room for other windows; see `wedlm_jax.decode.admission.with_slots`."""
    return with_slots(state, window, num_logprobs)
