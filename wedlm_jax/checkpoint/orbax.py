"""The one file that imports orbax.

It writes and reads two kinds of folder: a model's arrays, nested in one orbax checkpoint
(`write_arrays`, `read_arrays`), and the numbered states of a training run (`StepFolders`,
`restore_state`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from wedlm_jax.checkpoint.safetensors import DeferredArray
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.processes import fail_together, is_first, jax_processes, text_of_first
from wedlm_jax.host.storage import (
    absolute,
    asked_again,
    file_sizes,
    is_remote,
    move_tree,
    told,
)

T = TypeVar("T")

COMMITTED = "commit_success.txt"
"""The file that orbax writes last into a state in a bucket, which has no renames."""
DAMAGED = ".damaged"
"""In the name of a state that was set aside."""
LATE_REPORTS_S = 0.5
"""How long reads that were under way at a failure may take to end."""


class DamagedCheckpoint(InputError):
    """What is on disk cannot be read, or is not what was written."""


class OtherState(InputError):
    """A state is of another model or optimizer."""


class StepFolders:
    """Numbered states of a run, written in the background, whole or not at all.

    A state is a flat dictionary of arrays, global ones included: every process of a
    multi-process run calls each method, and writes and reads its own shards.

    Args:
      folder: holds a folder per step; made if absent.
      keep: how many of the newest to keep.
      keep_every: also keep each state whose step is a multiple of this; 0 for none.
      timeout: seconds in which a state must be written.
      states: the steps of the states that there are, the same in every process; by default what
        process 0 finds.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        keep_every: int = 0,
        timeout: int = 1200,
        states: Sequence[int] | None = None,
    ):
        self._folder, processes = folder, jax_processes()
        if states is None:
            states = json.loads(text_of_first(json.dumps(whole_steps(folder))))
        self._states = sorted(states)
        client = ocp.multihost.get_jax_distributed_client() if processes.count > 1 else None
        name = text_of_first(uuid.uuid4().hex)
        self._meetings = SaveMeetings(client, processes.index, processes.count, name)
        self._refused = ""
        self._options: dict[str, Any] = {
            "max_to_keep": keep,
            "keep_period": keep_every or None,
            "create": False,
            "async_options": ocp.options.AsyncOptions(
                timeout_secs=timeout, barrier_sync_fn=self._meetings
            ),
            # Without, one process asks the storage something while the others wait for it on the
            # devices, where they cannot be told that it failed. The background looks, too.
            "file_options": ocp.options.FileOptions(skip_sync_file_validations=True),
            # It would read of every state when it was written, each process by itself.
            "lightweight_initialize": True,
        }
        self._silence = contextlib.ExitStack()
        self._manager: ocp.CheckpointManager | None = None

    def steps(self) -> list[int]:
        """Lists the steps whose states were written completely, newest first."""
        found = self._states if self._manager is None else self._manager.all_steps()
        return sorted(found, reverse=True)

    def _opened(self) -> ocp.CheckpointManager:
        """Returns orbax's manager, made when the first state is written. It is never asked what it
        lists by itself, since each process would list for itself."""
        if self._manager is None:
            # Its background threads log their errors; `finish` has one sentence for them.
            self._silence.enter_context(_late_reports_unheard())
            logging.getLogger("absl").addFilter(_is_no_error_of_orbax)
            self._silence.callback(logging.getLogger("absl").removeFilter, _is_no_error_of_orbax)
            names = _ListedSteps(self._states)
            options = ocp.CheckpointManagerOptions(step_name_format=names, **self._options)
            with _quiet():
                self._manager = ocp.CheckpointManager(absolute(self._folder), options=options)
        return self._manager

    def save(self, step: int, state: dict[str, jax.Array]) -> None:
        """Writes a state in the background; returns when its arrays may be overwritten.

        The state before it must be finished: see `finish`.
        """
        self._meetings.begin(step)
        # Orbax's threads would wait for minutes for a folder that could not be made.
        refusal = text_of_first(self._refusal() if is_first() else "")
        self._refused = self._meetings.sentence({0: refusal}) if refusal else ""
        if not refusal:
            self._opened().save(step, args=ocp.args.StandardSave(state), force=True)

    def _refusal(self) -> str:
        """Makes the folder, writes a file beside the states; returns the storage's error, or
        none."""
        path = self._folder / ".writable"
        try:
            with contextlib.suppress(FileExistsError):  # what is there instead, the next line tells
                self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            path.unlink()
        except Exception as error:
            # A bucket's client has errors of many types.
            return told(error)
        return ""

    @property
    def saving(self) -> bool:
        """Whether a state is being written."""
        return self._manager is not None and self._manager.is_saving_in_progress()

    def finish(self) -> None:
        """Waits until the state under way is written.

        Raises:
          StorageFailure: in every process, when one of them could not write it. The state does not
            count, and another can be written.
        """
        if self._refused:
            raise StorageFailure(self._refused)
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            # Where the manager's own thread failed, the one that writes arrays may still run, and
            # would raise its error in the next save.
            with contextlib.suppress(Exception):
                self._manager._checkpointer.wait_until_finished()
            raise self._meetings.note(error) from None

    def files(self, step: int) -> str:
        """Describes the files of a state that this process sees, and their sizes.

        Raises:
          StorageFailure: the storage fails.
        """
        folder = self._folder / str(step)
        found = sorted(asked_again(folder, lambda: file_sizes(folder)).items())
        digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:8]
        return f"{len(found)} files of {sum(size for _, size in found):,} bytes ({digest})"

    def set_aside(self, step: int) -> None:
        """Renames a state, so that it counts no more and its step can be written again. Call this
        before a state is written."""
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
                # A bucket's client has errors of many types.
                failure = f"{folder}: cannot be renamed ({told(error)})"
        fail_together(failure)
        self._states.remove(step)

    def any_set_aside(self) -> bool:
        """Returns whether process 0 sees a state that was set aside, by this run or an earlier
        attempt at it."""
        return bool(text_of_first("yes" if any(self._folder.glob(f"*{DAMAGED}*")) else ""))

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
          StorageFailure: as `finish` does.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._meetings.note(error) from None
        finally:
            self._manager.close()
            self._silence.close()


