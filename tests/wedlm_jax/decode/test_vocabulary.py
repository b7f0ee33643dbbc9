"""Ids that a tokenizer does not know are never chosen, and cost nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.examples.decode import TINY, Case, run, small_engine
from tests.jaxpr_shapes import arrays_in
from tests.wedlm_jax.decode.test_sharded_choice import widths_in
from wedlm_jax.decode.logprobs import token_logprobs
from wedlm_jax.decode.options import Vocabulary
from wedlm_jax.decode.sampling import entropy, largest
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh

KNOWN = {1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 23}
"""The tokenizer knows the mask token too, which is not chosen for all that."""
MODES = ("paper", "verified", "ar")


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


@pytest.mark.parametrize("vocabulary", [Vocabulary(24, 24, (23,)), Vocabulary.of(TINY, KNOWN)])
def test_logits_equal_numpy(vocabulary):
    logits = np.random.default_rng(0).normal(size=(3, 24)).astype(np.float32)
    expected = np.where([token in vocabulary for token in range(24)], logits, -np.inf)
    np.testing.assert_array_equal(vocabulary.restricted(jnp.array(logits)), expected)


@pytest.fixture(scope="module")
def engines():
    """A model that likes best what its tokenizer does not know; with the tokenizer and without."""
    model = Transformer(TINY, rngs=nnx.Rngs(7))
    unknown = np.array([token not in KNOWN for token in range(24)])
    head = model.head_matrix()
    model.lm_head[...] = head * np.where(unknown, 3.0, 1.0)[:, None]
    expected = [SamplingParams(mode=mode, temperature=1.0, logprobs=3, top_k=3) for mode in MODES]
    with_tokenizer = small_engine(model, expected, deterministic=True, known_tokens=KNOWN)
    return with_tokenizer, small_engine(model, expected, deterministic=True)


def cases():
    return [
        Case(
            (3 + i, 20, 4),
            SamplingParams(
                mode=MODES[i % 3],
                temperature=float(i % 2),
                seed=i,
                max_tokens=20,
                ignore_eos=True,
                logprobs=3,
                entropy_threshold=1.6,
                draft_budget=6.0,
            ),
            4,
        )
        for i in range(12)
    ]


def told(results):
    """All tokens that were chosen, or told as alternatives."""
    chosen = {token for one in results for token in one.token_ids}
    beside = {t for one in results for token in one.logprobs or [] for t, _ in token.top}
    return chosen | beside


@pytest.mark.full
def test_what_the_tokenizer_does_not_know_is_never_chosen(engines):
    with_tokenizer, without = engines
    assert told(run(without, cases())) - KNOWN, "there is something to keep out"
    results = run(with_tokenizer, cases())
    assert told(results) <= KNOWN - {23}
    # Log-probabilities are of what may be chosen: the three likeliest of them are likely.
    sums = [np.exp([p for _, p in one.top]).sum() for r in results for one in r.logprobs or []]
    assert max(sums) <= 1 + 1e-5
    assert np.mean(sums) > 0.3


def test_no_device_makes_the_whole_vocabulary_and_no_array_is_added():
    part = 1001
    vocab, rows = 8 * part, 3
    vocabulary = Vocabulary(vocab, vocab - 1200, (7, 4000))

    def choose(logits):
        logits = vocabulary.restricted(logits)
        tokens = largest(logits)
        return tokens, entropy(logits), token_logprobs(logits, tokens, 2).top

    logits = jnp.array(np.random.default_rng(0).normal(size=(rows, vocab)), jnp.float32)
    logits = logits.at[:, vocab - 3].set(9.0).at[:, 4000].set(8.0)
    expected = choose(logits)
    assert (np.array(expected[0]) < vocabulary.end).all()
    mesh = make_mesh({"tensor": 8})
    with jax.set_mesh(mesh):
        parts = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        compiled = jax.jit(choose).lower(parts).compile()
        ours = compiled(parts)
    np.testing.assert_array_equal(ours[0], expected[0])
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-5)
    np.testing.assert_allclose(ours[2], expected[2], rtol=1e-5)
    assert vocab not in widths_in(compiled.as_text())


def test_without_a_tokenizer_nothing_is_compared():
    def shapes(vocabulary):
        traced = jax.make_jaxpr(vocabulary.restricted)(jnp.zeros((3, 24)))
        return {x.shape for x in arrays_in(traced.jaxpr) if x.dtype == bool and x.ndim}

    assert (24,) in shapes(Vocabulary.of(TINY, KNOWN))
    assert not shapes(Vocabulary.of(TINY))
