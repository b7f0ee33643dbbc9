"""A recipe's program: model, mesh, the state's shapes and the step, built in one place.

`wedlm train` runs what `wedlm train --compile-only` compiles, because both call `make_program`. It
needs no weights: shapes, dtypes and shardings are enough to compile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.optimizer import make_optimizer, schedule_of
from train.recipe.config import TrainConfig
from train.recipe.phases import phases_of, source_names
from train.step import GuardState, Objective, TrainState, make_train_step
from wedlm_jax.aot.topology import compiler_options
from wedlm_jax.attention import check_runs_on
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.errors import require_extra
from wedlm_jax.host.signals import compiled
from wedlm_jax.loss import LossConfig
from wedlm_jax.model import Transformer
from wedlm_jax.model.layers import with_int8_products
from wedlm_jax.model.lora import TARGETS, LoraConfig, with_adapters
from wedlm_jax.sharding import batch_sharding, check_fits, tree_shardings


def lora_of(config: TrainConfig) -> LoraConfig | None:
    """Returns the recipe's adapters; None if it trains all parameters."""
    lora = config.lora
    targets = tuple(name for name in TARGETS if name in lora.targets)
    if not lora.rank:
        return None
    if config.objective == "drafter":
        section = config.drafter
        return LoraConfig(
            lora.rank, lora.alpha, targets, "masked", section.window_size, section.previous_rank
        )
    return LoraConfig(lora.rank, lora.alpha, targets)


def objective_of(config: TrainConfig, model: ModelConfig) -> Objective:
    mask = model.require_mask_token_id() if config.objective == "wedlm" else None
    loss = LossConfig(**dataclasses.asdict(config.loss))
    if config.objective == "drafter":
        section = config.drafter
        return Objective(
            "drafter",
            section.window_size,
            None,
            loss,
            windows=config.windows,
            distance=section.distance,
        )
    return Objective(config.objective, config.block_size, mask, loss, config.suffix_share)


