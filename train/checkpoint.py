"""Training checkpoints: orbax writes a `TrainState` as a flat dictionary, in the background, whole
or not at all.

Parameters that a run does not train are left out: they never change, and may be most of the model.

Each state has a checksum of every array, computed on the devices, so that a file damaged on disk is
detected when it is read and not some thousand steps later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax import Array

from train.step import TrainState
from wedlm_jax.checkpoint.orbax import (
    COMMITTED,
    DamagedCheckpoint,
    array_headers,
    late_reports_unheard,
    quiet,
    read_orbax,
    step_tree,
    whole_steps,
)
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.processes import (
    SEEN_WITHIN_S,
    answer_of_first,
    fail_together,
    is_first,
    jax_processes,
    say,
    text_of_first,
    texts_of_all,
)
from wedlm_jax.host.storage import (
    absolute,
    file_sizes,
    is_remote,
    move_tree,
    retried,
    storage_message,
)

CHECKSUMS = "checksums"
DAMAGED = ".damaged"
"""A part of the name of a state that was set aside."""
PAUSES_S = (0.0, 5.0, 30.0)
"""Pauses before consecutive attempts to write a state. A bucket's client retries several times
within each attempt."""


class OtherState(InputError):
    """Raised if a state belongs to another model or optimizer."""


class Checkpoints:
    """Saves and restores the states of a run. All processes of the run call each method, and write
    and read their own shards.

    Args:
      folder: the folder of the states; made if absent.
      keep: how many of the newest states to keep.
      keep_every: also keep each state whose step is a multiple of this; 0 for none.
      timeout: seconds within which a state must be written.
      states: the steps of existing states, the same in all processes, from `train.agreement.agree`;
        by default those that process 0 finds.
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
        self._timeout = timeout
        if states is None:
            states = json.loads(text_of_first(json.dumps(whole_steps(folder))))
        self._states = sorted(states)
        self._meetings = SaveMeetings()
        self._manager: ocp.CheckpointManager | None = None
        self._silence = contextlib.ExitStack()
        self._under_way, self._refused, self._failed = False, "", 0

    def steps(self) -> list[int]:
        """Lists the steps whose states were written completely, newest first."""
        found = self._states if self._manager is None else self._manager.all_steps()
        return sorted(found, reverse=True)

    def kept(self, every: int) -> str:
        """Describes which states are kept if a run writes one at these intervals."""
        text = f"a state every {every:,} steps; the newest {self._keep} are kept"
        if not self._keep_every:
            return text
        both = math.lcm(every, self._keep_every)
        text += f", and all at multiples of {both:,}"
        if both != self._keep_every:
            text += f": keep_every={self._keep_every} is not a multiple of checkpoint_every"
        return text

    def save(self, state: TrainState, *, whole: bool = False) -> None:
        """Starts to write a state, unless its step exists already.

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
        if not self._under_way:
            return False
        saving = self._manager is not None and self._manager.is_saving_in_progress()
        if not jax_processes().all_true(not saving):
            return False
        return not self._settled()

    def _start(self, state: TrainState) -> None:
        """Begins to write a state; returns when its arrays may be overwritten."""
        step = int(state.step)
        if step in self.steps():
            return
        time.sleep(PAUSES_S[min(self._failed, len(PAUSES_S) - 1)])
        arrays = _as_dict(state)
        arrays |= {CHECKSUMS: checksums(arrays)}
        self._meetings.begin(step)
        # Orbax's threads would wait for minutes for a folder that could not be made.
        refusal = text_of_first(self._refusal() if is_first() else "")
        self._refused = self._meetings.sentence({0: refusal}) if refusal else ""
        if not refusal:
            self._opened().save(step, args=ocp.args.StandardSave(arrays), force=True)
        self._under_way = True

    def _refusal(self) -> str:
        """Makes the folder and writes a file next to the states; returns the storage's error, or
        an empty text."""
        path = self._folder / ".writable"
        try:
            with contextlib.suppress(FileExistsError):  # writing reports what is there instead
                self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            path.unlink()
        except Exception as error:
            # A bucket's client has errors of many types.
            return storage_message(error)
        return ""

    def _settled(self) -> bool:
        """Waits until no state is being written; returns whether the last one was written."""
        if not self._under_way:
            return True
        self._under_way = False
        failure = self._refused or self._failure()
        if not failure:
            self._failed = 0
            return True
        self._failed += 1
        attempts = len(PAUSES_S)
        if self._failed == attempts:
            raise StorageFailure(
                f"{self._folder}: {failure}, the last of {attempts} attempts; the same command "
                "continues from the newest whole state"
            )
        pause = PAUSES_S[self._failed]
        say(f"{failure}; attempt {self._failed + 1} of {attempts} in {pause:g} s")
        return False

    def _failure(self) -> str:
        """Waits until the state under way is written. Returns an empty text or, in every process if
        one of them could not write it, the reason."""
        assert self._manager is not None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            # If the manager's own thread failed, the one that writes arrays may still be running,
            # and would raise its error in the next save.
            with contextlib.suppress(Exception):
                self._manager._checkpointer.wait_until_finished()
            return self._meetings.note(error)
        return ""

    def _opened(self) -> ocp.CheckpointManager:
        """Returns orbax's manager, which is made when the first state is written. It never lists
        the states itself, since each process would do so on its own."""
        if self._manager is not None:
            return self._manager
        # Its background threads log their errors, which `_settled` reports in one sentence.
        self._silence.enter_context(late_reports_unheard())
        logging.getLogger("absl").addFilter(_is_no_error_of_orbax)
        self._silence.callback(logging.getLogger("absl").removeFilter, _is_no_error_of_orbax)
        options = ocp.CheckpointManagerOptions(
            step_name_format=_ListedSteps(self._states),
            max_to_keep=self._keep,
            keep_period=self._keep_every or None,
            create=False,
            async_options=ocp.options.AsyncOptions(
                timeout_secs=self._timeout, barrier_sync_fn=self._meetings
            ),
            # Otherwise one process queries the storage while the others wait for it on the devices,
            # where they cannot be told that it failed. The background threads check, too.
            file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
            # Otherwise each process would read when each state was written.
            lightweight_initialize=True,
        )
        with quiet():
            self._manager = ocp.CheckpointManager(absolute(self._folder), options=options)
        return self._manager

    def restore(self, like: TrainState, say: Callable[[str], None] = print) -> TrainState | None:
        """Returns the newest whole state, with shapes and shardings as in ``like`` but without
        frozen parameters; None if there has never been a state. Damaged states are reported through
        ``say`` and set aside.

        Args:
          like: arrays, or only their shapes and shardings.

        Raises:
          InputError: all states are damaged, or the newest belongs to another model.
          StorageFailure: in all processes, if one of them cannot read it now, or does not see the
            files that the others see.
        """
        steps = self.steps()
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
            self._set_aside(step)
        if steps or self._any_set_aside():
            raise InputError(
                f"{self._folder}: every state is damaged, so the run cannot be resumed; to start "
                "over, use another output"
            )
        return None

    def _see_the_same(self, step: int) -> None:
        """Waits until all processes see the same files of a state; raises `StorageFailure` in all
        of them if they do not within `SEEN_WITHIN_S`."""
        deadline = time.monotonic() + SEEN_WITHIN_S
        while True:
            seen = texts_of_all(self._files(step))
            other = next((i for i, files in enumerate(seen) if files != seen[0]), None)
            late = answer_of_first(time.monotonic() > deadline)
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
            raise InputError(f"{other}, so use another output") from None

    def _files(self, step: int) -> str:
        """Describes the files of a state that this process sees, and their sizes."""
        folder = self._folder / str(step)
        found = sorted(retried(folder, lambda: file_sizes(folder)).items())
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:8]
        return f"{len(found)} files of {sum(size for _, size in found):,} bytes ({digest})"

    def _set_aside(self, step: int) -> None:
        """Renames a state, so that it no longer counts and its step can be written again."""
        assert self._manager is None
        folder, failure = self._folder / str(step), ""
        if is_first():
            try:
                suffixes = itertools.chain([""], (f"-{i}" for i in itertools.count(2)))
                places = (folder.with_name(f"{step}{DAMAGED}{suffix}") for suffix in suffixes)
                place = next(place for place in places if not place.exists())
                if is_remote(folder):
                    move_tree(folder, place, COMMITTED)
                else:
                    folder.rename(place)
            except Exception as error:
                failure = f"{folder}: cannot be renamed ({storage_message(error)})"
        fail_together(failure)
        self._states.remove(step)

    def _any_set_aside(self) -> bool:
        """Returns whether process 0 sees a state that this or an earlier attempt set aside."""
        return answer_of_first(any(self._folder.glob(f"*{DAMAGED}*")))

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
          StorageFailure: in all processes, if one of them could not write the last state.
        """
        if self._manager is None:
            return
        try:
            if failure := self._failure():
                raise StorageFailure(failure)
        finally:
            self._manager.close()
            self._silence.close()


