"""Training checkpoints: the one file in `train` that knows orbax."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from train.step import TrainState


class Checkpoints:
    """The newest few states of a run, written in the background, whole or not at all."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        self._manager.save(int(state.step), args=ocp.args.StandardSave(_as_tree(state)))

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, with the shapes, dtypes and placement of ``like``."""
        step = self._manager.latest_step()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_tree(like))
        tree = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        leaves = jax.tree.leaves(tree)
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _as_tree(state: TrainState) -> dict[str, jax.Array]:
    """Leaves under flat, sortable names: orbax then needs to know none of our classes."""
    leaves = jax.tree.leaves(state)
    return {f"{i:04d}": leaf for i, leaf in enumerate(leaves)}
