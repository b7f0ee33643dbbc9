"""What just fits into an engine, and how many pages are planned for a machine's memory."""

import dataclasses

import pytest
from flax import nnx

from tests.examples.decode import TINY, Case, run, small_engine
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.settings import CPU_TOKENS, SPARE, bytes_per_page, plan_pages
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams

PLAIN = SamplingParams(mode="paper", max_tokens=12, entropy_threshold=1.6)


def test_the_longest_text_and_the_widest_window_fit_and_no_more(tiny_model):
    for limit in (None, 10):
        engine = Engine(tiny_model, EngineConfig(max_model_len=limit))
        most = engine.most_tokens(Request(-1, [3] * 5, PLAIN))
        assert most == (limit or 48) - 5
        engine.check([3] * 5, dataclasses.replace(PLAIN, max_tokens=most))
        with pytest.raises(InputError, match=f"max_tokens {most + 1}"):
            engine.check([3] * 5, dataclasses.replace(PLAIN, max_tokens=most + 1))
    widest = engine.settings.window
    engine.check_window(widest)
    for window in (-1, widest + 1):
        with pytest.raises(InputError, match=f"window_size: expected 0 to {widest}"):
            engine.check_window(window)


def test_without_a_mask_token_only_a_window_of_0_runs():
    model = Transformer(
        dataclasses.replace(TINY, mask_token_id=None, num_hidden_layers=1), rngs=nnx.Rngs(0)
    )
    with pytest.raises(InputError, match="not trained on masks"):
        Engine(model, EngineConfig(window_size=4))
    engine = small_engine(model, [], window_size=0, deterministic=True)
    result = run(engine, [Case((3,), SamplingParams(max_tokens=3), 0)])[0]
    assert 1 <= len(result.token_ids) <= 3


# --- memory -------------------------------------------------------------------------------

PAGE = 16


def planned(platform, tokens, limit):
    """Pages for 4 sequences of so many tokens on a device of ``limit`` pages."""
    return plan_pages(
        TINY,
        weights=0,
        working=0,
        page_size=PAGE,
        pages_per_sequence=tokens // PAGE,
        sequences=4,
        dtype="float32",
        platform=platform,
        limit=limit * bytes_per_page(TINY, PAGE, "float32"),
    )


@pytest.mark.parametrize(
    ("platform", "tokens", "limit", "cached"),
    [
        ("cpu", 512, 10**6, SPARE * 4 * 512),  # all sequences
        ("cpu", 4096, 10**6, SPARE * 4 * CPU_TOKENS),  # no more than for a usual context
        ("cpu", 32768, 10**6, 32768),  # one sequence may be as long as the context
        ("tpu", 32768, 10_000, (9500 - 1) * PAGE),  # what is left
    ],
)
def test_pages_are_planned_for_the_memory_of_a_machine(platform, tokens, limit, cached):
    assert planned(platform, tokens, limit).cached_tokens == cached


def test_a_context_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="lower max_model_len"):
        planned("tpu", 32768, 1000)
