"""A long prompt among others: what its first and last chunks cost, and how long others wait."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax

from infer.bench.subject import SHAPES, Subject, random_prompts, random_subject
from wedlm_jax.benchmark import Bar
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.events import TokenDelta
from wedlm_jax.engine.settings import PAGE_SIZES
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.config import ModelConfig
    from wedlm_jax.engine.engine import Engine

CHUNK = 1024
"""Compares the first so many tokens of the prompt with the last; a forward computes fewer."""
OTHERS = 4
"""Sequences that decode meanwhile, autoregressively: so each has a token a forward."""
OTHERS_TOKENS = 32
"""Of their prompts."""
QUIET_FORWARDS = 64
"""Forwards of a burst in which they are alone."""


@dataclasses.dataclass(frozen=True)
class ChunkCost:
    """A prompt of many tokens, among a few sequences that decode; medians over the passes.

    Attributes:
      shape: whose random weights.
      tokens: of the prompt.
      first, last: milliseconds of its first and last `CHUNK` tokens, alone.
      products: how many times the products of the first chunk the last one has, by counting those
        of visible places alone.
      forward_tokens: tokens of it that a forward beside others computes, on average of those with
        any.
      quiet, busy: milliseconds from token to token of the others, without it and meanwhile, on
        average over the same tokens.
      longest: the longest such time meanwhile, averaged over a burst.
      stalled: bursts meanwhile in which one of them got no token.
      alone: seconds that the prompt takes where nobody else decodes.
      among: seconds that it takes beside the others.
    """

    shape: str
    tokens: int
    first: float
    last: float
    products: float
    forward_tokens: float
    quiet: float
    busy: float
    longest: float
    stalled: int
    alone: float
    among: float

    @property
    def against_products(self) -> float:
        """Compares the last chunk's time with the first's: 1 where it grew as its matrix products
        did."""
        return self.last / self.first / self.products

    @property
    def slowdown(self) -> float:
        return self.busy / self.quiet


def compare_chunks(
    shape: str, *, tokens: int, dtype: str | None, passes: int, bar: Bar
) -> ChunkCost:
    """Computes a long prompt while other sequences decode.

    Raises:
      InputError: the shape's context is too short for it.
    """
    config = SHAPES[shape]
    if not 2 * CHUNK <= tokens < config.max_position_embeddings:
        raise InputError(
            f"--prompt-tokens: expected {2 * CHUNK} to {config.max_position_embeddings - 1}, "
            f"not {tokens}"
        )
    subject = random_subject(config, dtype)
    longest = min(2 * tokens, config.max_position_embeddings)
    room = tokens + OTHERS * tokens // 4  # the others have a token for several of the prompt
    page_size = PAGE_SIZES.get(jax.default_backend(), PAGE_SIZES["gpu"])
    engine = subject.engine(
        0,
        OTHERS + 1,
        max_model_len=longest,
        page_size=page_size,
        num_pages=(room + (OTHERS + 1) * CHUNK) // page_size,
    )
    bar.expect(passes + 1)
    made = []
    for number in range(passes + 1):
        bar.begin("a long prompt" if number else "a long prompt, compiling")
        made.append(_long_prompt(engine, subject, tokens))
    passed = made[1:]

    def median(value: Callable[[_ChunkPass], float]) -> float:
        return statistics.median(value(one) for one in passed)

    return ChunkCost(
        shape,
        tokens,
        first=median(lambda one: one.chunk_seconds(0) * 1e3),
        last=median(lambda one: one.chunk_seconds(tokens - CHUNK) * 1e3),
        products=products_of(config, tokens - CHUNK) / products_of(config, 0),
        forward_tokens=median(
            lambda one: tokens / sum(burst.forwards for burst in one.among if burst.computed)
        ),
        quiet=median(lambda one: _seconds_a_forward(one.others) * 1e3),
        busy=median(lambda one: _seconds_a_forward(one.among) * 1e3),
        longest=median(lambda one: max(b.seconds / b.forwards for b in one.among)) * 1e3,
        stalled=max(sum(b.served < OTHERS for b in one.among) for one in passed),
        alone=median(lambda one: _total(one.alone)),
        among=median(lambda one: _total(one.among)),
    )


def products_of(config: ModelConfig, before: int) -> float:
    """Multiplications of `CHUNK` tokens that stand after ``before`` others: of linear layers, and
    of attention to the places that each of them sees."""
    linear = config.num_parameters(embeddings=False) * CHUNK
    seen = CHUNK * before + CHUNK * (CHUNK + 1) // 2
    return linear + config.attention_per_place * seen


class _TimedBurst(NamedTuple):
    """Seconds and forwards, the prompt's tokens that were computed, and how many of the others got
    a token."""

    seconds: float
    forwards: int
    computed: int
    served: int


@dataclasses.dataclass(frozen=True)
class _ChunkPass:
    """Bursts of the prompt alone, a forward each; of all together; and of the others alone."""

    alone: list[_TimedBurst]
    among: list[_TimedBurst]
    others: list[_TimedBurst]

    def chunk_seconds(self, start: int) -> float:
        """Returns how long a chunk of `CHUNK` tokens takes that starts at token ``start`` of the
        prompt, with no other sequence."""
        spent, before = 0.0, 0
        for burst in self.alone:
            after = before + burst.computed
            inside = min(after, start + CHUNK) - max(before, start)
            spent += burst.seconds * max(inside, 0) / max(burst.computed, 1)
            before = after
        return spent


def _seconds_a_forward(bursts: Sequence[_TimedBurst]) -> float:
    return _total(bursts) / sum(burst.forwards for burst in bursts)


def _total(bursts: Sequence[_TimedBurst]) -> float:
    return sum(burst.seconds for burst in bursts)


def _long_prompt(engine: Engine, subject: Subject, tokens: int) -> _ChunkPass:
    prompt = random_prompts(subject.config, 1, tokens, seed=1)[0]
    prompt[0] = subject.config.vocab_size - 1  # unlike those of the others
    long = Request(OTHERS, prompt, SamplingParams(max_tokens=1))
    engine.scheduler.forget_prefixes()
    engine.step([long], max_forwards=0)
    alone = _until_computed(engine, tokens, at_once=1)
    _submit_others(engine, subject)
    engine.step([long], max_forwards=0)
    among = _until_computed(engine, tokens, at_once=None)
    # The others alone, as far as they came: with every token a forward takes a little longer.
    _submit_others(engine, subject)
    others: list[_TimedBurst] = []
    left = sum(burst.forwards for burst in among)
    while left > 0:
        others.append(_burst(engine, 0, min(left, QUIET_FORWARDS)))
        left -= others[-1].forwards
    engine.step(aborted=range(OTHERS + 1), max_forwards=0)
    return _ChunkPass(alone, among, others)


def _until_computed(engine: Engine, tokens: int, at_once: int | None) -> list[_TimedBurst]:
    """Runs bursts until the long prompt is computed.

    Args:
      at_once: forwards of a burst; by default no further than the prompt probably goes, since
        forwards after it are of no interest.
    """
    bursts: list[_TimedBurst] = []
    computed, each = 0, 1.0
    while computed < tokens:
        forwards = math.ceil((tokens - computed) / each) if at_once is None else at_once
        bursts.append(_burst(engine, tokens - computed, forwards))
        computed += bursts[-1].computed
        each = max(bursts[-1].computed / bursts[-1].forwards, 1)
    return bursts


def _submit_others(engine: Engine, subject: Subject) -> None:
    """Submits the others anew, and runs them until they decode."""
    engine.step(aborted=range(OTHERS + 1), max_forwards=0)
    engine.scheduler.forget_prefixes()
    params = SamplingParams(max_tokens=engine.max_model_len // 2, ignore_eos=True)
    prompts = random_prompts(subject.config, OTHERS, OTHERS_TOKENS)
    others = [Request(number, each, params) for number, each in enumerate(prompts)]
    engine.step(others, max_forwards=OTHERS)


def _burst(engine: Engine, left: int, forwards: int | None = None) -> _TimedBurst:
    """Runs a burst.

    Args:
      left: tokens of the long prompt that are not computed yet.
    """
    before, started = int(engine.device.counters[0]), time.perf_counter()
    events = engine.step(max_forwards=forwards)
    seconds = time.perf_counter() - started
    ran = max(int(engine.device.counters[0]) - before, 1)
    served = {event.number for event in events if isinstance(event, TokenDelta)}
    remaining = engine.scheduler.prompt_left(OTHERS)
    return _TimedBurst(seconds, ran, left - remaining, len(served - {OTHERS}))
