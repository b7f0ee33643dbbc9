"""Drafters on disk: adapters on masks, in PEFT's layout, a few MB beside a checkpoint.

`adapter_config.json` and `adapter_model.safetensors` are PEFT's, so that its tools can read them.
What PEFT does not know stands in the configuration under ``wedlm``: that the adapters act on masks
only, so they must not be merged; how wide the windows were that they were trained on; and a digest
of the model that they belong to. A mask's embedding is one more tensor.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from wedlm_jax.checkpoint.hf import Checkpoint
from wedlm_jax.checkpoint.model import gathered, read_slices
from wedlm_jax.checkpoint.names import check_tensors
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.checkpoint.peft import CONFIG, WEIGHTS
from wedlm_jax.checkpoint.safetensors import (
    DeferredArray,
    SafetensorsFile,
    numpy_dtype,
    write_safetensors,
)
from wedlm_jax.errors import InputError, file_error
from wedlm_jax.host.processes import jax_processes, replacing_together
from wedlm_jax.host.storage import as_path
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked
from wedlm_jax.model.lora import TARGETS, LoraConfig, with_adapters
from wedlm_jax.sharding import parameter_axes, spec

EMBEDDING = "base_model.model.mask_embedding"


def base_digest(checkpoint: Checkpoint) -> str:
    """Returns a digest of a checkpoint's parameters: of the first row of each, in bfloat16, so that
    it is the same for a copy in another dtype, and read without the rest."""
    digest = hashlib.sha256()
    for entry in check_tensors(checkpoint):
        layers = [(0, entry.shape[0])] if entry.stacked else []
        first = [(0, 1) if len(entry.hf_shape) > 1 else (0, entry.hf_shape[0])]
        index = (*layers, *first, *((0, size) for size in entry.hf_shape[1:]))
        values = read_slices(checkpoint, entry, np.float32, [index])[index]
        digest.update(f"{entry.path} {entry.shape} ".encode())
        digest.update(values.astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()


def save_drafter(
    adapters: nnx.State, lora: LoraConfig, folder: Path, *, base: Path, dtype: str
) -> None:
    """Writes a drafter. All processes of a run call this.

    Args:
      adapters: the `nnx.LoRAParam` of a model with stacked layers.
      lora: which they are.
      folder: appears whole, in the place of an earlier one.
      base: folder of the model that they belong to.
      dtype: "float32", "bfloat16" or "float16".
    """
    tensors, values = [], []
    stored = numpy_dtype(dtype)
    assert stored is not None
    for path, leaf in adapters.flat_state():
        layers: list[int | None] = [None] if path[0] != "layers" else [*range(leaf.shape[0])]
        for layer in layers:
            value = gathered(leaf[...], layer)
            name = _stored_name(path, layer)
            tensors.append(DeferredArray(name, value.shape, stored, value.copy))
            values.append(value)
    processes = jax_processes()
    with replacing_together(folder, processes) as beside:
        if processes.index == 0:
            write_safetensors(beside / WEIGHTS, tensors, values)
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
                    "base_digest": base_digest(open_checkpoint(base)),
                },
            }
            text = json.dumps(content, indent=2) + "\n"
            (beside / CONFIG).write_text(text, encoding="utf-8")


def with_drafter(
    model: Transformer, base: Path, folder: str | Path, mesh: Mesh | None = None
) -> Transformer:
    """Reads a drafter and puts it beside its model.

    Args:
      model: the checkpoint's, in any layout; it is changed, and returned.
      base: the checkpoint.
      folder: the drafter's.
      mesh: the model's mesh.

    Raises:
      InputError: naming the file: it is none of a drafter, or of another model.
    """
    folder = as_path(folder)
    lora = _read_config(folder, base)
    file = SafetensorsFile(folder / WEIGHTS)
    shapes = nnx.eval_shape(
        lambda: with_adapters(Transformer(model.config, rngs=nnx.Rngs(0)), lora, nnx.Rngs(0))
    )
    expected = dict(nnx.state(shapes, nnx.LoRAParam).flat_state())
    left = dict(file.tensors)
    values: dict[tuple[Any, ...], np.ndarray] = {}
    for path, leaf in expected.items():
        stacked = path[0] == "layers"
        layers: list[int | None] = [*range(leaf.shape[0])] if stacked else [None]
        parts = []
        for layer in layers:
            name, shape = _stored_name(path, layer), leaf.shape[1:] if stacked else leaf.shape
            if name not in left:
                raise InputError(f"{file.path}: tensor {name!r} is missing")
            tensor = left.pop(name)
            if tensor.shape != shape:
                raise InputError(
                    f"{file.path}: tensor {name!r} has shape {list(tensor.shape)}, expected "
                    f"{list(shape)}"
                )
            parts.append(tensor.read().astype(np.float32))
        values[path] = np.stack(parts) if stacked else parts[0]
    if left:
        raise InputError(f"{file.path}: tensor {min(left)!r} is not part of a drafter")
    dtype, apart = model.embed_tokens[...].dtype, not are_stacked(model)
    placed = {
        own: nnx.LoRAParam(_placed(jnp.asarray(array, dtype), own, mesh))
        for path, value in values.items()
        for own, array in (_by_layer(path, value) if apart else {path: value}).items()
    }
    made = with_adapters(model, lora, nnx.Rngs(0))
    nnx.update(made, nnx.State.from_flat_path(placed))
    return made


def _by_layer(path: tuple[Any, ...], value: np.ndarray) -> dict[tuple[Any, ...], np.ndarray]:
    """Returns a stacked parameter's layers by their paths where layers lie apart."""
    if path[0] != "layers":
        return {path: value}
    return {("layers", layer, *path[1:]): own for layer, own in enumerate(value)}


def _placed(array: jax.Array, path: tuple[Any, ...], mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return array
    axes = parameter_axes("/".join(map(str, path)))
    assert axes is not None
    return jax.device_put(array, NamedSharding(mesh, spec(axes)))


def _stored_name(path: tuple[Any, ...], layer: int | None) -> str:
    """Returns PEFT's name of an adapter's matrix, of one layer."""
    if layer is None:
        return EMBEDDING
    _, *owner, _, part = path
    return f"base_model.model.model.layers.{layer}.{'.'.join(owner)}.lora_{part.upper()}.weight"


def _read_config(folder: Path, base: Path) -> LoraConfig:
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(content["r"]), float(content["lora_alpha"])
        targets, ours = content["target_modules"], content.get("wedlm")
    except FileNotFoundError:
        raise InputError(f"{folder}: no drafter, which would have {CONFIG}") from None
    except OSError as error:
        raise file_error(path, "cannot be read", error) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: not the configuration of LoRA adapters ({error})") from None
    if not isinstance(ours, dict) or ours.get("rows") != "masked":
        raise InputError(
            f"{folder}: these adapters act on rows of text: give them as the model; a drafter's, "
            "from `wedlm train` with objective drafter, act on masks only"
        )
    unknown = sorted({*map(str, targets)} - {*TARGETS})
    if unknown or rank < 1:
        raise InputError(f"{path}: not what a drafter has: rank {rank}, targets {targets}")
    if ours.get("base_digest") != base_digest(open_checkpoint(base)):
        raise InputError(
            f"{folder}: a drafter of another model: the parameters of {base} are not those that it "
            "was trained beside"
        )
    known = tuple(name for name in TARGETS if name in targets)
    return LoraConfig(rank, alpha, known, "masked", int(ours.get("window_size", 0)))
