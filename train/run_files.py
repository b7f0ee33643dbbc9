"""A run's folder, which all hosts must see and which may be in a bucket, and its growing files.

Objects in a bucket cannot be appended to. So logs are written on this machine and copied to the
bucket as a whole, before every checkpoint and at the end. A run that was killed finds there what it
had logged up to the state from which it resumes; later lines would be discarded anyway.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from wedlm_jax.errors import InputError, StorageFailure, file_error
from wedlm_jax.host.atomic import lock_folder
from wedlm_jax.host.processes import (
    SEEN_WITHIN_S,
    fail_together,
    is_first,
    text_of_first,
    texts_of_all,
)
from wedlm_jax.host.storage import as_path, bucket_error, is_remote, upload

CONFIG = "config.yaml"
"""The file of a run's recipe."""

GROWING = ("*.jsonl", "time.json", "wandb.id")
"""The files of a run that its next attempt continues."""


def open_output(name: str) -> Path:
    """Creates a run's folder and checks that every host sees it.

    One process writes a file and all look for it, so all must call this. Without the check a run
    whose hosts do not share the folder would hang at its first checkpoint.

    Raises:
      InputError: it cannot be written, or a host does not see what another wrote there.
      StorageFailure: it cannot be written now, as on a full disk.
    """
    output = as_path(name)
    token = text_of_first(uuid.uuid4().hex)
    path, failure, kind = output / f".seen-by-all-{token}", "", InputError.__name__
    if is_first():
        try:
            output.mkdir(parents=True, exist_ok=True)
            path.write_text(token, encoding="utf-8")
        except Exception as error:
            # A bucket's client has many error types, such as those of credentials.
            reason = bucket_error(output, "cannot be written", error)
            if isinstance(error, OSError) and not is_remote(output):
                reason = file_error(output, "cannot be written", error)
            failure, kind = str(reason), type(reason).__name__
    if failure := text_of_first(failure):
        passing = text_of_first(kind) == StorageFailure.__name__
        raise (StorageFailure if passing else InputError)(failure)
    appears = _comes(lambda: path.read_text(encoding="utf-8") == token)
    seen = texts_of_all(token if appears else "")
    blind = [i for i, found in enumerate(seen) if not found]
    if is_first():
        path.unlink(missing_ok=True)
    if blind:
        raise InputError(
            f"{output}: what host 0 of {len(seen)} writes there is not seen within "
            f"{SEEN_WITHIN_S:.0f} s by host {', '.join(map(str, blind))}; output must be a folder "
            "that all hosts share, or gs://BUCKET/NAME"
        )
    return output


def _comes(there: Callable[[], bool]) -> bool:
    """Returns whether ``there()`` becomes true within `SEEN_WITHIN_S`."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if there():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


class RunFiles:
    """Manages the growing files of a run: in its folder, from `open_output`, or as local copies of
    those in a bucket.

    Attributes:
      folder: the folder on this machine to write to.

    Raises:
      InputError: another process trains in this folder.
    """

    def __init__(self, output: Path):
        self._output = output
        self._lock: int | None = None
        if is_first() and not is_remote(output):
            try:
                self._lock = lock_folder(output)
            except BlockingIOError:
                raise InputError(
                    f"output: another process is training in {output}; wait for it, or name "
                    "another folder"
                ) from None
        self._copied: dict[str, tuple[int, int]] = {}
        self._temporary = tempfile.mkdtemp(prefix="wedlm-") if is_remote(output) else None
        self.folder = output if self._temporary is None else Path(self._temporary) / output.name
        if self._temporary is not None:
            self.folder.mkdir()
            if is_first():
                self._fetch()

    def publish(self) -> None:
        """Copies to the bucket what this process has written since the last call: logs in process
        0, profiles in any. All processes call this.

        Raises:
          StorageFailure: in all processes, if one of them cannot write.
        """
        if self._temporary is not None:
            failure = ""
            try:
                self._copy()
            except StorageFailure as error:
                failure = str(error)
            fail_together(failure)

    def _copy(self) -> None:
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.is_file() and self._copied.get(name) != _state(path):
                state = _state(path)
                try:
                    upload(self._output / name, path.read_bytes())
                except (InputError, StorageFailure) as error:  # it was writable before
                    raise StorageFailure(str(error)) from None
                self._copied[name] = state

    def close(self) -> None:
        """Copies what is left, removes the local copies, and unlocks the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            try:
                self._copy()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Removes the local copies; the next attempt at the run rewrites what was not published."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _fetch(self) -> None:
        for pattern in GROWING:
            for path in self._output.glob(pattern):
                copy = self.folder / path.name
                copy.write_bytes(path.read_bytes())
                self._copied[path.name] = _state(copy)


def _state(path: Path) -> tuple[int, int]:
    """Returns a file's size and time, which change when it is written to."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns
