"""Tokens chosen where each device has a part of the vocabulary, and where replicas have their own
sequences; ids that a tokenizer does not know are never chosen, and cost nothing."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.examples.decode import TINY
from tests.examples.windows import VOCAB, forward_of, sequences, some_logits
from tests.jaxpr_shapes import arrays_in
from wedlm_jax.decode import sampling
from wedlm_jax.decode.logits import adjusted_logits, token_use
from wedlm_jax.decode.logprobs import token_logprobs
from wedlm_jax.decode.options import Vocabulary
from wedlm_jax.decode.sampling import entropy, largest
from wedlm_jax.sharding import make_mesh

SEEDS = st.integers(0, 2**16)


def choose(logits, state, options, rows):
    use = token_use(state, options, VOCAB)
    logits = adjusted_logits(logits, state, options, rows, use)
    return sampling.choose_tokens(logits, state, options, rows), sampling.entropy(logits)


plain, parted = jax.jit(choose), jax.jit(choose)


def given_to(some, seed):
    return jnp.array(some_logits(seed)), *forward_of(some)[0]


def assert_same(ours, theirs):
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


@given(some=st.lists(sequences(), min_size=3, max_size=3), seed=SEEDS)
def test_a_vocabulary_in_parts_chooses_the_same(some, seed):
    given_here = given_to(some, seed)
    expected = plain(*given_here)
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    over_vocabulary = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    with jax.set_mesh(mesh):
        logits = jax.device_put(given_here[0], over_vocabulary)
        assert_same(parted(logits, *given_here[1:]), expected)


def widths_in(compiled):
    """The sizes of all axes of all arrays in a compiled program's text."""
    shapes = re.findall(r"[a-z]+\d*\[([\d,]+)\]", compiled)
    return {int(size) for shape in shapes for size in shape.split(",")}


@pytest.mark.parametrize("way", ["sample_at_once", "sample_one_by_one"])
def test_no_device_makes_the_whole_vocabulary(way):
    rows, vocab = 3, 8 * 1001
    mesh = make_mesh({"tensor": 8})
    keys = jax.vmap(jax.random.key)(jnp.arange(rows))
    limits = sampling.Limits(jnp.full(rows, 9), jnp.full(rows, 0.9), jnp.zeros(rows))
    everywhere = NamedSharding(mesh, PartitionSpec())
    of_rows = jax.device_put((keys, jnp.ones(rows, bool), limits), everywhere)
    logits = jnp.zeros((rows, vocab))
    with jax.set_mesh(mesh):
        logits = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        compiled = jax.jit(getattr(sampling, way)).lower(logits, *of_rows).compile().as_text()
    assert 1001 in widths_in(compiled)
    assert vocab not in widths_in(compiled)


@pytest.mark.parametrize(("part", "k"), [(1001, 0), (1001, 20), (11, 20)])
def test_what_is_made_of_a_vocabulary_in_parts_is_the_same(part, k):
    """Some of its ids may not be chosen."""
    rows, vocab = 3, 8 * part
    vocabulary = Vocabulary(vocab, vocab - part - 3, (7,))
    # Few levels, so that equal logits lie in all parts.
    logits = jnp.array(np.random.default_rng(k).integers(0, 3, (rows, vocab)), jnp.float32)
    logits = logits.at[:, vocab - 3].set(9.0).at[:, 7].set(8.0)
    tokens = jnp.array([0, part, 6 * part])

    def made(logits, tokens):
        allowed = vocabulary.restricted(logits)
        found = token_logprobs(allowed, tokens, k)
        return (largest(allowed), found.top_ids), (entropy(allowed), found.top, found.chosen)

    same, near = made(logits, tokens)
    assert (same[0] < vocabulary.end).all()
    np.testing.assert_array_equal(same[0], vocabulary.restricted(logits).argmax(axis=1))
    mesh = make_mesh({"tensor": 8})
    with jax.set_mesh(mesh):
        parts = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        compiled = jax.jit(made).lower(parts, tokens).compile()
        ours = compiled(parts, tokens)
    jax.tree.map(np.testing.assert_array_equal, ours[0], same)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), ours[1], near)
    if k < part:
        assert vocab not in widths_in(compiled.as_text())


# --- ids that a tokenizer does not know --------------------------------------------------


KNOWN = {1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 23}
"""The tokenizer knows the mask token too, which is not chosen for all that."""


def test_what_may_be_chosen():
    assert Vocabulary.of(TINY) == Vocabulary(24, 24, (23,))
    assert Vocabulary.of(dataclasses.replace(TINY, mask_token_id=None)) == Vocabulary(24, 24)
    some = Vocabulary.of(TINY, KNOWN)
    assert some == Vocabulary(24, 17, (0, 5, 10))
    assert [token for token in range(-1, 30) if token in some] == sorted(KNOWN - {23})
    assert len(some) == len(KNOWN) - 1
    # A token that ends the text may be chosen even where no text belongs to it; ids beyond the
    # model's rows do not exist.
    ends = dataclasses.replace(TINY, eos_token_ids=(1, 20))
    assert Vocabulary.of(ends, {2, 1000}) == Vocabulary(24, 21, (0, *range(3, 20)))


def test_without_a_tokenizer_nothing_is_compared():
    def shapes(vocabulary):
        traced = jax.make_jaxpr(vocabulary.restricted)(jnp.zeros((3, 24)))
        return {x.shape for x in arrays_in(traced.jaxpr) if x.dtype == bool and x.ndim}

    assert (24,) in shapes(Vocabulary.of(TINY, KNOWN))
    assert not shapes(Vocabulary.of(TINY))
