"""Names of parameters, ours and Hugging Face's: one table."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from wedlm_jax.config import ModelConfig
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import TURNED

# The parameter-name table: our path, Hugging Face's name, whether the matrix is stored
# the other way round there ([out, in]). "{}" stands for the layer. Names and shapes here are
# those of stacked layers; `parameter_entries` says what they are where layers are apart.
PARAMETER_TABLE: tuple[tuple[str, str, bool], ...] = (
    ("embed_tokens", "model.embed_tokens.weight", False),
    ("norm.scale", "model.norm.weight", False),
    ("lm_head", "lm_head.weight", True),
    ("layers.input_layernorm.scale", "model.layers.{}.input_layernorm.weight", False),
    (
        "layers.post_attention_layernorm.scale",
        "model.layers.{}.post_attention_layernorm.weight",
        False,
    ),
    ("layers.self_attn.q_norm.scale", "model.layers.{}.self_attn.q_norm.weight", False),
    ("layers.self_attn.k_norm.scale", "model.layers.{}.self_attn.k_norm.weight", False),
    *(
        (f"layers.self_attn.{x}_proj.kernel", f"model.layers.{{}}.self_attn.{x}_proj.weight", True)
        for x in "qkvo"
    ),
    *(
        (f"layers.self_attn.{x}_proj.bias", f"model.layers.{{}}.self_attn.{x}_proj.bias", False)
        for x in "qkv"
    ),
    *(
        (f"layers.mlp.{x}_proj.kernel", f"model.layers.{{}}.mlp.{x}_proj.weight", True)
        for x in ("gate", "up", "down")
    ),
)


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
    """Fills in the table for a model of this configuration.

    Args:
      stacked, columns: how the model's layers lie; see `wedlm_jax.model.layer_layout`.
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
    """Converts a pytree key path of a model's `nnx.State` to a dotted path of the table."""
    parts = [str(getattr(p, "key", getattr(p, "name", ""))) for p in path]
    return ".".join(p for p in parts if p not in ("value", ""))


def _shapes(config: ModelConfig, stacked: bool, columns: bool) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_model(config, stacked, columns)[1])
    return {hf_path(path): leaf.shape for path, leaf in leaves}


def abstract_model(
    config: ModelConfig, stacked: bool, columns: bool
) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    return nnx.split(  # type: ignore[no-any-return]
        nnx.eval_shape(
            lambda: Transformer(config, rngs=nnx.Rngs(0), stacked=stacked, columns=columns)
        )
    )
