"""Reads and writes models in orbax format: folders from `wedlm convert`, with a model's arrays by
dotted path, and the numbered states of a training run (`train.checkpoint`).

A state does not describe the model: its arrays are numbered in the order of `jax.tree.leaves`,
first the step and then the trained parameters. So a run describes its model next to its states
(`describe_run`), including the adapters if it trains only these; their base parameters are then in
``base/``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx, traverse_util
from orbax.checkpoint import type_handlers

from wedlm_jax.checkpoint import ORBAX, RUN, RUN_BASE, RUN_MODEL, RUN_STATES
from wedlm_jax.checkpoint.hf import (
    Checkpoint,
    HFCheckpoint,
    copy_tokenizer,
    model_config,
    read_object,
    values_by_dtype,
    write_config,
    write_object,
)
from wedlm_jax.checkpoint.names import PARAMETER_TABLE, check_tensors, dotted_path
from wedlm_jax.checkpoint.safetensors import DeferredArray
from wedlm_jax.config import ModelConfig, config_to_hf, read_config_json
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.processes import jax_processes, replacing_together
from wedlm_jax.host.storage import absolute, is_remote, retried
from wedlm_jax.model import Transformer
from wedlm_jax.model.lora import LoraConfig, adapter_of, merged_weight, with_adapters

T = TypeVar("T")

COMMITTED = "commit_success.txt"
"""The file that orbax writes last into a state in a bucket, which has no renames."""
LATE_REPORTS_S = 0.5
"""How long reads in progress at a failure may take to end."""
LEAVES_BEFORE_PARAMETERS = 1  # the step
LORA = "lora.json"
"""In a run's ``model/``: the configuration of the adapters that it trains."""


class DamagedCheckpoint(InputError):
    """What is on disk cannot be read, or is not what was written."""


def step_tree(step_folder: Path) -> Path:
    """Returns the folder of a numbered state's arrays."""
    return step_folder / "default"


def is_whole(step_folder: Path) -> bool:
    """Returns whether a numbered state was written completely."""
    if is_remote(step_folder):
        return (step_folder / COMMITTED).exists()
    # On a file system, a state that is still being written has another name.
    return step_tree(step_folder).is_dir()


def whole_steps(folder: Path) -> list[int]:
    """Lists the steps of the complete states in a folder; empty if there is no such folder."""

    def listed() -> list[int]:
        try:
            found = [path for path in folder.iterdir() if path.name.isdigit()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(path.name) for path in found if is_whole(path))

    return retried(folder, listed)


