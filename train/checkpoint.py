"""Training checkpoints: a `TrainState` as the flat dictionary that orbax writes.

Parameters that a run does not train are left out: they never change, and may be most of the model.

Each state has a checksum of every array, computed on the devices, so that a file damaged on disk is
detected when it is read and not some thousand steps later.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from train.step import TrainState
from wedlm_jax.checkpoint.orbax import (
    DamagedCheckpoint,
    OtherState,
    StepFolders,
    check_state,
    restore_state,
)
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.processes import (
    SEEN_WITHIN_S,
    fail_together,
    is_first,
    jax_processes,
    say,
    text_of_first,
    texts_of_all,
)

CHECKSUMS = "checksums"
PAUSES_S = (5.0, 30.0)
"""Pauses before the second and the third consecutive attempt to write a state. A bucket's client
retries several times within each attempt."""


class Checkpoints:
    """Saves and restores the states of a run.

    Args:
      folder: the folder of the states.
      keep: how many of the newest states to keep.
      keep_every: also keep each state whose step is a multiple of this; 0 for none.
      timeout: seconds within which a state must be written.
      states: the steps of existing states, from `train.agreement.agree`; by default those found.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        keep_every: int = 0,
        timeout: int = 1200,
        states: Sequence[int] | None = None,
    ):
        self._folder, self._keep, self._keep_every = folder, keep, keep_every
        self._folders = StepFolders(folder, keep, keep_every, timeout, states)
        self._under_way, self._failed, self._pause = False, 0, 0.0

    def steps(self) -> list[int]:
        """Lists the steps whose states were written completely, newest first."""
        return self._folders.steps()

    def kept(self, every: int) -> str:
        """Describes which states are kept if a run writes one at these intervals."""
        text = f"a state every {every:,} steps, of which the newest {self._keep} stay"
        if not self._keep_every:
            return text
        both = math.lcm(every, self._keep_every)
        text += f", and for good those at multiples of {both:,}"
        if both != self._keep_every:
            text += f": keep_every={self._keep_every} is no multiple of checkpoint_every"
        return text

    def save(self, state: TrainState, *, whole: bool = False) -> None:
        """Starts to write a state, unless its step exists already. All processes call this.

        Args:
          whole: return only when it is written, after as many attempts as it takes.

        Raises:
          StorageFailure: in all processes, if too many consecutive attempts have failed.
        """
        self._settled()
        self._start(state)
        while whole and not self._settled():
            self._start(state)

    def failed(self) -> bool:
        """Returns whether a process failed to write the last state, so that another should be
        saved. All processes call this after the same step.

        Raises:
          StorageFailure: as in `save`.
        """
        if not self._under_way or not jax_processes().all_true(not self._folders.saving):
            return False
        return not self._settled()

    def _start(self, state: TrainState) -> None:
        step = int(state.step)
        if step not in self._folders.steps():
            time.sleep(self._pause)
            arrays = _as_dict(state)
            self._folders.save(step, arrays | {CHECKSUMS: checksums(arrays)})
            self._under_way = True

    def _settled(self) -> bool:
        """Waits until no state is being written; returns whether the last one was written."""
        if not self._under_way:
            return True
        self._under_way = False
        try:
            self._folders.finish()
        except StorageFailure as failure:
            self._failed += 1
            attempts = len(PAUSES_S) + 1
            if self._failed == attempts:
                raise StorageFailure(
                    f"{self._folder}: {failure}, the last of {attempts} attempts; the same command "
                    "goes on from the newest whole state"
                ) from None
            self._pause = PAUSES_S[self._failed - 1]
            say(f"{failure}; attempt {self._failed + 1} of {attempts} in {self._pause:g} s")
            return False
        self._failed, self._pause = 0, 0.0
        return True

    def restore(self, like: TrainState, say: Callable[[str], None] = print) -> TrainState | None:
        """Returns the newest whole state, with shapes and shardings as in ``like`` but without
        frozen parameters; None if there has never been a state. Damaged states are reported through
        ``say`` and set aside.

        Args:
          like: arrays, or only their shapes and shardings.
          say: called with a message for each damaged state.

        Raises:
          InputError: all states are damaged, or the newest belongs to another model.
          StorageFailure: in all processes, if one of them cannot read it now, or does not see the
            files that the others see.
        """
        steps = self._folders.steps()
        for step in steps:
            try:
                return self._read(step, like)
            except DamagedCheckpoint as damage:
                if is_first():
                    print(f"{damage}; reading it once more", file=sys.stderr, flush=True)
            # A state is damaged if reading fails again when all processes see the same files; until
            # then a process may not have seen all of them yet.
            self._see_the_same(step)
            try:
                return self._read(step, like)
            except DamagedCheckpoint as damage:
                say(f"{damage}; it is set aside, and the state before it is tried")
            self._folders.set_aside(step)
        if steps or self._folders.any_set_aside():
            raise InputError(
                f"{self._folder}: every state is damaged; nothing can be resumed, and a run that "
                "is to start over needs another output"
            )
        return None

    def _see_the_same(self, step: int) -> None:
        """Waits until all processes see the same files of a state.

        Raises:
          StorageFailure: in all processes, if they do not within `SEEN_WITHIN_S`.
        """
        deadline = time.monotonic() + SEEN_WITHIN_S
        while True:
            seen = texts_of_all(self._folders.files(step))
            other = next((i for i, files in enumerate(seen) if files != seen[0]), None)
            late = text_of_first("late" if time.monotonic() > deadline else "")
            if other is None:
                return
            if late:
                raise StorageFailure(
                    f"{self._folder / str(step)}: is left as it is, because after "
                    f"{SEEN_WITHIN_S:.0f} s host {other} of {len(seen)} still sees {seen[other]} "
                    f"there and host 0 {seen[0]}"
                )
            time.sleep(0.5)

    def _read(self, step: int, like: TrainState) -> TrainState:
        try:
            return read_state(self._folder / str(step), like)
        except OtherState as other:
            raise InputError(f"{other}, so give the run a folder of its own") from None

    def close(self) -> None:
        self._folders.close()


