"""Reads and writes adapters in PEFT's layout, ``adapter_config.json`` and
``adapter_model.safetensors``.

The adapters of an ordinary finetune name their base model and are read as a merged model: each
matrix is merged as it is read, W + s B A, row by row, so that such a folder can be used wherever a
model can. Nothing is written, and no merged copy is kept.

A drafter's adapters act on masks only and must not be merged. The configuration says so under the
key ``wedlm``, with the width of the windows that they were trained on and a digest of their base
model. A mask's embedding and the previous-token head are additional tensors.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.checkpoint import ADAPTER_CONFIG, PEFT
from wedlm_jax.checkpoint.hf import Checkpoint, write_object
from wedlm_jax.checkpoint.names import check_tensors, gathered
from wedlm_jax.checkpoint.safetensors import (
    DeferredArray,
    Rows,
    SafetensorsFile,
    array_in_rows,
    cast,
    numpy_dtype,
    write_safetensors,
)
from wedlm_jax.config import read_object
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import jax_processes, replacing_together
from wedlm_jax.host.storage import as_path
from wedlm_jax.model import Transformer
from wedlm_jax.model.lora import TARGETS, LoraConfig, with_adapters
from wedlm_jax.option_values import is_number
from wedlm_jax.sharding import tree_shardings

ADAPTER_WEIGHTS = "adapter_model.safetensors"

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
"""Fields of PEFT's configuration, with the values for which W + s B A is the whole change."""


class PeftCheckpoint(Checkpoint):
    """A base model with the adapters of a folder merged in.

    Raises:
      InputError: the adapters are of another kind, are truncated, or do not fit the base.
    """

    kind = PEFT

    def __init__(self, folder: Path, base: Checkpoint):
        content = read_adapter_config(folder)
        rank, alpha = content["r"], content["lora_alpha"]
        scale = alpha / (rank**0.5 if content.get("use_rslora") else rank)
        self.folder, self.config, self.raw_config = folder, base.config, base.raw_config
        names = ("tokenizer.json", "tokenizer_config.json")
        has_tokenizer = any((folder / name).exists() for name in names)
        self._base = base
        self.tokenizer_folder = folder if has_tokenizer else base.tokenizer_folder
        tensors = dict(base.tensors)
        path = folder / ADAPTER_WEIGHTS
        for name, (a, b) in _pairs(SafetensorsFile(path)).items():
            if name not in tensors or len(tensors[name].shape) != 2:
                raise InputError(
                    f"{path}: adapters of {name!r}, which is not a matrix of the base model in "
                    f"{base.folder}"
                )
            if a.shape[0] != rank:  # the scale would be wrong, too
                raise InputError(
                    f"{path}: adapters of {name!r} have rank {a.shape[0]}, but {ADAPTER_CONFIG} "
                    f"says r {rank}"
                )
            tensors[name] = _merged(tensors[name], a, b, scale, path)
        self.tensors = tensors

    def write_tokenizer(self, destination: Path) -> None:
        self._base.write_tokenizer(destination)
        super().write_tokenizer(destination)


def read_adapter_config(folder: Path, *, drafter: bool = False) -> dict[str, Any]:
    """Returns the content of a folder's ``adapter_config.json``, checked as far as merging needs.

    Raises:
      InputError: a field is missing or asks for more than a low-rank term, or the adapters are not
        a drafter's, as ``drafter`` says they must be, or the reverse.
    """
    path = folder / ADAPTER_CONFIG
    if (content := read_object(path)) is None:
        if not drafter:
            raise InputError(f"{path}: no such file")
        what = f"no {ADAPTER_CONFIG} here, so this is not the folder of a drafter"
        raise InputError(f"{folder}: {what if folder.exists() else 'no such folder'}")
    settings = content.get("wedlm")
    if drafter != (isinstance(settings, dict) and settings.get("rows") == "masked"):
        raise InputError(
            f"{folder}: adapters of an ordinary finetune, not a drafter: pass this folder as the "
            "model (`wedlm train` with objective=drafter trains a drafter)"
            if drafter
            else f"{folder}: a drafter, not a model; pass its model, and this folder as the drafter"
        )
    if (kind := content.get("peft_type")) != "LORA":
        raise InputError(
            f"{path}: expected LORA as peft_type, not {kind!r}; other types are not supported"
        )
    for field, plain in UNSUPPORTED.items():
        if (value := content.get(field)) not in plain:
            raise InputError(f"{path}: {field} {value!r} is not supported; merge it with PEFT")
    for field in ("r", "lora_alpha"):
        value = content.get(field)
        if not is_number(value) or value <= 0:
            raise InputError(f"{path}: expected a number above 0 as {field}, not {value!r}")
    return content


def base_of(folder: Path) -> str | Path:
    """Returns the name of the base model of a folder's adapters: a path, or an id on the hub. A
    relative path may also start from the adapters' folder.

    Raises:
      InputError: the folder does not name it.
    """
    name = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path does not name the base model; "
            "write its folder there"
        )
    relative = folder / name
    return relative if not Path(name).exists() and relative.is_dir() else name


def _pairs(file: SafetensorsFile) -> dict[str, tuple[DeferredArray, DeferredArray]]:
    """Returns A and B by the Hugging Face name of their matrix."""
    parts: dict[str, dict[str, DeferredArray]] = {}
    for name, tensor in file.tensors.items():
        found = NAME.fullmatch(name)
        if found is None:
            raise InputError(f"{file.path}: tensor {name!r} is not a LoRA A or B matrix")
        parts.setdefault(f"{found['owner']}.weight", {})[found["part"]] = tensor
    for name, both in parts.items():
        if len(both) < 2:
            (part,) = both
            raise InputError(f"{file.path}: {name!r} has only lora_{part}; expected A and B")
    return {name: (both["A"], both["B"]) for name, both in parts.items()}


def _merged(
    weight: DeferredArray, a: DeferredArray, b: DeferredArray, scale: float, path: Path
) -> DeferredArray:
    """Returns ``W + s B A``, computed in float32 and rounded to the dtype of W."""
    n_out, n_in = weight.shape
    rank = a.shape[0]
    if a.shape != (rank, n_in) or b.shape != (n_out, rank):
        raise InputError(
            f"{path}: A {list(a.shape)} and B {list(b.shape)} do not fit {weight.name!r} of shape "
            f"{list(weight.shape)}; they belong to another model"
        )

    def read_rows(rows: slice) -> Rows:
        right, left = _read_finite(a, path), _read_finite(b, path) * scale
        for start, part in weight.read_rows(rows):
            change = left[start : start + len(part)] @ right
            yield start, cast(weight.name, part.astype(np.float32) + change, weight.dtype)

    return array_in_rows(weight.name, weight.shape, weight.dtype, read_rows)


def _read_finite(tensor: DeferredArray, path: Path) -> np.ndarray:
    """Returns the tensor in float32; refuses NaN and infinity, which every token would inherit."""
    values = tensor.read().astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{path}: tensor {tensor.name!r} has values that are not finite")
    return values


# --- drafters -----------------------------------------------------------------------------


