"""Drafts chosen from left to right, against a loop over sequences and slots on the whole
vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import SLOTS, VOCAB, options_of, sequences, state_of
from wedlm_jax.decode import chain
from wedlm_jax.decode.chain import chained_drafts, likeliest
from wedlm_jax.decode.sampling import choose_tokens, entropy
from wedlm_jax.decode.spans import SpanPlan
from wedlm_jax.decode.state import HeadRows

COUNT = 3


class Pairs:
    """A model whose corrections are of pairs of tokens, and of the mask's place."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.of_pair = jnp.asarray(3 * random.normal(size=(VOCAB, VOCAB)), jnp.float32)
        self.of_place = jnp.asarray(random.normal(size=(COUNT * SLOTS, VOCAB)), jnp.float32)

    def logit_corrections(self, hidden, before, tokens):
        place = hidden[:, 0].astype(jnp.int32)
        return jnp.take_along_axis(self.of_pair[before] + self.of_place[place], tokens, axis=1)


def forward(some, seed):
    """Spans of all slots one after another, and predictions of each."""
    state, options = state_of(some), options_of(some)
    slots = jnp.tile(jnp.arange(SLOTS), (COUNT, 1))
    plan = SpanPlan(
        starts=jnp.arange(COUNT + 1) * SLOTS,
        chunk=jnp.zeros(COUNT, jnp.int32),
        window=jnp.arange(COUNT) < len(some),
        place=slots,
        order=slots,
    )
    random = np.random.default_rng(seed)
    logits = 2 * random.normal(size=(COUNT, SLOTS + 1, VOCAB)).astype(np.float32)
    logits[..., -1] = -np.inf
    tokens = random.integers(0, VOCAB - 1, (COUNT, SLOTS + 1))
    return state, options, plan, jnp.asarray(logits), jnp.asarray(tokens, jnp.int32)


@jax.jit
def chained(state, options, plan, logits, tokens, of_pair, of_place):
    model = Pairs(0)
    model.of_pair, model.of_place = of_pair, of_place
    found = jax.vmap(likeliest)(logits)
    hidden = jnp.arange(COUNT * SLOTS, dtype=jnp.float32)[:, None]
    entropies = jnp.full(tokens.shape, 7.0)
    return chained_drafts(model, state, hidden, plan, options, tokens, entropies, found)


@given(
    some=st.lists(sequences("verified"), min_size=COUNT - 1, max_size=COUNT - 1),
    seed=st.integers(0, 2**16),
)
def test_each_draft_follows_the_draft_before_it(some, seed):
    model = Pairs(seed)
    state, options, plan, logits, tokens = forward(some, seed)
    drafts, entropies = chained(
        state, options, plan, logits, tokens, model.of_pair, model.of_place
    )
    expected, uncertain = np.array(tokens), np.full(tokens.shape, 7.0, np.float32)
    for i, one in enumerate(some):
        masks = [slot for slot, token in enumerate(one.window) if token is None]
        for slot in masks[1:]:
            before = expected[i, slot - 1]
            row = jax.nn.log_softmax(logits[i, slot])
            row = (row + model.of_pair[before] + model.of_place[i * SLOTS + slot])[None]
            rows = HeadRows(*(jnp.array([x]) for x in (i, slot, True, True)))
            expected[i, slot] = choose_tokens(row, state, options, rows)[0]
            uncertain[i, slot] = entropy(row)[0]
    np.testing.assert_array_equal(drafts, expected)
    # The 12 tokens are all candidates, so those left over have no probability but rounding's.
    np.testing.assert_allclose(entropies, uncertain, rtol=1e-3, atol=1e-3)


def test_other_tokens_than_the_candidates_count_as_one(monkeypatch):
    monkeypatch.setattr(chain, "CANDIDATES", 2)
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    found = likeliest(logits)
    np.testing.assert_array_equal(found.tokens, [[1, 3]])
    np.testing.assert_allclose(jnp.exp(found.logprobs), [[0.5, 0.25]], rtol=1e-6)
    uncertain = chain._entropy(found.logprobs, found.logprobs)
    np.testing.assert_allclose(uncertain, 1.5 * np.log(2.0), rtol=1e-6)
