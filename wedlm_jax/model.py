"""The causal transformer: Qwen2.5 and Qwen3 shapes, with explicit logical positions.

The layers know nothing of masks, caches and pages: each hands its queries, keys and values to
a function and gets back what they attended to. `Transformer.__call__` computes rectangles
``[B, T]`` of sequences under a mask, as training does; `Transformer.run` flat tokens ``[T]``
of many sequences, as decoding does.

Hidden states are rows: tokens first, features last, ``[..., D]``, and products are
``x @ kernel``. Where layers lie apart they may be columns instead, ``[D, T]``, and products
``weight @ x`` with a weight ``[out, in]``: a CPU multiplies from the left with a large matrix as
it lies in memory, which for 4 to 64 tokens takes half the time; see `wedlm_jax.layer_layout`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.attention import attend
from wedlm_jax.attention.int8 import to_float, to_int8
from wedlm_jax.config import ModelConfig
from wedlm_jax.masks import Mask
from wedlm_jax.quantization import is_quantized, left_product, product
from wedlm_jax.rope import apply_rope, held, rope_tables
from wedlm_jax.sharding import constrain

Carry = TypeVar("Carry")
Attend = Callable[..., tuple[Array, Any]]
"""From what it carries, the number of a layer, its queries ``[..., H, head_dim]``, its keys and
values ``[..., K, head_dim]`` to what the queries attended to, and what it carries on."""

ROWS, COLUMNS = -1, -2
"""The axis of the features: of tokens by features, of features by tokens."""

REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


CACHED_BYTES = 2 * 2**20
"""A matrix larger than this does not stay in a CPU core's own cache."""


