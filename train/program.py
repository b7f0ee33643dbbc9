"""What a recipe's program is made of: optimizer, objective, first state and batch on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from train.config import TrainConfig
from train.optimizer import make_optimizer
from train.schedule import schedule_of
from train.skipped_steps import Guard, GuardState
from train.step import Objective, TrainState
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.loss import LossConfig
from wedlm_jax.sharding import batch_sharding, tree_shardings


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