def abstract_state(
    mesh: Mesh,
    parameters: nnx.State,
    optimizer: optax.GradientTransformationExtraArgs,
    frozen: nnx.State | None = None,
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the first state; ``parameters`` and ``frozen``
    may be shapes, too."""

    def first(parameters: nnx.State, frozen: nnx.State | None) -> TrainState:
        step, moments = jnp.zeros((), jnp.int32), optimizer.init(parameters)
        return TrainState(step, parameters, moments, frozen=frozen)

    shapes = jax.eval_shape(first, parameters, frozen)

    def place(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, tree_shardings(mesh, shapes))


def abstract_rows(config: TrainConfig, mesh: Mesh, sources: int = 1) -> PackedRows:
    """Returns the shapes, dtypes and shardings of a global batch ``[A, R, L]`` for a number of
    sources."""
    place = batch_sharding(mesh)

    def array(width: int, dtype: Any) -> Any:
        shape = (config.accumulation, config.rows, width)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    whole = array(config.row_length, jnp.int32)
    flags = array(config.row_length, jnp.bool_)
    source = array(sources, jnp.bool_) if sources > 1 else None
    blocks = None
    if config.leaves_blocks_out:
        blocks = array(config.prediction_blocks, jnp.int32)
    return PackedRows(whole, whole, whole, flags, source, blocks)


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """What a recipe runs on a mesh.

    Attributes:
      lora: the adapters that it trains while the model is frozen; None if it trains all parameters.
      graph: graph definition of the model.
      optimizer: the optimizer, with its schedule.
      step: the jitted step; see `train.step.make_train_step`.
      state: shapes, dtypes and shardings of the state that the step reads and writes.
      rows: shapes, dtypes and shardings of a global batch.
      key: shape, dtype and sharding of the masks' key.
    """

    config: TrainConfig
    model: ModelConfig
    lora: LoraConfig | None
    mesh: Mesh
    graph: nnx.GraphDef[Transformer]
    optimizer: optax.GradientTransformationExtraArgs
    objective: Objective
    step: jax.stages.Wrapped
    state: TrainState
    rows: PackedRows
    key: Any

    def lower(self, rows: PackedRows | None = None) -> jax.stages.Lowered:
        """Traces the step. Call this under ``jax.set_mesh(mesh)``.

        Args:
          rows: from `abstract_rows`, for a phase with batches of another shape.
        """
        return self.step.lower(self.state, rows or self.rows, self.key)

    def compile(self, rows: PackedRows | None = None) -> jax.stages.Compiled:
        """Compiles the step for the mesh's devices, with the flags that suit them."""
        options: Any = compiler_options(self.mesh.devices.flat[0].device_kind)
        lowered = self.lower(rows)
        return compiled(lambda: lowered.compile(compiler_options=options or None))

    def mask_key(self) -> jax.Array:
        """Returns the key from which the masks of all steps are drawn, replicated."""
        return jax.jit(lambda: jax.random.key(self.config.seed), out_shardings=self.key.sharding)()

    def random_parameters(self) -> nnx.State:
        """Draws the trained parameters from the recipe's seed, each with its sharding."""

        def make() -> nnx.State:
            return _split(_transformer(self.model, self.config), self.config)[1]

        layout = jax.tree.map(lambda leaf: leaf.sharding, self.state.parameters)
        return jax.jit(make, out_shardings=layout)()

    def first_state(self, given: nnx.State | None = None) -> TrainState:
        """Returns the state before the first step, with its shardings.

        Args:
          given: the model's parameters, with their shardings: the ones to train or, if adapters are
            trained, the frozen ones. By default they are drawn.
        """
        frozen = given if self.lora else None
        parameters = self.random_parameters() if given is None or self.lora else given
        layout = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        moments = jax.jit(self.optimizer.init, out_shardings=layout.optimizer)(parameters)
        step = jax.device_put(jnp.zeros((), jnp.int32), layout.step)
        guard = jax.device_put(GuardState.first(), layout.guard)
        return TrainState(step, parameters, moments, guard, frozen)


def make_program(
    config: TrainConfig, model: ModelConfig, mesh: Mesh, sources: int | None = None
) -> TrainProgram:
    """Builds the program of a recipe; nothing is compiled yet.

    Args:
      model: the architecture; see `train.start.recipe_model`.
      mesh: from `wedlm_jax.sharding.make_mesh`; its devices may be absent.
      sources: the number of sources of the whole run, if the recipe is a phase's; by default the
        recipe's.

    Raises:
      InputError: sizes, of any phase, that the mesh does not divide, an attention kernel that is
        not for these devices, a schedule without room, or a model without a mask token.
    """
    check_runs_on(config.loss.attention, mesh.devices.flat[0].platform)
    if config.quantized_training == "int8":
        require_extra("quantized_training", "int8", "qwix")
    for phase in phases_of(config):
        check_fits(mesh, model, rows=phase.config.rows, row_tokens=phase.config.row_tokens)
    shapes = nnx.eval_shape(lambda: _transformer(model, config))
    graph, parameters, frozen = _split(shapes, config)
    schedule, objective = schedule_of(config), objective_of(config, model)
    optimizer = make_optimizer(schedule, config.optimizer)
    step = make_train_step(
        graph,
        optimizer,
        objective,
        schedule=schedule,
        spike_factor=config.optimizer.spike_factor,
        norms=config.metrics.norms,
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    return TrainProgram(
        config=config,
        model=model,
        lora=lora_of(config),
        mesh=mesh,
        graph=graph,
        optimizer=optimizer,
        objective=objective,
        step=step,
        state=abstract_state(mesh, parameters, optimizer, frozen),
        rows=abstract_rows(config, mesh, sources or len(source_names(config))),
        key=jax.ShapeDtypeStruct(
            key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
    )


def _transformer(architecture: ModelConfig, config: TrainConfig) -> Transformer:
    """Returns a recipe's model, drawn at random, with its adapters."""
    rngs = nnx.Rngs(params=jax.random.key(config.seed))
    model, lora = Transformer(architecture, rngs=rngs), lora_of(config)
    if config.quantized_training == "int8":
        model = with_int8_products(model)
    return model if lora is None else with_adapters(model, lora, rngs)


def _split(
    model: Transformer, config: TrainConfig
) -> tuple[nnx.GraphDef[Transformer], nnx.State, nnx.State | None]:
    """Returns a model's graph, its trained parameters and, in the compute dtype, its frozen ones.
    The model may consist of shapes."""
    if model.lora is None:
        graph, parameters = nnx.split(model)
        return graph, parameters, None
    graph, adapters, *others = nnx.split(model, nnx.LoRAParam, ...)
    dtype = jnp.dtype(config.loss.dtype)

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype)
        return leaf.astype(dtype)

    return graph, adapters, jax.tree.map(cast, others[0])
