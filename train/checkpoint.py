"""Training checkpoints: a `TrainState` as the flat dictionary that orbax writes."""

from __future__ import annotations

from pathlib import Path

import jax

from train.step import TrainState
from wedlm_jax.orbax_io import StepFolders


class Checkpoints:
    """The newest few states of a run, written in the background, whole or not at all."""

    def __init__(self, folder: Path, keep: int):
        self._folders = StepFolders(folder, keep)

    def latest_step(self) -> int | None:
        return self._folders.latest_step()

    def save(self, state: TrainState) -> None:
        self._folders.save(int(state.step), _as_dict(state))

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, with the shapes, dtypes and placement of ``like``."""
        restored = self._folders.restore(_as_dict(like))
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(restored))

    def close(self) -> None:
        self._folders.close()


def _as_dict(state: TrainState) -> dict[str, jax.Array]:
    """Leaves under flat, sortable names: orbax then needs to know none of our classes."""
    leaves = jax.tree.leaves(state)
    return {f"{i:04d}": leaf for i, leaf in enumerate(leaves)}
