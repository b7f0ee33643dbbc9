"""Reads and writes folders in Hugging Face format: the configuration, the weights, and small files.

Opening a folder reads only headers and imports neither JAX nor Flax, so `wedlm info` is fast
however large the weights are. The layout of a file is known before any value is read, so weights
are written sequentially, with one tensor in memory at a time.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.checkpoint import HF
from wedlm_jax.checkpoint.safetensors import DeferredArray, SafetensorsFile, write_safetensors
from wedlm_jax.config import ModelConfig, config_from_hf, read_config_json, read_object
from wedlm_jax.errors import InputError, StorageFailure, errors_at, shortened
from wedlm_jax.host.atomic import part_folder
from wedlm_jax.host.processes import ALONE, Processes
from wedlm_jax.host.storage import as_path, copy_file, is_remote
from wedlm_jax.params import SamplingParams

SHARD_BYTES = 5 * 1000**3

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
"""For each of `wedlm_jax.config.PARTS`, a tensor that every layer with this part has."""


class Checkpoint:
    """An open checkpoint of any format. No values are read until they are asked for.

    Attributes:
      kind: one of the kinds in `wedlm_jax.checkpoint`.
      folder: where it is, for messages.
      tokenizer_folder: where its tokenizer's files are.
      config: the architecture.
      raw_config: the content of ``config.json``.
      tensors: the tensors by Hugging Face name.
    """

    kind: str
    folder: Path
    tokenizer_folder: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    tensors: Mapping[str, DeferredArray]

    def stored_name(self, name: str) -> str:
        """Returns a tensor's name in the file, for messages."""
        return name

    def write_tokenizer(self, destination: Path) -> None:
        copy_tokenizer(self.tokenizer_folder, destination)


class HFCheckpoint(Checkpoint):
    """An open folder in Hugging Face format; ``files`` are its safetensors files by name.

    Raises:
      InputError: a file is missing, truncated or malformed.
    """

    kind = HF

    def __init__(self, folder: str | Path):
        self.folder = self.tokenizer_folder = as_path(folder)
        self.raw_config = read_config_json(self.folder)
        self.files, self.tensors = self._open()
        self.config = model_config(self.folder, self.raw_config, self.tensors)

    def _open(self) -> tuple[dict[str, SafetensorsFile], dict[str, DeferredArray]]:
        """Opens the files. As in transformers, a single file takes precedence over an index."""
        if (self.folder / WEIGHTS).exists():
            file = SafetensorsFile(self.folder / WEIGHTS)
            return {WEIGHTS: file}, file.tensors
        weight_map = self._weight_map()
        files = {name: SafetensorsFile(self.folder / name) for name in set(weight_map.values())}
        for tensor, name in weight_map.items():
            if tensor not in files[name].tensors:
                raise InputError(
                    f"{self.folder / name}: tensor {tensor!r} is missing, though {INDEX} names it"
                )
        # Not all tensors of the files: these may hold leftovers that the index leaves out.
        return files, {tensor: files[name].tensors[tensor] for tensor, name in weight_map.items()}

    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except FileNotFoundError:
            raise InputError(f"{self.folder}: has neither {WEIGHTS} nor {INDEX}") from None
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path}: not a safetensors index") from None
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise InputError(f"{path}: tensor {tensor!r} is in no file of this folder")
        return weight_map


def model_config(folder: Path, raw: dict[str, Any], tensors: Collection[str]) -> ModelConfig:
    """Returns the architecture that ``raw``, the content of the folder's ``config.json``, describes
    together with the Hugging Face names of the tensors. Its stop tokens include those of
    `generation_config.json`, often the only place that names a chat model's end of turn."""
    raw = dict(raw)
    if raw.get("model_type") == "wedlm":
        # Models of any family can have this type; the tensors show what the file leaves out.
        for part, tensor in PART_TENSORS.items():
            raw.setdefault(part, f"model.layers.0.{tensor}" in tensors)
    with errors_at(folder / "config.json"):
        try:
            config = config_from_hf(raw)
        except InputError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"model config: a field is malformed ({error})") from None
    generation = read_generation_config(folder)
    ends = tuple(dict.fromkeys((*config.eos_token_ids, *generation.eos_token_ids)))
    with errors_at(generation.path):
        return dataclasses.replace(config, eos_token_ids=ends)


def write_config(folder: Path, raw: dict[str, Any]) -> None:
    write_object(folder / "config.json", raw)


def write_object(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copies those of `TOKENIZER_FILES` that exist."""
    if not source.is_dir():
        raise InputError(f"{source}: no such folder to take the tokenizer from")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            copy_file(source / name, destination / name)


ALWAYS = ("repetition_penalty",)
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""Fields of `generation_config.json` that `SamplingParams` also has; those in `SAMPLED` apply only
with ``do_sample``."""


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """The part of a `generation_config.json` that is used here.

    Attributes:
      path: the file, for messages.
      eos_token_ids: tokens that end a text, in addition to those of ``config.json``.
      advised: the sampling parameters that the model's makers recommend, unchecked.
    """

    path: Path
    eos_token_ids: tuple[int, ...] = ()
    advised: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether the file recommends sampling rather than the most likely tokens."""
        return bool(self.advised.get("temperature"))

    def params(self) -> SamplingParams:
        """Returns the sampling parameters that the file recommends.

        Raises:
          InputError: a value is out of its field's range.
        """
        with errors_at(self.path):
            return SamplingParams(**self.advised)


def read_generation_config(folder: Path) -> GenerationConfig:
    """Reads a folder's `generation_config.json`; without one, nothing is recommended.

    Raises:
      InputError: it is not a JSON object, or its stop tokens are not token ids.
    """
    path = folder / GENERATION_CONFIG
    raw = read_object(path)
    if raw is None:
        return GenerationConfig(path)
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
        advised = {"temperature": 1.0} | advised  # the default of transformers
    return GenerationConfig(path, tuple(dict.fromkeys(ends)), advised)


def write_stop_tokens(folder: Path, eos_token_ids: Sequence[int]) -> None:
    """Puts a model's stop tokens into `generation_config.json`, if there is one: programs that
    read it do not look for them in ``config.json``."""
    path = folder / GENERATION_CONFIG
    if not eos_token_ids or (raw := read_object(path)) is None:
        return
    read_generation_config(folder)  # reports a malformed file
    ends = list(eos_token_ids)
    write_object(path, {**raw, "eos_token_id": ends[0] if len(ends) == 1 else ends})


# --- weights, written ---------------------------------------------------------------------


def require_replaceable(folder: Path) -> None:
    """Refuses a folder with content that is neither a checkpoint nor left by a killed call."""
    if is_remote(folder) and part_folder(folder).exists():
        return
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise InputError(f"{folder}: not empty, and not a checkpoint that could be replaced")


def values_by_dtype(tensors: Iterable[DeferredArray]) -> dict[str, int]:
    """Counts the values of each dtype ("float32", "bfloat16"), the most frequent first."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype.name] += tensor.size
    return dict(counts.most_common())


def write_weights(
    tensors: Sequence[DeferredArray],
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes = ALONE,
) -> None:
    """Writes tensors as one file, or as several and an index.

    Processes take turns: each file is written by one of them, and every tensor is read by all,
    since several may be needed to gather it. A process whose disk fails keeps reading, so that the
    others do not wait for it, and fails at the end.

    Args:
      tensors: the same in all processes.
      folder: where to write; all processes see it.
      shard_bytes: maximum size of a file, unless a single tensor is larger.
    """
    files = _by_file(tensors, shard_bytes)
    failure: Exception | None = None
    for number, (name, group) in enumerate(files.items()):
        values = (tensor.read() for tensor in group)
        if number % processes.count == processes.index and failure is None:
            try:
                write_safetensors(folder / name, group, values)
            except (OSError, InputError, StorageFailure) as error:
                failure = error
        if processes.count > 1:
            for _ in values:
                pass
    if failure is not None:
        raise failure
    if len(files) > 1 and processes.index == 0:
        weight_map = {tensor.name: name for name, group in files.items() for tensor in group}
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_object(folder / INDEX, index)


def _by_file(tensors: Sequence[DeferredArray], shard_bytes: int) -> dict[str, list[DeferredArray]]:
    groups: list[list[DeferredArray]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    for group in groups:
        group.sort(key=lambda tensor: -tensor.dtype.itemsize)  # keeps every offset aligned
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    count = len(groups)
    return {
        f"model-{i + 1:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups)
    }