class SaveMeetings:
    """Orbax's `AsyncOptions.barrier_sync_fn`: processes wait for one another, and when one of them
    has failed all raise.

    Orbax writes in background threads, which wait for those of the other processes when they have
    written, and again when the state counts. In a process whose write failed the thread ends, and
    the others would wait for it until the time is up. But as it ends it asks for one more wait,
    with its error in flight. So every process has one sequence of meetings per state here, whatever
    orbax calls them: one that failed says so, and comes to the meeting where the others are.

    Args:
      client: the client of `jax.distributed`'s service; None for a single process.
      index: this process.
      count: how many processes there are.
      name: the same in all of them, and used for nothing else.
    """

    def __init__(self, client: Any, index: int, count: int, name: str):
        self._client, self._index, self._count, self._name = client, index, count, name
        self._state, self._met, self._step = 0, 0, 0
        self._starter = 0
        self._one_at_a_time = threading.Lock()
        self.failure = ""

    def begin(self, step: int) -> None:
        """Begins the next state. Every process calls this, in the thread that starts to write."""
        self._state, self._met, self._step, self.failure = self._state + 1, 0, step, ""
        self._starter = threading.get_ident()

    def note(self, error: BaseException) -> StorageFailure:
        """Returns why the state failed: what a process has reported, or the error of this one."""
        self.failure = self.failure or self.sentence({self._index: told(error)})
        return StorageFailure(self.failure)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        if self._count == 1:
            return
        # The thread that starts to write may itself handle an error, of something else.
        starts = threading.get_ident() == self._starter
        error = None if starts else sys.exception()
        place = f"wedlm/{self._name}/{self._state}"
        if error is not None and not self.failure:
            self._client.key_value_set(f"{place}/failed/{self._index}", told(error), True)
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
            self.failure = self.sentence({int(name.split("/")[-1]): said for name, said in failed})

    def sentence(self, failed: dict[int, str]) -> str:
        """Returns the message about a state: what the storage said to each process that failed."""
        reasons = [
            f"host {index} of {self._count}: {said}" if self._count > 1 else said
            for index, said in sorted(failed.items())
        ]
        return f"the state of step {self._step} could not be written ({'; '.join(reasons)})"


class _ListedSteps:
    """Lists a run's states for orbax: those that the processes agreed on. A listing by each of them
    may be out of date."""

    def __init__(self, steps: Sequence[int]):
        self._steps = tuple(steps)

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[ocp.path.step.Metadata]:
        return (self.find_step(base_path, step) for step in self._steps)

    def find_step(self, base_path: Any, step: int) -> ocp.path.step.Metadata:
        return ocp.path.step.Metadata(step=step, path=epath.Path(base_path) / str(step))


def step_tree(step_folder: Path) -> Path:
    """Returns the folder of a numbered state's arrays."""
    return step_folder / "default"


def is_whole(step_folder: Path) -> bool:
    """Returns whether a numbered state was written completely."""
    if is_remote(step_folder):
        return (step_folder / COMMITTED).exists()
    # On a file system a state that is still being written stands under another name.
    return step_tree(step_folder).is_dir()


def whole_steps(folder: Path) -> list[int]:
    """Lists the steps of the complete states in a folder; none where there is no such folder.

    Raises:
      StorageFailure: it cannot be read.
    """

    def listed() -> list[int]:
        try:
            found = [path for path in folder.iterdir() if path.name.isdigit()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(path.name) for path in found if is_whole(path))

    return asked_again(folder, listed)


