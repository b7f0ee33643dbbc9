"""`wedlm convert`: Hugging Face checkpoint to orbax, or back, bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import InputError
from wedlm_jax.model_folder import FORMATS, ORBAX, format_of

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

    from wedlm_jax.hf_folder import HFCheckpoint
    from wedlm_jax.model_folder import OrbaxCheckpoint
    from wedlm_jax.run_folder import RunModel

TITLES = {"hf": "Hugging Face", "orbax": "orbax"}
RUN = "run"


@dataclasses.dataclass(frozen=True)
class Converted:
    """What was written: format ("hf" or "orbax"), tensors there, bytes, dtype names."""

    format: str
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="wedlm convert",
        description="Converts a checkpoint folder: Hugging Face (config.json and safetensors) to\n"
        f"orbax (config.json and {ORBAX}/), or back. What SOURCE is, is found out; the other\n"
        "format is written, or the one that --to names. config.json and the tokenizer's\n"
        "files go along. Values are not changed unless --dtype is given.",
        epilog="examples:\n"
        "  wedlm convert ./WeDLM-8B ./WeDLM-8B-orbax            Hugging Face to orbax\n"
        "  wedlm convert ./WeDLM-8B-orbax ./back                and back, bit for bit\n"
        "  wedlm convert runs/my/hf ./small --to hf --dtype bfloat16\n"
        "                                                       same format, other dtype\n"
        "  wedlm convert runs/my ./now --config ./Qwen3-8B      a run's newest state, while it\n"
        "                                                       trains from ./Qwen3-8B",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a checkpoint folder, or with --config a training run's"
    )
    parser.add_argument("destination", metavar="DESTINATION", help="the folder to write")
    parser.add_argument("--to", choices=FORMATS, help="the format to write [the other one]")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="cast the weights [as they are]"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the checkpoint that DESTINATION holds"
    )
    parser.add_argument(
        "--config",
        metavar="DIR",
        help="SOURCE is a training run: take config.json and the tokenizer from DIR",
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()
    done = convert(
        options.source,
        options.destination,
        to=options.to,
        dtype=options.dtype,
        force=options.force,
        config_from=options.config,
    )
    print(
        f"wrote {options.destination}: {TITLES[done.format]}, {done.tensors} tensors, "
        f"{done.bytes / 1e6:,.1f} MB, {', '.join(done.dtypes)}, "
        f"in {time.monotonic() - start:.1f} s"
    )
    return 0


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    config_from: str | Path | None = None,
) -> Converted:
    """Writes the checkpoint in ``source`` anew, in the other format or another dtype.

    The destination appears whole or not at all.

    Args:
      source: a Hugging Face or an orbax checkpoint folder; with ``config_from`` a training
        run's folder, of which the newest state's parameters are written.
      destination: must be absent or empty, or a checkpoint with ``force``.
      to: "hf" or "orbax"; by default the format that the source has not, "hf" for a run.
      dtype: "float32", "bfloat16" or "float16"; as it is by default.
      force: replace a checkpoint at the destination.
      config_from: where a run's ``config.json`` and tokenizer are: the checkpoint that it
        started from, or any of the same shape.

    Raises:
      InputError: naming the folder, file or tensor, and what was expected of it.
    """
    source, destination = Path(source), Path(destination)
    found = RUN if config_from is not None else format_of(source)
    target = to or next(name for name in FORMATS if name != found)
    if target not in FORMATS:
        raise InputError(f"to: expected one of {', '.join(FORMATS)}, not {target!r}")
    if target == found and dtype is None:
        raise InputError(
            f"{source}: is {TITLES[found]} already; to write it in the same format, give a dtype"
        )
    _check_destination(source, destination, force)
    # Imported late: all of JAX comes with them, and mistakes should be told at once.
    from wedlm_jax.folder_swap import replacing
    from wedlm_jax.hf import copy_tokenizer, numpy_dtype, write_config

    np_dtype = numpy_dtype(dtype)
    try:
        with replacing(destination) as beside, _progress() as progress:
            opened = _open(source, config_from, found, np_dtype, progress)
            result = opened.write_orbax(beside) if target == "orbax" else opened.write_hf(beside)
            if dtype is None and found != RUN:
                shutil.copyfile(source / "config.json", beside / "config.json")
            else:
                raw = opened.raw_config
                write_config(beside, raw if dtype is None else _with_dtype(raw, dtype))
            copy_tokenizer(source if config_from is None else Path(config_from), beside)
    except OSError as error:
        raise InputError(f"{destination}: writing failed ({error.strerror or error})") from None
    return result


def _check_destination(source: Path, destination: Path, force: bool) -> None:
    here, there = source.resolve(), destination.resolve()
    if here == there:
        raise InputError(f"{destination}: source and destination are the same folder")
    if here in there.parents:
        raise InputError(f"{destination}: lies inside the source folder {source}")
    if there in here.parents:
        raise InputError(f"{destination}: holds the source folder {source}")
    if destination.exists() and not destination.is_dir():
        raise InputError(f"{destination}: is a file, where a folder is to be written")
    if destination.is_dir() and any(destination.iterdir()):
        if not force:
            raise InputError(f"{destination}: not empty; --force replaces the checkpoint there")
        if not (destination / "config.json").exists():
            raise InputError(
                f"{destination}: not a checkpoint, and --force replaces nothing else; "
                "name another folder"
            )


def _with_dtype(raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """``config.json`` as it stands, but for the field that names a dtype."""
    field = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
    return {**raw, field: dtype}


def _open(
    source: Path,
    config_from: str | Path | None,
    found: str,
    dtype: np.dtype | None,
    progress: Progress,
) -> _HuggingFace | _Orbax:
    if found == "hf":
        return _HuggingFace(source, dtype, progress)
    if config_from is None:
        from wedlm_jax.model_folder import OrbaxCheckpoint

        return _Orbax(OrbaxCheckpoint(source), dtype, progress)
    from wedlm_jax.run_folder import RunModel

    return _Orbax(RunModel(source, config_from), dtype, progress)


class _HuggingFace:
    """A Hugging Face source, checked."""

    def __init__(self, folder: Path, dtype: np.dtype | None, progress: Progress):
        from wedlm_jax.hf import check_tensors
        from wedlm_jax.hf_folder import HFCheckpoint

        self._checkpoint: HFCheckpoint = HFCheckpoint(folder)
        self._entries = check_tensors(self._checkpoint)
        self._dtype, self._progress = dtype, progress
        self.raw_config = self._checkpoint.raw_config

    def write_orbax(self, folder: Path) -> Converted:
        from wedlm_jax.hf import read_entry

        values = {
            entry.path: read_entry(self._checkpoint, entry, self._dtype)
            for entry in self._progress.track(self._entries, description="reading")
        }
        return _write_orbax(values, folder, self._progress)

    def write_hf(self, folder: Path) -> Converted:
        return _write_hf(self._tensors(), folder)

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        from wedlm_jax.hf import cast

        names = [name for entry in self._entries for name in entry.hf_names]
        for name in self._progress.track(names, description="converting"):
            yield name, cast(name, self._checkpoint.read(name), self._dtype)


class _Orbax:
    """An orbax source or a run's state, checked and read."""

    def __init__(
        self, checkpoint: OrbaxCheckpoint | RunModel, dtype: np.dtype | None, progress: Progress
    ):
        from wedlm_jax.model_folder import check_arrays

        self._entries = check_arrays(checkpoint)
        self._dtype, self._progress = dtype, progress
        self.raw_config = checkpoint.raw_config
        with _spinner(progress, "reading"):
            self._values = checkpoint.read()

    def write_orbax(self, folder: Path) -> Converted:
        from wedlm_jax.hf import cast

        values = {path: cast(path, value, self._dtype) for path, value in self._values.items()}
        return _write_orbax(values, folder, self._progress)

    def write_hf(self, folder: Path) -> Converted:
        from wedlm_jax.hf import hf_tensors

        count = sum(len(entry.hf_names) for entry in self._entries)
        tensors = hf_tensors(self._entries, self._values, self._dtype)
        return _write_hf(self._progress.track(tensors, total=count, description="writing"), folder)


def _write_orbax(values: dict[str, np.ndarray], folder: Path, progress: Progress) -> Converted:
    from wedlm_jax.orbax_io import write_arrays

    with _spinner(progress, "writing"):
        write_arrays(folder / ORBAX, values)
    size = sum(value.nbytes for value in values.values())
    dtypes = sorted({value.dtype.name for value in values.values()})
    return Converted("orbax", len(values), size, tuple(dtypes))


def _write_hf(tensors: Iterator[tuple[str, np.ndarray]] | Any, folder: Path) -> Converted:
    from wedlm_jax.hf import write_weights

    count, size, dtypes = 0, 0, set()

    def counted() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal count, size
        for name, tensor in tensors:
            count, size = count + 1, size + tensor.nbytes
            dtypes.add(tensor.dtype.name)
            yield name, tensor

    write_weights(counted(), folder)
    return Converted("hf", count, size, tuple(sorted(dtypes)))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on standard error, only where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


@contextmanager
def _spinner(progress: Progress, what: str) -> Iterator[None]:
    task = progress.add_task(what, total=None)
    yield
    progress.remove_task(task)
