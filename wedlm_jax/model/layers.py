"""The parts of a decoder layer: normalisation, linear maps, attention, MLP; and the embedding.

Hidden states are rows, ``[..., D]``, and matrices are ``[out, in]``, as in Hugging Face.

A layer names its intermediate results: queries, keys and values before RoPE (``projected``), the
output of attention (``attended``), the hidden states after attention (``mixed``), and the two inner
products of its MLP (``gate``, ``up``). A policy (`checkpoint_policy`) keeps some of them for the
backward pass, in addition to the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.attention.tiles import ATTENDED
from wedlm_jax.config import ModelConfig
from wedlm_jax.model.quantization import int8_product, left_product, product
from wedlm_jax.model.rope import apply_rope
from wedlm_jax.sharding import constrain

Rows = Array | bool
"""The hidden states that adapters act on: all, none, or those where a bool array ``[...]`` is True.
"""

Model = TypeVar("Model", bound=nnx.Module)

CACHED_BYTES = 2 * 2**20
"""The bytes of the largest matrix that stays in the cache of a CPU core."""


def columns_are_faster(config: ModelConfig, dtype: Any) -> bool:
    """Returns whether a CPU multiplies a layer's matrices faster with columns than with rows.

    A CPU's matrix product repacks its right operand in each call. For a matrix that does not fit
    into the caches this takes longer than the product with a few tokens. For a smaller one it costs
    little, and rows are faster unless the number of tokens is a multiple of 16.
    """
    matrix = config.hidden_size * config.intermediate_size
    return matrix * jnp.dtype(dtype).itemsize > CACHED_BYTES


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32, as in Hugging Face's Qwen and Llama."""

    def __init__(self, size: int, epsilon: float, dtype: jnp.dtype):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Array) -> Array:
        # x / sqrt(mean(x²) + ε) in float32, rounded before it is scaled, as in Hugging Face: in
        # bfloat16 the order changes the last bit.
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.epsilon)
        return self.scale[...].astype(x.dtype) * x32.astype(x.dtype)


class Linear(nnx.Module):
    """A linear map, ``x @ weight.T + bias``, with parameters cast to the dtype of ``x``.

    Args:
      columns: whether to multiply as ``weight @ x.T``; see `columns_are_faster`.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        bias: bool,
        scale: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        columns: bool = False,
    ):
        self.columns = columns
        # Drawn as [in, out], so that a seed gives the same model as in earlier versions.
        self.weight = nnx.Param(normal(rngs, (n_in, n_out), scale, dtype).T)
        self.bias = nnx.Param(jnp.zeros((n_out,), dtype)) if bias else None
        # Or `int8_product`, for which qwix requires a path.
        self.product: Callable[[Array, Any], Array] = product
        self.qwix_path = ()
        self.adapter: Any = None  # or a `wedlm_jax.model.lora.LowRank`

    def __call__(self, x: Array, adapted: Rows = True) -> Array:
        """Maps ``x [..., in]`` to ``[..., out]``."""
        if self.columns:
            flat = adapted if isinstance(adapted, bool) else adapted.reshape(-1)
            return self.of_columns(as_columns(x), flat).T.reshape(*x.shape[:-1], -1)
        y = self.product(x, self.weight[...])
        if self.adapter is not None and adapted is not False:
            y = _where(adapted, y + self.adapter(x), y, -1)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def of_columns(self, x: Array, adapted: Rows = True) -> Array:
        """Maps ``x [in, T]`` to ``[out, T]``."""
        y = left_product(self.weight[...], x)
        if self.adapter is not None and adapted is not False:
            y = _where(adapted, y + self.adapter.of_columns(x), y, 0)
        return y if self.bias is None else y + self.bias[...][:, None].astype(x.dtype)


def with_int8_products(model: Model) -> Model:
    """Changes the model's layers to train with products of 8-bit integers, and returns the model.
    Adapters and the output projection compute as before."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.product = int8_product
    return model


def _where(rows: Rows, new: Array, old: Array, axis: int) -> Array:
    """Returns ``new`` at these rows and, bit for bit, ``old`` at the others; ``axis`` is the axis
    of the features."""
    return new if isinstance(rows, bool) else jnp.where(jnp.expand_dims(rows, axis), new, old)


