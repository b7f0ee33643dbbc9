"""A recipe's program: model, mesh, the state's shapes and the compiled step, built in one place.

`wedlm train` runs what `wedlm train --compile-only` compiles, because both call `make_program`.
Nothing here holds a weight: shapes, dtypes and places are enough to compile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.config import TrainConfig
from train.optimizer import make_optimizer
from train.phases import source_names
from train.schedule import schedule_of
from train.skipped_steps import Guard, GuardState
from train.step import Objective, TrainState, TrainStep, make_train_step
from train.streams import leaves_blocks_out, row_tokens
from wedlm_jax.aot.topology import compiler_options
from wedlm_jax.attention import check_runs_on
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.loss import LossConfig
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import batch_sharding, check_fits, tree_shardings


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """The recipe's optimizer under its schedule."""
    o = config.optimizer
    return make_optimizer(
        schedule_of(config),
        name=o.name,
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
        first_moment_dtype=o.first_moment_dtype,
        average=o.average,
    )


def guard_of(config: TrainConfig) -> Guard:
    return Guard(spike_factor=config.optimizer.spike_factor)


def objective_of(config: TrainConfig, model: ModelConfig) -> Objective:
    mask = model.require_mask_token_id() if config.objective == "wedlm" else None
    loss = LossConfig(**dataclasses.asdict(config.loss))
    return Objective(config.objective, config.block_size, mask, loss, config.suffix_share)


def abstract_state(
    mesh: Mesh, parameters: nnx.State, optimizer: optax.GradientTransformation
) -> TrainState:
    """Shapes, dtypes and places of the first state; ``parameters`` may be shapes, too."""

    def first(parameters: nnx.State) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), parameters, optimizer.init(parameters))

    shapes = jax.eval_shape(first, parameters)

    def place(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, tree_shardings(mesh, shapes))


def abstract_rows(config: TrainConfig, mesh: Mesh, sources: int = 1) -> PackedRows:
    """Shapes, dtypes and places of a global batch ``[A, R, L]`` of a run with so many sources."""
    place = batch_sharding(mesh)

    def array(width: int, dtype: Any) -> Any:
        shape = (config.accumulation, config.rows, width)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    whole = array(config.row_length, jnp.int32)
    flags = array(config.row_length, jnp.bool_)
    source = array(sources, jnp.bool_) if sources > 1 else None
    blocks = None
    if leaves_blocks_out(config):
        blocks = array(config.prediction_blocks, jnp.int32)
    return PackedRows(whole, whole, whole, flags, source, blocks)


@dataclasses.dataclass(frozen=True)
class TrainProgram:
    """What a recipe runs on a mesh.

    Attributes:
      config: the recipe.
      model: the architecture that it trains.
      mesh: where.
      graph: of the model.
      optimizer: under its schedule.
      objective: what is learned.
      step: jitted; see `train.step.make_train_step`.
      state: shapes, dtypes and places of the state that the step reads and writes.
      rows: the same of a global batch.
      key: the same of the masks' key.
    """

    config: TrainConfig
    model: ModelConfig
    mesh: Mesh
    graph: nnx.GraphDef[Transformer]
    optimizer: optax.GradientTransformation
    objective: Objective
    step: TrainStep
    state: TrainState
    rows: PackedRows
    key: Any

    def lower(self, rows: PackedRows | None = None) -> jax.stages.Lowered:
        """Traces the step. Called under ``jax.set_mesh(mesh)``.

        Args:
          rows: those of a phase with batches of another shape; from `abstract_rows`.
        """
        return self.step.lower(self.state, rows or self.rows, self.key)

    def compile(self, rows: PackedRows | None = None) -> jax.stages.Compiled:
        """Compiles `lower` for the mesh's own devices, with the flags that suit them."""
        options: Any = compiler_options(self.mesh.devices.flat[0].device_kind)
        return self.lower(rows).compile(compiler_options=options or None)

    def mask_key(self) -> jax.Array:
        """Makes the key from which the masks of all steps are drawn, on every device."""
        return jax.jit(lambda: jax.random.key(self.config.seed), out_shardings=self.key.sharding)()

    def random_parameters(self) -> nnx.State:
        """Draws parameters from the recipe's seed, each where it lies."""

        def make() -> nnx.State:
            key = jax.random.key(self.config.seed)
            return nnx.state(Transformer(self.model, rngs=nnx.Rngs(params=key)))

        layout = jax.tree.map(lambda leaf: leaf.sharding, self.state.parameters)
        return jax.jit(make, out_shardings=layout)()

    def first_state(self, parameters: nnx.State) -> TrainState:
        """Makes the state before the first step around parameters that are placed already, the rest
        where it lies."""
        layout = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        moments = jax.jit(self.optimizer.init, out_shardings=layout.optimizer)(parameters)
        step = jax.device_put(jnp.zeros((), jnp.int32), layout.step)
        guard = jax.device_put(GuardState.first(), layout.guard)
        return TrainState(step, parameters, moments, guard)


def make_program(
    config: TrainConfig, model: ModelConfig, mesh: Mesh, sources: int | None = None
) -> TrainProgram:
    """Builds the program of a recipe; nothing is compiled yet.

    Args:
      config: the recipe.
      model: the architecture; see `train.start.recipe_model`.
      mesh: from `wedlm_jax.sharding.make_mesh`, of devices that are here or absent.
      sources: of the whole run, where the recipe is that of a phase; by default the recipe's.

    Raises:
      InputError: sizes that the mesh does not divide, an attention kernel that is not for these
        devices, a schedule without room, or a model without a mask token.
    """
    check_runs_on(config.loss.attention, mesh.devices.flat[0].platform)
    check_fits(mesh, model, rows=config.rows, row_tokens=row_tokens(config))
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
    optimizer, objective = optimizer_of(config), objective_of(config, model)
    step = make_train_step(
        graph,
        optimizer,
        objective,
        schedule=schedule_of(config),
        guard=guard_of(config),
        norms=config.metrics.norms,
    )
    return TrainProgram(
        config=config,
        model=model,
        mesh=mesh,
        graph=graph,
        optimizer=optimizer,
        objective=objective,
        step=step,
        state=abstract_state(mesh, parameters, optimizer),
        rows=abstract_rows(config, mesh, sources or len(source_names(config))),
        key=_abstract_key(mesh),
    )


def _abstract_key(mesh: Mesh) -> Any:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
