"""The jitted training step: masks, loss, gradients and update in one program.

The global batch arrives as ``[A, R, L]``: A accumulation steps of R packed rows. The dual-stream
batch is built on the device; denominators are summed over the whole global batch before the scan
over A, so accumulation affects only memory.

A step is skipped if its gradients are not finite, or far larger than usual. Parameters and
optimizer then stay unchanged; the data and the learning rate advance, since they depend on the
step's number. This is decided inside the program, so nothing waits for the host, which reads it
with the metrics (`train.watch.records`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from wedlm_jax.corruption import DualStreamBatch, PackedRows, dual_stream, sample_masks
from wedlm_jax.drafter import (
    WindowBatch,
    drafter_denominators,
    drafter_loss,
    draw_anchors,
    window_batch,
)
from wedlm_jax.loss import LossConfig, ar_denominators, ar_loss, wedlm_denominators, wedlm_loss
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import constrain_tree

NORM_DECAY = 0.98
"""The decay of the running mean of gradient norms, which covers about 50 steps."""
SETTLE = 50
"""The first steps, whose norms vary much, in which spikes do not count."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """The guard's memory.

    Attributes:
      mean_norm: float32 scalar, running mean of the gradient norms of the steps taken.
      skipped: int32 scalar, steps skipped in a row until now.
    """

    mean_norm: Array
    skipped: Array

    @classmethod
    def first(cls) -> GuardState:
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


def judge(
    state: GuardState, step: Array, norm: Array, spike_factor: float = 0.0
) -> tuple[Array, GuardState]:
    """Returns whether step number ``step`` (from 0), with this gradient norm, is taken, a bool
    scalar, and the guard's state after it. A step is skipped if its norm is not finite, or exceeds
    the running mean by ``spike_factor``, unless that is 0."""
    taken, known = jnp.isfinite(norm), state.mean_norm > 0
    if spike_factor:
        taken &= (step < SETTLE) | ~known | (norm <= spike_factor * state.mean_norm)
    mean = jnp.where(known, NORM_DECAY * state.mean_norm + (1 - NORM_DECAY) * norm, norm)
    return taken, GuardState(
        mean_norm=jnp.where(taken, mean, state.mean_norm),
        skipped=jnp.where(taken, 0, state.skipped + 1),
    )


GROUPS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "q_proj": "attention",
    "k_proj": "attention",
    "v_proj": "attention",
    "o_proj": "attention",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
    "scale": "norms",
}
"""A parameter's group, by a part of its path."""


def group_norms(tree: Any, name: str) -> dict[str, Array]:
    """Returns the Euclidean norm of each group's leaves over all layers, as float32 scalars called
    ``<name>_norm_<group>``."""
    squares: dict[str, list[Array]] = collections.defaultdict(list)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        group = next((GROUPS[part] for part in parts if part in GROUPS), "others")
        squares[group].append(jnp.square(leaf.astype(jnp.float32)).sum())
    return {f"{name}_norm_{group}": jnp.sqrt(sum(parts)) for group, parts in squares.items()}


Metrics = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
      step: int32 scalar, completed steps.
      parameters: the trained parameters, an `nnx.State` in float32: the model's or its adapters'.
      optimizer: the optax state.
      guard: the guard's memory.
      frozen: the model's other parameters, in the compute dtype; None if all are trained.
    """

    step: Array
    parameters: nnx.State
    optimizer: Any
    guard: GuardState = dataclasses.field(default_factory=GuardState.first)
    frozen: nnx.State | None = None


def forgiven(state: TrainState) -> TrainState:
    """Returns the same state with the count of consecutive skipped steps reset."""
    none = jax.device_put(np.zeros((), np.int32), state.guard.skipped.sharding)
    return dataclasses.replace(state, guard=dataclasses.replace(state.guard, skipped=none))


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is learned.

    Attributes:
      kind: "wedlm" (MLM + AR over dual streams), "ar" (next token) or "drafter" (only masks).
      block_size: B of the dual stream, or W of a drafter's windows.
      mask_token_id: the token at masked inputs; only used by "wedlm".
      suffix_share: the share of blocks whose last tokens are masked.
      windows, distance: for a drafter, the windows of masks per row, and a distance in
        `wedlm_jax.model.distillation.DISTANCES`.
      loss: options of the loss.
    """

    kind: str
    block_size: int
    mask_token_id: int | None
    loss: LossConfig
    suffix_share: float = 0.0
    windows: int = 0
    distance: str = "kl"


def make_train_step(
    graph: nnx.GraphDef[Transformer],
    optimizer: optax.GradientTransformationExtraArgs,
    objective: Objective,
    *,
    schedule: optax.Schedule | None = None,
    spike_factor: float = 0.0,
    norms: bool = True,
) -> jax.stages.Wrapped:
    """Returns the jitted step, whose state argument is donated. Called under ``jax.set_mesh``, it
    runs on that mesh, sharded by the rules of `wedlm_jax.sharding`.

    Args:
      optimizer: an optimizer from `make_optimizer`.
      schedule: the optimizer's schedule, for reporting the learning rate.
      spike_factor: which steps are skipped (`judge`).
      norms: whether to measure norms of parameters and updates (`group_norms`).

    Returns:
      ``step(state, rows, key)``: ``rows`` has arrays ``[A, R, L]``; ``key`` is the run's mask key,
      into which the step number is folded. Metrics are float32 scalars, except losses by mask ratio
      and by source (see `wedlm_jax.loss.wedlm_loss`) and ``denominators``, a dictionary of what the
      losses were divided by; ``skipped`` counts consecutive skipped steps, and is 0 if this one was
      taken.
    """

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, rows: PackedRows, key: Array) -> tuple[TrainState, Metrics]:
        batches, denominators, loss = prepare(objective, rows, jax.random.fold_in(key, state.step))
        gradients, metrics = accumulate(
            graph, state.parameters, batches, denominators, loss, state.frozen
        )
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer, state.parameters, step=state.step
        )
        parameters = optax.apply_updates(state.parameters, updates)
        # Measured before clipping, which would hide a spike.
        norm = optax.global_norm(gradients)
        taken, guard_state = judge(state.guard, state.step, norm, spike_factor)
        # Both branches exist in the program, and a skipped step keeps the old state bit for bit.
        parameters, optimizer_state = jax.tree.map(
            partial(jnp.where, taken),
            (parameters, optimizer_state),
            (state.parameters, state.optimizer),
        )
        metrics |= {"gradient_norm": norm, "skipped": guard_state.skipped}
        metrics["denominators"] = denominators
        if norms:
            metrics |= group_norms(state.parameters, "parameter") | group_norms(updates, "update")
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        new_state = TrainState(
            state.step + 1, parameters, optimizer_state, guard_state, state.frozen
        )
        return constrain_tree(new_state), metrics

    return step


