"""Measures the cost of a forward's matrix products and of an empty burst on this machine, from
which the speeds of another machine can be predicted.

The matrix products of a forward over T tokens (linear layers and head, without attention, norms,
RoPE or sampling) take time t(T). For one token, t is the time to read the weights; for many, the
time to compute. If nothing else took time, decoding in F forwards of T tokens would take F t(T),
and two ways of decoding the same text would differ in speed by the ratio of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.table import Table

from infer.bench.measure import milliseconds, table
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.probe import empty_burst_seconds
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import are_stacked
from wedlm_jax.model.layers import DecoderLayer

TOKENS = (1, 16, 256, 1024)
"""Tokens of the forwards whose products are timed."""
TURNS, SECONDS, ROUNDS = 16, 0.5, 3
"""One call computes the products up to 16 times, for at most about half a second, so that the
overhead of the call is small. The fastest of three calls counts."""
LONGEST = 10.0
"""Seconds; forwards whose products are expected to take longer are not timed."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of a machine with the weights of one model.

    Attributes:
      tokens: T of the forwards that were timed, ascending.
      milliseconds: t(T) of each.
      weight_bytes: bytes of all matrices that a token is multiplied with.
      flops_per_token: floating-point operations of these products, per token.
      empty_burst: milliseconds of a burst of no forwards, from the host to the device and back.
    """

    tokens: list[int]
    milliseconds: list[float]
    weight_bytes: int
    flops_per_token: int
    empty_burst: float

    def of(self, tokens: float) -> float:
        """Returns t(T) in milliseconds, interpolated linearly between the sizes that were timed."""
        if tokens <= self.tokens[-1] or len(self.tokens) < 2:
            return float(np.interp(tokens, self.tokens, self.milliseconds))
        (low, high), (before, last) = self.tokens[-2:], self.milliseconds[-2:]
        return last + (tokens - high) * (last - before) / (high - low)


def measure(engine: Engine) -> Constants:
    """Measures the constants with the weights of an idle engine, in the layout that it decodes
    with."""
    config = engine.config
    matrices = config.num_parameters(embeddings=False) + config.vocab_size * config.hidden_size
    leaves = jax.tree.leaves(engine.device.parameters)
    size = sum(x.nbytes for x in leaves) / sum(x.size for x in leaves)
    tokens, times = list[int](), list[float]()
    for count in TOKENS:
        if not times or times[-1] * count / tokens[-1] < LONGEST * 1e3:
            tokens.append(count)
            times.append(milliseconds_of_products(engine, count))
    return Constants(
        tokens,
        times,
        weight_bytes=round(matrices * size),
        flops_per_token=2 * matrices,
        empty_burst=empty_burst_seconds(engine.device) * 1e3,
    )


def milliseconds_of_products(engine: Engine, tokens: int) -> float:
    """Times the products of one forward over this many tokens; compiling is not counted."""
    dtype = jax.tree.leaves(engine.device.parameters)[0].dtype
    x = jnp.ones((tokens, engine.config.hidden_size), dtype)
    logits = jnp.zeros((tokens, engine.config.vocab_size), jnp.float32)

    def timed(turns: int) -> float:
        call = partial(engine.run_model, products, x, logits, jnp.int32(turns))
        return milliseconds(call) / turns

    timed(1)  # compiles
    turns = int(np.clip(SECONDS * 1e3 / timed(1), 1, TURNS))
    return min(timed(turns) for _ in range(ROUNDS))


@partial(jax.jit, static_argnums=0)
def products(
    graph: nnx.GraphDef[Transformer], parameters: nnx.State, x: Array, logits: Array, turns: Array
) -> Array:
    """Computes the products this many times; returns the last logits."""
    model = nnx.merge(graph, parameters)

    def turn(_: Array, logits: Array) -> Array:
        # Each turn needs the one before it, or the compiler would run only one.
        inputs = x + (logits[:1, :1] * 1e-9).astype(x.dtype)
        return model.logits(_through_layers(model, inputs))

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


def constants_table(found: Constants) -> Table:
    """Makes a table of the constants."""
    rows = [
        {
            "way": f"{tokens:,} token{'s' * (tokens > 1)}",
            "ms": time,
            "GB/s of weights": found.weight_bytes / time / 1e6,
            "GFLOP/s": found.flops_per_token * tokens / time / 1e6,
        }
        for tokens, time in zip(found.tokens, found.milliseconds, strict=True)
    ]
    caption = f"an empty burst takes {found.empty_burst:.2f} ms"
    return table("this machine: the matrix products of a forward", rows, caption=caption)


def by_products(found: Constants, one: Sequence[int], other: Sequence[int]) -> float:
    """Returns the speed-up of one way of decoding over another if only products took time.

    Args:
      one, other: number of forwards of each way, and number of tokens in all of them.
    """

    def milliseconds_of(forwards: int, tokens: int) -> float:
        return forwards * found.of(tokens / max(forwards, 1))

    return milliseconds_of(*other) / max(milliseconds_of(*one), 1e-9)
