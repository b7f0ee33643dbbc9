"""Keeps compiled programs on disk, so that what was compiled once is not compiled again; and, next
to them, what was measured with them.

Training uses JAX's own cache. It keeps what XLA makes of a program, but finds it only by tracing
and lowering that program again, which for a decoder takes three times as long as loading it.
`ProgramStore` keeps whole executables under a name that covers everything that they depend on, and
reads them without tracing anything.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import platform
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.atomic import write_json
from wedlm_jax.host.notices import log
from wedlm_jax.host.storage import absolute, cache_folder, source_digest

LIMIT = 2 * 2**30
"""The maximum bytes of a cache; the least recently used files are removed first."""


def keep_compiled(folder: Path) -> None:
    """Keeps what JAX compiles in ``folder``, unless JAX has another cache folder already; the same
    command then starts faster the next time."""
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(absolute(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    jax.config.update("jax_compilation_cache_max_size", LIMIT)


def program_folder() -> Path | None:
    """Returns the folder of a `ProgramStore`, ``wedlm-jax/programs`` in the user's cache folder.

    None if JAX is set to keep nothing (``JAX_ENABLE_COMPILATION_CACHE=false``), or has its own
    cache folder, which then keeps everything: XLA cannot write an executable that came from there
    (on a CPU with jaxlib 0.10 and 0.12, it would lack the functions that it calls).
    """
    import jax

    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if not enabled or jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return None
    return cache_folder() / "programs"


def folder_of_jax() -> Path | None:
    """Returns the folder on this machine in which JAX keeps what it compiles; None without one."""
    import jax

    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return Path(folder) if folder and "://" not in folder else None


def recalled(folder: Path | None, kind: str, key: Mapping[str, Any]) -> Any:
    """Returns what `remember` has stored in a folder; None if there is none, or it is damaged."""
    if folder is not None:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(_remembered(folder, kind, key).read_text(encoding="utf-8"))
    return None


def remember(folder: Path | None, kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Stores a value, to be found again by its kind and by everything that it depends on. A folder
    that cannot be written to only costs another measurement next time; None stores nothing."""
    if folder is not None:
        with contextlib.suppress(OSError, InputError, StorageFailure):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(_remembered(folder, kind, key), value)


def _remembered(folder: Path, kind: str, key: Mapping[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True, default=str)
    return folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


class ProgramStore:
    """Keeps executables in a folder.

    A name must say everything that an executable depends on. This class adds the versions of the
    libraries, this package's source, the devices and the compiler's flags; callers add the rest.
    A file that cannot be read or written costs a compilation, and nothing else.

    Args:
      folder: folder of the programs; created when the first one is kept.
      limit: maximum bytes of all files.
    """

    def __init__(self, folder: Path, limit: int = LIMIT):
        self.folder, self._limit = folder, limit

    def load(self, name: Sequence[Any], devices: Sequence[Any]) -> Any:
        """Returns the executable of that name, loaded onto ``devices``; None if there is none."""
        from jax.experimental import serialize_executable

        path = self._path(name, devices)
        try:
            executable, given, result = pickle.loads(zlib.decompress(path.read_bytes()))
            os.utime(path)
            return serialize_executable.deserialize_and_load(
                executable, given, result, execution_devices=devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # from another machine, truncated, or not for this JAX
            log().info("%s: cannot be loaded and is compiled again (%r)", path, error)
            return None

    @property
    def is_writable(self) -> bool:
        """Whether programs can be kept: the folder, or where it would be created, is writable."""
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        return os.access(there, os.W_OK)

    def save(self, name: Sequence[Any], devices: Sequence[Any], compiled: Any) -> None:
        """Keeps an executable for the next process."""
        from jax.experimental import serialize_executable

        path = self._path(name, devices)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            content = zlib.compress(pickle.dumps(serialize_executable.serialize(compiled)), 1)
            self.folder.mkdir(parents=True, exist_ok=True)
            # No sync: after a loss of power a torn file is compiled again.
            temporary.write_bytes(content)
            os.replace(temporary, path)
            self._make_room()
        except Exception as error:  # disk full, no permission, or it cannot be serialised
            with contextlib.suppress(OSError):
                temporary.unlink()
            log().info("%s: a compiled program cannot be kept (%r)", path, error)

    def _make_room(self) -> None:
        files = []
        for path in self.folder.iterdir():
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process has made room
                continue
            files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, name: Sequence[Any], devices: Sequence[Any]) -> Path:
        kinds = [(one.platform, one.device_kind, one.id) for one in devices]
        parts = (*_environment(), kinds, *name)
        digest = hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()
        return self.folder / digest[:32]


@functools.cache
def _environment() -> tuple[str, ...]:
    """Returns what every executable of this process depends on."""
    import jax

    import wedlm_jax

    versions = [f"{name} {_version(name)}" for name in ("jax", "jaxlib", "libtpu", "flax", "qwix")]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    options = (
        "jax_default_matmul_precision",
        "jax_disable_most_optimizations",
        "jax_enable_x64",
        "jax_default_prng_impl",
        "jax_threefry_partitionable",
    )
    chosen = [f"{name}={jax.config.values.get(name)}" for name in options]  # type: ignore[attr-defined]
    clients = f"{jax.process_count()} {jax.device_count()} {jax.local_device_count()}"
    return (*versions, *flags, *chosen, clients, _processor(), source_digest(wedlm_jax))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Identifies this processor's instructions: an executable does not run on a lesser CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known = (line for line in lines if line.startswith(("flags", "Features", "model name")))
    return hashlib.sha256("\n".join(sorted(set(known))).encode()).hexdigest()
