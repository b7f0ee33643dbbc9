"""Maps parameter names between ours, Hugging Face's and llama.cpp's in one table, and converts a
model to arrays by name and back."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from wedlm_jax.checkpoint.hf import Checkpoint
from wedlm_jax.checkpoint.safetensors import DeferredArray, bits
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.model.transformer import abstract_model

PIECE_BYTES = 2**28
"""Bytes gathered at a time from an array that several hosts share; every device holds them for a
moment."""

# The parameter-name table: our path with stacked layers, Hugging Face's name, and llama.cpp's name
# in GGUF. "{}" stands for the layer.
PARAMETER_TABLE: tuple[tuple[str, str, str], ...] = (
    ("embed_tokens", "model.embed_tokens.weight", "token_embd.weight"),
    ("norm.scale", "model.norm.weight", "output_norm.weight"),
    ("lm_head", "lm_head.weight", "output.weight"),
    *(
        (f"layers.{ours}.scale", f"model.layers.{{}}.{ours}.weight", f"blk.{{}}.{theirs}")
        for ours, theirs in (
            ("input_layernorm", "attn_norm.weight"),
            ("post_attention_layernorm", "ffn_norm.weight"),
            ("self_attn.q_norm", "attn_q_norm.weight"),
            ("self_attn.k_norm", "attn_k_norm.weight"),
        )
    ),
    *(
        (
            f"layers.{ours}_proj.{kind}",
            f"model.layers.{{}}.{ours}_proj.{kind}",
            f"blk.{{}}.{theirs}.{kind}",
        )
        for kind in ("weight", "bias")
        for ours, theirs in (
            ("self_attn.q", "attn_q"),
            ("self_attn.k", "attn_k"),
            ("self_attn.v", "attn_v"),
            ("self_attn.o", "attn_output"),
            ("mlp.gate", "ffn_gate"),
            ("mlp.up", "ffn_up"),
            ("mlp.down", "ffn_down"),
        )
    ),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter of a model, and the Hugging Face tensors that it is made of.

    Attributes:
      path: our dotted path.
      shape: our shape, with a leading layer axis if stacked.
      hf_names: names of the Hugging Face tensors, one per layer if stacked.
      stacked: whether the names are the layers of one stacked parameter.
    """

    path: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    stacked: bool

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of each tensor: matrices are ``[out, in]`` on both sides."""
        return self.shape[1:] if self.stacked else self.shape


def parameter_entries(config: ModelConfig, *, stacked: bool = True) -> list[Entry]:
    """Fills in the table for a model of this configuration, its layers stacked or apart."""
    model = abstract_model(config, stacked=stacked)
    shapes = {path: leaf.shape for path, leaf in arrays_from_model(model).items()}
    entries = []
    names: list[tuple[str, ...]]
    for path, name, _ in PARAMETER_TABLE:
        per_layer = "{}" in name
        layers = range(config.num_hidden_layers if per_layer else 1)
        if per_layer and not stacked:
            paths = [path.replace("layers.", f"layers.{i}.", 1) for i in layers]
            names = [(name.format(i),) for i in layers]
        else:
            paths, names = [path], [tuple(name.format(i) for i in layers)]
        entries += [
            Entry(full, shapes[full], tensors, stacked and per_layer)
            for full, tensors in zip(paths, names, strict=True)
            if full in shapes
        ]
    assert len(entries) == len(shapes), "the parameter table misses a parameter of the model"
    return entries


def check_tensors(checkpoint: Checkpoint, *, stacked: bool = True) -> list[Entry]:
    """Returns `parameter_entries` of a checkpoint's model, and refuses, with an `InputError` that
    names the first, tensors that are missing, extra or misshapen."""
    tensors = checkpoint.tensors
    entries = parameter_entries(checkpoint.config, stacked=stacked)
    expected = {name: entry.hf_shape for entry in entries for name in entry.hf_names}

    def fault(name: str, what: str) -> InputError:
        return InputError(f"{checkpoint.folder}: tensor {checkpoint.stored_name(name)!r} {what}")

    for name, shape in expected.items():
        if name not in tensors:
            raise fault(name, "is missing")
        if (found := tensors[name].shape) != shape:
            raise fault(name, f"has shape {list(found)}, expected {list(shape)}")
    extra = set(tensors) - set(expected)
    if checkpoint.config.tie_word_embeddings:
        extra.discard("lm_head.weight")  # some exporters write the tied head
    if extra:
        raise fault(min(extra), "is not part of this model")
    return entries


def stored_tensors(checkpoint: Checkpoint, dtype: np.dtype | None = None) -> list[DeferredArray]:
    """Returns a checkpoint's tensors in the order of the table, checked by `check_tensors`, to be
    written in ``dtype`` or by default their own."""
    names = [name for entry in check_tensors(checkpoint) for name in entry.hf_names]
    tensors = [checkpoint.tensors[name] for name in names]
    return [dataclasses.replace(tensor, dtype=dtype or tensor.dtype) for tensor in tensors]


def arrays_from_model(model: Transformer) -> dict[str, jax.Array]:
    """Returns the parameters by dotted path of the table."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    return {dotted_path(path): leaf for path, leaf in leaves}


