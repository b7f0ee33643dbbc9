"""LoRA adapters of an ordinary finetune, in PEFT's layout, read as the model that they make.

A folder with ``adapter_config.json`` and ``adapter_model.safetensors`` names its base model. Each
matrix is merged as it is read, W + s B A, row by row, so that such a folder can stand wherever a
model can: to decode with, on a mesh, in eight bits, to convert. Nothing is written, and no merged
copy is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from wedlm_jax.checkpoint import PEFT
from wedlm_jax.checkpoint.hf import Checkpoint
from wedlm_jax.checkpoint.safetensors import (
    DeferredArray,
    Rows,
    SafetensorsFile,
    array_in_rows,
    cast,
)
from wedlm_jax.config import read_object
from wedlm_jax.errors import InputError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

NAME = re.compile(r"base_model\.model\.(?P<owner>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Fields of PEFT's configuration, and the values with which W + s B A is the whole change."""


class PeftCheckpoint(Checkpoint):
    """A base model with the adapters of a folder merged in.

    Args:
      folder: the adapters' folder.
      base: the model that they belong to, open.

    Raises:
      InputError: the adapters are of another kind, are cut off, or do not fit the base.
    """

    kind = PEFT

    def __init__(self, folder: Path, base: Checkpoint):
        content = read_adapter_config(folder)
        rank, alpha = content["r"], content["lora_alpha"]
        scale = alpha / (rank**0.5 if content.get("use_rslora") else rank)
        self.folder, self.config, self.raw_config = folder, base.config, base.raw_config
        own = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
        self._base, self.tokenizer_folder = base, folder if own else base.tokenizer_folder
        tensors = dict(base.tensors)
        for name, (a, b) in _pairs(SafetensorsFile(folder / WEIGHTS)).items():
            if name not in tensors or len(tensors[name].shape) != 2:
                raise InputError(
                    f"{folder / WEIGHTS}: adapters of {name!r}, which is no matrix of the base "
                    f"model in {base.folder}"
                )
            if a.shape[0] != rank:  # the scale would be another, too
                raise InputError(
                    f"{folder / WEIGHTS}: adapters of {name!r} have rank {a.shape[0]}, and "
                    f"{CONFIG} says r {rank}"
                )
            tensors[name] = _merged(tensors[name], a, b, scale, folder)
        self.tensors = tensors

    def write_tokenizer(self, destination: Path) -> None:
        self._base.write_tokenizer(destination)
        super().write_tokenizer(destination)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a folder's ``adapter_config.json``, checked as far as merging needs.

    Raises:
      InputError: naming the field that is missing, or asks for more than a low-rank term.
    """
    path = folder / CONFIG
    content = read_object(path)
    if content is None:
        raise InputError(f"{path}: no such file")
    if (content.get("wedlm") or {}).get("rows") == "masked":
        raise InputError(
            f"{folder}: a drafter, which belongs beside its model: give the model, and this folder "
            "as its drafter"
        )
    if content.get("peft_type") != "LORA":
        kind = content.get("peft_type")
        raise InputError(f"{path}: expected LORA as peft_type, not {kind!r}; others are not merged")
    for field, plain in UNSUPPORTED.items():
        if (value := content.get(field)) not in plain:
            raise InputError(f"{path}: {field} {value!r} is not supported; merge it with PEFT")
    for field in ("r", "lora_alpha"):
        value = content.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InputError(f"{path}: expected a number above 0 as {field}, not {value!r}")
    return content


def base_of(folder: Path) -> str | Path:
    """Returns the name of the model that a folder's adapters belong to: a path, or an id on the
    hub. A relative path may count from the adapters' folder, too.

    Raises:
      InputError: it is not named.
    """
    name = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{folder / CONFIG}: base_model_name_or_path does not name the base model; write its "
            "folder there"
        )
    beside = folder / name
    return beside if not Path(name).exists() and beside.is_dir() else name


def _pairs(file: SafetensorsFile) -> dict[str, tuple[DeferredArray, DeferredArray]]:
    """Returns A and B by the Hugging Face name of the matrix that they belong to."""
    parts: dict[str, dict[str, DeferredArray]] = {}
    for name, tensor in file.tensors.items():
        found = NAME.fullmatch(name)
        if found is None:
            raise InputError(f"{file.path}: tensor {name!r} is not LoRA's A or B of a matrix")
        parts.setdefault(f"{found['owner']}.weight", {})[found["part"]] = tensor
    for name, both in parts.items():
        if len(both) < 2:
            (part,) = both
            raise InputError(f"{file.path}: {name!r} has lora_{part} alone, not A and B")
    return {name: (both["A"], both["B"]) for name, both in parts.items()}


def _merged(
    weight: DeferredArray, a: DeferredArray, b: DeferredArray, scale: float, folder: Path
) -> DeferredArray:
    """Returns ``W + s B A``, computed in float32 and rounded to the dtype of W."""
    n_out, n_in = weight.shape
    rank = a.shape[0]
    if a.shape != (rank, n_in) or b.shape != (n_out, rank):
        raise InputError(
            f"{folder / WEIGHTS}: A {list(a.shape)} and B {list(b.shape)} do not fit "
            f"{weight.name!r} of shape {list(weight.shape)}: adapters of another model"
        )

    def rows(wanted: slice) -> Rows:
        right = a.read().astype(np.float32)
        left = b.read().astype(np.float32) * scale
        for start, part in weight.read_rows(wanted):
            change = left[start : start + len(part)] @ right
            yield start, cast(weight.name, part.astype(np.float32) + change, weight.dtype)

    return array_in_rows(weight.name, weight.shape, weight.dtype, rows)
