"""A tiny model and random packed rows for the tests of training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.reference.training import MaskedSample
from wedlm_jax.attention import attend
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import Transformer
from wedlm_jax.packing import TokenisedSample, row_arrays

BLOCK, MASK_TOKEN = 4, 96

# No two sizes are equal, so that a shape says what an array is. Every option that adds
# parameters is on, and the weights are large enough to make a difference visible.
TINY = ModelConfig(
    vocab_size=97,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    attention_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    initializer_range=0.3,
    mask_token_id=MASK_TOKEN,
)

# Without those options: what its step computes is counted by hand.
PLAIN = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    mask_token_id=99,
)


DIVIDED = {
    "vocab_size": 104,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Sizes that a mesh of eight devices divides."""


def tiny_transformer(**changes):
    return Transformer(dataclasses.replace(TINY, **changes), rngs=nnx.Rngs(5))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatrixMask(CausalMask):
    """Exactly the given 0/1 matrix ``[B, T, T]``."""

    matrix: jax.Array | None = None

    def dense(self, batch, length):
        assert self.matrix is not None
        assert self.matrix.shape == (batch, length, length)
        return self.matrix


@jax.jit
def run_flat(model, tokens, is_mask):
    """Final hidden states ``[T, D]`` of one text, as decoding runs it: flat tokens, of which those
    of a mask are told by a flag."""

    def attend_causally(_, __, *qkv):
        q, k, v = (x[None] for x in qkv)
        k, v = (x.swapaxes(1, 2) for x in (k, v))
        return attend(q, k, v, CausalMask(), implementation="dense")[0], None

    places = jnp.arange(len(tokens))
    return model.run(tokens, places, attend_causally, None, is_mask=is_mask)[0]


def random_sample(random, length, prompt=0):
    """Random tokens and masks. The mask token's id may occur as a plain token, too."""
    trainable = np.arange(length) >= prompt
    blocks = random.uniform(0.05, 1.0, -(-length // BLOCK)).astype(np.float32)
    return MaskedSample(
        tokens=random.integers(0, TINY.vocab_size, length).astype(np.int32),
        trainable=trainable,
        masked=trainable & (random.random(length) < 0.5),
        ratio=np.repeat(blocks, BLOCK)[:length],
    )


def packed(rows, row_length):
    """Rows of samples as arrays ``[R, L]``, with ``masked`` and ``ratio`` in logical order."""
    arrays = {}
    for samples in rows:
        plain = [TokenisedSample(sample.tokens, sample.trainable) for sample in samples]
        row = row_arrays(plain, row_length=row_length, block_size=BLOCK, pad_token_id=0)
        row["masked"], row["ratio"] = np.zeros(row_length, bool), np.ones(row_length, np.float32)
        start = 0
        for sample in samples:
            here = slice(start, start + len(sample.tokens))
            row["masked"][here], row["ratio"][here] = sample.masked, sample.ratio
            start += -(-len(sample.tokens) // BLOCK) * BLOCK
        for name, value in row.items():
            arrays.setdefault(name, []).append(value)
    stacked = {name: jnp.asarray(np.stack(values)) for name, values in arrays.items()}
    masked, ratio = stacked.pop("masked"), stacked.pop("ratio")
    return PackedRows(**stacked), masked, ratio
