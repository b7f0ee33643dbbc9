"""Weights from and to Hugging Face checkpoint folders, through one table of names.

Files are read and written as raw safetensors, tensor by tensor, without PyTorch. A
round trip is bit-exact: values are only transposed, stacked and, if asked, cast.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from wedlm_jax.config import ModelConfig, config_to_hf
from wedlm_jax.errors import InputError
from wedlm_jax.folder_swap import replacing
from wedlm_jax.hf_folder import INDEX, TOKENIZER_FILES, WEIGHTS, HFCheckpoint
from wedlm_jax.model import Transformer
from wedlm_jax.safetensors_file import write_safetensors

SHARD_BYTES = 5 * 1000**3
DTYPES = ("float32", "bfloat16", "float16")

# The parameter-name table: our path, Hugging Face's name, whether the matrix is stored
# the other way round there ([out, in]). "{}" stands for the layer; those are stacked here.
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


def parameter_entries(config: ModelConfig) -> list[Entry]:
    """The table, filled in for a model of this configuration."""
    shapes = _shapes(config)
    entries = []
    for path, name, transposed in PARAMETER_TABLE:
        if path not in shapes:
            continue
        stacked = "{}" in name
        names = [name.format(i) for i in range(config.num_hidden_layers)] if stacked else [name]
        entries.append(Entry(path, shapes[path], tuple(names), transposed, stacked))
    assert len(entries) == len(shapes), "the parameter table misses a parameter of the model"
    return entries


def hf_path(path: tuple[Any, ...]) -> str:
    """A pytree key path of a model's `nnx.State` as a dotted path of the table."""
    parts = [str(getattr(p, "key", getattr(p, "name", ""))) for p in path]
    return ".".join(p for p in parts if p not in ("value", ""))


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    return {hf_path(path): leaf.shape for path, leaf in leaves}


def check_tensors(checkpoint: HFCheckpoint) -> list[Entry]:
    """Verifies that the tensors of a folder are exactly the model's; returns the table.

    Raises:
      InputError: naming the first missing, extra or misshapen tensor.
    """
    config, folder = checkpoint.config, checkpoint.folder
    entries = parameter_entries(config)
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


def load_checkpoint(folder: str | Path, *, dtype: Any = None) -> Transformer:
    """Reads a Hugging Face checkpoint (wedlm, qwen2 or qwen3) into a model.

    Args:
      folder: holds ``config.json`` and one or several safetensors files.
      dtype: of the parameters; that of the file by default.

    Raises:
      InputError: naming the file and tensor that is missing, extra, misshapen or truncated.
    """
    checkpoint = HFCheckpoint(folder)
    values = {e.path: read_entry(checkpoint, e, dtype) for e in check_tensors(checkpoint)}
    return model_from_arrays(checkpoint.config, values)


def model_from_arrays(config: ModelConfig, values: dict[str, Any]) -> Transformer:
    """A model whose parameters are ``values``, by dotted path of the table."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    state = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(values[hf_path(path)]), abstract
    )
    return nnx.merge(graph, state)


def arrays_from_model(model: Transformer) -> dict[str, jax.Array]:
    """The parameters by dotted path of the table."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    return {hf_path(path): leaf for path, leaf in leaves}


def read_entry(checkpoint: HFCheckpoint, entry: Entry, dtype: Any = None) -> np.ndarray:
    """One parameter, in our shape.

    Args:
      dtype: of the result; by default that of the file, and where the layers' tensors
        differ in dtype, the narrowest that holds all their values.
    """
    names = entry.hf_names
    kinds = {np.dtype(checkpoint.tensors[name].dtype(name)) for name in names}
    target = np.dtype(dtype) if dtype is not None else _common_dtype(kinds)
    out = np.empty(entry.shape, target)
    for i, name in enumerate(names):
        tensor = cast(name, checkpoint.read(name), target)
        out[i if entry.stacked else ...] = tensor.T if entry.transposed else tensor
    return out


def _common_dtype(kinds: set[np.dtype]) -> np.dtype:
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def cast(name: str, tensor: np.ndarray, dtype: Any) -> np.ndarray:
    """``tensor`` in ``dtype``.

    Raises:
      InputError: it holds finite values that this dtype cannot (float16 ends at 65504).
    """
    if dtype is None or tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        result = tensor.astype(dtype)
    if np.dtype(dtype).name != "float32" and np.any(np.isinf(result) & np.isfinite(tensor)):
        raise InputError(
            f"tensor {name!r} holds values too large for {np.dtype(dtype).name}; use bfloat16"
        )
    return result


def hf_tensors(
    entries: list[Entry], values: Mapping[str, Any], dtype: Any = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters under their Hugging Face names and shapes, one at a time.

    Args:
      entries: the table, from `parameter_entries`.
      values: the parameters by dotted path.
      dtype: of the tensors; that of the parameters by default.
    """
    for entry in entries:
        value = np.asarray(values[entry.path])
        parts = value if entry.stacked else value[None]
        for name, part in zip(entry.hf_names, parts, strict=True):
            tensor = part.T if entry.transposed else part
            yield name, np.ascontiguousarray(cast(name, tensor, dtype))


def numpy_dtype(name: str | None) -> np.dtype | None:
    """The dtype called "float32", "bfloat16" or "float16"; None for None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, not {name!r}")
    return np.dtype(getattr(ml_dtypes, name, name))


def save_checkpoint(
    model: Transformer,
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: str | None = None,
    tokenizer_from: str | Path | None = None,
    raw_config: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a Hugging Face checkpoint folder: weights, ``config.json``, tokenizer files.

    The folder appears whole or not at all: files are written to one beside it, which
    then takes its name.

    Args:
      model: what to write.
      config: written as ``config.json``; normally ``model.config``.
      folder: must not exist, or hold an earlier checkpoint, which is replaced.
      dtype: "float32", "bfloat16" or "float16"; that of the parameters by default.
      tokenizer_from: a folder whose tokenizer files are copied.
      raw_config: written as ``config.json`` instead, as it stands.
      shard_bytes: a file is closed before it exceeds this.

    Raises:
      InputError: ``folder`` holds something else, or the values do not fit ``dtype``.
    """
    np_dtype = numpy_dtype(dtype)
    require_replaceable(Path(folder))
    entries, values = parameter_entries(model.config), arrays_from_model(model)
    with replacing(folder) as beside:
        written = write_weights(hf_tensors(entries, values, np_dtype), beside, shard_bytes)
        write_config(beside, raw_config or config_to_hf(config, dtype=dtype or written))
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


def write_weights(
    tensors: Iterable[tuple[str, np.ndarray]], folder: Path, shard_bytes: int = SHARD_BYTES
) -> str:
    """Writes tensors in files of bounded size, with an index where there are several.

    Returns:
      the name of the dtype that most values have.
    """
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    size: Counter[str] = Counter()

    def flush() -> None:
        write_safetensors(folder / f"shard-{len(shards)}", pending)
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor
        size[tensor.dtype.name] += tensor.nbytes
    flush()
    [(dtype, _)] = size.most_common(1)
    if len(shards) == 1:
        os.rename(folder / "shard-0", folder / WEIGHTS)
        return dtype
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"shard-{i}", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    metadata = {"total_size": size.total()}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtype
