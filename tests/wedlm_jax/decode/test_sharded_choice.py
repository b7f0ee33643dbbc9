"""Tokens chosen where each device has a part of the vocabulary, and where replicas have their own
sequences."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.examples.windows import VOCAB, options_of, rows_of, sequences, state_of
from wedlm_jax.decode import sampling
from wedlm_jax.decode.logits import adjusted_logits, token_use
from wedlm_jax.decode.logprobs import token_logprobs
from wedlm_jax.sharding import make_mesh, on_replicas

ROWS = 40
SEEDS = st.integers(0, 2**16)


def choose(logits, state, options, rows):
    use = token_use(state, options, VOCAB)
    logits = adjusted_logits(logits, state, options, rows, use)
    return sampling.choose_tokens(logits, state, options, rows), sampling.entropy(logits)


plain, parted = jax.jit(choose), jax.jit(choose)
replicated = jax.jit(lambda *given: on_replicas(choose, whole=())(*given))


def given_to(some, seed):
    _, named = rows_of(some, padding=0)
    rows, _ = rows_of(some, padding=ROWS - len(named))
    logits = 2 * np.random.default_rng(seed).normal(size=(ROWS, VOCAB))
    logits[:, -1] = -np.inf
    return jnp.array(logits, jnp.float32), state_of(some), options_of(some), rows


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


@pytest.mark.full
@given(
    one=st.lists(sequences(), min_size=3, max_size=3),
    two=st.lists(sequences(), min_size=3, max_size=3),
    seed=SEEDS,
)
def test_each_replica_chooses_for_its_own(one, two, seed):
    shares = [given_to(one, seed), given_to(two, seed + 1)]
    both = jax.tree.map(lambda *x: jnp.concatenate(x), *shares)
    mesh = make_mesh({"data": 2, "tensor": 4})
    with jax.set_mesh(mesh):
        tokens, entropies = replicated(*both)
    for i, share in enumerate(shares):
        here = slice(i * ROWS, (i + 1) * ROWS)
        assert_same((tokens[here], entropies[here]), plain(*share))


def widths_in(compiled):
    """The sizes of all axes of all arrays in a compiled program's text."""
    shapes = re.findall(r"[a-z]+\d*\[([\d,]+)\]", compiled)
    return {int(size) for shape in shapes for size in shape.split(",")}


@pytest.mark.parametrize("way", ["sample_at_once", "sample_one_by_one"])
def test_no_device_makes_the_whole_vocabulary(way):
    rows, vocab = 3, 8 * 1001
    mesh = make_mesh({"tensor": 8})
    everywhere = NamedSharding(mesh, PartitionSpec())
    of_rows = jax.tree.map(
        lambda x: jax.device_put(x, everywhere),
        (
            jax.vmap(jax.random.key)(jnp.arange(rows)),
            jnp.ones(rows, bool),
            sampling.Limits(jnp.full(rows, 9), jnp.full(rows, 0.9), jnp.zeros(rows)),
        ),
    )
    logits = jnp.zeros((rows, vocab))
    with jax.set_mesh(mesh):
        logits = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        compiled = jax.jit(getattr(sampling, way)).lower(logits, *of_rows).compile().as_text()
    assert 1001 in widths_in(compiled)
    assert vocab not in widths_in(compiled)


@pytest.mark.parametrize(("part", "k"), [(1001, 0), (1001, 20), (11, 20)])
def test_log_probabilities_of_a_vocabulary_in_parts_are_the_same(part, k):
    rows, vocab = 3, 8 * part
    # Few levels, so that equal logits lie in all parts.
    logits = jnp.array(np.random.default_rng(k).integers(0, 3, (rows, vocab)), jnp.float32)
    tokens = jnp.array([0, part, vocab - 1])
    expected = token_logprobs(logits, tokens, k)
    mesh = make_mesh({"tensor": 8})
    with jax.set_mesh(mesh):
        parts = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        compiled = jax.jit(token_logprobs, static_argnums=2).lower(parts, tokens, k).compile()
        ours = compiled(parts, tokens)
    np.testing.assert_array_equal(ours.top_ids, expected.top_ids)
    np.testing.assert_allclose(ours.top, expected.top, rtol=1e-5)
    np.testing.assert_allclose(ours.chosen, expected.chosen, rtol=1e-5)
    if k < part:
        assert vocab not in widths_in(compiled.as_text())