class SaveMeetings:
    """Orbax's `AsyncOptions.barrier_sync_fn`: processes wait for one another, and all raise if one
    of them has failed.

    Orbax writes in background threads, which wait for those of the other processes after writing,
    and again when the state counts. If a write fails, its thread ends, and the others would wait
    for it until the timeout. But as it ends it requests one more wait, with its error in flight. So
    here every process has one sequence of meetings per state, whatever keys orbax gives them: a
    process that failed reports it, and joins the meeting at which the others wait.
    """

    def __init__(self) -> None:
        self._processes = jax_processes()
        several = self._processes.count > 1
        self._client: Any = ocp.multihost.get_jax_distributed_client() if several else None
        self._name = text_of_first(uuid.uuid4().hex)
        self._state, self._met, self._step = 0, 0, 0
        self._starter = 0
        self._one_at_a_time = threading.Lock()
        self.failure = ""

    def begin(self, step: int) -> None:
        """Begins the next state. Every process calls this, in the thread that starts to write."""
        self._state, self._met, self._step, self.failure = self._state + 1, 0, step, ""
        self._starter = threading.get_ident()

    def note(self, error: BaseException) -> str:
        """Returns why the state failed: what a process has reported, or the error of this one."""
        self.failure = self.failure or self.sentence(
            {self._processes.index: storage_message(error)}
        )
        return self.failure

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        if self._processes.count == 1:
            return
        # The thread that starts to write may be handling an unrelated error.
        starts = threading.get_ident() == self._starter
        error = None if starts else sys.exception()
        place = f"wedlm/{self._name}/{self._state}"
        if error is not None and not self.failure:
            self._client.key_value_set(
                f"{place}/failed/{self._processes.index}", storage_message(error), True
            )
        with self._one_at_a_time:
            if not self.failure:
                self._meet(place, timeout_ms)
        if self.failure and error is None:
            raise StorageFailure(self.failure)

    def _meet(self, place: str, timeout_ms: int) -> None:
        self._met += 1
        try:
            self._client.wait_at_barrier(f"{place}/{self._met}", timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            self.note(error)
            return
        failed = self._client.key_value_dir_get(f"{place}/failed/")
        if failed:
            self.failure = self.sentence({int(name.split("/")[-1]): why for name, why in failed})

    def sentence(self, failed: dict[int, str]) -> str:
        """Returns the message about a state: the storage's error in each process that failed."""
        count = self._processes.count
        reasons = [
            f"host {index} of {count}: {why}" if count > 1 else why
            for index, why in sorted(failed.items())
        ]
        return f"the state of step {self._step} could not be written ({'; '.join(reasons)})"


class _ListedSteps:
    """Lists for orbax the states that the processes agreed on. What each process would list itself
    may be out of date."""

    def __init__(self, steps: Sequence[int]):
        self._steps = tuple(steps)

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[ocp.path.step.Metadata]:
        return (self.find_step(base_path, step) for step in self._steps)

    def find_step(self, base_path: Any, step: int) -> ocp.path.step.Metadata:
        return ocp.path.step.Metadata(step=step, path=epath.Path(base_path) / str(step))


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def read_state(folder: Path, like: TrainState) -> TrainState:
    """Reads the state in a folder, with shapes and shardings as in ``like`` but without frozen
    parameters. All processes call this, and none waits for the others while it reads; nothing is
    written there.

    Raises:
      DamagedCheckpoint: in all processes, if one of them cannot read what was written.
      OtherState: the state belongs to another model or optimizer.
      StorageFailure: as in `Checkpoints.restore`.
    """
    arrays = _as_dict(like)
    failures = dict.fromkeys((StorageFailure, OtherState, DamagedCheckpoint), "")
    restored: dict[str, Array] = {}
    try:
        restored = _restored(folder, arrays | {CHECKSUMS: jnp.zeros((len(arrays),), jnp.uint32)})
    except (InputError, StorageFailure) as error:
        failures[type(error) if type(error) in failures else OtherState] = str(error)
    for kind, failure in failures.items():
        fail_together(failure, kind)
    expected = restored.pop(CHECKSUMS)
    wrong = jax.device_get(checksums(restored) != expected)
    if wrong.any():
        names = ", ".join(name for name, bad in zip(sorted(arrays), wrong, strict=True) if bad)
        raise DamagedCheckpoint(f"{folder}: array {names} is not what was written")
    structure = jax.tree.structure(_trained(like))
    return jax.tree.unflatten(structure, [restored[name] for name in sorted(restored)])


def _restored(step_folder: Path, like: dict[str, Array]) -> dict[str, Array]:
    """Reads a state's arrays, with the shapes, dtypes and placement of ``like``."""
    folder = step_tree(step_folder)
    _check_arrays(folder, like)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    # Not through the manager, which makes processes wait for one that has failed.
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        arguments = ocp.args.StandardRestore(target)
        path = epath.Path(absolute(folder))
        return read_orbax(folder, lambda: handler.restore(path, args=arguments))


def check_readable(folder: Path, like: TrainState) -> None:
    """Refuses a state of another model or optimizer, going by its headers.

    Raises:
      OtherState: its arrays differ from those of ``like``, which may be shapes.
    """
    arrays = _as_dict(like)
    sums = jax.ShapeDtypeStruct((len(arrays),), jnp.uint32)
    _check_arrays(step_tree(folder), arrays | {CHECKSUMS: sums})


def _check_arrays(folder: Path, like: Mapping[str, Any]) -> None:
    """Compares the arrays of a state with those expected, by their headers."""
    # Orbax would only say that a shape is not compatible.
    found = array_headers(folder)
    if found.keys() != like.keys():
        raise OtherState(
            f"{folder}: a state of {len(found)} arrays where this recipe has {len(like)}; it "
            "belongs to another model or optimizer"
        )
    for name, leaf in like.items():
        if found[name].shape != leaf.shape:
            raise OtherState(
                f"{folder}: array {name} has shape {list(found[name].shape)} where this recipe has "
                f"{list(leaf.shape)}; it belongs to another model"
            )
        if found[name].dtype != leaf.dtype:
            raise OtherState(
                f"{folder}: array {name} is {found[name].dtype.name} where this recipe has "
                f"{leaf.dtype.name}; it belongs to another optimizer.first_moment_dtype"
            )


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
