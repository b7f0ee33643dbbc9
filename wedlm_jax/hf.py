"""Weights from and to Hugging Face checkpoint folders, through one table of names.

Files are read (`wedlm_jax.hf_import`) and written (`wedlm_jax.hf_export`) as raw safetensors,
a few rows at a time, without PyTorch. A round trip is bit-exact: values are only transposed,
stacked and, if asked, cast.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.config import ModelConfig, config_to_hf
from wedlm_jax.dtypes import numpy_dtype
from wedlm_jax.errors import InputError
from wedlm_jax.hf_export import (
    SHARD_BYTES,
    largest_dtype,
    model_tensors,
    plan_files,
    write_weights,
)
from wedlm_jax.hf_folder import TOKENIZER_FILES, HFCheckpoint
from wedlm_jax.hf_import import load_parameter, parameter_sharding
from wedlm_jax.layer_layout import TURNED, are_stacked, is_on_columns
from wedlm_jax.model import Transformer, columns_are_faster
from wedlm_jax.processes import Processes, jax_processes, replacing_together
from wedlm_jax.quantization import check_quantization, rounded_alone

# The parameter-name table: our path, Hugging Face's name, whether the matrix is stored
# the other way round there ([out, in]). "{}" stands for the layer. Names and shapes here are
# those of stacked layers; `parameter_entries` says what they are where layers are apart.
PARAMETER_TABLE: tuple[tuple[str, str, bool], ...] = (
    ("embed_tokens", "model.embed_tokens.weight", False),
    ("norm.scale", "model.norm.weight", False),
    ("lm_head", "lm_head.weight", True),
    ("layers.input_layernorm.scale", "model.layers.{}.input_layernorm.weight", False),
    ("layers.post_attention_layernorm.scale",
     "model.layers.{}.post_attention_layernorm.weight", False),
    ("layers.self_attn.q_norm.scale", "model.layers.{}.self_attn.q_norm.weight", False),
    ("layers.self_attn.k_norm.scale", "model.layers.{}.self_attn.k_norm.weight", False),
    *((f"layers.self_attn.{x}_proj.kernel", f"model.layers.{{}}.self_attn.{x}_proj.weight", True)
      for x in "qkvo"),
    *((f"layers.self_attn.{x}_proj.bias", f"model.layers.{{}}.self_attn.{x}_proj.bias", False)
      for x in "qkv"),
    *((f"layers.mlp.{x}_proj.kernel", f"model.layers.{{}}.mlp.{x}_proj.weight", True)
      for x in ("gate", "up", "down")),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter of a given model in both worlds.

    Attributes:
      path: our dotted path.
      shape: ours, with the leading layer axis where stacked.
      hf_names: Hugging Face's tensors, one per layer where stacked.
      transposed: whether each is stored ``[out, in]`` there.
      stacked: whether the names are the layers of one stacked parameter.
    """

    path: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    transposed: bool
    stacked: bool

    @property
    def hf_shape(self) -> tuple[int, ...]:
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape


def parameter_entries(
    config: ModelConfig, *, stacked: bool = True, columns: bool = False
) -> list[Entry]:
    """The table, filled in for a model of this configuration.

    Args:
      stacked, columns: how the model's layers lie; see `wedlm_jax.layer_layout`.
    """
    shapes = _shapes(config, stacked, columns)
    entries = []
    for path, name, transposed in PARAMETER_TABLE:
        of_layers = "{}" in name
        parent, dot, last = path.rpartition(".")
        if last in TURNED and not stacked and (columns or not of_layers):
            path, transposed = f"{parent}{dot}{TURNED[last]}", not transposed
        names = [name.format(i) for i in range(config.num_hidden_layers if of_layers else 1)]
        tensors: list[tuple[str, tuple[str, ...]]]
        if of_layers and not stacked:
            paths = [path.replace("layers.", f"layers.{i}.", 1) for i in range(len(names))]
            tensors = [(own, (name,)) for own, name in zip(paths, names, strict=True)]
        else:
            tensors = [(path, tuple(names))]
        entries += [
            Entry(path, shapes[path], own, transposed, stacked and of_layers)
            for path, own in tensors
            if path in shapes
        ]
    assert len(entries) == len(shapes), "the parameter table misses a parameter of the model"
    return entries


def hf_path(path: tuple[Any, ...]) -> str:
    """A pytree key path of a model's `nnx.State` as a dotted path of the table."""
    parts = [str(getattr(p, "key", getattr(p, "name", ""))) for p in path]
    return ".".join(p for p in parts if p not in ("value", ""))


def _shapes(config: ModelConfig, stacked: bool, columns: bool) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(_abstract(config, stacked, columns)[1])
    return {hf_path(path): leaf.shape for path, leaf in leaves}


def _abstract(
    config: ModelConfig, stacked: bool, columns: bool
) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    return nnx.split(  # type: ignore[no-any-return]
        nnx.eval_shape(
            lambda: Transformer(config, rngs=nnx.Rngs(0), stacked=stacked, columns=columns)
        )
    )


def check_tensors(
    checkpoint: HFCheckpoint, *, stacked: bool = True, columns: bool = False
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
    """Reads a Hugging Face checkpoint (wedlm, qwen2 or qwen3) into a model.

    Names, shapes and sizes are checked before any values are read. Beyond the parameters
    themselves a host holds its slices of one of them; see `wedlm_jax.hf_import`.

    Args:
      folder: holds ``config.json`` and one or several safetensors files.
      dtype: of the parameters; that of the file by default.
      mesh: lays each parameter out as `wedlm_jax.sharding` says, and each host reads only the
        slices that its devices hold; the default device holds all without one.
      stacked: whether the model's layers are to lie stacked, or apart, each read by itself.
      columns: whether layers that are apart compute on columns; by default where
        `wedlm_jax.model.columns_are_faster`.
      quantization: a name in `wedlm_jax.quantization.QUANTIZATIONS`: each matrix is rounded as
        soon as it is read, so that no more than one is in memory as it was.

    Raises:
      InputError: naming the file and tensor that is missing, extra, misshapen or truncated,
        or the parameter that the mesh does not divide.
    """
    check_quantization(quantization)
    checkpoint = HFCheckpoint(folder)
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
    """A model whose parameters are ``values``, by dotted path of the table."""
    graph, abstract = _abstract(config, stacked, columns)
    state = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree.map(jnp.asarray, values[hf_path(path)]), abstract
    )
    return nnx.merge(graph, state)


def arrays_from_model(model: Transformer) -> dict[str, jax.Array]:
    """The parameters by dotted path of the table."""
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
      model: what to write, however it is sharded.
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
    require_replaceable(Path(folder))
    processes = processes or jax_processes()
    entries = parameter_entries(
        model.config, stacked=are_stacked(model), columns=is_on_columns(model)
    )
    arrays = arrays_from_model(model)
    if any(entry.path not in arrays for entry in entries):
        raise InputError(f"{folder}: the model's matrices are rounded; export it as it was before")
    tensors = model_tensors(entries, arrays, np_dtype)
    with replacing_together(folder, processes) as beside:
        write_weights(plan_files(tensors, shard_bytes), beside, processes)
        if processes.index == 0:
            written = dtype or largest_dtype(tensors)
            write_config(beside, raw_config or config_to_hf(config, dtype=written))
            if tokenizer_from is not None:
                copy_tokenizer(Path(tokenizer_from), beside)


def require_replaceable(folder: Path) -> None:
    """Refuses a folder that holds anything but a checkpoint."""
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
            shutil.copyfile(source / name, destination / name)