def restore_state(step_folder: Path, like: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reads a numbered state, with the shapes, dtypes and placement of ``like``. Nothing is written
    to its folder, and a process does not wait for the others.

    Raises:
      DamagedCheckpoint: it cannot be read.
      StorageFailure: the storage fails, so nothing is known about the state.
      OtherState: its arrays have other names, shapes or dtypes.
    """
    folder = step_tree(step_folder)
    check_state(step_folder, like)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    # Not by the manager, which makes processes wait for one that has failed.
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        arguments = ocp.args.StandardRestore(target)
        return _read(folder, lambda: handler.restore(epath.Path(absolute(folder)), args=arguments))


def check_state(step_folder: Path, like: Mapping[str, Any]) -> None:
    """Compares the arrays of a numbered state with those expected, by their headers.

    Raises:
      OtherState: naming the first of another shape or dtype.
    """
    # Orbax would only say that a shape is not compatible.
    folder = step_tree(step_folder)
    found = array_headers(folder)
    if found.keys() != like.keys():
        raise OtherState(
            f"{folder}: a state of {len(found)} arrays where this recipe has {len(like)}; it is "
            "of another model or optimizer"
        )
    for name, leaf in like.items():
        if found[name].shape != leaf.shape:
            raise OtherState(
                f"{folder}: array {name} has shape {list(found[name].shape)} where this recipe has "
                f"{list(leaf.shape)}; it is of another model"
            )
        if found[name].dtype != leaf.dtype:
            raise OtherState(
                f"{folder}: array {name} is {found[name].dtype.name} where this recipe has "
                f"{leaf.dtype.name}; it is of another optimizer.first_moment_dtype"
            )


class _OneAtATime(type_handlers.NumpyHandler):
    """Writes deferred arrays as NumPy ones, the next when the last is on disk."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for i, (value, info) in enumerate(zip(values, infos, strict=True)):
            own = None if args is None else args[i : i + 1]
            for future in await super().serialize([value.read()], [info], own):
                future.result()
        return []


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray | DeferredArray]) -> None:
    """Writes arrays as one orbax checkpoint, nested at the dots of their paths.

    Args:
      folder: must not exist.
      arrays: by dotted path, such as ``layers.mlp.up_proj.weight``. Few of the deferred ones are
        in memory at once: one is read while one is written.
    """
    deferred = {
        path: DeferredArray(path, array.shape, array.dtype, lambda array=array: array)  # type: ignore[misc]
        if isinstance(array, np.ndarray)
        else array
        for path, array in arrays.items()
    }
    with _quiet():
        registry = type_handlers.create_type_handler_registry((DeferredArray, _OneAtATime()))
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(absolute(folder), args=ocp.args.PyTreeSave(_nested(deferred)))


def array_headers(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array by dotted path; no values are read.

    Raises:
      InputError: the folder is no orbax checkpoint, or parts of it are missing.
    """
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = _read(folder, lambda: handler.metadata(epath.Path(absolute(folder))).tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise InputError(f"{folder}: this orbax checkpoint holds no arrays")
    return {_dotted(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves}


def read_arrays(folder: Path, paths: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Returns arrays of a checkpoint in host memory, by dotted path.

    Args:
      paths: the arrays to read, all by default; the others stay on disk.

    Raises:
      InputError: the folder is no orbax checkpoint, or parts of it are missing or cut off.
    """
    headers = array_headers(folder)
    item = _nested(headers if paths is None else {path: headers[path] for path in paths})
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = _read(folder, lambda: handler.restore(epath.Path(absolute(folder)), args=args))
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _read(folder: Path, read: Callable[[], T]) -> T:
    def quietly() -> T:
        with _quiet():
            return read()

    try:
        return asked_again(folder, quietly)
    except (StorageFailure, MemoryError, jax.errors.JaxRuntimeError):
        raise  # none of these is about what lies there
    except Exception as error:
        # Tensorstore's errors are of many types; the others mean that the files are damaged.
        [reason, *_] = str(error).strip().splitlines() or [type(error).__name__]
        raise DamagedCheckpoint(
            f"{folder}: damaged or not an orbax checkpoint ({reason[:200]})"
        ) from None


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in arrays.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part.key) for part in path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences orbax's informational log lines, and its tracebacks after a failed read."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with _late_reports_unheard():
            try:
                yield
            except Exception:
                # Whichever error it was, and it is raised again: its late reports arrive within
                # this time, while they are still ignored.
                time.sleep(LATE_REPORTS_S)
                raise
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _late_reports_unheard() -> Iterator[None]:
    """Ignores errors that arrive after the first: orbax reads and writes many parts at once and
    closes its event loop at the first error; the other parts then report to a closed loop, each
    with a traceback on standard error."""
    hook = sys.unraisablehook

    def without_late_reports(report: Any) -> None:
        if str(report.exc_value) != "Event loop is closed":
            hook(report)

    sys.unraisablehook = without_late_reports
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
