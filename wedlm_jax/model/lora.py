"""LoRA: a low-rank term that is trained, added to a frozen matrix (Hu et al., arXiv 2106.09685).

``y = x Wᵀ + s (x Aᵀ) Bᵀ`` with W ``[out, in]``, A ``[rank, in]``, B ``[out, rank]`` and
s = alpha / rank. B is initialised to zeros, so that training starts from the unchanged model.

The adapters of qwix and Flax do not fit: qwix creates them when the model is called, within our
scan over the layers; `nnx.LoRA` has no alpha and a fixed dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.errors import InputError
from wedlm_jax.model.layers import Linear, normal
from wedlm_jax.model.quantization import left_product, product
from wedlm_jax.model.transformer import Transformer, abstract_model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer that can have adapters."""

PREVIOUS_RANK = 256
"""The hidden units of a drafter's previous-token head, unless a recipe says otherwise."""

TINY = 1e-12
"""Keeps an embedding of zeros finite when it is scaled to RMS 1."""


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The size of adapters, and which matrices have them.

    Attributes:
      rank: rank of the term.
      alpha: the term is scaled by ``alpha / rank``.
      targets: names in `TARGETS`.
      rows: "all", or "masked" for adapters that act on masks only; masks then also have a trained
        embedding, and rows of text stay the unchanged model's, bit for bit.
      window_size: with "masked", the number of masks in a training window.
      previous_rank: with "masked", hidden units of a `PreviousTokenHead`; 0 for none.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    rows: str = "all"
    window_size: int = 0
    previous_rank: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LowRank(nnx.Module):
    """The term ``s (x Aᵀ) Bᵀ`` of a linear map, with parameters cast to the dtype of ``x``."""

    def __init__(self, a: Array, b: Array, scale: float):
        self.a, self.b = nnx.LoRAParam(a), nnx.LoRAParam(b)
        self.scale = scale

    def __call__(self, x: Array) -> Array:
        return product(product(x, self.a[...]) * self.scale, self.b[...])

    def of_columns(self, x: Array) -> Array:
        """Maps ``x [in, T]`` to ``[out, T]``."""
        return left_product(self.b[...], left_product(self.a[...], x) * self.scale)


class PreviousTokenHead(nnx.Module):
    """Corrects what a mask predicts, once the token before it is known.

    The masks of a window are computed together, so none of them sees what the others draft. After
    the layers this head adds to a mask's final hidden state h what the token before says about it::

        h' = h + B silu(A h + E e)        e: the embedding of the token before, scaled to RMS 1

    with A, E ``[rank, D]`` and B ``[D, rank]``, float32, cast to the dtype of h. A and E are drawn
    uniformly within ±1 / √D; B is zero, so that a new head changes nothing. In training the token
    before is the text's, since a draft counts only if all drafts before it are right; in decoding
    it is the draft before (`wedlm_jax.decode.chain`).
    """

    def __init__(self, hidden_size: int, rank: int, rngs: nnx.Rngs):
        shape = (rank, hidden_size)
        self.state, self.token = (nnx.LoRAParam(_drawn(rngs, shape)) for _ in range(2))
        self.out = nnx.LoRAParam(jnp.zeros((hidden_size, rank), jnp.float32))

    def __call__(self, hidden: Array, before: Array) -> Array:
        """Returns what is added to ``hidden [..., D]``, given the embeddings ``before [..., D]`` of
        the tokens before."""
        x32 = before.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + TINY)
        token = x32.astype(hidden.dtype)
        inner = product(hidden, self.state[...]) + product(token, self.token[...])
        return product(jax.nn.silu(inner), self.out[...])


def with_adapters(model: Transformer, lora: LoraConfig, rngs: nnx.Rngs) -> Transformer:
    """Adds float32 adapters to the matrices of a model, and returns it. They are `nnx.LoRAParam`,
    by which `nnx.split` distinguishes them. A is uniform within ±1 / √in as in the original; B is
    zero.

    Raises:
      InputError: the rank is not below that of a whole matrix.
    """
    for name, linear in _linears(model, lora.targets):
        *layers, n_out, n_in = linear.weight.shape
        if lora.rank >= min(n_in, n_out):
            raise InputError(
                f"lora.rank must be below {min(n_in, n_out)}, the smaller side of {name}, not "
                f"{lora.rank}"
            )
        a = _drawn(rngs, (*layers, lora.rank, n_in))
        b = jnp.zeros((*layers, n_out, lora.rank), jnp.float32)
        linear.adapter = nnx.data(LowRank(a, b, lora.scale))
    if lora.rows == "masked":
        config = model.config
        mask = normal(rngs, (config.hidden_size,), config.initializer_range, jnp.dtype("float32"))
        model.mask_embedding = nnx.data(nnx.LoRAParam(mask))
        if lora.previous_rank:
            head = PreviousTokenHead(config.hidden_size, lora.previous_rank, rngs)
            model.previous_token = nnx.data(head)
        model.config = dataclasses.replace(config, has_drafter=True)
    model.lora = lora
    return model


def _drawn(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    """Draws matrices ``[..., out, in]``, uniform within ±1 / √in."""
    bound = shape[-1] ** -0.5
    return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)


def _linears(model: Transformer, names: Iterable[str]) -> Iterator[tuple[str, Linear]]:
    """Yields the linear maps with these names: stacked ones, or layer by layer."""
    layers = model.layers if isinstance(model.layers, nnx.List) else [model.layers]
    for layer in layers:
        for name in names:
            block = layer.mlp if hasattr(layer.mlp, name) else layer.self_attn
            yield name, getattr(block, name)


def merged_weight(weight: Any, a: Any, b: Any, scale: float) -> Any:
    """Returns ``W + s B A`` in float32, for NumPy or JAX arrays."""
    return weight.astype("float32") + scale * (b @ a)


def adapter_of(weight: str) -> tuple[str, str]:
    """Returns the dotted paths of A and B for the matrix at a dotted path."""
    owner = weight.removesuffix("weight")
    return f"{owner}adapter.a", f"{owner}adapter.b"


def merged(model: Transformer) -> Transformer:
    """Returns a model without adapters that computes the same, with matrices in their original
    dtype. A model without adapters, or a drafter, which cannot be merged, is returned unchanged."""
    if model.lora is None or model.lora.rows == "masked":
        return model
    flat = dict(nnx.state(model).flat_state())
    for owner in [path[:-2] for path in flat if path[-2:] == ("adapter", "a")]:
        a, b = (flat.pop((*owner, "adapter", part))[...] for part in "ab")
        weight = flat[(*owner, "weight")]
        value = _merged_layers(weight[...], a, b, model.lora.scale)
        flat[(*owner, "weight")] = weight.replace(value)
    return nnx.merge(nnx.graphdef(abstract_model(model.config)), nnx.State.from_flat_path(flat))


@jax.jit
def _merged_layers(weight: Array, a: Array, b: Array, scale: float) -> Array:
    # Layer by layer, since a float32 copy of a whole stack would be the largest array by far.
    def one(layer: tuple[Array, Array, Array]) -> Array:
        return merged_weight(*layer, scale).astype(weight.dtype)

    return jax.lax.map(one, (weight, a, b))
