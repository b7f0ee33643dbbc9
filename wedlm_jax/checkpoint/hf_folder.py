"""A folder in Hugging Face format: its configuration, its tensors and the small files beside them.

Only headers are read here, and neither JAX nor Flax is imported, so that `wedlm info` answers at
once however large the weights are.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from wedlm_jax.checkpoint.safetensors_file import SafetensorsFile
from wedlm_jax.config import ModelConfig, config_from_hf, read_config_json
from wedlm_jax.errors import InputError, shortened
from wedlm_jax.host.storage import as_path, copy_file
from wedlm_jax.params import SamplingParams

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION_CONFIG,
)

PART_TENSORS = {
    "qk_norm": "self_attn.q_norm.weight",
    "attention_bias": "self_attn.q_proj.bias",
    "attention_out_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.gate_proj.bias",
}
"""A tensor of each of `wedlm_jax.config.PARTS`, in every layer that has it."""


class StoredTensors(Protocol):
    """A file of tensors; see `wedlm_jax.checkpoint.safetensors_file.SafetensorsFile`."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str) -> np.ndarray: ...

    def read_rows(self, name: str, rows: slice = ...) -> Iterator[tuple[int, np.ndarray]]: ...


class Checkpoint:
    """An opened checkpoint, whatever format it is stored in. No values are read until asked for.

    Attributes:
      folder: where it is, for messages.
      tokenizer_folder: where its tokenizer's files are.
      config: the architecture.
      raw_config: the content of ``config.json``.
      tensors: the file of each tensor, by the tensor's Hugging Face name.
    """

    folder: Path
    tokenizer_folder: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    tensors: Mapping[str, StoredTensors]

    def dtypes(self) -> set[str]:
        """Returns the dtypes of the tensors, such as "float32" and "bfloat16"."""
        return {file.dtype(name) for name, file in self.tensors.items()}

    def values_by_dtype(self) -> dict[str, int]:
        """Counts the values held in each dtype, the most frequent first."""
        counts: Counter[str] = Counter()
        for name, file in self.tensors.items():
            counts[file.dtype(name)] += math.prod(file.shape(name))
        return dict(counts.most_common())

    def read(self, name: str) -> np.ndarray:
        """Reads the values of a tensor, in the shape and dtype of the file."""
        return self.tensors[name].read(name)

    def stored_name(self, name: str) -> str:
        """Returns what a tensor is called in the file, for messages."""
        return name

    def write_tokenizer(self, destination: Path) -> None:
        copy_tokenizer(self.tokenizer_folder, destination)


class HFCheckpoint(Checkpoint):
    """An opened folder in Hugging Face format.

    Attributes:
      files: the safetensors files by name.

    Raises:
      InputError: a file is missing, cut off or not what it should be.
    """

    def __init__(self, folder: str | Path):
        self.folder = self.tokenizer_folder = as_path(folder)
        self.raw_config = read_config_json(self.folder)
        self.files, self.tensors = self._open()
        self.config = model_config(self.folder, self.raw_config, self.tensors)

    def _open(self) -> tuple[dict[str, SafetensorsFile], dict[str, SafetensorsFile]]:
        """Opens the files. As in transformers, a single file takes precedence over an index."""
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
            raise InputError(f"{self.folder}: neither {WEIGHTS} nor {INDEX} is here") from None
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path}: not a safetensors index") from None
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise InputError(f"{path}: tensor {tensor!r} is in no file of this folder")
        return weight_map


def model_config(folder: Path, raw: dict[str, Any], tensors: Collection[str]) -> ModelConfig:
    """Returns the architecture that ``raw`` describes. Its stop tokens include those of
    `generation_config.json`, where a chat model's end of turn often stands alone.

    Args:
      folder: named in errors; `generation_config.json` is read in it.
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


def write_config(folder: Path, raw: dict[str, Any]) -> None:
    text = json.dumps(raw, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copies those of `TOKENIZER_FILES` that are there."""
    if not source.is_dir():
        raise InputError(f"{source}: no such folder to take the tokenizer from")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            copy_file(source / name, destination / name)


ALWAYS = ("repetition_penalty",)
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""Fields of `generation_config.json` that `SamplingParams` has, too; those of `SAMPLED` count only
with ``do_sample``."""


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """The part of a `generation_config.json` that is used here.

    Attributes:
      path: of the file, for messages.
      eos_token_ids: tokens that end a text, besides those of ``config.json``.
      advised: the sampling parameters that the model's makers advise, not checked.
    """

    path: Path
    eos_token_ids: tuple[int, ...] = ()
    advised: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether the file advises to sample, instead of the most likely tokens."""
        return bool(self.advised.get("temperature"))

    def params(self) -> SamplingParams:
        """Returns the sampling parameters that the file advises.

        Raises:
          InputError: a value is out of its field's range.
        """
        try:
            return SamplingParams(**self.advised)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None


def read_generation_config(folder: Path) -> GenerationConfig:
    """Reads a folder's `generation_config.json`; without one, nothing is advised.

    Raises:
      InputError: it is no JSON object, or its stop tokens are no token ids.
    """
    path = folder / GENERATION_CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return GenerationConfig(path)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object")
    given = raw.get("eos_token_id")
    ends = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(one) is int and one >= 0 for one in ends):
        shown = shortened(json.dumps(given), 60)
        raise InputError(f"{path}: expected a token id, or a list, as eos_token_id, not {shown}")
    do_sample = raw.get("do_sample")
    if do_sample not in (None, True, False):
        raise InputError(f"{path}: expected true or false as do_sample, not {do_sample!r}")
    names = (*SAMPLED, *ALWAYS) if do_sample else ALWAYS
    advised = {name: raw[name] for name in names if raw.get(name) is not None}
    if do_sample:
        advised = {"temperature": 1.0} | advised  # what transformers takes
    return GenerationConfig(path, tuple(dict.fromkeys(ends)), advised)


def write_stop_tokens(folder: Path, eos_token_ids: Sequence[int]) -> None:
    """Puts a model's stop tokens into `generation_config.json`, if there is one: programs that
    read it do not look for them in ``config.json``."""
    path = folder / GENERATION_CONFIG
    if not path.exists() or not eos_token_ids:
        return
    read_generation_config(folder)  # reports a malformed file
    raw = json.loads(path.read_text(encoding="utf-8"))
    ends = list(eos_token_ids)
    raw["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    path.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
