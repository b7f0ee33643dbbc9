"""The model in a training run's newest complete state, before the run has exported it.

A state knows nothing of the model: its arrays are numbered in the order of
`jax.tree.leaves`, the step first and then what is trained (`train.checkpoint`). So a run
says beside its states what its model is (`describe_run`), and which adapters it trains, if these
are all that it trains; the parameters that they belong to are then in ``base/``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from wedlm_jax.checkpoint.hf import check_tensors, copy_tokenizer, write_config
from wedlm_jax.checkpoint.hf_folder import INDEX, WEIGHTS, HFCheckpoint, model_config
from wedlm_jax.checkpoint.hf_import import read_parameter
from wedlm_jax.checkpoint.model_folder import (
    ORBAX,
    RUN_BASE,
    RUN_MODEL,
    RUN_STATES,
    OrbaxCheckpoint,
)
from wedlm_jax.checkpoint.names import Entry, hf_path
from wedlm_jax.checkpoint.opened import open_checkpoint
from wedlm_jax.checkpoint.orbax_io import (
    array_shapes,
    is_whole,
    read_arrays,
    step_tree,
    whole_steps,
)
from wedlm_jax.config import ModelConfig, config_to_hf, read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import jax_processes, replacing_together
from wedlm_jax.host.storage import as_path
from wedlm_jax.model import Transformer
from wedlm_jax.model.lora import LoraConfig, adapter_of, merged_kernel, with_adapters

LEAVES_BEFORE_PARAMETERS = 1  # the step
LORA = "lora.json"
"""In a run's ``model/``: the adapters that it trains."""


class RunModel:
    """The parameters of a run's newest complete state, opened as a checkpoint.

    Args:
      folder: the run's, its ``checkpoints``, or one state in there.
      config_from: a folder whose ``config.json`` describes the model.

    Attributes:
      array_folder: where orbax keeps the state.
      step: that of the state.
      config: the architecture; its type is "wedlm", as when a run exports its model.
      raw_config: the same as the content of a ``config.json``.
      arrays: shape and dtype name of each parameter, by dotted path.

    Raises:
      InputError: there is no state, or the configuration is not that of its model.
    """

    def __init__(self, folder: str | Path, config_from: str | Path):
        state = newest_state(as_path(folder))
        self.step = int(state.name)
        self.array_folder = step_tree(state)
        self.config = dataclasses.replace(described_model(as_path(config_from)), model_type="wedlm")
        run = state.parent.parent
        self._lora = described_lora(run)
        leaves = array_shapes(self.array_folder)
        paths = _trained_paths(self.config, self._lora)
        names = list(leaves)[LEAVES_BEFORE_PARAMETERS:][: len(paths)]
        if len(names) < len(paths):
            raise InputError(
                f"{self.array_folder}: a state of {len(leaves)} arrays, too few for the model in "
                f"{config_from}"
            )
        self._names = dict(zip(paths, names, strict=True))
        self.arrays = {path: leaves[name] for path, name in self._names.items()}
        self._entries: dict[str, Entry] = {}
        if self._lora is not None:
            self._base = open_checkpoint(run / RUN_BASE)
            self._entries = {entry.path: entry for entry in check_tensors(self._base)}
            # As a run that trains all of its parameters keeps and exports them.
            self.arrays = {path: (e.shape, "float32") for path, e in self._entries.items()}
        dtypes = {dtype for _, dtype in self.arrays.values()}
        self.raw_config: dict[str, Any] = config_to_hf(self.config, dtype=min(dtypes))

    def read(self, path: str) -> np.ndarray:
        """Reads one parameter into host memory, what adapters add to it included; the others and
        the optimizer stay on disk."""
        if self._lora is None:
            return self._read([path])[0]
        value = read_parameter(self._base, self._entries[path], np.float32)
        adapter = [one for one in adapter_of(path) if one in self._names]
        if adapter:
            scale, layers = self._lora.scale, zip(value, *self._read(adapter), strict=True)
            value = np.stack([merged_kernel(w, a, b, scale) for w, a, b in layers])
        return value

    def _read(self, paths: list[str]) -> list[np.ndarray]:
        names = [self._names[path] for path in paths]
        arrays = read_arrays(self.array_folder, names)
        return [arrays[name] for name in names]


def describe_run(
    run: Path, config: ModelConfig, tokenizer_from: Path, lora: LoraConfig | None = None
) -> None:
    """Writes ``<run>/model``: the model's ``config.json``, the tokenizer's files, and which
    adapters are trained, if these are all that is.

    They are what an export needs beside a state. All processes of a run call this.
    """
    processes = jax_processes()
    with replacing_together(run / RUN_MODEL, processes) as beside:
        if processes.index == 0:
            write_config(beside, config_to_hf(dataclasses.replace(config, model_type="wedlm")))
            copy_tokenizer(tokenizer_from, beside)
            if lora is not None:
                text = json.dumps(dataclasses.asdict(lora), indent=2)
                (beside / LORA).write_text(f"{text}\n", encoding="utf-8")


def described_lora(run: Path) -> LoraConfig | None:
    """Reads which adapters a run trains; None where it trains all parameters.

    Raises:
      InputError: what is written there cannot be read.
    """
    path = run / RUN_MODEL / LORA
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return LoraConfig(**{**fields, "targets": tuple(fields["targets"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: not what a run writes ({error})") from None


def is_described(run: Path, config: ModelConfig) -> bool:
    """Tells whether `describe_run` has written ``config`` already."""
    folder = run / RUN_MODEL
    described = (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
    return described and described_model(folder) == dataclasses.replace(config, model_type="wedlm")


def newest_state(folder: Path) -> Path:
    """Finds the newest complete state of a run: given its folder, its ``checkpoints``, or itself.

    Raises:
      InputError: there is none.
    """
    if folder.name.isdigit() and is_whole(folder):
        return folder
    for place in (folder / RUN_STATES, folder):
        if states := whole_steps(place):
            return place / str(states[-1])
    raise InputError(f"{folder}: no complete state of a training run is here")


def described_model(folder: Path) -> ModelConfig:
    """Reads the architecture from a folder's ``config.json``, and from the weights' headers where
    there are weights: a config.json may be silent where tensors tell."""
    if (folder / ORBAX).is_dir():
        return OrbaxCheckpoint(folder).config
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return HFCheckpoint(folder).config
    return model_config(folder, read_config_json(folder), ())


def _trained_paths(config: ModelConfig, lora: LoraConfig | None) -> list[str]:
    """Lists the dotted paths of the trained parameters, in the order of `jax.tree.leaves`."""

    def make() -> Transformer:
        model = Transformer(config, rngs=nnx.Rngs(0))
        return model if lora is None else with_adapters(model, lora, nnx.Rngs(0))

    kind = nnx.Param if lora is None else nnx.LoRAParam
    state = nnx.state(nnx.eval_shape(make), kind)
    return [hf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
