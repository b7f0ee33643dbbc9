"""Weights from and to Hugging Face checkpoint folders, through one table of names.

Files are read and written as raw safetensors, tensor by tensor, without PyTorch. A
round trip is bit-exact: values are only transposed, stacked and, if asked, cast.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from wedlm_jax.config import ModelConfig, config_from_hf, config_to_hf, read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.safetensors_file import SafetensorsFile, write_safetensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1000**3

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip

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


class HFCheckpoint:
    """An opened checkpoint folder: its configuration, and its tensors by name."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"{self.folder}: no such model folder")
        self.raw_config = read_config_json(self.folder)
        self._files = {name: SafetensorsFile(self.folder / name) for name in self._file_names()}
        self.tensors = {tensor: file for file in self._files.values() for tensor in file.names()}
        self.config = self._config()

    def _file_names(self) -> list[str]:
        index = self.folder / INDEX
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return sorted(set(weight_map.values()))
            except (ValueError, KeyError, AttributeError, TypeError):
                raise InputError(f"{index}: not a safetensors index") from None
        if (self.folder / WEIGHTS).exists():
            return [WEIGHTS]
        raise InputError(f"{self.folder}: neither {WEIGHTS} nor {INDEX} is here")

    def _config(self) -> ModelConfig:
        raw = dict(self.raw_config)
        if raw.get("model_type") == "wedlm":
            # Both Qwen styles carry this type; where the file is silent the tensors tell.
            layer = "model.layers.0.self_attn."
            raw.setdefault("attention_bias", layer + "q_proj.bias" in self.tensors)
            raw.setdefault("qk_norm", layer + "q_norm.weight" in self.tensors)
        try:
            return config_from_hf(raw)
        except InputError as error:
            raise InputError(f"{self.folder / 'config.json'}: {error}") from None

    def check(self) -> list[Entry]:
        """Verifies that the tensors are exactly the model's; returns the table.

        Raises:
          InputError: naming the first missing, extra or misshapen tensor.
        """
        entries = parameter_entries(self.config)
        expected = {name: entry.hf_shape for entry in entries for name in entry.hf_names}
        extra = set(self.tensors) - set(expected)
        if self.config.tie_word_embeddings:
            extra.discard("lm_head.weight")  # some exporters write the tied head out
        for name in sorted(set(expected) - set(self.tensors)):
            raise InputError(f"{self.folder}: tensor {name!r} is missing")
        for name in sorted(extra):
            raise InputError(f"{self.folder}: tensor {name!r} is not part of this model")
        for name, shape in expected.items():
            found = self.tensors[name].shape(name)
            if found != shape:
                raise InputError(
                    f"{self.folder}: tensor {name!r} has shape {list(found)}, "
                    f"expected {list(shape)}"
                )
        return entries

    def dtypes(self) -> set[str]:
        return {file.dtype(name) for name, file in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name].read(name)


def load_checkpoint(folder: str | Path, *, dtype: Any = None) -> Transformer:
    """Reads a Hugging Face checkpoint (wedlm, qwen2 or qwen3) into a model.

    Args:
      folder: holds ``config.json`` and one or several safetensors files.
      dtype: of the parameters; that of the file by default.

    Raises:
      InputError: naming the file and tensor that is missing, extra, misshapen or truncated.
    """
    checkpoint = HFCheckpoint(folder)
    values = {e.path: _read_entry(checkpoint, e, dtype) for e in checkpoint.check()}
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


def _read_entry(checkpoint: HFCheckpoint, entry: Entry, dtype: Any) -> np.ndarray:
    first = checkpoint.read(entry.hf_names[0])
    target = np.dtype(dtype) if dtype is not None else first.dtype
    if not entry.stacked:
        return np.ascontiguousarray((first.T if entry.transposed else first).astype(target))
    out = np.empty(entry.shape, target)
    for i, name in enumerate(entry.hf_names):
        tensor = checkpoint.read(name)
        out[i] = tensor.T if entry.transposed else tensor
    return out


def hf_tensors(model: Transformer, dtype: Any = None) -> Iterator[tuple[str, np.ndarray]]:
    """The model's tensors under their Hugging Face names and shapes, one at a time."""
    values = arrays_from_model(model)
    for entry in parameter_entries(model.config):
        value = np.asarray(values[entry.path])
        parts = value if entry.stacked else value[None]
        for name, part in zip(entry.hf_names, parts, strict=True):
            tensor = part.T if entry.transposed else part
            yield name, np.ascontiguousarray(tensor if dtype is None else tensor.astype(dtype))


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
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise InputError(f"{folder}: not empty, and not a checkpoint that could be replaced")
    beside = folder.with_name(folder.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    np_dtype = None if dtype is None else np.dtype(getattr(ml_dtypes, dtype, dtype))
    written = _write_shards(hf_tensors(model, np_dtype), beside, shard_bytes)
    raw = raw_config or config_to_hf(config, dtype=dtype or written)
    (beside / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES if tokenizer_from is not None else ():
        source = Path(str(tokenizer_from)) / name
        if source.exists():
            shutil.copyfile(source, beside / name)
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(beside, folder)


def _write_shards(tensors: Iterator[tuple[str, np.ndarray]], folder: Path, shard_bytes: int) -> str:
    """Writes the tensors in files of bounded size; returns the dtype's name."""
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total, dtype = 0, "float32"

    def flush() -> None:
        write_safetensors(folder / f"shard-{len(shards)}", pending)
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor
        total += tensor.nbytes
        dtype = tensor.dtype.name
    flush()
    if len(shards) == 1:
        os.rename(folder / "shard-0", folder / WEIGHTS)
        return dtype
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"shard-{i}", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtype
