"""Measures a long prompt among other sequences: what its last chunk costs against its first, and
how long the others wait for their tokens meanwhile. Weights are random."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from benchmarks.options import SHAPES, add_numbers, new_parser, random_prompts, random_subject
from infer.bench.measure import Report, status, table
from infer.bench.subject import Subject
from infer.flags import add_engine_options
from wedlm_jax.config import ModelConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request, TokenDelta
from wedlm_jax.engine.settings import PAGE_SIZES
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command
from wedlm_jax.params import SamplingParams

CHUNK = 1024
"""First tokens of the prompt, compared with as many last ones; a forward computes fewer."""
OTHERS = 4
"""Sequences that decode while the prompt is computed, each one token per forward."""
OTHERS_TOKENS = 32
"""Tokens of their prompts."""
QUIET_FORWARDS = 64
"""Forwards per burst before the long prompt arrives."""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("chunks", __doc__)
    add_numbers(parser, "--prompt-tokens", 16_384, "tokens of the long prompt")
    shape = "shape of the model, with random weights [embedded, with a long context]"
    parser.add_argument("--shape", default="embedded", choices=tuple(SHAPES), help=shape)
    add_engine_options(parser, names=("dtype",))
    options = parser.parse_args(arguments)
    tokens, longest = options.prompt_tokens, SHAPES[options.shape].max_position_embeddings
    if not 2 * CHUNK <= tokens < longest:
        raise InputError(f"--prompt-tokens: expected {2 * CHUNK} to {longest - 1}, not {tokens}")
    report = Report(options.output)
    subject = random_subject(options.shape, vars(options))
    room = tokens + OTHERS * tokens // 4  # the prompt gets several tokens for one of the others
    page_size = PAGE_SIZES.get(jax.default_backend(), PAGE_SIZES["gpu"])
    engine = subject.engine(
        0,
        OTHERS + 1,
        max_model_len=min(2 * tokens, longest),
        page_size=page_size,
        num_pages=(room + (OTHERS + 1) * CHUNK) // page_size,
    )
    made = []
    with status("a long prompt") as shown:
        for number in range(options.passes + 1):
            shown.update(f"a long prompt · pass {number} of {options.passes}")
            made.append(_long_prompt(engine, subject, tokens))
    figures = _figures(subject.config, tokens, made[1:])
    rows = [{"": name, "median": value} for name, value in figures.items()]
    report.add("chunks", [figures], table(f"a prompt of {tokens:,} tokens", rows))
    return 0


def _figures(config: ModelConfig, tokens: int, passes: Sequence[_Pass]) -> dict[str, float]:
    """Returns medians over the passes, by name. The products of the last chunk against those of the
    first are counted, not measured, and only over visible places."""

    def median(value: Callable[[_Pass], float]) -> float:
        return statistics.median(value(one) for one in passes)

    first = median(lambda one: one.chunk_seconds(0) * 1e3)
    last = median(lambda one: one.chunk_seconds(tokens - CHUNK) * 1e3)
    products = products_of(config, tokens - CHUNK) / products_of(config, 0)
    quiet = median(lambda one: _seconds_a_forward(one.others) * 1e3)
    busy = median(lambda one: _seconds_a_forward(one.among) * 1e3)
    return {
        "tokens per forward beside others": median(
            lambda one: tokens / sum(burst.forwards for burst in one.among if burst.computed)
        ),
        f"its first {CHUNK:,} tokens, alone, ms": first,
        f"its last {CHUNK:,} tokens, alone, ms": last,
        "the last against the first": last / first,
        "what visible products say": products,
        "one against the other": last / first / products,
        "others, token to token, alone, ms": quiet,
        "others, token to token, meanwhile, on average, ms": busy,
        "meanwhile against alone": busy / quiet,
        "the longest meanwhile, ms": median(
            lambda one: max(b.seconds / b.forwards for b in one.among) * 1e3
        ),
        "bursts without a token for one of them": max(
            sum(b.served < OTHERS for b in one.among) for one in passes
        ),
        "the prompt, among them, s": median(lambda one: _total(one.among)),
        "the prompt, alone, s": median(lambda one: _total(one.alone)),
    }


def products_of(config: ModelConfig, before: int) -> float:
    """Returns the multiplications for `CHUNK` tokens after ``before`` others: in linear layers, and
    in attention to the places that each token sees."""
    linear = config.num_parameters(embeddings=False) * CHUNK
    seen = CHUNK * before + CHUNK * (CHUNK + 1) // 2
    return linear + config.attention_per_place * seen


class _Burst(NamedTuple):
    """Holds seconds, forwards, computed tokens of the prompt, and how many of the others got a
    token."""

    seconds: float
    forwards: int
    computed: int
    served: int


@dataclasses.dataclass(frozen=True)
class _Pass:
    """Holds the bursts of the prompt alone, a forward each; of all together; and of the others."""

    alone: list[_Burst]
    among: list[_Burst]
    others: list[_Burst]

    def chunk_seconds(self, start: int) -> float:
        """Returns the seconds for `CHUNK` tokens of the prompt from token ``start`` on, without the
        other sequences."""
        spent, before = 0.0, 0
        for burst in self.alone:
            after = before + burst.computed
            inside = min(after, start + CHUNK) - max(before, start)
            spent += burst.seconds * max(inside, 0) / max(burst.computed, 1)
            before = after
        return spent


def _seconds_a_forward(bursts: Sequence[_Burst]) -> float:
    return _total(bursts) / sum(burst.forwards for burst in bursts)


def _total(bursts: Sequence[_Burst]) -> float:
    return sum(burst.seconds for burst in bursts)


def _long_prompt(engine: Engine, subject: Subject, tokens: int) -> _Pass:
    prompt = random_prompts(subject.config, 1, tokens, seed=1)[0]
    prompt[0] = subject.config.vocab_size - 1  # unlike those of the others
    long = Request(OTHERS, prompt, SamplingParams(max_tokens=1))
    engine.scheduler.forget_prefixes()
    engine.step([long], max_forwards=0)
    alone = _until_computed(engine, tokens, at_once=1)
    _submit_others(engine, subject)
    engine.step([long], max_forwards=0)
    among = _until_computed(engine, tokens, at_once=None)
    # The others alone, over the same tokens: each token makes a forward a little slower.
    _submit_others(engine, subject)
    others: list[_Burst] = []
    left = sum(burst.forwards for burst in among)
    while left > 0:
        others.append(_burst(engine, 0, min(left, QUIET_FORWARDS)))
        left -= others[-1].forwards
    engine.step(aborted=range(OTHERS + 1), max_forwards=0)
    return _Pass(alone, among, others)


def _until_computed(engine: Engine, tokens: int, at_once: int | None) -> list[_Burst]:
    """Runs bursts of ``at_once`` forwards until the long prompt is computed; None: of as many as it
    probably still needs, since later forwards are of no interest."""
    bursts: list[_Burst] = []
    computed, each = 0, 1.0
    while computed < tokens:
        forwards = math.ceil((tokens - computed) / each) if at_once is None else at_once
        bursts.append(_burst(engine, tokens - computed, forwards))
        computed += bursts[-1].computed
        each = max(bursts[-1].computed / bursts[-1].forwards, 1)
    return bursts


def _submit_others(engine: Engine, subject: Subject) -> None:
    """Submits the others again and runs them until they decode."""
    engine.step(aborted=range(OTHERS + 1), max_forwards=0)
    engine.scheduler.forget_prefixes()
    params = SamplingParams(max_tokens=engine.max_model_len // 2, ignore_eos=True)
    prompts = random_prompts(subject.config, OTHERS, OTHERS_TOKENS)
    others = [Request(number, each, params) for number, each in enumerate(prompts)]
    engine.step(others, max_forwards=OTHERS)


def _burst(engine: Engine, left: int, forwards: int) -> _Burst:
    """Runs a burst, before which ``left`` tokens of the long prompt are still to compute."""
    before, started = int(engine.device.counters[0]), time.perf_counter()
    events = engine.step(max_forwards=forwards)
    seconds = time.perf_counter() - started
    ran = max(int(engine.device.counters[0]) - before, 1)
    served = {event.number for event in events if isinstance(event, TokenDelta)}
    long = [one for one in engine.scheduler.sequences if one.number == OTHERS]
    remaining = sum(len(one.text) - one.num_computed for one in long if one.is_prefilling)
    return _Burst(seconds, ran, left - remaining, len(served - {OTHERS}))


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.chunks", lambda: main(sys.argv[1:])))
