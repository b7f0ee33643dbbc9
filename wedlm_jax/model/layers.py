"""The parts of a decoder layer: normalisation, linear maps, attention, MLP.

Hidden states are rows, ``[..., D]``, and products are ``x @ kernel``. Layers that lie apart may use
columns instead, ``[D, T]``, and products ``weight @ x`` with a weight ``[out, in]``: a CPU then
reads a large matrix as it lies in memory, which for 4 to 64 tokens takes half the time; see
`wedlm_jax.model.layer_layout`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.config import ModelConfig
from wedlm_jax.model.quantization import left_product, product
from wedlm_jax.model.rope import apply_rope
from wedlm_jax.sharding import constrain

ROWS, COLUMNS = -1, -2
"""The axis of the features: last in rows of tokens, second to last in columns."""

CACHED_BYTES = 2 * 2**20
"""A larger matrix does not stay in a CPU core's own cache."""


def columns_are_faster(config: ModelConfig, dtype: Any) -> bool:
    """Tells whether layers that lie apart run faster on columns, on a CPU."""
    matrix = config.hidden_size * config.intermediate_size
    return matrix * jnp.dtype(dtype).itemsize > CACHED_BYTES


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32, as in Hugging Face's Qwen and Llama."""

    def __init__(self, size: int, epsilon: float, dtype: jnp.dtype, axis: int = ROWS):
        self.epsilon, self.axis = epsilon, axis
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Array) -> Array:
        # x / sqrt(mean(x²) + ε) in float32; rounded before it is scaled, which decides the last bit
        # in bfloat16 and is how Hugging Face does it.
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, self.axis, keepdims=True) + self.epsilon)
        return _along(self.axis, self.scale[...]).astype(x.dtype) * x32.astype(x.dtype)


class Linear(nnx.Module):
    """A product and a bias, parameters cast to the dtype of ``x``.

    For rows ``x [..., in]``: ``x @ kernel + bias``, kernel ``[in, out]``; for columns
    ``x [in, T]``: ``weight @ x + bias``, weight ``[out, in]``.
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
        axis: int = ROWS,
    ):
        self.axis = axis
        matrix = normal(rngs, (n_in, n_out), scale, dtype)
        if axis == ROWS:
            self.kernel = nnx.Param(matrix)
        else:
            self.weight = nnx.Param(matrix.T)
        self.bias = nnx.Param(jnp.zeros((n_out,), dtype)) if bias else None
        # Or that of `wedlm_jax.model.int8_training`; qwix wants a path, whatever it is.
        self.product, self.qwix_path = product, ()
        self.adapter: Any = None  # or a `wedlm_jax.model.lora.LowRank`

    def __call__(self, x: Array) -> Array:
        if self.axis == ROWS:
            y = self.product(x, self.kernel[...])
            if self.adapter is not None:
                y = y + self.adapter(x)
        else:
            y = left_product(self.weight[...], x)
        return y if self.bias is None else y + _along(self.axis, self.bias[...]).astype(x.dtype)


def _along(axis: int, vector: Array) -> Array:
    """Shapes a vector of features so that it broadcasts over hidden states."""
    return vector if axis == ROWS else vector[:, None]


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and optional per-head QK-norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, axis: int):
        d, h = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * h, config.num_key_value_heads * h
        scale = config.initializer_range
        # 2 n sums go into the residual stream; dividing by the root keeps its variance.
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        self.head_dim, self.axis = h, axis
        linear = partial(Linear, dtype=dtype, rngs=rngs, axis=axis)
        self.q_proj = linear(d, q_size, bias=config.attention_bias, scale=scale)
        self.k_proj = linear(d, kv_size, bias=config.attention_bias, scale=scale)
        self.v_proj = linear(d, kv_size, bias=config.attention_bias, scale=scale)
        self.o_proj = linear(q_size, d, bias=config.attention_out_bias, scale=residual)
        norm = config.qk_norm
        self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype, axis) if norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype, axis) if norm else None

    def project(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Returns queries ``[..., H, head_dim]``, keys and values ``[..., K, head_dim]`` of
        ``x [..., D]`` or ``[D, T]``."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._heads(checkpoint_name(proj(x), "projected")) for proj in projections)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # Queries and keys only: their product then depends on the distance of their positions.
        q, k = (apply_rope(x, rope, self.axis) for x in (q, k))
        if self.axis == COLUMNS:
            q, k, v = (x.transpose(2, 0, 1) for x in (q, k, v))
        return q, k, v

    def mix_heads(self, attended: Array) -> Array:
        """Returns ``[..., D]`` or ``[D, T]`` of what each head attended to,
        ``[..., H, head_dim]``."""
        if self.axis == COLUMNS:
            return self.o_proj(attended.transpose(1, 2, 0).reshape(-1, attended.shape[0]))
        return self.o_proj(attended.reshape(*attended.shape[:-2], -1))

    def _heads(self, x: Array) -> Array:
        """Splits ``[..., H * head_dim]`` into ``[..., H, head_dim]``, or columns into
        ``[H, head_dim, T]``."""
        if self.axis == COLUMNS:
            return x.reshape(-1, self.head_dim, x.shape[-1])
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, axis: int):
        d, f, scale = config.hidden_size, config.intermediate_size, config.initializer_range
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        linear = partial(Linear, bias=config.mlp_bias, dtype=dtype, rngs=rngs, axis=axis)
        self.gate_proj = linear(d, f, scale=scale)
        self.up_proj = linear(d, f, scale=scale)
        self.down_proj = linear(f, d, scale=residual)

    def __call__(self, x: Array) -> Array:
        gate = checkpoint_name(self.gate_proj(x), "gate")
        return self.down_proj(jax.nn.silu(gate) * checkpoint_name(self.up_proj(x), "up"))


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer, in two halves so that its caller decides how to attend."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, axis: int = ROWS):
        d, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, epsilon, dtype, axis)
        self.self_attn = Attention(config, dtype, rngs, axis)
        self.post_attention_layernorm = RMSNorm(d, epsilon, dtype, axis)
        self.mlp = MLP(config, dtype, rngs, axis)

    def before_attention(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values, as `Attention.project`, of hidden states
        ``[B, T, D]``, ``[T, D]`` or ``[D, T]``."""
        return self.self_attn.project(self.input_layernorm(x), rope)

    def after_attention(self, x: Array, attended: Array) -> Array:
        """Returns the next layer's hidden states from ``x`` and what its queries attended to."""
        x = checkpoint_name(laid_out(x + self.self_attn.mix_heads(attended)), "mixed")
        return laid_out(x + self.mlp(self.post_attention_layernorm(x)))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: jnp.dtype) -> Array:
    return (jax.random.normal(rngs.params(), shape) * scale).astype(dtype)


def laid_out(x: Array) -> Array:
    """Lays out hidden states as `wedlm_jax.sharding` says; flat tokens whole on each device."""
    return constrain(x, "batch", "length") if x.ndim == 3 else constrain(x)