class _OneAtATime(type_handlers.NumpyHandler):
    """Writes deferred arrays as NumPy arrays, each after the previous one is on disk."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for i, (value, info) in enumerate(zip(values, infos, strict=True)):
            arguments = None if args is None else args[i : i + 1]
            for future in await super().serialize([value.read()], [info], arguments):
                future.result()
        return []


def write_arrays(folder: Path, arrays: Iterable[DeferredArray]) -> None:
    """Writes arrays named by dotted path, such as ``layers.mlp.up_proj.weight``, as one orbax
    checkpoint in a folder that must not exist. Each is read after the previous one is on disk."""
    tree = _nested({array.name: array for array in arrays})
    with quiet():
        registry = type_handlers.create_type_handler_registry((DeferredArray, _OneAtATime()))
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(absolute(folder), args=ocp.args.PyTreeSave(tree))


def array_headers(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array by dotted path; no values are read.

    Raises:
      InputError: the folder is not an orbax checkpoint, or parts of it are missing.
    """
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = read_orbax(folder, lambda: handler.metadata(epath.Path(absolute(folder))).tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise InputError(f"{folder}: this orbax checkpoint holds no arrays")
    return {_dotted(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves}


def read_arrays(folder: Path, paths: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Returns arrays of a checkpoint, by default all, in host memory by dotted path; the others
    stay on disk.

    Raises:
      InputError: the folder is not an orbax checkpoint, or parts are missing or truncated.
    """
    headers = array_headers(folder)
    item = _nested(headers if paths is None else {path: headers[path] for path in paths})
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = read_orbax(folder, lambda: handler.restore(epath.Path(absolute(folder)), args=args))
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def read_orbax(folder: Path, read: Callable[[], T]) -> T:
    """Returns the result of ``read``, which reads a folder with orbax.

    Raises:
      DamagedCheckpoint: it cannot be read.
      StorageFailure: the storage fails, so nothing is known about the folder.
    """
    try:
        return retried(folder, quiet()(read))
    except (StorageFailure, MemoryError, jax.errors.JaxRuntimeError):
        raise  # none of these says anything about the files
    except Exception as error:
        # Tensorstore raises many types of errors; any other means that the files are damaged.
        [reason, *_] = str(error).strip().splitlines() or [type(error).__name__]
        raise DamagedCheckpoint(
            f"{folder}: damaged or not an orbax checkpoint ({reason[:200]})"
        ) from None


_nested = partial(traverse_util.unflatten_dict, sep=".")
_dotted = partial(jax.tree_util.keystr, simple=True, separator=".")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences orbax's informational log lines, and its tracebacks after a failed read."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with late_reports_unheard():
            try:
                yield
            except Exception:
                # Whatever the error is, orbax's threads report it again within this time.
                time.sleep(LATE_REPORTS_S)
                raise
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def late_reports_unheard() -> Iterator[None]:
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


# --- models ---------------------------------------------------------------------------------


class OrbaxTensors(Checkpoint):
    """A model whose parameters are in orbax's files, opened as Hugging Face's tensors.

    A stacked parameter is read when the first of its tensors is, and kept in the host's memory
    until another parameter is read; so read tensors in the order of the table.
    """

    def _set_arrays(
        self, folder: Path, names: Mapping[str, str], headers: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Sets the tensors that can be read, given the names of an orbax checkpoint's arrays by the
        parameters' dotted paths, and the headers of the arrays by name."""
        self.folder, self._names = folder, names
        self._newest: tuple[tuple[str, ...], list[np.ndarray]] | None = None
        self.tensors: dict[str, DeferredArray] = {}
        known = {path: name for path, name, _ in PARAMETER_TABLE}
        for path in sorted(names, key=[*known, *names].index):
            template, header = known.get(path, path), headers[names[path]]
            shape, dtype = tuple(header.shape), np.dtype(header.dtype)
            stacked = "{}" in template
            for layer in range(shape[0]) if stacked and shape else [None]:
                name, read = template.format(layer), partial(self._read, path, layer)
                tensor_shape = shape[1:] if stacked else shape
                self.tensors[name] = DeferredArray(name, tensor_shape, dtype, read)

    def _read(self, path: str, layer: int | None) -> np.ndarray:
        [values] = self._parameters(path)
        return values if layer is None else values[layer]

    def _parameters(self, *paths: str) -> list[np.ndarray]:
        if self._newest is None or self._newest[0] != paths:
            self._newest = None  # freed before the next are read
            names = [self._names[path] for path in paths]
            arrays = read_arrays(self.folder, names)
            self._newest = (paths, [arrays[name] for name in names])
        return self._newest[1]


class OrbaxCheckpoint(OrbaxTensors):
    """A folder with ``config.json`` and, in ``orbax/``, the parameters as this project names and
    stacks them (`wedlm_jax.checkpoint.names.PARAMETER_TABLE`).

    Raises:
      InputError: a file is missing, truncated or malformed.
    """

    kind = ORBAX

    def __init__(self, folder: Path):
        self.tokenizer_folder = folder
        self.raw_config = read_config_json(folder)
        headers = array_headers(folder / ORBAX)
        self._set_arrays(folder / ORBAX, {path: path for path in headers}, headers)
        self.config = model_config(folder, self.raw_config, self.tensors)


class RunCheckpoint(OrbaxTensors):
    """The model in a training run's newest complete state, its adapters merged. The optimizer's
    arrays and the average of the parameters stay on disk.

    Args:
      folder: the run's folder, its ``checkpoints``, or one state in them.
      described: the folder of the model's tokenizer.
      config: the architecture; its type becomes "wedlm", as when a run exports its model.

    Raises:
      InputError: there is no state, or it is too small for this model.
    """

    kind = RUN

    def __init__(self, folder: Path, described: Path, config: ModelConfig):
        run, arrays, self._lora = _newest(folder)
        self.tokenizer_folder = described
        self.config = dataclasses.replace(config, model_type="wedlm")
        if self._lora is not None and self._lora.rows == "masked":
            raise InputError(
                f"{run}: this run trains a drafter: `wedlm convert` writes it as adapters; the "
                f"model that it belongs to is {run / RUN_BASE}"
            )
        headers = array_headers(arrays)
        names = _trained_names(arrays, headers, self.config, self._lora)
        self._set_arrays(arrays, names, headers)
        if self._lora is not None:
            base = HFCheckpoint(run / RUN_BASE)
            self.tensors = {
                name: self._merged(base.tensors[name], entry.path, layer)
                for entry in check_tensors(base)
                for layer, name in enumerate(entry.hf_names)
            }
        dtype = min(values_by_dtype(self.tensors.values()))
        self.raw_config = config_to_hf(self.config, dtype=dtype)

    def _merged(self, tensor: DeferredArray, path: str, layer: int) -> DeferredArray:
        """Returns a tensor of the base with its adapters merged. It is in float32, in which a run
        that trains all parameters keeps and exports them."""
        lora, adapter = self._lora, adapter_of(path)

        def read() -> np.ndarray:
            value = tensor.read().astype(np.float32)
            if lora is None or adapter[0] not in self._names:
                return value
            a, b = (array[layer] for array in self._parameters(*adapter))
            return np.asarray(merged_weight(value, a, b, lora.scale))

        return DeferredArray(tensor.name, tensor.shape, np.dtype(np.float32), read)


def describe_run(
    run: Path, config: ModelConfig, tokenizer_from: Path, lora: LoraConfig | None = None
) -> None:
    """Writes ``<run>/model``, which an export needs in addition to a state: ``config.json``, the
    tokenizer's files, and the adapters' configuration if only they are trained. All processes must
    call this."""
    processes = jax_processes()
    with replacing_together(run / RUN_MODEL, processes) as new_folder:
        if processes.index == 0:
            write_config(new_folder, config_to_hf(dataclasses.replace(config, model_type="wedlm")))
            copy_tokenizer(tokenizer_from, new_folder)
            if lora is not None:
                write_object(new_folder / LORA, dataclasses.asdict(lora))


def described_lora(run: Path) -> LoraConfig | None:
    """Reads the configuration of the adapters that a run trains; None if it trains all
    parameters."""
    path = run / RUN_MODEL / LORA
    if (fields := read_object(path)) is None:
        return None
    try:
        return LoraConfig(**{**fields, "targets": tuple(fields["targets"])})
    except (TypeError, KeyError) as error:
        raise InputError(f"{path}: not what a run writes ({error})") from None


def is_described(run: Path, config: ModelConfig) -> bool:
    """Returns whether `describe_run` has written ``config`` already."""
    folder = run / RUN_MODEL
    described = (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
    return described and model_config(folder, read_config_json(folder), ()) == dataclasses.replace(
        config, model_type="wedlm"
    )


def newest_state(folder: Path) -> Path:
    """Finds the newest complete state of a run, given the run's folder, ``checkpoints`` or a
    state."""
    if folder.name.isdigit() and is_whole(folder):
        return folder
    for place in (folder / RUN_STATES, folder):
        if states := whole_steps(place):
            return place / str(states[-1])
    raise InputError(f"{folder}: no complete state of a training run is here")


def _newest(folder: Path) -> tuple[Path, Path, LoraConfig | None]:
    """Returns a run's folder, the folder of its newest state's arrays, and the adapters that it
    trains."""
    state = newest_state(folder)
    run = state.parent.parent
    return run, step_tree(state), described_lora(run)


def drafter_of_run(folder: Path) -> tuple[nnx.State, LoraConfig, Checkpoint] | None:
    """Reads the drafter that a run trains from its newest complete state.

    Returns:
      its adapters, their configuration, and their base model; None if the run trains a model.
    """
    run, arrays, lora = _newest(folder)
    if lora is None or lora.rows != "masked":
        return None
    base = HFCheckpoint(run / RUN_BASE)
    names = _trained_names(arrays, array_headers(arrays), base.config, lora)
    values = read_arrays(arrays, names.values())
    leaves, structure = jax.tree.flatten(_trained_shapes(base.config, lora))
    assert len(leaves) == len(names)
    adapters = jax.tree.unflatten(structure, [jnp.asarray(values[name]) for name in names.values()])
    return adapters, lora, base


def _trained_names(
    arrays: Path, headers: Mapping[str, Any], config: ModelConfig, lora: LoraConfig | None
) -> dict[str, str]:
    """Returns the names of the trained parameters' arrays in a state, by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(_trained_shapes(config, lora))
    names = list(headers)[LEAVES_BEFORE_PARAMETERS:][: len(leaves)]
    if len(names) < len(leaves):
        raise InputError(f"{arrays}: a state of {len(headers)} arrays, too few for this model")
    return {dotted_path(path): name for (path, _), name in zip(leaves, names, strict=True)}


def _trained_shapes(config: ModelConfig, lora: LoraConfig | None) -> nnx.State:
    def make() -> Transformer:
        model = Transformer(config, rngs=nnx.Rngs(0))
        return model if lora is None else with_adapters(model, lora, nnx.Rngs(0))

    return nnx.state(nnx.eval_shape(make), nnx.Param if lora is None else nnx.LoRAParam)
