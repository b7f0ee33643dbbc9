"""A drafter's previous-token head: what a mask predicts once the token before it is known.

The masks of a window are computed together, so none of them sees what the others draft. This head
adds what the token before a mask says about the mask's own, to the final hidden state h, after the
layers::

    h' = h + B silu(A h + E e)        e: the embedding of the token before, scaled to RMS 1

with A, E ``[rank, D]`` and B ``[D, rank]``. Chosen from left to right, each draft then follows the
draft before it. In training the token before is the text's, for a draft counts only if all drafts
before it are right.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.model.quantization import product


class PreviousTokenHead(nnx.Module):
    """The head, with float32 parameters cast to the dtype of the hidden states.

    Args:
      hidden_size: D.
      rank: the number of hidden units.
      rngs: A and E are drawn from its ``params``, uniform within ±1 / √D; B is zero, so that a new
        head changes nothing.
    """

    def __init__(self, hidden_size: int, rank: int, rngs: nnx.Rngs):
        bound = hidden_size**-0.5
        shape = (rank, hidden_size)

        def drawn() -> nnx.LoRAParam:
            value = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
            return nnx.LoRAParam(value)

        self.state, self.token = drawn(), drawn()
        self.out = nnx.LoRAParam(jnp.zeros((hidden_size, rank), jnp.float32))

    def __call__(self, hidden: Array, before: Array) -> Array:
        """Returns what is added to ``hidden [..., D]``, given the embeddings ``before [..., D]`` of
        the tokens before."""
        x32 = before.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-12)
        token = x32.astype(hidden.dtype)
        inner = product(hidden, self.state[...]) + product(token, self.token[...])
        return product(jax.nn.silu(inner), self.out[...])