def as_columns(x: Array) -> Array:
    """Returns ``x [..., D]`` as ``[D, T]``."""
    return x.reshape(-1, x.shape[-1]).T


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and optional per-head QK-norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, columns: bool):
        d, h = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * h, config.num_key_value_heads * h
        scale = config.initializer_range
        # The residual stream is a sum of 2 n terms; dividing by the root keeps its variance.
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        self.head_dim = h
        linear = partial(Linear, dtype=dtype, rngs=rngs, columns=columns)
        self.q_proj = linear(d, q_size, bias=config.attention_bias, scale=scale)
        self.k_proj = linear(d, kv_size, bias=config.attention_bias, scale=scale)
        self.v_proj = linear(d, kv_size, bias=config.attention_bias, scale=scale)
        self.o_proj = linear(q_size, d, bias=config.attention_out_bias, scale=residual)
        norm = config.qk_norm
        self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype) if norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype) if norm else None

    def project(
        self, x: Array, rope: tuple[Array, Array], adapted: Rows = True
    ) -> tuple[Array, Array, Array]:
        """Returns the queries ``[..., H, head_dim]``, and the keys and values
        ``[..., K, head_dim]``, of ``x [..., D]``."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        flat = (checkpoint_name(linear(x, adapted), "projected") for linear in projections)
        q, k, v = (y.reshape(*y.shape[:-1], -1, self.head_dim) for y in flat)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # Only queries and keys are rotated: their product then depends on their distance.
        return apply_rope(q, rope), apply_rope(k, rope), v

    def mix_heads(self, attended: Array, adapted: Rows = True) -> Array:
        """Maps what each head attended to, ``[..., H, head_dim]``, to ``[..., D]``."""
        return self.o_proj(attended.reshape(*attended.shape[:-2], -1), adapted)


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, columns: bool):
        d, f, scale = config.hidden_size, config.intermediate_size, config.initializer_range
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        linear = partial(Linear, bias=config.mlp_bias, dtype=dtype, rngs=rngs, columns=columns)
        self.gate_proj = linear(d, f, scale=scale)
        self.up_proj = linear(d, f, scale=scale)
        self.down_proj = linear(f, d, scale=residual)

    def __call__(self, x: Array, adapted: Rows = True) -> Array:
        if self.down_proj.columns:  # XLA would not cancel the transpositions in between
            y, rows = as_columns(x), adapted if isinstance(adapted, bool) else adapted.reshape(-1)
            y = jax.nn.silu(self.gate_proj.of_columns(y, rows)) * self.up_proj.of_columns(y, rows)
            return self.down_proj.of_columns(y, rows).T.reshape(x.shape)
        gate = checkpoint_name(self.gate_proj(x, adapted), "gate")
        up = checkpoint_name(self.up_proj(x, adapted), "up")
        return self.down_proj(jax.nn.silu(gate) * up, adapted)


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer, in two halves so that its caller chooses how to attend."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, columns: bool):
        d, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, epsilon, dtype)
        self.self_attn = Attention(config, dtype, rngs, columns)
        self.post_attention_layernorm = RMSNorm(d, epsilon, dtype)
        self.mlp = MLP(config, dtype, rngs, columns)

    def before_attention(
        self, x: Array, rope: tuple[Array, Array], adapted: Rows = True
    ) -> tuple[Array, Array, Array]:
        """Returns the queries, keys and values of hidden states ``[B, T, D]`` or ``[T, D]``; see
        `Attention.project`."""
        return self.self_attn.project(self.input_layernorm(x), rope, adapted)

    def after_attention(self, x: Array, attended: Array, adapted: Rows = True) -> Array:
        """Returns the next layer's hidden states from ``x`` and what its queries attended to."""
        x = checkpoint_name(laid_out(x + self.self_attn.mix_heads(attended, adapted)), "mixed")
        return laid_out(x + self.mlp(self.post_attention_layernorm(x), adapted))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: jnp.dtype) -> Array:
    return (jax.random.normal(rngs.params(), shape) * scale).astype(dtype)


def laid_out(x: Array) -> Array:
    """Shards hidden states by the rules of `wedlm_jax.sharding`; flat tokens are replicated."""
    return constrain(x, "batch", "length") if x.ndim == 3 else constrain(x)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def looked_up(table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    """Returns the rows of ``table [V, D]`` for ``tokens``, in ``dtype``.

    Each device looks up whole rows in its share of the vocabulary. They are gathered in the smaller
    dtype, which halves memory and traffic for float32 parameters and bfloat16 states. The table's
    gradient is nevertheless summed in the table's dtype; the plain derivative would sum in
    ``dtype``.
    """
    smaller = min(table.dtype, dtype, key=lambda kind: kind.itemsize)
    return constrain(table.astype(smaller), "vocab", None)[tokens].astype(dtype)


def _looked_up_forward(
    table: Array, tokens: Array, dtype: jnp.dtype
) -> tuple[Array, tuple[Array, Array]]:
    # The empty array carries the table's shape and dtype.
    return looked_up(table, tokens, dtype), (tokens, jnp.zeros((0, *table.shape), table.dtype))


def _looked_up_backward(
    _: jnp.dtype, saved: tuple[Array, Array], by_rows: Array
) -> tuple[Array, None]:
    tokens, like = saved
    zeros = constrain(jnp.zeros(like.shape[1:], like.dtype), "vocab", None)
    return zeros.at[tokens].add(by_rows.astype(like.dtype)), None


looked_up.defvjp(_looked_up_forward, _looked_up_backward)


# --- what is kept for the backward pass ----------------------------------------------------

KEPT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "products": (ATTENDED, "projected", "mixed", "gate", "up"),
        "gate": (ATTENDED, "projected", "mixed", "gate"),
        "projections": (ATTENDED, "projected", "mixed"),
        "attention": (ATTENDED,),
        "full": (),
        "offload": (),
    }
)
"""The results that each policy keeps, from the policy that keeps most to the one that keeps least.
Before them all comes ``none``, which keeps everything."""

LAYER_INPUT = "layer_input"
"""The name of a layer's input. ``offload`` moves it to the host's memory and back."""

POLICIES: tuple[str, ...] = ("none", *KEPT)


def checkpoint_policy(name: str) -> Callable | None:
    """Returns a policy of `POLICIES` for `jax.checkpoint`; None if nothing is recomputed."""
    if name == "none":
        return None
    if name == "offload":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*KEPT[name])
