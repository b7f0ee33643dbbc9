"""Random sequences to decode on the tiny model, and the reference's answer to each."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from tests.reference.decode_loop import decode, decode_verified
from wedlm_jax.config import ModelConfig
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import tree_shardings

TINY = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    qk_norm=True,
    # Large enough that predictions differ from place to place, and their entropies too.
    initializer_range=0.5,
    max_position_embeddings=48,
    mask_token_id=23,
    eos_token_ids=(1,),
)

BATCH = 4
LONGEST_PROMPT, LONGEST_COMPLETION = 28, 20
"""Together the context of the tiny model."""

SAFE_MARGIN = 1e-4
"""Choices decided by less may differ by rounding between a cached and a full forward."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt to decode, its options, and its window."""

    prompt: tuple[int, ...]
    params: SamplingParams
    window: int


@st.composite
def cases(draw, *, window=4):
    """A prompt (which may hold the mask's id), parameters, and a window of at most ``window``."""
    prompt = draw(st.lists(st.integers(0, 23), min_size=1, max_size=LONGEST_PROMPT))
    hot = draw(st.booleans())
    params = SamplingParams(
        mode="paper",
        temperature=draw(st.sampled_from([0.5, 1.0, 1.7])) if hot else 0.0,
        top_p=draw(st.sampled_from([0.3, 0.8, 1.0])) if hot else 1.0,
        top_k=draw(st.sampled_from([0, 1, 3, 100])) if hot else 0,
        max_tokens=draw(st.integers(1, LONGEST_COMPLETION)),
        stop_token_ids=tuple(draw(st.lists(st.integers(2, 22), max_size=2))),
        entropy_threshold=draw(st.sampled_from([None, 0.4, 1.0, 1.6, 2.2, 9.0])),
        position_penalty=draw(st.sampled_from([0.0, 0.02, 0.4])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    return Case(tuple(prompt), params, draw(st.integers(1, window)) if window else 0)


def logit_options(last):
    """Any of the options that change logits, for tokens up to ``last``; few, often repeated."""
    token = st.integers(0, last)
    words = st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4)
    return st.fixed_dictionaries(
        {},
        optional={
            "min_tokens": st.integers(1, 12),
            "repetition_penalty": st.sampled_from([0.5, 1.3, 4.0]),
            "presence_penalty": st.sampled_from([-2.0, 0.6, 2.0]),
            "frequency_penalty": st.sampled_from([-0.3, 0.4, 2.0]),
            "logit_bias": st.dictionaries(token, st.sampled_from([-100, -1.5, 2, 5]), max_size=5),
            "bad_words": words.map(tuple),
        },
    )


@st.composite
def cases_with_options(draw, *, window=4):
    """As `cases`, with any of the options that change logits."""
    case, options = draw(cases(window=window)), draw(logit_options(22))
    if case.params.temperature:
        options["min_p"] = draw(st.sampled_from([0.0, 0.05, 0.3]))
    options["min_tokens"] = min(options.get("min_tokens", 0), case.params.max_tokens)
    options["logprobs"] = draw(st.none() | st.integers(0, 4))
    return in_mode(case, "paper", **options)


def batches(*, window=4):
    return st.lists(cases(window=window), min_size=BATCH, max_size=BATCH)


def random_cases(count, seed, *, window=4, **options):
    """Cases with prompts of many lengths and windows up to ``window``, alternately greedy and
    sampled."""
    rng = np.random.default_rng(seed)
    usual = {"max_tokens": LONGEST_COMPLETION, "ignore_eos": True}
    return [
        Case(
            tuple(rng.integers(2, 23, rng.integers(1, LONGEST_PROMPT)).tolist()),
            SamplingParams(temperature=float(number % 2), seed=number, **{**usual, **options}),
            int(rng.integers(1, window + 1)),
        )
        for number in range(count)
    ]


EVERYTHING = [
    SamplingParams(
        mode=mode,
        temperature=1.0,
        top_k=3,
        min_tokens=1,
        repetition_penalty=1.3,
        logit_bias=dict.fromkeys(range(8), 1.0),
        bad_words=((3, 4, 5),) * 8,
        logprobs=4,
        stop_token_ids=(2, 3),
    )
    for mode in ("paper", "verified", "ar")
]
"""All that the examples may ask for: an engine that expects it compiles a single program."""

DRAWN = [SamplingParams(mode="paper", temperature=1.0, top_k=3)]
"""The same without the options that change logits."""


def small_engine(model, expected=EVERYTHING, **options):
    """An engine of few sequences and short pages, compiled for all that is ``expected``."""
    usual = {"window_size": 4, "lookup": 0, "max_batch_size": BATCH, "page_size": 4}
    given = {**usual, "chunk_tokens": 8, **options}
    beside = ("mesh", "grammars", "known_tokens", "store")
    of_engine = {name: given.pop(name) for name in beside if name in given}
    engine = Engine(model, EngineConfig(**given), **of_engine)
    engine.expect(expected)
    return engine


def on_mesh(model, mesh):
    """The model with its parameters on a mesh."""
    graph, parameters = nnx.split(model)
    return nnx.merge(graph, jax.device_put(parameters, tree_shardings(mesh, parameters)))


def requests_of(batch, first=0):
    """Requests of the cases, numbered from ``first``."""
    return [
        Request(first + i, case.prompt, case.params, case.window) for i, case in enumerate(batch)
    ]


def run(engine, batch):
    """Decodes all cases at once; results in order, but for what was cached of a prompt."""
    return [as_if_first(result) for result in engine.decode(requests_of(batch))]


def events_of(engine, submitted=(), aborted=(), **options):
    """Yields the events of an engine until nothing is left to do."""
    yield from engine.step(submitted, aborted, **options)
    while engine.has_work:
        yield from engine.step(**options)


def as_if_first(result):
    return dataclasses.replace(result, num_cached_tokens=0)


def in_mode(case, mode, **changes):
    params = dataclasses.replace(case.params, mode=mode, **changes)
    return dataclasses.replace(case, params=params)


def say_the_same(ours, theirs):
    """Whether tokens and reasons are equal; counts may differ."""
    return (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)


def assert_same(ours, theirs):
    """Compares tokens, finish reasons and counts exactly, log-probabilities up to rounding."""
    plain, other = (dataclasses.replace(result, logprobs=None) for result in (ours, theirs))
    assert plain == other
    assert_logprobs_near(ours, theirs)


def assert_logprobs_near(ours, theirs):
    assert (ours.logprobs is None) == (theirs.logprobs is None)
    for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


def reference(forward, config, case, backup=None):
    """What the loop in Python says; in mode "verified" with ``backup`` masks at most."""
    how = {
        "window": case.window,
        "mask_token_id": config.require_mask_token_id(),
        "eos_token_ids": () if case.params.ignore_eos else config.eos_token_ids,
    }
    if backup is None:
        return decode(forward, case.prompt, case.params, **how)
    return decode_verified(forward, case.prompt, case.params, backup=backup, **how)