def base_digest(checkpoint: Checkpoint) -> str:
    """Returns a digest of the first row of each of a checkpoint's parameters, in bfloat16: it is
    the same for a copy in another dtype, and the other rows are not read."""
    digest = hashlib.sha256()
    for entry in check_tensors(checkpoint):
        digest.update(f"{entry.path} {entry.shape} ".encode())
        rows = slice(1) if len(entry.hf_shape) > 1 else slice(None)
        for name in entry.hf_names:
            for _, values in checkpoint.tensors[name].read_rows(rows):
                digest.update(values.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()


def save_drafter(
    adapters: nnx.State, lora: LoraConfig, folder: Path, *, base: Checkpoint, dtype: str
) -> None:
    """Writes a drafter. All processes of a run must call this.

    Args:
      adapters: the `nnx.LoRAParam` of a model with stacked layers.
      folder: folder to write; appears whole, and replaces an earlier one.
      dtype: "float32", "bfloat16" or "float16".
    """
    tensors, values = [], []
    stored = numpy_dtype(dtype)
    assert stored is not None
    for path, leaf in adapters.flat_state():
        for layer, name in enumerate(_stored_names(path, leaf.shape)):
            value = gathered(leaf[...], layer if path[0] == "layers" else None)
            tensors.append(DeferredArray(name, value.shape, stored, value.copy))
            values.append(value)
    processes = jax_processes()
    with replacing_together(folder, processes) as new_folder:
        if processes.index == 0:
            write_safetensors(new_folder / ADAPTER_WEIGHTS, tensors, values)
            content = {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": None,
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "lora_dropout": 0.0,
                "target_modules": list(lora.targets),
                "bias": "none",
                "inference_mode": True,
                "wedlm": {
                    "rows": lora.rows,
                    "window_size": lora.window_size,
                    "previous_rank": lora.previous_rank,
                    "base_digest": base_digest(base),
                },
            }
            write_object(new_folder / ADAPTER_CONFIG, content)


def check_drafter(folder: Path) -> None:
    """Refuses, with an `InputError`, a folder without a whole drafter; no weights are read."""
    read_adapter_config(folder, drafter=True)
    SafetensorsFile(folder / ADAPTER_WEIGHTS)


def with_drafter(
    model: Transformer, base: Checkpoint, folder: str | Path, mesh: Mesh | None = None
) -> Transformer:
    """Reads a drafter, adds it to the model of ``base``, in any layout and on any mesh, and returns
    the model.

    Raises:
      InputError: a file is not a drafter's, or belongs to another model; the message names it.
    """
    folder = as_path(folder)
    dtype = model.embed_tokens[...].dtype
    made = with_adapters(model, read_drafter_config(folder, base), nnx.Rngs(0))
    read = read_drafter(folder, nnx.state(made, nnx.LoRAParam))
    state = jax.tree.map(lambda x: jnp.asarray(x, dtype), read)
    nnx.update(made, state if mesh is None else jax.device_put(state, tree_shardings(mesh, state)))
    return made


def read_drafter(folder: Path, parameters: nnx.State) -> nnx.State:
    """Returns the `nnx.LoRAParam` of a drafter's model, in any layout, with the values of the
    drafter in ``folder`` as float32 NumPy arrays.

    Raises:
      InputError: a tensor is missing, does not fit or is not finite; the message names it and the
        file.
    """
    file = SafetensorsFile(folder / ADAPTER_WEIGHTS)
    left = dict(file.tensors)

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in left:
            raise InputError(f"{file.path}: tensor {name!r} is missing")
        tensor = left.pop(name)
        if tensor.shape != shape:
            raise InputError(
                f"{file.path}: tensor {name!r} has shape {list(tensor.shape)}, expected "
                f"{list(shape)}"
            )
        # A NaN of a mask would reach the text: in attention, 0 times NaN is NaN.
        return _read_finite(tensor, file.path)

    found = {}
    for path, leaf in parameters.flat_state():
        # Whether layers are stacked or not, a tensor is a matrix of one layer, or the embedding.
        parts = [read(name, leaf.shape[-2:]) for name in _stored_names(path, leaf.shape)]
        found[path] = leaf.replace(np.stack(parts).reshape(leaf.shape))
    if left:
        raise InputError(f"{file.path}: tensor {min(left)!r} is not part of a drafter")
    return nnx.State.from_flat_path(found)


def _stored_names(path: tuple[Any, ...], shape: tuple[int, ...]) -> list[str]:
    """Returns PEFT's names of an adapter's matrices, one per layer of the parameter."""
    if path[0] != "layers":
        return [f"base_model.model.{'.'.join(path)}"]
    _, *owner, _, part = path
    layers = [owner.pop(0)] if isinstance(owner[0], int) else range(shape[0])
    rest = f"{'.'.join(owner)}.lora_{part.upper()}.weight"
    return [f"base_model.model.model.layers.{layer}.{rest}" for layer in layers]


def read_drafter_config(folder: Path, base: Checkpoint) -> LoraConfig:
    """Reads the rank, the scale and the target matrices of a drafter's adapters.

    Raises:
      InputError: they are not a drafter's, or belong to a model other than ``base``.
    """
    content = read_adapter_config(folder, drafter=True)
    rank, targets = content["r"], content.get("target_modules")
    settings = content["wedlm"]
    if not isinstance(targets, list) or not {*map(str, targets)} <= {*TARGETS}:
        raise InputError(
            f"{folder / ADAPTER_CONFIG}: not a drafter's configuration: rank {rank}, targets "
            f"{targets}"
        )
    sizes = {"r": rank} | {x: settings.get(x, 0) for x in ("window_size", "previous_rank")}
    for name, value in sizes.items():
        if type(value) is not int or value < 0:
            raise InputError(
                f"{folder / ADAPTER_CONFIG}: expected an integer of at least 0 as {name}, not "
                f"{value!r}"
            )
    if settings.get("base_digest") != base_digest(base):
        raise InputError(
            f"{folder}: a drafter of another model: it was not trained with the parameters of "
            f"{base.folder}"
        )
    known = tuple(name for name in TARGETS if name in targets)
    return LoraConfig(
        rank,
        float(content["lora_alpha"]),
        known,
        "masked",
        window_size=sizes["window_size"],
        previous_rank=sizes["previous_rank"],
    )
