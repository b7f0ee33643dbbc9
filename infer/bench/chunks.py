"""A long prompt among others: what its first and last chunks cost, and how long others wait."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import TYPE_CHECKING

from infer.bench.subject import SHAPES, Subject, random_prompts, random_subject
from infer.bench.turns import Bar
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.events import TokenDelta
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.config import ModelConfig
    from wedlm_jax.engine.engine import Engine

CHUNK = 1024
"""Tokens of the chunks that are compared; a forward may compute fewer at a time."""
OTHERS = 4
"""Sequences that decode meanwhile, autoregressively: so each has a token a forward."""
OTHERS_TOKENS = 32
"""Of their prompts."""
QUIET_STEPS = 16
"""Steps in which they are alone."""


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
      forward_tokens: tokens of it that a forward computes.
      quiet, busy: milliseconds from token to token of the others, without it and meanwhile.
      longest: the longest such time meanwhile.
      stalled: steps meanwhile in which one of them got no token.
    """

    shape: str
    tokens: int
    first: float
    last: float
    products: float
    forward_tokens: int
    quiet: float
    busy: float
    longest: float
    stalled: int

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
    engine = subject.engine(0, OTHERS + 1, max_model_len=tokens + CHUNK)
    bar.expect(passes + 1)
    made = []
    for number in range(passes + 1):
        bar.begin("a long prompt" if number else "a long prompt, compiling")
        made.append(_long_prompt(engine, subject, tokens))
    passed = made[1:]
    return ChunkCost(
        shape,
        tokens,
        first=statistics.median(one.first for one in passed),
        last=statistics.median(one.last for one in passed),
        products=products_of(config, tokens - CHUNK) / products_of(config, 0),
        forward_tokens=min(engine.settings.chunk_tokens, CHUNK),
        quiet=statistics.median(one.quiet for one in passed),
        busy=statistics.median(one.busy for one in passed),
        longest=statistics.median(one.longest for one in passed),
        stalled=max(one.stalled for one in passed),
    )


def products_of(config: ModelConfig, before: int) -> float:
    """Multiplications of `CHUNK` tokens that stand behind ``before`` others: of linear layers, and
    of attention to the places that each of them sees."""
    linear = config.num_parameters(embeddings=False) * CHUNK
    seen = CHUNK * before + CHUNK * (CHUNK + 1) // 2
    width = config.num_attention_heads * config.head_dim
    return linear + 2 * config.num_hidden_layers * width * seen


@dataclasses.dataclass(frozen=True)
class _Pass:
    first: float
    last: float
    quiet: float
    busy: float
    longest: float
    stalled: int


def _long_prompt(engine: Engine, subject: Subject, tokens: int) -> _Pass:
    engine.scheduler.forget_prefixes()
    each = min(engine.settings.chunk_tokens, CHUNK)
    steps = math.ceil(tokens / CHUNK)
    per_step = math.ceil(CHUNK / each)
    most = (steps + QUIET_STEPS + 8) * per_step
    short = SamplingParams(max_tokens=most, ignore_eos=True)
    prompts = random_prompts(subject.config, OTHERS, OTHERS_TOKENS)
    others = [Request(number, prompt, short) for number, prompt in enumerate(prompts)]
    engine.step(others, max_forwards=OTHERS)
    quiet = [_step(engine, per_step)[0] for _ in range(QUIET_STEPS)]
    prompt = random_prompts(subject.config, 1, tokens, seed=1)[0]
    prompt[0] = subject.config.vocab_size - 1  # unlike those of the others
    long = Request(OTHERS, prompt, SamplingParams(max_tokens=1))
    engine.step([long], max_forwards=0)
    busy, stalled = [], 0
    for _ in range(tokens // CHUNK):
        milliseconds, served = _step(engine, per_step)
        busy.append(milliseconds)
        stalled += served < OTHERS
    engine.step(aborted=range(OTHERS + 1), max_forwards=0)
    own = [(step - statistics.median(quiet)) * per_step for step in (busy[0], busy[-1])]
    return _Pass(
        own[0], own[1], statistics.median(quiet), statistics.median(busy), max(busy), stalled
    )


def _step(engine: Engine, forwards: int) -> tuple[float, int]:
    """Milliseconds a forward of a burst, and how many of the others got a token in it."""
    before, started = int(engine.device.counters[0]), time.perf_counter()
    events = engine.step(max_forwards=forwards)
    passed = (time.perf_counter() - started) * 1e3
    ran = max(int(engine.device.counters[0]) - before, 1)
    served = {event.number for event in events if isinstance(event, TokenDelta)}
    return passed / ran, len(served - {OTHERS})
