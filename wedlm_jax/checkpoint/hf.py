"""Weights from and to Hugging Face checkpoint folders, through one table of names.

Files are read (`wedlm_jax.checkpoint.hf_import`) and written (`wedlm_jax.checkpoint.hf_export`) as
raw safetensors, a few rows at a time, without PyTorch. A round trip is bit-exact: values are only
transposed, stacked and, if asked, cast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.checkpoint.dtypes import numpy_dtype
from wedlm_jax.checkpoint.generation_config import write_ends
from wedlm_jax.checkpoint.hf_export import (
    SHARD_BYTES,
    largest_dtype,
    model_tensors,
    plan_files,
    write_weights,
)
from wedlm_jax.checkpoint.hf_folder import TOKENIZER_FILES
from wedlm_jax.checkpoint.hf_import import load_parameter, parameter_sharding
from wedlm_jax.checkpoint.names import Entry, abstract_model, hf_path, parameter_entries
from wedlm_jax.checkpoint.opened import OpenedCheckpoint, open_checkpoint
from wedlm_jax.config import ModelConfig, config_to_hf
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import part_folder
from wedlm_jax.host.processes import Processes, jax_processes, replacing_together
from wedlm_jax.host.storage import as_path, copy_file, is_remote
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked, is_on_columns
from wedlm_jax.model.layers import columns_are_faster
from wedlm_jax.model.quantization import check_quantization, rounded_alone


def check_tensors(
    checkpoint: OpenedCheckpoint, *, stacked: bool = True, columns: bool = False
) -> list[Entry]:
    """Verifies that the tensors of a folder are exactly the model's; returns the table, as
    `parameter_entries`.

    Raises:
      InputError: naming the first missing, extra or misshapen tensor.
    """
    config, folder = checkpoint.config, checkpoint.folder
    entries = parameter_entries(config, stacked=stacked, columns=columns)
    expected = {name: entry.hf_shape for entry in entries for name in entry.hf_names}
    extra = set(checkpoint.tensors) - set(expected)
    if config.tie_word_embeddings:
        extra.discard("lm_head.weight")  # some exporters write the tied head out
    for name in sorted(set(expected) - set(checkpoint.tensors)):
        raise InputError(f"{folder}: tensor {name!r} is missing")
    for name in sorted(extra):
        raise InputError(f"{folder}: tensor {name!r} is not part of this model")
    for name, shape in expected.items():
        found = checkpoint.tensors[name].shape(name)
        if found != shape:
            raise InputError(
                f"{folder}: tensor {name!r} has shape {list(found)}, expected {list(shape)}"
            )
    return entries


def load_checkpoint(
    folder: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    stacked: bool = True,
    columns: bool | None = None,
    quantization: str | None = None,
) -> Transformer:
    """Reads a checkpoint (of a type in `wedlm_jax.config.FAMILIES`) into a model.

    Names, shapes and sizes are checked before any values are read. Beyond the parameters
    themselves a host holds its slices of one of them; see `wedlm_jax.checkpoint.hf_import`.

    Args:
      folder: holds ``config.json`` and one or several safetensors files, or ``orbax/``, as `wedlm
        convert` makes it; of that each host reads whole parameters, one at a time.
      dtype: of the parameters; that of the file by default.
      mesh: lays each parameter out as `wedlm_jax.sharding` says, and each host reads only the
        slices that its devices hold; the default device holds all without one.
      stacked: whether the model's layers are to lie stacked, or apart, each read by itself.
      columns: whether layers that are apart compute on columns; by default where
        `wedlm_jax.model.layers.columns_are_faster`.
      quantization: a name in `wedlm_jax.model.quantization.QUANTIZATIONS`: each matrix is rounded
        as soon as it is read, so that no more than one is in memory as it was.

    Raises:
      InputError: naming the file and tensor that is missing, extra, misshapen or truncated,
        or the parameter that the mesh does not divide.
    """
    check_quantization(quantization)
    checkpoint = open_checkpoint(folder)
    if columns is None:
        kinds = [dtype] if dtype is not None else checkpoint.dtypes()
        widest = max((jnp.dtype(kind) for kind in kinds), key=lambda kind: kind.itemsize)
        columns = not stacked and columns_are_faster(checkpoint.config, widest)
    entries = check_tensors(checkpoint, stacked=stacked, columns=columns)
    if mesh is not None:
        for entry in entries:
            parameter_sharding(mesh, entry)

    def load(entry: Entry) -> Any:
        value = load_parameter(checkpoint, entry, dtype, mesh)
        name = entry.path.rpartition(".")[2]
        return value if quantization is None else rounded_alone(value, name)

    values = {entry.path: load(entry) for entry in entries}
    return model_from_arrays(checkpoint.config, values, stacked=stacked, columns=columns)


def model_from_arrays(
    config: ModelConfig, values: dict[str, Any], *, stacked: bool = True, columns: bool = False
) -> Transformer:
    """Builds a model whose parameters are ``values``, by dotted path of the table."""
    graph, abstract = abstract_model(config, stacked, columns)
    state = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree.map(jnp.asarray, values[hf_path(path)]), abstract
    )
    return nnx.merge(graph, state)


def arrays_from_model(model: Transformer) -> dict[str, jax.Array]:
    """Returns the parameters by dotted path of the table."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    return {hf_path(path): leaf for path, leaf in leaves}


