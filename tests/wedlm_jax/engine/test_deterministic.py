"""`deterministic=True`: in bfloat16 too, a sequence's tokens depend on nothing but itself."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.examples.decode import TINY, in_mode, random_cases, run, say_the_same, small_engine
from tests.forward_sizes import usual_sizes
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams

PARAMS = [SamplingParams(mode=mode, temperature=1.0, top_k=3) for mode in ("verified", "ar")]


def in_bfloat16(config):
    return Transformer(config, rngs=nnx.Rngs(3), dtype=jnp.dtype("bfloat16"))


@pytest.fixture(scope="module")
def engine():
    return small_engine(in_bfloat16(TINY), PARAMS, window_size=16, deterministic=True)


def test_verified_equals_autoregressive_alone_and_together(engine):
    batch = random_cases(60, 0, window=engine.settings.window, draft_budget=6.0)
    drafted = run(engine, batch)
    expected = run(engine, [in_mode(case, "ar") for case in batch])
    assert all(map(say_the_same, drafted, expected))
    assert run(engine, batch[::-1]) == drafted[::-1]
    assert [run(engine, [case])[0] for case in batch[:20]] == drafted[:20]
    # There is something to tell apart: with other numbers the same prompts say other things.
    reseeded = [in_mode(case, "ar", seed=case.params.seed + 1) for case in batch[1::2]]
    assert run(engine, reseeded) != expected[1::2]


WIDER = dataclasses.replace(
    TINY, vocab_size=512, mask_token_id=511, hidden_size=64, intermediate_size=160, head_dim=16
)
"""Wide enough that products of other shapes round differently."""


@pytest.mark.full
@pytest.mark.parametrize("sequences", [1, 4])
def test_every_program_computes_the_same_to_the_bit(sequences):
    """Whoever is there: programs are compiled for those alone, at the sizes that users get."""
    sizes = {"window_size": 16, "max_batch_size": sequences}
    with usual_sizes():
        engine = small_engine(in_bfloat16(WIDER), [], **sizes, deterministic=True)
        batch = random_cases(12, 4, window=16, draft_budget=6.0, logprobs=2)
        alone = [in_mode(case, "ar") for case in batch]
        expected = run(engine, alone)
        assert engine.device.traits.window == 0
        narrow = engine.num_programs
        drafted = run(engine, batch)
        assert engine.num_programs > narrow
        for ours, theirs in zip(drafted, expected, strict=True):
            assert say_the_same(ours, theirs)
            assert ours.logprobs == theirs.logprobs
        beside = run(engine, [*batch[6:], *alone[:6]])
        assert [one.logprobs for one in beside] == [
            one.logprobs for one in (*expected[6:], *expected[:6])
        ]
        for mode in ("ar", "verified"):
            unasked = run(engine, [in_mode(case, mode, logprobs=None) for case in batch])
            assert not engine.device.traits.logprobs
            assert all(map(say_the_same, unasked, expected))
