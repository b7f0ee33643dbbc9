"""A long prompt among others: what its first and last chunks cost, and how long others wait."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
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
"""Forwards in which they are alone."""


@dataclasses.dataclass(frozen=True)
class ChunkCost:
    """A prompt of many tokens, among a few sequences that decode; medians over the passes.

    Attributes:
      shape: whose random weights.
      tokens: of the prompt.
      first, last: milliseconds of its first and last `CHUNK` tokens, beyond those of the forwards
        that the others take anyway.
      products: how many times the products of the first chunk the last one has, by counting those
        of visible places alone.
      forward_tokens: tokens of it that a forward computes, on average.
      quiet, busy: milliseconds from token to token of the others, without it and meanwhile.
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
        """The last chunk's time against what its products say."""
        return self.last / self.first / self.products

    @property
    def slowdown(self) -> float:
        return self.busy / self.quiet


def compare_chunks(
    shape: str, *, tokens: int, dtype: str | None, passes: int, bar: Bar
) -> ChunkCost:
    """Computes a long prompt while others decode.

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
        first=median(lambda one: one.own_seconds(0) * 1e3),
        last=median(lambda one: one.own_seconds(tokens - CHUNK) * 1e3),
        products=products_of(config, tokens - CHUNK) / products_of(config, 0),
        forward_tokens=median(lambda one: tokens / sum(burst.forwards for burst in one.bursts)),
        quiet=median(lambda one: one.quiet * 1e3),
        busy=median(lambda one: statistics.median(b.seconds / b.forwards for b in one.bursts))
        * 1e3,
        longest=median(lambda one: max(b.seconds / b.forwards for b in one.bursts)) * 1e3,
        stalled=max(sum(b.served < OTHERS for b in one.bursts) for one in passed),
        alone=median(lambda one: one.alone),
        among=median(lambda one: sum(burst.seconds for burst in one.bursts)),
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
    quiet: float
    """Seconds of a forward without the prompt."""
    bursts: list[_TimedBurst]
    alone: float

    def own_seconds(self, start: int) -> float:
        """Seconds of `CHUNK` tokens from ``start`` on, beyond those that the others take anyway."""
        spent, before = 0.0, 0
        for burst in self.bursts:
            after = before + burst.computed
            inside = min(after, start + CHUNK) - max(before, start)
            if inside > 0:
                own = burst.seconds - burst.forwards * self.quiet
                spent += own * inside / burst.computed
            before = after
        return spent


def _long_prompt(engine: Engine, subject: Subject, tokens: int) -> _ChunkPass:
    prompt = random_prompts(subject.config, 1, tokens, seed=1)[0]
    prompt[0] = subject.config.vocab_size - 1  # unlike those of the others
    long = Request(OTHERS, prompt, SamplingParams(max_tokens=1))
    engine.scheduler.forget_prefixes()
    started = time.perf_counter()
    engine.decode([long])
    alone = time.perf_counter() - started
    engine.scheduler.forget_prefixes()
    short = SamplingParams(max_tokens=engine.max_model_len // 2, ignore_eos=True)
    prompts = random_prompts(subject.config, OTHERS, OTHERS_TOKENS)
    others = [Request(number, each, short) for number, each in enumerate(prompts)]
    engine.step(others, max_forwards=OTHERS)
    quiet = _burst(engine, tokens, QUIET_FORWARDS)
    engine.step([long], max_forwards=0)
    bursts: list[_TimedBurst] = []
    computed = 0
    while computed < tokens:
        # No further than the prompt probably goes: forwards after it are of no interest.
        each = bursts[-1].computed / bursts[-1].forwards if bursts else tokens
        forwards = math.ceil((tokens - computed) / max(each, 1))
        bursts.append(_burst(engine, tokens - computed, forwards))
        computed += bursts[-1].computed
    engine.step(aborted=range(OTHERS + 1), max_forwards=0)
    return _ChunkPass(quiet.seconds / quiet.forwards, bursts, alone)


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
