"""The causal transformer, with explicit logical positions, for all supported model families.

The layers are independent of masks, caches and pages: each passes its queries, keys and values to a
function, which returns what the queries attended to. `Transformer.__call__` runs batches ``[B, T]``
under a mask, for training; `Transformer.run` runs flat tokens ``[T]`` of many sequences, for
decoding.
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
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.attention import attend
from wedlm_jax.attention.pages import to_float, to_int8
from wedlm_jax.config import ModelConfig
from wedlm_jax.masks import DualStreamMask, Mask
from wedlm_jax.model.layers import (
    LAYER_INPUT,
    DecoderLayer,
    RMSNorm,
    Rows,
    as_columns,
    checkpoint_policy,
    columns_are_faster,
    laid_out,
    looked_up,
    normal,
)
from wedlm_jax.model.quantization import left_product, matrix_rows, product
from wedlm_jax.model.rope import held, rope_tables
from wedlm_jax.sharding import constrain

Carry = TypeVar("Carry")
Attend = Callable[..., tuple[Array, Any]]
"""Maps a carry, the number of a layer, its queries ``[..., H, head_dim]`` and its keys and values
``[..., K, head_dim]`` to what the queries attended to, and the next carry."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens that go through the layers together: the input of the first layer, ``[B, T, D]`` or
    ``[T, D]``, their RoPE tables, and which of them adapters act on."""

    x: Array
    rope: tuple[Array, Array]
    adapted: Rows


def _joined(parts: Sequence[Array]) -> Array:
    """Concatenates parts ``[B, T, ...]``. Of two, the first gets no gradient."""
    if len(parts) == 1:
        return parts[0]
    memory, prediction = parts
    return jnp.concatenate([jax.lax.stop_gradient(memory), prediction], axis=1)


def _cut(x: Array, parts: Sequence[Array]) -> Sequence[Array]:
    """Inverts `_joined`."""
    if len(parts) == 1:
        return (x,)
    memory, prediction = jnp.split(x, [parts[0].shape[1]], axis=1)
    return jax.lax.stop_gradient(memory), prediction


@dataclasses.dataclass(frozen=True)
class _ChosenLayer:
    """Runs one layer of a list, chosen on the device by its index, so that attention, the larger
    part of a program, is compiled once for all layers."""

    layers: Sequence[DecoderLayer]
    index: Array

    def before_attention(
        self, x: Array, rope: tuple[Array, Array], adapted: Rows
    ) -> tuple[Array, Array, Array]:
        return self._run([layer.before_attention for layer in self.layers], adapted, x, rope)

    def after_attention(self, x: Array, attended: Array, adapted: Rows) -> Array:
        return self._run([layer.after_attention for layer in self.layers], adapted, x, attended)

    def _run(self, functions: list[Callable[..., Any]], adapted: Rows, *inputs: Any) -> Any:
        branches = [partial(function, adapted=adapted) for function in functions]
        return jax.lax.switch(self.index, branches, *inputs)


class Transformer(nnx.Module):
    """The decoder.

    Its layers are either stacked, every parameter with a leading ``[num_hidden_layers]`` axis, or
    apart, as a list of `DecoderLayer` (see `wedlm_jax.model.layer_layout`). A scan runs through
    either. Parameters are stored in ``dtype``; computation runs in the dtype passed to the call.

    Args:
      stacked: whether the layers are stacked.
      columns: whether layers that are apart multiply columns; by default if
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
        assert not (stacked and columns), "stacked layers multiply rows"
        self.config = config
        self.lora: Any = None  # or the `wedlm_jax.model.lora.LoraConfig` of its adapters
        self.mask_embedding: Any = None  # or, with adapters on masks, the embedding of a mask
        self.previous_token: Any = None  # or, with it, a `PreviousTokenHead`
        d, scale = config.hidden_size, config.initializer_range
        self.embed_tokens = nnx.Param(normal(rngs, (config.vocab_size, d), scale, dtype))
        layer_keys = jax.random.split(rngs.params(), config.num_hidden_layers)

        def layer(key: Array) -> DecoderLayer:
            return DecoderLayer(config, dtype, nnx.Rngs(params=key), columns)

        self.layers: Any = (
            nnx.vmap(layer)(layer_keys) if stacked else nnx.List([layer(key) for key in layer_keys])
        )
        self.norm = RMSNorm(d, config.rms_norm_eps, dtype)
        tied, shape = config.tie_word_embeddings, (d, config.vocab_size)
        self.lm_head = None if tied else nnx.Param(normal(rngs, shape, scale, dtype).T)

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
        tile: int = 0,
        unroll: int = 1,
    ) -> Array:
        """Runs the layers over a batch of rows of equal length.

        Args:
          token_ids: int32 ``[B, T]`` in physical order.
          positions: int32 ``[B, T]``, their logical positions, which RoPE sees.
          mask: which tokens see which.
          int8_kv: whether keys and values are rounded to 8 bits, as in an int8 cache.
          dtype: compute dtype; the parameters' dtype by default.
          remat: one of `wedlm_jax.model.layers.POLICIES`.
          attention: a name in `wedlm_jax.attention.IMPLEMENTATIONS`.
          tile: side of the splash kernel's tiles; 0 for a size that suits the chip.
          unroll: layers per iteration of the scan; more of them take longer to compile.

        Returns:
          Normalised hidden states ``[B, T, D]`` (see `logits`).
        """

        def attend_to_sequences(_: None, __: Any, *qkv: Array) -> tuple[Array, None]:
            q, k, v = qkv
            q = constrain(q, "batch", None, "attention_heads")
            k, v = (constrain(x.swapaxes(1, 2), "batch", "attention_heads") for x in (k, v))
            if int8_kv:
                k, v = (to_float(to_int8(x), q.dtype) for x in (k, v))
            return attend(q, k, v, mask, implementation=attention, tile=tile), None

        # Adapters on masks do not affect the memory stream. It is a separate part, so that the
        # backward pass does not go through it.
        length, memory = token_ids.shape[1], 0
        if self.mask_embedding is not None:
            memory = mask.segment_ids.shape[1] if isinstance(mask, DualStreamMask) else length
        parts = [
            Part(
                self._embedded(token_ids[:, rows], dtype, adapted),
                rope_tables(self.config, positions[:, rows]),
                adapted,
            )
            for rows, adapted in ((slice(0, memory), False), (slice(memory, length), True))
            if rows.stop > rows.start
        ]
        policy = checkpoint_policy(remat)
        xs, _ = self._through_layers(parts, attend_to_sequences, None, policy, unroll)
        return self.norm(_joined(xs))

    def run(
        self,
        tokens: Array,
        positions: Array,
        attend: Callable[[Carry, Any, Array, Array, Array], tuple[Array, Carry]],
        carry: Carry,
        *,
        is_mask: Array | None = None,
        dtype: jnp.dtype | None = None,
    ) -> tuple[Array, Carry]:
        """Runs the layers over flat tokens of many sequences.

        Args:
          tokens: int32 ``[T]``.
          positions: int32 ``[T]``, their logical positions, which RoPE sees.
          attend: ``attend(carry, layer, q, k, v)`` stores the keys and values
            ``[T, K, head_dim]`` of a layer and returns what its queries ``[T, H, head_dim]``
            attended to, and the carry. ``layer`` is an int32 scalar.
          carry: passed through all layers: the pages of keys and values, updated in place.
          is_mask: bool ``[T]``, which tokens are masks, for a model with adapters on masks.
          dtype: compute dtype; the parameters' dtype by default.

        Returns:
          Normalised hidden states ``[T, D]`` (see `logits`), and the carry.
        """
        rope = held(rope_tables(self.config, positions))

        def attend_flat(carry: Carry, index: Array, *qkv: Array) -> tuple[Array, Carry]:
            q, k, v = (constrain(x, "tokens", "heads") for x in qkv)
            attended, after = attend(carry, index, q, k, v)
            return constrain(attended, "tokens", "heads"), after

        adapted = True if self.mask_embedding is None else is_mask
        assert adapted is not None, "adapters on masks need to know which rows are masks"
        x = self._embedded(tokens, dtype, adapted)
        (x,), carry = self._through_layers([Part(x, rope, adapted)], attend_flat, carry)
        return self.norm(x), carry

    def _embedded(self, tokens: Array, dtype: jnp.dtype | None, adapted: Rows) -> Array:
        table = self.embed_tokens[...]
        x = looked_up(table, tokens, jnp.dtype(dtype or table.dtype))
        if self.mask_embedding is not None and adapted is not False:
            mask = self.mask_embedding[...].astype(x.dtype)
            x = jnp.where(jnp.expand_dims(adapted, -1), mask, x)
        return laid_out(x)

    def _through_layers(
        self,
        parts: Sequence[Part],
        attend: Attend,
        carry: Any,
        policy: Callable | None = None,
        unroll: int = 1,
    ) -> tuple[tuple[Array, ...], Any]:
        """Scans the hidden states of parts, and the carry of ``attend``, through the layers. The
        backward pass recomputes what ``policy`` does not keep."""
        apart = isinstance(self.layers, nnx.List)
        graph: Any = None
        stacked: Any = None
        if not apart:
            graph, stacked = nnx.split(self.layers)

        def turn(inner: tuple[Any, Any], inputs: tuple[Any, Array]) -> tuple[Any, None]:
            (xs, carry), (parameters, index) = inner, inputs
            xs = [checkpoint_name(x, LAYER_INPUT) for x in xs]
            layer = _ChosenLayer(self.layers, index) if apart else nnx.merge(graph, parameters)
            qkv = [
                layer.before_attention(x, part.rope, part.adapted)
                for x, part in zip(xs, parts, strict=True)
            ]
            attended, carry = attend(carry, index, *map(_joined, zip(*qkv, strict=True)))
            xs = tuple(
                layer.after_attention(x, mixed, part.adapted)
                for x, mixed, part in zip(xs, _cut(attended, xs), parts, strict=True)
            )
            return (xs, carry), None

        if policy is not None:
            turn = jax.checkpoint(turn, policy=policy, prevent_cse=False)
        indices = jnp.arange(self.config.num_hidden_layers)
        start = tuple(part.x for part in parts), carry
        return jax.lax.scan(turn, start, (stacked, indices), unroll=unroll)[0]

    def correction(self, hidden: Array, before: Array) -> Array:
        """Returns what a previous-token head adds to masks' final hidden states ``[..., D]``, given
        the tokens before them, int32 ``[...]``."""
        embedded = looked_up(self.embed_tokens[...], before, hidden.dtype)
        correction: Array = self.previous_token(hidden, embedded)
        return correction

    def logit_corrections(self, hidden: Array, before: Array, tokens: Array) -> Array:
        """Returns what `correction` of ``hidden [N, D]``, given ``before [N]``, adds to the logits
        of ``tokens [N, C]``: float32 ``[N, C]``."""
        rows = matrix_rows(self.head_matrix(), tokens, hidden.dtype)
        change = self.correction(hidden, before)
        return jnp.einsum("ncd,nd->nc", rows, change, preferred_element_type=jnp.float32)

    def head_matrix(self) -> Array:
        """Returns the output projection ``[V, D]``, or the embedding if the two are tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: Array) -> Array:
        """Returns float32 logits ``[..., V]`` of hidden states ``[..., D]``."""
        if isinstance(self.layers, nnx.List):
            logits = left_product(self.head_matrix(), as_columns(hidden), jnp.float32)
            # The barriers make XLA transpose once. Otherwise it transposes in every later pass over
            # the logits: 16 rows of 1,024 features and 152k tokens then take 270 ms on two cores
            # instead of 160.
            hold = jax.lax.optimization_barrier
            return hold(hold(logits).T).reshape(*hidden.shape[:-1], -1)
        return product(hidden, self.head_matrix(), jnp.float32)


def abstract_model(config: ModelConfig, **how: Any) -> Transformer:
    """Returns a `Transformer`, made with these arguments, with shapes instead of arrays."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), **how))  # type: ignore[no-any-return]
