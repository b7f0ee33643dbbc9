"""Drafts chosen from left to right, against a loop over sequences and slots on the whole
vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.examples.decode import BATCH, TINY, Case, on_mesh, run, small_engine
from tests.examples.training import DIVIDED
from tests.examples.windows import SLOTS, VOCAB, options_of, sequences, state_of
from tests.reference import sampling as reference
from wedlm_jax.decode import chain
from wedlm_jax.decode.chain import chained_drafts, likeliest
from wedlm_jax.decode.spans import SpanPlan
from wedlm_jax.decode.state import Backup
from wedlm_jax.engine.config import MOST_LOOKUP, EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.model import Transformer
from wedlm_jax.model.lora import LoraConfig, with_adapters
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh

COUNT, MOST = 3, 3
"""Sequences, and the most backup masks of one."""
ROWS = SLOTS + MOST


class Pairs:
    """A model whose corrections are of pairs of tokens, and of the mask's place."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.of_pair = jnp.asarray(3 * random.normal(size=(VOCAB, VOCAB)), jnp.float32)
        self.of_place = jnp.asarray(random.normal(size=(COUNT * ROWS, VOCAB)), jnp.float32)

    def logit_corrections(self, hidden, before, tokens):
        place = hidden[:, 0].astype(jnp.int32)
        return jnp.take_along_axis(self.of_pair[before] + self.of_place[place], tokens, axis=1)


def forward(some, seed):
    """Spans of all slots and backup masks one after another, and predictions of each."""
    state, options = state_of(some), options_of(some)
    random = np.random.default_rng(seed)
    drafts = [sum(token is not None for token in one.window) - 1 for one in some]
    start = [random.integers(count) + 1 if count > 0 else 0 for count in [*drafts, 0]]
    count = [random.choice([0, 2, MOST]) if first else 0 for first in start]
    backup = Backup(jnp.array(start, jnp.int32), jnp.array(count, jnp.int32))
    state = dataclasses.replace(state, backup=backup)
    slots = jnp.tile(jnp.arange(SLOTS), (COUNT, 1))
    plan = SpanPlan(
        starts=jnp.arange(COUNT + 1) * ROWS,
        chunk=jnp.zeros(COUNT, jnp.int32),
        window=jnp.arange(COUNT) < len(some),
        place=slots,
        order=slots,
    )
    logits = 2 * random.normal(size=(COUNT, ROWS + 1, VOCAB)).astype(np.float32)
    logits[..., -1] = -np.inf
    tokens = random.integers(0, VOCAB - 1, (COUNT, ROWS + 1))
    return state, options, plan, jnp.asarray(logits), jnp.asarray(tokens, jnp.int32)


@jax.jit
def chained(state, options, plan, logits, tokens, of_pair, of_place):
    model = Pairs(0)
    model.of_pair, model.of_place = of_pair, of_place
    found = jax.vmap(likeliest)(logits)
    hidden = jnp.arange(COUNT * ROWS, dtype=jnp.float32)[:, None]
    entropies = jnp.full(tokens.shape, 7.0)
    return chained_drafts(model, state, hidden, plan, options, tokens, entropies, found)


@given(
    some=st.lists(sequences("verified"), min_size=COUNT - 1, max_size=COUNT - 1),
    seed=st.integers(0, 2**16),
)
def test_each_draft_follows_the_draft_before_it(some, seed):
    model = Pairs(seed)
    state, options, plan, logits, tokens = forward(some, seed)
    drafts, entropies = chained(state, options, plan, logits, tokens, model.of_pair, model.of_place)
    expected, uncertain = np.array(tokens), np.full(tokens.shape, 7.0, np.float32)
    logits, of_pair, of_place = map(np.asarray, (logits, model.of_pair, model.of_place))
    least = np.inf
    for i, one in enumerate(some):
        masks = [slot for slot, token in enumerate(one.window) if token is None]
        # A mask's slot, the column of its predictions, that of the token before it, and its place.
        places = [(slot, slot, slot - 1, slot) for slot in masks[1:]]
        start, count = int(state.backup.start[i]), int(state.backup.count[i])
        for number in range(1, count):
            column = SLOTS + 1 + number
            before = column - 1 if number > 1 else start
            places.append((start + number, column, before, len(one.window) + number))
        for slot, column, before, place in places:
            with np.errstate(divide="ignore"):
                row = np.log(reference.softmax(logits[i, column].astype(np.float64)))
            row += of_pair[expected[i, before]] + of_place[i * ROWS + place]
            choice = reference.choose_token(row, one.params, one.place(slot) + 1, 0)
            expected[i, column], least = choice[0], min(least, choice[1])
            # All 12 tokens are candidates, but the others have a least probability.
            uncertain[i, column] = reference.entropy([*row, np.log(1e-6)])
    assume(least > 1e-5)
    np.testing.assert_array_equal(drafts, expected)
    np.testing.assert_allclose(entropies, uncertain, rtol=1e-3, atol=1e-3)