def with_frozen(parameters: nnx.State, frozen: nnx.State | None) -> nnx.State:
    """Returns all parameters of a model, the frozen ones included."""
    return parameters if frozen is None else nnx.merge_state(parameters, frozen)


def make_evaluation_step(graph: nnx.GraphDef[Transformer], objective: Objective) -> Any:
    """Returns the jitted forward pass over held-out rows ``[A, R, L]``, which computes the metrics
    of a training step that need no gradient. Its argument ``key`` draws the masks."""

    @jax.jit
    def evaluate(parameters: nnx.State, rows: PackedRows, key: Array) -> Metrics:
        batches, denominators, loss = prepare(objective, rows, key)

        def body(_: None, batch: Any) -> tuple[None, Metrics]:
            value, shares = loss(nnx.merge(graph, parameters), batch, denominators)
            return None, {"loss": value, **shares}

        _, shares = jax.lax.scan(body, None, batches)
        return jax.tree.map(partial(jnp.sum, axis=0), shares)

    return evaluate


LossFn = Callable[[Transformer, Any, dict[str, Array]], tuple[Array, Metrics]]


def prepare(
    objective: Objective, rows: PackedRows, key: Array
) -> tuple[PackedRows | DualStreamBatch | WindowBatch, dict[str, Array], LossFn]:
    """Returns the model's batches ``[A, R, ...]``, global denominators, and the loss function."""
    if objective.kind == "ar":
        return rows, _totals(ar_denominators, rows), partial(ar_loss, config=objective.loss)
    # A key for each row, so that its masks do not depend on how a step is divided into
    # micro-batches.
    keys = jax.random.split(key, rows.tokens.shape[:2])
    if objective.kind == "drafter":
        draw = partial(draw_anchors, count=objective.windows)
        anchors = jax.vmap(jax.vmap(draw))(keys, rows)
        windows = jax.vmap(partial(window_batch, width=objective.block_size))(rows, anchors)
        loss = partial(drafter_loss, config=objective.loss, distance=objective.distance)
        return windows, _totals(drafter_denominators, windows), loss
    draw_row = partial(
        sample_masks, block_size=objective.block_size, suffix_share=objective.suffix_share
    )
    drawn = jax.vmap(jax.vmap(draw_row))(keys, rows.trainable[:, :, None])
    masked, ratio = (x[:, :, 0] for x in drawn)
    return prepare_given(objective, rows, masked, ratio)


def prepare_given(
    objective: Objective, rows: PackedRows, masked: Array, mask_ratio: Array
) -> tuple[DualStreamBatch, dict[str, Array], LossFn]:
    """Does the same as `prepare` with given masks and ratios ``[A, R, L]``, in logical order."""
    assert objective.mask_token_id is not None, "see `train.program.objective_of`"
    build = partial(
        dual_stream, block_size=objective.block_size, mask_token_id=objective.mask_token_id
    )
    batches = jax.vmap(build)(rows, masked, mask_ratio)
    totals = _totals(partial(wedlm_denominators, config=objective.loss), batches)
    return batches, totals, partial(wedlm_loss, config=objective.loss)


def _totals(count: Callable[[Any], dict[str, Array]], batches: Any) -> dict[str, Array]:
    """Returns the denominators of the whole global batch, before any gradient. Each micro-batch
    then adds its share of one mean, so accumulation does not change the result."""
    return jax.tree.map(partial(jnp.sum, axis=0), jax.vmap(count)(batches))


def accumulate(
    graph: nnx.GraphDef[Transformer],
    parameters: nnx.State,
    batches: Any,
    denominators: dict[str, Array],
    loss: LossFn,
    frozen: nnx.State | None = None,
) -> tuple[nnx.State, Metrics]:
    """Returns the gradients by ``parameters`` and the metrics of the global batch, computed one
    micro-batch at a time. ``frozen`` are the model's other parameters, if any."""

    def total(parameters: nnx.State, batch: Any) -> tuple[Array, Metrics]:
        model = nnx.merge(graph, with_frozen(parameters, frozen))
        value, shares = loss(model, batch, denominators)
        return value, {"loss": value, **shares}

    gradient = jax.grad(total, has_aux=True)

    def body(carry: tuple[nnx.State, Metrics], batch: Any) -> tuple[tuple, None]:
        gradients, shares = jax.tree.map(jnp.add, carry, gradient(parameters, batch))
        # Sharded like the parameters, so that no device holds a whole sum over micro-batches.
        return (constrain_tree(gradients), shares), None

    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(gradient, parameters, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (gradients, metrics), _ = jax.lax.scan(body, zeros, batches)
    return gradients, metrics
