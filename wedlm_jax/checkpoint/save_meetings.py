"""Where the processes of a run wait for one another while they write a state, and learn of
failures."""

from __future__ import annotations

import sys
import threading
from typing import Any

import jax

from wedlm_jax.checkpoint.storage_errors import told
from wedlm_jax.errors import StorageFailure


class SaveMeetings:
    """Makes the processes wait for one another, as orbax asks; raises in all when one has failed.

    Orbax writes in background threads, which wait for those of the other processes when theirs is
    written, and again when the state counts. In a process whose write failed the thread ends, and
    the others would wait for it until the time is up. But it asks for one more wait as it ends,
    with its error in flight. So here every process has one sequence of meetings a state, whatever
    orbax calls them: one that failed says so, and comes to the meeting at which the others are.

    It is orbax's `AsyncOptions.barrier_sync_fn`.

    Args:
      client: of the service that `jax.distributed` started; None for a process alone.
      index: this process.
      count: of how many.
      name: the same in all of them, and no other's.
    """

    def __init__(self, client: Any, index: int, count: int, name: str):
        self._client, self._index, self._count, self._name = client, index, count, name
        self._state, self._met, self._step = 0, 0, 0
        self._starter = 0
        self._one_at_a_time = threading.Lock()
        self.failure = ""

    def begin(self, step: int) -> None:
        """Begins the next state. Every process calls this, by the thread that starts to write."""
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
        """Returns the message for a state: what the storage said to each process that failed."""
        reasons = [
            f"host {index} of {self._count}: {said}" if self._count > 1 else said
            for index, said in sorted(failed.items())
        ]
        return f"the state of step {self._step} could not be written ({'; '.join(reasons)})"
