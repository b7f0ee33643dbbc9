"""What a recipe's program is made of: optimizer, objective, first state and batch on a mesh."""

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
from train.skipped_steps import Guard, GuardState
from train.step import Objective, TrainState, make_train_step
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import batch_sharding, tree_shardings


def schedule_of(config: TrainConfig) -> optax.Schedule:
    """Learning rate by step: a linear warm-up, then a cosine over the rest of the run.

    Raises:
      InputError: the warm-up leaves no step for the cosine.
    """
    o = config.optimizer
    if not 0 <= o.warmup_steps < config.steps:
        raise InputError(
            f"optimizer.warmup_steps must be 0 to {config.steps - 1}, below steps, "
            f"not {o.warmup_steps}"
        )
    return optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, o.warmup_steps, config.steps, o.final_learning_rate
    )


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
    )


def guard_of(config: TrainConfig) -> Guard:
    return Guard(spike_factor=config.optimizer.spike_factor)


def objective_of(config: TrainConfig, model: ModelConfig) -> Objective:
    mask = model.require_mask_token_id() if config.objective == "wedlm" else None
    loss = LossConfig(**dataclasses.asdict(config.loss))
    return Objective(config.objective, config.block_size, mask, loss, config.suffix_share)


def first_state(parameters: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), parameters, optimizer.init(parameters))


def abstract_state(
    mesh: Mesh, parameters: nnx.State, optimizer: optax.GradientTransformation
) -> TrainState:
    """Shapes, dtypes and places of the first state; ``parameters`` may be shapes, too."""
    shapes = jax.eval_shape(lambda p: first_state(p, optimizer), parameters)

    def place(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, tree_shardings(mesh, shapes))


def abstract_rows(config: TrainConfig, mesh: Mesh) -> PackedRows:
    """Shapes, dtypes and places of a global batch ``[A, R, L]``."""
    shape = (config.accumulation, config.rows, config.row_length)
    place = batch_sharding(mesh)
    whole: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    flags: Any = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=place)
    return PackedRows(tokens=whole, positions=whole, segment_ids=whole, trainable=flags)


def lowered_step(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> jax.stages.Lowered:
    """Traces the step of a recipe, from shapes alone. Called under ``jax.set_mesh(mesh)``."""
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
    optimizer, objective = optimizer_of(config), objective_of(config, model)
    step = make_train_step(
        graph, optimizer, objective, schedule=schedule_of(config), guard=guard_of(config)
    )
    state = abstract_state(mesh, parameters, optimizer)
    return step.lower(state, abstract_rows(config, mesh), _abstract_key(mesh))


def _abstract_key(mesh: Mesh) -> Any:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def placed_state(
    mesh: Mesh, parameters: nnx.State, optimizer: optax.GradientTransformation
) -> TrainState:
    """The first state around parameters that are placed already, the rest made where the rules
    put it."""
    layout = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(mesh, parameters, optimizer))
    moments = jax.jit(optimizer.init, out_shardings=layout.optimizer)(parameters)
    step = jax.device_put(jnp.zeros((), jnp.int32), layout.step)
    guard = jax.device_put(GuardState.first(), layout.guard)
    return TrainState(step, parameters, moments, guard)
