"""Keys, values and weights rounded to 8 bits: how far off they are, and what stays exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import TINY, Case, requests_of, run, small_engine
from wedlm_jax.attention.pages import Int8Rows, to_float, to_int8
from wedlm_jax.llm import LLM
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import Transformer
from wedlm_jax.model.quantization import quantize_weights
from wedlm_jax.params import SamplingParams

PROMPTS = [(5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16), (3,), (4, 9), (2, 3, 4, 5, 6, 7, 8)]


@given(seed=st.integers(0, 2**31 - 1), size=st.just(0.0) | st.floats(1e-6, 1e4))
def test_a_row_is_off_by_half_a_step_at_most(seed, size):
    x = size * np.random.default_rng(seed).standard_normal((3, 5, 16)).astype(np.float32)
    rows = to_int8(jnp.array(x))
    assert (rows.values.dtype, rows.scales.shape) == (jnp.int8, (3, 5))
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    assert (np.abs(np.array(to_float(rows, jnp.float32)) - x) <= 0.5001 * step).all()


MODES = ("paper", "verified", "ar")


@pytest.fixture(scope="module")
def engine(tiny_model):
    params = [SamplingParams(mode=mode, temperature=0.7) for mode in MODES]
    return small_engine(
        tiny_model, params, kv_cache_dtype="int8", backup_masks=3, deterministic=True
    )


def cases_in(mode):
    given = {"max_tokens": 14, "temperature": 0.7, "entropy_threshold": 2.0, "draft_budget": 50.0}
    return [
        Case(prompt, SamplingParams(mode=mode, seed=i, **given), 4)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.full
def test_the_cache_is_of_bytes_and_changes_what_is_said_but_little(engine, tiny_model):
    prompt = PROMPTS[0]
    engine.step(requests_of(cases_in("paper")[:1]), max_forwards=2)
    pages, table = engine.device._pages, engine.scheduler._table[0]
    assert isinstance(pages, Int8Rows)
    assert pages.values.dtype == jnp.int8
    tokens, positions = jnp.array([[*prompt]]), jnp.arange(len(prompt))[None]
    exact = tiny_model(tokens, positions, CausalMask())
    rounded = tiny_model(tokens, positions, CausalMask(), int8_kv=True)
    assert 0 < jnp.abs(rounded - exact).max() < 0.05 * jnp.abs(exact).max()

    # What the cache holds of layer 0 are its keys and values, in steps.
    def attend(kept, layer, q, k, v):
        return q, [jnp.where(layer == 0, new, old) for new, old in zip((k, v), kept, strict=True)]

    shape = (len(prompt), TINY.num_key_value_heads, TINY.head_dim)
    _, kept = tiny_model.run(tokens[0], positions[0], attend, [jnp.zeros(shape)] * 2)
    size = engine.settings.page_size
    for head, expected in enumerate(to_int8(x[:, 0]) for x in kept):
        for place in range(len(prompt)):
            page, offset = table[place // size], place % size
            found = np.array(pages.values[page, offset, head], int)
            assert np.abs(found - np.array(expected.values[place], int)).max() <= 1
            found_scale = float(pages.scales[page, offset, head])
            assert found_scale == pytest.approx(float(expected.scales[place]), 1e-5)
    engine.step(aborted=[0])


def test_verified_sequences_have_the_tokens_of_autoregressive_ones(engine):
    """Though these read from the cache what those still have in their windows."""
    expected, found = run(engine, cases_in("ar")), run(engine, cases_in("verified"))
    assert isinstance(engine.device._pages, Int8Rows)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    # Some drafts were right: every forward commits a token, and some more than one.
    assert sum(r.num_forwards for r in found) < sum(len(r.token_ids) for r in found)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_and_prefixes_taken_over_change_nothing(engine, mode):
    alone = []
    for case in cases_in(mode):
        engine.scheduler = engine._new_scheduler()  # forgets what is cached
        alone += run(engine, [case])
    assert run(engine, cases_in(mode) * 2) == alone * 2
    assert engine.counters.prefix_tokens > 0


# --- weights -----------------------------------------------------------------------------


def test_weights_are_bytes_and_products_nearly_as_before():
    """Those of a head of its own, too."""
    before = Transformer(dataclasses.replace(TINY, tie_word_embeddings=False), rngs=nnx.Rngs(0))
    model = quantize_weights(before)
    weight = model.layers.mlp.up_proj.weight[...]
    original = before.layers.mlp.up_proj.weight[...]
    assert weight.qvalue.dtype == jnp.int8
    assert weight.scale.shape == (*original.shape[:2], 1)
    back = weight.qvalue * weight.scale
    step = jnp.abs(original).max(axis=-1, keepdims=True) / 127
    assert (jnp.abs(back - original) <= 0.51 * step).all()
    tokens, positions = jnp.array([[*PROMPTS[0]]]), jnp.arange(len(PROMPTS[0]))[None]
    exact, rounded = (m.logits(m(tokens, positions, CausalMask())) for m in (before, model))
    assert rounded.dtype == jnp.float32
    assert 0 < jnp.abs(rounded - exact).max() < 0.1 * jnp.abs(exact).max()
    hidden = jax.random.normal(jax.random.key(0), (2, 3, TINY.hidden_size))
    exact, rounded = before.logits(hidden), model.logits(hidden)
    assert 0 < jnp.abs(rounded - exact).max() < 0.02 * jnp.abs(exact).max()
    assert before.layers.mlp.up_proj.weight[...] is original


def test_a_checkpoint_is_decoded_with_both(checkpoint):
    small = {"window_size": 2, "max_batch_size": 1, "deterministic": True}
    plain = LLM(checkpoint, **small)
    rounded = LLM(checkpoint, quantization="int8", kv_cache_dtype="int8", **small)
    assert rounded.engine.memory.weights < 0.8 * plain.engine.memory.weights
    result = rounded.generate("the cat", SamplingParams(max_tokens=8))[0]
    assert len(result.token_ids) <= 8
