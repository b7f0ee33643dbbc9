"""The linear layers and the head of a model, alone: what no forward can be faster than."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked
from wedlm_jax.model.layers import DecoderLayer

if TYPE_CHECKING:
    from wedlm_jax.engine.engine import Engine

TURNS = 16
"""Forwards in one call, so that the call itself counts for little."""


def milliseconds_of_products(engine: Engine, tokens: int) -> float:
    """Times the matrix products of one forward over so many flat tokens, the head included, and
    nothing else: no attention, norms, RoPE or sampling. Compiling is not counted."""
    dtype = jax.tree.leaves(engine.device.parameters)[0].dtype
    x = jnp.ones((tokens, engine.config.hidden_size), dtype)
    logits = jnp.zeros((tokens, engine.config.vocab_size), jnp.float32)
    turns = jnp.int32(TURNS)
    compiled, started = engine.compile_seconds, time.perf_counter()
    jax.block_until_ready(engine.run_model(_products, x, logits, turns))
    compiling = engine.compile_seconds - compiled
    return (time.perf_counter() - started - compiling) / TURNS * 1e3


@partial(jax.jit, static_argnums=0)
def _products(
    graph: nnx.GraphDef[Transformer], parameters: nnx.State, x: Array, logits: Array, turns: Array
) -> Array:
    model = nnx.merge(graph, parameters)

    def turn(_: Array, logits: Array) -> Array:
        # Each turn needs the one before it, or the compiler would run only one.
        own = x + (logits[:1, :1] * 1e-9).astype(x.dtype)
        return model.logits(_through_layers(model, own))

    return jax.lax.fori_loop(0, turns, turn, logits)


def _through_layers(model: Transformer, x: Array) -> Array:
    if not are_stacked(model):
        for layer in model.layers:
            x = _layer(layer, x)
        return x
    graph, parameters = nnx.split(model.layers)

    def turn(x: Array, own: nnx.State) -> tuple[Array, None]:
        return _layer(nnx.merge(graph, own), x), None

    return jax.lax.scan(turn, x, parameters)[0]


def _layer(layer: DecoderLayer, x: Array) -> Array:
    attention = layer.self_attn
    q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    mixed = q + jnp.concatenate([k + v] * (q.size // k.size), -1)
    x = x + attention.o_proj(mixed)
    return x + layer.mlp(x)
