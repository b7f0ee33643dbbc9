"""What an engine refuses, and what just fits: its own options, windows, prompts, and options of
requests."""

import dataclasses

import pytest
from flax import nnx

from tests.examples.decode import TINY, Case, run, small_engine
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams

PLAIN = SamplingParams(mode="paper", max_tokens=12, entropy_threshold=1.6)


def test_the_most_tokens_that_fit_do_and_one_more_does_not(tiny_model):
    for limit in (None, 10):
        engine = Engine(tiny_model, EngineConfig(max_model_len=limit))
        most = engine.most_tokens(Request(-1, [3] * 5, PLAIN))
        assert most == (limit or 48) - 5
        engine.check([3] * 5, dataclasses.replace(PLAIN, max_tokens=most))
        with pytest.raises(InputError, match=f"max_tokens {most + 1}"):
            engine.check([3] * 5, dataclasses.replace(PLAIN, max_tokens=most + 1))


def test_a_window_wider_than_the_engine_s_is_refused(streaming_engine):
    widest = streaming_engine.settings.window
    streaming_engine.check_window(widest)
    for window in (-1, widest + 1):
        with pytest.raises(InputError, match=f"window_size: expected 0 to {widest}"):
            streaming_engine.check_window(window)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [
        ([], 4, "the prompt has no tokens"),
        ([3, 24], 4, "prompt token id 24 lies outside the vocabulary of 24"),
        ([-1, 3], 4, "prompt token id -1 lies outside the vocabulary of 24"),
        ([0.5], 4, "expected a flat list of integers"),
        ([[3, 4]], 4, "expected a flat list of integers"),
        ([3] * 40, 9, "a prompt of 40 tokens and max_tokens 9 exceed max_model_len 48"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_refused(streaming_engine, prompt, max_tokens, sentence):
    with pytest.raises(InputError, match=sentence):
        streaming_engine.check(prompt, SamplingParams(max_tokens=max_tokens))


def test_a_prompt_that_just_fits_is_not_refused(streaming_engine):
    streaming_engine.check([23, 0] * 20, SamplingParams(max_tokens=8))
    with pytest.raises(InputError, match="exceed max_model_len"):
        streaming_engine.decode([Request(0, [3] * 40, PLAIN)])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window_size": -1}, "window_size: expected an integer of at least 0 or 'auto', not -1"),
        ({"window_size": True}, "window_size: expected an integer"),
        ({"window_size": 2.0}, "window_size: expected an integer"),
        ({"window_size": 49}, "window_size: expected at most 48, the longest text"),
        ({"lookup": 16}, "lookup: expected an integer from 0 to 15, not 16"),
        ({"refill": "both"}, "refill: expected one of streaming, blockwise, not 'both'"),
        ({"max_model_len": 0}, "max_model_len: expected an integer of at least 1, not 0"),
        ({"max_model_len": 49}, "max_model_len: expected 1 to 48"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected one of int8, None, not 'fp8'"),
        ({"attention": "flash"}, "attention: expected one of xla, gather, rpa, None, not 'flash'"),
        ({"attention": "rpa"}, "attention 'rpa' is for TPUs, not for 'cpu'"),
        ({"num_pages": 1}, "num_pages: expected"),
        ({"page_size": 0}, "page_size: expected"),
        ({"chunk_tokens": 0}, "chunk_tokens: expected"),
    ],
)
def test_an_engine_that_cannot_run_is_refused(tiny_model, options, sentence):
    with pytest.raises(InputError, match=sentence):
        Engine(tiny_model, EngineConfig(**options))


def test_without_a_mask_token_only_a_window_of_0_runs():
    model = Transformer(
        dataclasses.replace(TINY, mask_token_id=None, num_hidden_layers=1), rngs=nnx.Rngs(0)
    )
    with pytest.raises(InputError, match="not trained on masks"):
        Engine(model, EngineConfig(window_size=4))
    engine = small_engine(model, [], window_size=0, deterministic=True)
    result = run(engine, [Case((3,), SamplingParams(max_tokens=3), 0)])[0]
    assert 1 <= len(result.token_ids) <= 3
