"""The causal transformer: Qwen2.5 and Qwen3 shapes, with explicit logical positions.

The layers know nothing of masks, caches and pages: each hands its queries, keys and values to
a function and gets back what they attended to. `Transformer.__call__` computes rectangles
``[B, T]`` of sequences under a mask, as training does; `Transformer.run` flat tokens ``[T]``
of many sequences, as decoding does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.attention import attend
from wedlm_jax.config import ModelConfig
from wedlm_jax.int8 import to_float, to_int8
from wedlm_jax.masks import Mask
from wedlm_jax.quantization import is_quantized, product
from wedlm_jax.rope import apply_rope, held, rope_tables
from wedlm_jax.sharding import constrain

Carry = TypeVar("Carry")
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
"""From queries ``[..., H, head_dim]``, keys and values ``[..., K, head_dim]`` of a layer to
what its queries attended to ``[..., H, head_dim]``, and anything that is to be kept."""

REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32, as in Hugging Face's Qwen."""

    def __init__(self, size: int, epsilon: float, dtype: jnp.dtype):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return self.scale[...].astype(x.dtype) * x32.astype(x.dtype)


class Linear(nnx.Module):
    """``x @ kernel (+ bias)``, parameters cast to the dtype of ``x``; kernel ``[in, out]``."""

    def __init__(
        self, n_in: int, n_out: int, *, bias: bool, scale: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(_normal(rngs, (n_in, n_out), scale, dtype))
        self.bias = nnx.Param(jnp.zeros((n_out,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = product(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and optional per-head QK-norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, h = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * h, config.num_key_value_heads * h
        bias, scale = config.attention_bias, config.initializer_range
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        self.head_dim = h
        self.q_proj = Linear(d, q_size, bias=bias, scale=scale, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(d, kv_size, bias=bias, scale=scale, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(d, kv_size, bias=bias, scale=scale, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(q_size, d, bias=False, scale=residual, dtype=dtype, rngs=rngs)
        norm = config.qk_norm
        self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype) if norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype) if norm else None

    def __call__(self, x: Array, rope: tuple[Array, Array], attend: Attend) -> tuple[Array, Any]:
        """``x [..., D]`` to the same shape, and what ``attend`` keeps."""
        q, k, v = (
            proj(x).reshape(*x.shape[:-1], -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, kept = attend(apply_rope(q, rope), apply_rope(k, rope), v)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), kept


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, f, scale = config.hidden_size, config.intermediate_size, config.initializer_range
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        self.gate_proj = Linear(d, f, bias=False, scale=scale, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(d, f, bias=False, scale=scale, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(f, d, bias=False, scale=residual, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, epsilon, dtype)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(d, epsilon, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x: Array, rope: tuple[Array, Array], attend: Attend) -> tuple[Array, Any]:
        """``x [B, T, D]`` or ``[T, D]`` to the same shape, and what ``attend`` keeps."""
        mixed, kept = self.self_attn(self.input_layernorm(x), rope, attend)
        x = _laid_out(x + mixed)
        return _laid_out(x + self.mlp(self.post_attention_layernorm(x))), kept


def _laid_out(x: Array) -> Array:
    """Hidden states laid out as `wedlm_jax.sharding` says; flat tokens whole on each device."""
    return constrain(x, "batch", "length") if x.ndim == 3 else constrain(x, "tokens")


class Transformer(nnx.Module):
    """The decoder.

    Its layers are stacked and scanned, every parameter with a leading ``[num_hidden_layers]``
    axis, or apart: a list of `DecoderLayer`, through which a Python loop goes. On a CPU a scan
    copies each layer's weights out of the stack, which costs more than reading them.
    `wedlm_jax.layer_layout` makes one of the other.

    Parameters are held in ``dtype``; computation runs in the dtype passed to the call.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype = jnp.dtype("float32"),
        stacked: bool = True,
    ):
        self.config = config
        d, scale = config.hidden_size, config.initializer_range
        self.embed_tokens = nnx.Param(_normal(rngs, (config.vocab_size, d), scale, dtype))
        layer_keys = jax.random.split(rngs.params(), config.num_hidden_layers)

        def layer(key: Array) -> DecoderLayer:
            return DecoderLayer(config, dtype, nnx.Rngs(params=key))

        self.layers: Any = (
            nnx.vmap(layer)(layer_keys) if stacked else nnx.List([layer(key) for key in layer_keys])
        )
        self.norm = RMSNorm(d, config.rms_norm_eps, dtype)
        head = (
            None
            if config.tie_word_embeddings
            else _normal(rngs, (d, config.vocab_size), scale, dtype)
        )
        self.lm_head = None if head is None else nnx.Param(head)

    def __call__(
        self,
        token_ids: Array,
        positions: Array,
        mask: Mask,
        *,
        int8_kv: bool = False,
        dtype: jnp.dtype | None = None,
        remat: str = "none",
        attention: str = "streams",
        unroll: int = 1,
    ) -> Array:
        """Runs the layers over rectangles of sequences.

        Args:
          token_ids: int32 ``[B, T]`` in physical order.
          positions: int32 ``[B, T]``, the logical position of each; what RoPE sees.
          mask: who sees whom.
          int8_kv: whether keys and values are rounded to 8 bits, as in an int8 cache.
          dtype: compute dtype; that of the parameters by default.
          remat: a name in `REMAT_POLICIES`.
          attention: a name in `wedlm_jax.attention.IMPLEMENTATIONS`.
          unroll: stacked layers in one turn of the scan; more of them compile longer.

        Returns:
          Normalised hidden states ``[B, T, D]`` (see `logits`).
        """
        rope = rope_tables(self.config, positions)

        def attend_to_sequences(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return _attend(q, k, v, mask, attention, int8_kv), None

        def layer(module: DecoderLayer, index: Any, x: Array) -> Array:
            return module(x, rope, attend_to_sequences)[0]

        x = self._embedded(token_ids, dtype)
        return self.norm(self._through_layers(layer, x, REMAT_POLICIES[remat], unroll))

    def run(
        self,
        tokens: Array,
        positions: Array,
        attend: Callable[[Carry, Any, Array, Array, Array], tuple[Array, Carry]],
        carry: Carry,
        *,
        dtype: jnp.dtype | None = None,
    ) -> tuple[Array, Carry]:
        """Runs the layers over flat tokens of many sequences.

        Args:
          tokens: int32 ``[T]``.
          positions: int32 ``[T]``, the logical position of each; what RoPE sees.
          attend: ``attend(carry, layer, q, k, v)`` stores the keys and values
            ``[T, K, head_dim]`` of a layer and returns what its queries ``[T, H, head_dim]``
            attended to, and the carry. ``layer`` is an int32 scalar where layers are stacked,
            an int where they are apart.
          carry: goes through all layers; the pages of keys and values, updated in place.
          dtype: compute dtype; that of the parameters by default.

        Returns:
          Normalised hidden states ``[T, D]`` (see `logits`), and the carry.
        """
        rope = held(rope_tables(self.config, positions))

        def layer(
            module: DecoderLayer, index: Any, inputs: tuple[Array, Carry]
        ) -> tuple[Array, Carry]:
            x, carry = inputs

            def attend_flat(q: Array, k: Array, v: Array) -> tuple[Array, Carry]:
                q, k, v = (constrain(x, "tokens", "heads") for x in (q, k, v))
                out, after = attend(carry, index, q, k, v)
                return constrain(out, "tokens", "heads"), after

            return module(x, rope, attend_flat)

        x, carry = self._through_layers(layer, (self._embedded(tokens, dtype), carry))
        return self.norm(x), carry

    def _embedded(self, tokens: Array, dtype: jnp.dtype | None) -> Array:
        # Each device looks up whole rows in its share of the vocabulary.
        x = constrain(self.embed_tokens[...], "vocab", None)[tokens]
        return _laid_out(x if dtype is None else x.astype(dtype))

    def _through_layers(
        self,
        layer: Callable[[Any, Any, Any], Any],
        carry: Any,
        policy: Callable | None = None,
        unroll: int = 1,
    ) -> Any:
        """Folds ``layer(module, index, carry) -> carry`` over the layers. Under a policy of
        `REMAT_POLICIES` their activations are computed again."""
        if isinstance(self.layers, nnx.List):
            for index, module in enumerate(self.layers):
                step: Callable[[Any], Any] = partial(layer, module, index)
                if policy is not None:
                    step = jax.checkpoint(step, policy=policy, prevent_cse=False)
                carry = step(carry)
            return carry

        graph, parameters = nnx.split(self.layers)

        def turn(carry: Any, inputs: tuple[nnx.State, Array]) -> tuple[Any, None]:
            return layer(nnx.merge(graph, inputs[0]), inputs[1], carry), None

        if policy is not None:
            turn = jax.checkpoint(turn, policy=policy, prevent_cse=False)
        indices = jnp.arange(self.config.num_hidden_layers)
        return jax.lax.scan(turn, carry, (parameters, indices), unroll=unroll)[0]

    def head_matrix(self) -> Array:
        """The output projection ``[D, V]``: its own, or the embedding transposed."""
        return self.embed_tokens[...].T if self.lm_head is None else self.lm_head[...]

    def logits(self, hidden: Array) -> Array:
        """float32 logits ``[..., V]`` of hidden states ``[..., D]``."""
        head = self.head_matrix()
        if is_quantized(head):
            return product(hidden, head).astype(jnp.float32)
        head = head.astype(hidden.dtype)
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def _attend(q: Array, k: Array, v: Array, mask: Mask, implementation: str, int8_kv: bool) -> Array:
    """What ``q [B, T, H, head_dim]`` attends to of ``k`` and ``v [B, T, K, head_dim]``."""
    q = constrain(q, "batch", None, "attention_heads")
    k, v = (constrain(x.swapaxes(1, 2), "batch", "attention_heads") for x in (k, v))
    if int8_kv:
        k, v = (to_float(to_int8(x), q.dtype) for x in (k, v))
    return attend(q, k, v, mask, implementation=implementation)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: jnp.dtype) -> Array:
    return (jax.random.normal(rngs.params(), shape) * scale).astype(dtype)
