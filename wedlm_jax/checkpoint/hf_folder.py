"""A Hugging Face checkpoint folder, opened: its configuration, and its tensors by name.

Only headers are read here, and neither JAX nor Flax is imported: what a folder holds can
be told at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from wedlm_jax.checkpoint.generation_config import read_generation_config
from wedlm_jax.checkpoint.safetensors_file import SafetensorsFile
from wedlm_jax.config import ModelConfig, config_from_hf, read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.host.storage import as_path

EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded"
PART_TENSORS = {
    "qk_norm": "self_attn.q_norm.weight",
    "attention_bias": "self_attn.q_proj.bias",
    "attention_out_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.gate_proj.bias",
}
"""A tensor of each of `wedlm_jax.config.PARTS`, in every layer that has it."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class HFCheckpoint:
    """An opened checkpoint folder.

    Attributes:
      folder: where it is.
      raw_config: ``config.json`` as it stands.
      config: the architecture.
      files: the safetensors files by name.
      tensors: the file of each tensor.

    Raises:
      InputError: a file is missing, cut off or not what it should be.
    """

    def __init__(self, folder: str | Path):
        self.folder = as_path(folder)
        if not self.folder.is_dir():
            is_file = self.folder.suffix == ".gguf"
            raise InputError(f"{self.folder}: no such {'file' if is_file else 'model folder'}")
        self.raw_config = read_config_json(self.folder)
        self.files, self.tensors = self._open()
        self.config = model_config(self.folder, self.raw_config, self.tensors)

    def _open(self) -> tuple[dict[str, SafetensorsFile], dict[str, SafetensorsFile]]:
        """Opens the files. As in transformers, a single file goes before an index."""
        if (self.folder / WEIGHTS).exists():
            file = SafetensorsFile(self.folder / WEIGHTS)
            return {WEIGHTS: file}, dict.fromkeys(file.names(), file)
        weight_map = self._weight_map()
        files = {name: SafetensorsFile(self.folder / name) for name in set(weight_map.values())}
        for tensor, name in weight_map.items():
            if tensor not in files[name].names():
                raise InputError(
                    f"{self.folder / name}: tensor {tensor!r} is missing, though {INDEX} names it"
                )
        # The index, not the file, says where a tensor is: files may hold leftovers.
        return files, {tensor: files[name] for tensor, name in weight_map.items()}

    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except FileNotFoundError:
            raise InputError(f"{self.folder}: {_why_no_weights(self.folder)}") from None
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path}: not a safetensors index") from None
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise InputError(f"{path}: tensor {tensor!r} is in no file of this folder")
        return weight_map

    def dtypes(self) -> set[str]:
        """Names such as "float32" and "bfloat16"."""
        return {file.dtype(name) for name, file in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Reads the values of one tensor, in the shape and dtype of the file."""
        return self.tensors[name].read(name)


def _why_no_weights(folder: Path) -> str:
    if list(folder.glob("pytorch_model*.bin")):
        return "holds PyTorch's pytorch_model.bin; only safetensors files are read"
    return f"neither {WEIGHTS} nor {INDEX} is here"


def model_config(folder: Path, raw: dict[str, Any], tensors: Collection[str]) -> ModelConfig:
    """Returns the architecture that ``raw`` describes, ended by what a `generation_config.json`
    beside it ends texts with, too: the turn's end of a chat model often stands there alone.

    Args:
      folder: named in errors; the other file is read in it.
      raw: the content of ``config.json``.
      tensors: Hugging Face names of the tensors that are there.
    """
    raw = dict(raw)
    if raw.get("model_type") == "wedlm":
        # Models of any family carry this type; where the file is silent the tensors tell.
        for part, tensor in PART_TENSORS.items():
            raw.setdefault(part, f"model.layers.0.{tensor}" in tensors)
    try:
        config = config_from_hf(raw)
    except InputError as error:
        raise InputError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder / 'config.json'}: model config: a field is malformed ({error})"
        ) from None
    generation = read_generation_config(folder)
    ends = tuple(dict.fromkeys((*config.eos_token_ids, *generation.eos_token_ids)))
    try:
        return dataclasses.replace(config, eos_token_ids=ends)
    except InputError as error:
        raise InputError(f"{generation.path}: {error}") from None