def save_checkpoint(
    model: Transformer,
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: str | None = None,
    tokenizer_from: str | Path | None = None,
    raw_config: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes | None = None,
) -> None:
    """Writes a Hugging Face checkpoint folder: weights, ``config.json``, tokenizer files.

    The folder appears whole or not at all: files are written to one beside it, which
    then takes its name.

    Beyond the parameters a host holds one tensor. In a job of several processes all of them
    call this: each writes some of the files, process 0 the rest of the folder, and parameters
    that lie on several hosts are gathered tensor by tensor.

    Args:
      model: what to write, however it is sharded; adapters are merged.
      config: written as ``config.json``; normally ``model.config``.
      folder: must not exist, or hold an earlier checkpoint, which is replaced.
      dtype: "float32", "bfloat16" or "float16"; that of the parameters by default.
      tokenizer_from: a folder whose tokenizer files are copied.
      raw_config: written as ``config.json`` instead, as it stands.
      shard_bytes: a file holds at most this, but for a tensor that alone has more.
      processes: of the job; those of JAX by default.

    Raises:
      InputError: ``folder`` holds something else, the values do not fit ``dtype``, or the
        model's matrices are rounded.
    """
    np_dtype = numpy_dtype(dtype)
    require_replaceable(as_path(folder))
    processes = processes or jax_processes()
    entries = parameter_entries(
        model.config, stacked=are_stacked(model), columns=is_on_columns(model)
    )
    arrays = arrays_from_model(model)
    if any(entry.path not in arrays for entry in entries):
        raise InputError(f"{folder}: the model's matrices are rounded; export it as it was before")
    scale = 0.0 if model.lora is None else model.lora.scale
    tensors = model_tensors(entries, arrays, np_dtype, scale)
    with replacing_together(folder, processes) as beside:
        write_weights(plan_files(tensors, shard_bytes), beside, processes)
        if processes.index == 0:
            written = dtype or largest_dtype(tensors)
            write_config(beside, raw_config or config_to_hf(config, dtype=written))
            if tokenizer_from is not None:
                copy_tokenizer(as_path(tokenizer_from), beside)
                if raw_config is None:
                    write_ends(beside, config.eos_token_ids)


def require_replaceable(folder: Path) -> None:
    """Refuses a folder that holds anything but a checkpoint, or what a killed call left of one."""
    if is_remote(folder) and part_folder(folder).exists():
        return
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise InputError(f"{folder}: not empty, and not a checkpoint that could be replaced")


def write_config(folder: Path, raw: dict[str, Any]) -> None:
    text = json.dumps(raw, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copies what tokenizer files there are."""
    if not source.is_dir():
        raise InputError(f"{source}: no such folder to take the tokenizer from")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            copy_file(source / name, destination / name)