def model_from_arrays(
    config: ModelConfig, values: dict[str, Any], *, stacked: bool = True
) -> Transformer:
    """Builds a model whose parameters are ``values``, by dotted path of the table."""
    dtype = values["embed_tokens"].dtype
    graph, abstract = nnx.split(abstract_model(config, stacked=stacked, dtype=dtype))
    state = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree.map(jnp.asarray, values[dotted_path(path)]), abstract
    )
    return nnx.merge(graph, state)


def dotted_path(path: tuple[Any, ...]) -> str:
    """Converts a pytree key path of a model's `nnx.State` to a dotted path of the table."""
    parts = [str(getattr(p, "key", getattr(p, "name", ""))) for p in path]
    return ".".join(p for p in parts if p not in ("value", ""))


def gathered(array: jax.Array, layer: int | None = None) -> np.ndarray:
    """Returns an array, or a layer of a stacked one, in host memory; do not write to it.

    If it is spread over several hosts, all of them must call this in the same order, and each gets
    the whole array.
    """
    dtype = array.dtype
    if layer is not None:
        array = _layer(array, layer)
    if not array.is_fully_addressable:
        return _from_all_hosts(array).view(dtype)
    # An array keeps its host copy for as long as it lives, so a new one is made of its buffers.
    parts = [shard.data for shard in array.addressable_shards]
    same = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return np.asarray(same).view(dtype)


def _from_all_hosts(array: jax.Array) -> np.ndarray:
    """Returns all of an array in host memory; it goes through every device in chunks."""

    def gather(piece: jax.Array) -> np.ndarray:
        return np.asarray(multihost_utils.process_allgather(piece, tiled=True))

    if array.ndim == 0 or array.nbytes <= PIECE_BYTES:
        return gather(array)
    whole = np.empty(array.shape, array.dtype)
    rows = max(PIECE_BYTES * len(array) // array.nbytes, 1)
    for start in range(0, len(array), rows):
        # The last piece begins where a whole one still fits, so that one program serves all.
        start = min(start, len(array) - rows)
        bits(whole)[start : start + rows] = bits(gather(_rows(array, start, rows)))
    return whole


@partial(jax.jit, static_argnums=2)
def _rows(array: jax.Array, start: int, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, count)


@jax.jit
def _layer(stacked: jax.Array, layer: int) -> jax.Array:
    """Returns a layer as unsigned integers: CPUs would compute in float32 instead of bfloat16, and
    change the bits of NaNs."""
    words = jax.lax.bitcast_convert_type(stacked, jnp.dtype(f"uint{8 * stacked.dtype.itemsize}"))
    return jax.lax.dynamic_index_in_dim(words, layer, keepdims=False)