def test_other_tokens_than_the_candidates_count_as_one(monkeypatch):
    monkeypatch.setattr(chain, "CANDIDATES", 2)
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    found = likeliest(logits)
    np.testing.assert_array_equal(found.tokens, [[1, 3]])
    np.testing.assert_allclose(jnp.exp(found.logprobs), [[0.5, 0.25]], rtol=1e-6)
    uncertain = chain._entropy(found.logprobs, found.logprobs)
    np.testing.assert_allclose(uncertain, 1.5 * np.log(2.0), rtol=1e-6)


def test_candidates_are_the_best_of_groups():
    """Of 300 tokens; 7, 135 and 263 are in one group."""
    logits = jnp.arange(300.0)[None].at[0, 7].set(1000.0)
    tokens = np.asarray(likeliest(logits).tokens[0])
    expected = [7, *(token for token in range(299, 268, -1) if token % chain.GROUPS != 7)]
    np.testing.assert_array_equal(tokens, expected)
    alone = likeliest(jnp.full((1, 300), -jnp.inf).at[0, 299].set(2.0))
    assert alone.tokens[0, 0] == 299
    np.testing.assert_array_equal(alone.logprobs[0, :2], [0.0, -np.inf])


# --- A text in which each token depends on the token before it alone -------------------------


def model_of_pairs(config):
    """Its layers do nothing, and its previous-token head does what its rows of text do: silu(x) -
    silu(-x) = x, so the head adds the token's embedding, scaled as the final norm scales it. A mask
    on its own predicts every token alike."""
    model = Transformer(config, rngs=nnx.Rngs(3))
    lora = LoraConfig(rank=2, alpha=2.0, rows="masked", previous_rank=2 * config.hidden_size)
    model = with_adapters(model, lora, nnx.Rngs(0))
    for linear in (model.layers.self_attn.o_proj, model.layers.mlp.down_proj):
        linear.weight[...] = jnp.zeros_like(linear.weight[...])
    head, one = model.previous_token, jnp.eye(config.hidden_size)
    model.mask_embedding[...] = jnp.zeros(config.hidden_size)
    head.state[...] = jnp.zeros_like(head.state[...])
    head.token[...], head.out[...] = jnp.concatenate([one, -one]), jnp.hstack([one, -one])
    return model


def answers(engine, **options):
    params = SamplingParams(max_tokens=17, draft_budget=1000.0, ignore_eos=True, **options)
    return run(engine, [Case((3, n), params, 4) for n in range(5, 5 + BATCH)])


@pytest.fixture(scope="module")
def engine():
    return small_engine(model_of_pairs(TINY), [SamplingParams(temperature=1.0, top_k=3)])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3, "seed": 5}], ids=str)
def test_where_the_token_before_is_all_that_counts_every_draft_is_right(engine, options):
    results = answers(engine, **options)
    # The first forward has no drafts yet; the others commit three, and the token after them.
    assert [one.num_forwards for one in results] == [1 + 16 // 4] * BATCH


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_drafts_are_the_same_with_the_vocabulary_divided(sizes):
    config = dataclasses.replace(TINY, **DIVIDED)
    model, mesh = model_of_pairs(config), make_mesh(sizes, jax.devices()[: 2 ** len(sizes)])
    expected = answers(small_engine(model))
    each = BATCH // sizes["data"]
    assert answers(small_engine(on_mesh(model, mesh), mesh=mesh, max_batch_size=each)) == expected
    # Of a vocabulary larger than the candidates, only some drafts are right.
    assert min(one.num_forwards for one in expected) < 17


def test_an_engine_gives_a_drafter_its_own_width_and_copies():
    def engine_of(model):
        return Engine(model, EngineConfig(max_batch_size=1, max_model_len=48))

    def copies(engine):
        return engine.windows.lookup(Request(0, [5], SamplingParams()))

    model = model_of_pairs(TINY)
    model.lora = dataclasses.replace(model.lora, window_size=4)
    ours, trained = engine_of(model), engine_of(Transformer(TINY, rngs=nnx.Rngs(3)))
    assert (ours.settings.window, copies(ours)) == (4, MOST_LOOKUP)
    assert (trained.settings.window, copies(trained)) == (16, 0)