def columns_are_faster(config: ModelConfig, dtype: Any) -> bool:
    """Tells whether layers that are apart are to compute on columns, on a CPU."""
    matrix = config.hidden_size * config.intermediate_size
    return matrix * jnp.dtype(dtype).itemsize > CACHED_BYTES


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32, as in Hugging Face's Qwen."""

    def __init__(self, size: int, epsilon: float, dtype: jnp.dtype, axis: int = ROWS):
        self.epsilon, self.axis = epsilon, axis
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Array) -> Array:
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
        matrix = _normal(rngs, (n_in, n_out), scale, dtype)
        if axis == ROWS:
            self.kernel = nnx.Param(matrix)
        else:
            self.weight = nnx.Param(matrix.T)
        self.bias = nnx.Param(jnp.zeros((n_out,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        if self.axis == ROWS:
            y = product(x, self.kernel[...])
        else:
            y = left_product(self.weight[...], x)
        return y if self.bias is None else y + _along(self.axis, self.bias[...]).astype(x.dtype)


def _along(axis: int, vector: Array) -> Array:
    """A vector of features as it is added to hidden states."""
    return vector if axis == ROWS else vector[:, None]


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and optional per-head QK-norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, axis: int):
        d, h = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * h, config.num_key_value_heads * h
        scale = config.initializer_range
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        self.head_dim, self.axis = h, axis
        linear = partial(Linear, dtype=dtype, rngs=rngs, axis=axis)
        self.q_proj = linear(d, q_size, bias=config.attention_bias, scale=scale)
        self.k_proj = linear(d, kv_size, bias=config.attention_bias, scale=scale)
        self.v_proj = linear(d, kv_size, bias=config.attention_bias, scale=scale)
        self.o_proj = linear(q_size, d, bias=False, scale=residual)
        norm = config.qk_norm
        self.q_norm = RMSNorm(h, config.rms_norm_eps, dtype, axis) if norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps, dtype, axis) if norm else None

    def project(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Returns queries ``[..., H, head_dim]``, keys and values ``[..., K, head_dim]`` of
        ``x [..., D]`` or ``[D, T]``."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
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
        """``[..., H * head_dim]`` to ``[..., H, head_dim]``, or of columns to
        ``[H, head_dim, T]``."""
        if self.axis == COLUMNS:
            return x.reshape(-1, self.head_dim, x.shape[-1])
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, axis: int):
        d, f, scale = config.hidden_size, config.intermediate_size, config.initializer_range
        residual = scale / (2 * config.num_hidden_layers) ** 0.5
        linear = partial(Linear, bias=False, dtype=dtype, rngs=rngs, axis=axis)
        self.gate_proj = linear(d, f, scale=scale)
        self.up_proj = linear(d, f, scale=scale)
        self.down_proj = linear(f, d, scale=residual)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
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
        """Returns the next layer's hidden states, of ``x`` and what its queries attended to."""
        x = _laid_out(x + self.self_attn.mix_heads(attended))
        return _laid_out(x + self.mlp(self.post_attention_layernorm(x)))


@dataclasses.dataclass(frozen=True)
class _ChosenLayer:
    """Runs one layer of a list, chosen on the device.

    Only products, norms and RoPE are compiled for each layer; attention, the larger part of a
    program, once for all.
    """

    layers: Sequence[DecoderLayer]
    index: Array

    def before_attention(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return self._run([layer.before_attention for layer in self.layers], x, rope)

    def after_attention(self, x: Array, attended: Array) -> Array:
        return self._run([layer.after_attention for layer in self.layers], x, attended)

    def _run(self, functions: list[Callable[..., Any]], *inputs: Any) -> Any:
        return jax.lax.switch(self.index, functions, *inputs)


def _laid_out(x: Array) -> Array:
    """Hidden states laid out as `wedlm_jax.sharding` says; flat tokens whole on each device."""
    return constrain(x, "batch", "length") if x.ndim == 3 else constrain(x)


class Transformer(nnx.Module):
    """The decoder.

    Its layers are stacked, every parameter with a leading ``[num_hidden_layers]`` axis, or apart:
    a list of `DecoderLayer`. A scan goes through either. On a CPU it copies a layer's weights out
    of a stack, which costs more than reading them.
    `wedlm_jax.layer_layout` makes one of the other.

    Parameters are held in ``dtype``; computation runs in the dtype passed to the call.

    Args:
      stacked: whether the layers are.
      columns: whether layers that are apart compute on columns ``[D, T]``; by default where
        `columns_are_faster`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype = jnp.dtype("float32"),
        stacked: bool = True,
        columns: bool | None = None,
    ):
        if columns is None:
            columns = not stacked and columns_are_faster(config, dtype)
        assert not (stacked and columns), "stacked layers compute on rows"
        axis = COLUMNS if columns else ROWS
        self.config, self.axis = config, axis
        d, scale = config.hidden_size, config.initializer_range
        self.embed_tokens = nnx.Param(_normal(rngs, (config.vocab_size, d), scale, dtype))
        layer_keys = jax.random.split(rngs.params(), config.num_hidden_layers)

        def layer(key: Array) -> DecoderLayer:
            return DecoderLayer(config, dtype, nnx.Rngs(params=key), axis)

        self.layers: Any = (
            nnx.vmap(layer)(layer_keys) if stacked else nnx.List([layer(key) for key in layer_keys])
        )
        self.norm = RMSNorm(d, config.rms_norm_eps, dtype, axis)
        tied, head_shape = config.tie_word_embeddings, (d, config.vocab_size)
        head = None if tied else _normal(rngs, head_shape, scale, dtype)
        self.lm_head = None if head is None or not stacked else nnx.Param(head)
        self.head_weight = None if head is None or stacked else nnx.Param(head.T)

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
        shape = token_ids.shape
        if self.axis == COLUMNS:
            token_ids, positions = token_ids.reshape(-1), positions.reshape(-1)

        def attend_to_sequences(_: None, __: Any, *qkv: Array) -> tuple[Array, None]:
            q, k, v = (x.reshape(*shape, *x.shape[-2:]) for x in qkv)
            return _attend(q, k, v, mask, attention, int8_kv).reshape(qkv[0].shape), None

        rope = rope_tables(self.config, positions, self.axis)
        x = self._embedded(token_ids, dtype)
        policy = REMAT_POLICIES[remat]
        x, _ = self._through_layers(x, rope, attend_to_sequences, None, policy, unroll)
        return self._normalised(x).reshape(*shape, -1)

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
            attended to, and the carry. ``layer`` is an int32 scalar.
          carry: goes through all layers; the pages of keys and values, updated in place.
          dtype: compute dtype; that of the parameters by default.

        Returns:
          Normalised hidden states ``[T, D]`` (see `logits`), and the carry.
        """
        rope = held(rope_tables(self.config, positions, self.axis), self.axis)

        def attend_flat(carry: Carry, index: Array, *qkv: Array) -> tuple[Array, Carry]:
            q, k, v = (constrain(x, "tokens", "heads") for x in qkv)
            attended, after = attend(carry, index, q, k, v)
            return constrain(attended, "tokens", "heads"), after

        x = self._embedded(tokens, dtype)
        x, carry = self._through_layers(x, rope, attend_flat, carry)
        return self._normalised(x), carry

    def _embedded(self, tokens: Array, dtype: jnp.dtype | None) -> Array:
        # Each device looks up whole rows in its share of the vocabulary.
        x = constrain(self.embed_tokens[...], "vocab", None)[tokens]
        x = x if self.axis == ROWS else x.T
        return _laid_out(x if dtype is None else x.astype(dtype))

    def _normalised(self, x: Array) -> Array:
        """The last layer's states as rows."""
        x = self.norm(x)
        return x if self.axis == ROWS else x.T

    def _through_layers(
        self,
        x: Array,
        rope: tuple[Array, Array],
        attend: Attend,
        carry: Any,
        policy: Callable | None = None,
        unroll: int = 1,
    ) -> tuple[Array, Any]:
        """Scans ``x`` and what ``attend`` carries through the layers. Under a policy of
        `REMAT_POLICIES` their activations are computed again."""
        apart = isinstance(self.layers, nnx.List)
        graph: Any = None
        stacked: Any = None
        if not apart:
            graph, stacked = nnx.split(self.layers)

        def turn(inner: tuple[Array, Any], inputs: tuple[Any, Array]) -> tuple[Any, None]:
            (x, carry), (parameters, index) = inner, inputs
            layer = _ChosenLayer(self.layers, index) if apart else nnx.merge(graph, parameters)
            q, k, v = layer.before_attention(x, rope)
            attended, carry = attend(carry, index, q, k, v)
            return (layer.after_attention(x, attended), carry), None

        if policy is not None:
            turn = jax.checkpoint(turn, policy=policy, prevent_cse=False)
        indices = jnp.arange(self.config.num_hidden_layers)
        return jax.lax.scan(turn, (x, carry), (stacked, indices), unroll=unroll)[0]

    def head_matrix(self) -> Array:
        """The output projection ``[D, V]``: its own, or the embedding transposed."""
        return self._head_weight().T if self.lm_head is None else self.lm_head[...]

    def _head_weight(self) -> Any:
        """That of a model without `lm_head`, ``[V, D]``."""
        return (self.embed_tokens if self.head_weight is None else self.head_weight)[...]

    def logits(self, hidden: Array) -> Array:
        """float32 logits ``[..., V]`` of hidden states ``[..., D]``."""
        if isinstance(self.layers, nnx.List):
            columns = hidden.reshape(-1, hidden.shape[-1]).T
            logits = left_product(self._head_weight(), columns, jnp.float32)
            # Transposed once. Else XLA does it within every pass over them that follows, and 16
            # rows of 1,024 features and 152k tokens take 270 ms on two cores instead of 160.
            hold = jax.lax.optimization_barrier
            return hold(hold(logits).T).reshape(*hidden.shape[:-1], -1)
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
