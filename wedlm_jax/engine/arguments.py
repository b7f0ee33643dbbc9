"""The arguments of an engine's programs as shapes alone: to compile for devices that are here, and
for those that are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from wedlm_jax.attention.ragged_pages import allocate_pages
from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.options import Traits, abstract_options
from wedlm_jax.decode.spans import Allowance
from wedlm_jax.decode.state import idle_state
from wedlm_jax.engine.programs import burst
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import AXIS_RULES


def lower_burst(
    graph: nnx.GraphDef[Transformer],
    parameters: Any,
    config: ModelConfig,
    settings: EngineSettings,
    traits: Traits,
    mesh: Mesh | None = None,
) -> jax.stages.Lowered:
    """Lowers the burst of an engine, under its mesh.

    Args:
      graph, parameters: of the model; the parameters may be shapes.
      traits: of the sequences.
      mesh: of the devices; None for one device.
    """
    arguments = burst_arguments(config, settings, traits, mesh)
    return burst.lower(graph, parameters, *arguments, program=settings.program(traits))


def burst_arguments(
    config: ModelConfig, settings: EngineSettings, traits: Traits, mesh: Mesh | None
) -> tuple[Any, ...]:
    """What `wedlm_jax.engine.programs.burst` takes behind the parameters: the state, the pages, the
    options, the allowance, and whose window has changed."""
    state = jax.eval_shape(partial(empty_state, settings, traits))
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
        integers(),
    )
    changed = jax.ShapeDtypeStruct((sequences,), jnp.bool)
    others = (state, abstract_options(sequences, traits), allowance, changed)
    state, options, allowance, changed = _placed(mesh, others, ())
    return state, _placed(mesh, pages, (None, "attention_heads")), options, allowance, changed


def empty_state(settings: EngineSettings, traits: Traits) -> Any:
    """The state without any sequence."""
    return idle_state(
        settings.sequences,
        window=traits.window,
        text=settings.max_text,
        emitted=settings.emitted,
        num_logprobs=traits.num_logprobs,
    )


def _placed(mesh: Mesh | AbstractMesh | None, tree: Any, behind: tuple[str | None, ...]) -> Any:
    """The shapes, each cut over the replicas, and behind that axis as named."""
    if mesh is None:
        return tree
    axes = [AXIS_RULES[axis] if axis else None for axis in behind]

    def place(leaf: Any) -> Any:
        spec = PartitionSpec("data", *axes) if leaf.ndim else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)