def read_state(folder: Path, like: TrainState) -> TrainState:
    """Reads the state in a folder, with shapes and shardings as in ``like`` but without frozen
    parameters. All processes call this; nothing is written there.

    Raises:
      DamagedCheckpoint: in all processes, if one of them cannot read what was written.
      OtherState: the state belongs to another model or optimizer.
      StorageFailure: as in `Checkpoints.restore`.
    """
    arrays = _as_dict(like)
    expected = jnp.zeros((len(arrays),), jnp.uint32)
    damage = failure = refusal = ""
    restored = None
    try:
        restored = restore_state(folder, arrays | {CHECKSUMS: expected})
    except DamagedCheckpoint as error:
        damage = str(error)
    except StorageFailure as error:
        failure = str(error)
    except InputError as error:
        refusal = str(error)
    fail_together(failure)
    fail_together(refusal, OtherState)
    fail_together(damage, DamagedCheckpoint)
    assert restored is not None
    expected = restored.pop(CHECKSUMS)
    wrong = jax.device_get(checksums(restored) != expected)
    if wrong.any():
        names = ", ".join(name for name, bad in zip(sorted(arrays), wrong, strict=True) if bad)
        raise DamagedCheckpoint(f"{folder}: array {names} is not what was written")
    structure = jax.tree.structure(_trained(like))
    return jax.tree.unflatten(structure, [restored[name] for name in sorted(restored)])


def check_readable(folder: Path, like: TrainState) -> None:
    """Refuses a state of another model or optimizer, going by its headers.

    Raises:
      OtherState: its arrays differ from those of ``like``, which may be shapes.
    """
    arrays = _as_dict(like)
    check_state(folder, arrays | {CHECKSUMS: jax.ShapeDtypeStruct((len(arrays),), jnp.uint32)})


@jax.jit
def checksums(arrays: dict[str, Array]) -> Array:
    """Returns the checksum of each array in the order of their names, uint32 ``[N]``: the sum of
    its words, each multiplied by an odd number that depends on its place, modulo 2³²."""
    return jnp.stack([_checksum(arrays[name]) for name in sorted(arrays)])


def _checksum(x: Array) -> Array:
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    # Places along each axis are mixed by odd factors, modulo 2³². A flat index would make the
    # compiler move a sharded array.
    weights = jnp.ones((), jnp.uint32)
    for axis in range(x.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        weights = weights * jnp.uint32(2654435761) + 2 * place
    return (words.astype(jnp.uint32) * weights).sum(dtype=jnp.uint32)


def _as_dict(state: TrainState) -> dict[str, Array]:
    """Returns the leaves under flat, sortable names, so that orbax need not know our classes."""
    leaves = jax.tree.leaves(_trained(state))
    return {f"{i:04d}": leaf for i, leaf in enumerate(leaves)}


def _trained(state: TrainState) -> TrainState:
    return dataclasses.replace(state, frozen=None)
