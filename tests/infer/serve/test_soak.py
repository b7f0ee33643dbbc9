"""Prompts of random lengths for a long time, while a third of the clients go away in the middle of
their answers: all others hear what they would hear offline, nothing is compiled after the warm-up,
no page stays held, and memory stays flat."""

import asyncio
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.load_client import Ask, ask_all
from tests.infer.serve.conftest import KINDS, SMALL
from tests.infer.serve.running_server import running_server
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

CLIENTS = 12
"""At a time, three for each place."""
LONGEST_PROMPT, LONGEST_ANSWER = 200, 60
LEAVING = 1 / 3
GROWTH_ALLOWED = 0.05
"""Of the memory of the process, from the first quarter to the end."""


def random_asks(count, vocab_size):
    """Calls with random tokens of random lengths, short ones most often; some draw, some fill
    masks out of order."""
    rng = np.random.default_rng(0)

    def length(most):
        return round(float(np.exp(rng.uniform(0, np.log(most)))))

    asks = []
    for number in range(count):
        fields = {
            "prompt": rng.integers(0, vocab_size, length(LONGEST_PROMPT)).tolist(),
            "max_tokens": length(LONGEST_ANSWER),
            "temperature": 0.7 if number % 4 == 0 else 0.0,
            "mode": "paper" if number % 4 == 2 else "verified",
            "seed": number,
        }
        leaves = rng.random() < LEAVING
        after = 1 + int(rng.integers(fields["max_tokens"])) if leaves else None
        asks.append(Ask(fields, leave_after=after))
    return asks


@pytest.fixture(scope="module")
def offline(checkpoint):
    llm = LLM(checkpoint, **SMALL)
    llm.warm_up(KINDS)
    return llm


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_soak(requests, offline):
    engine = offline.engine
    asks = random_asks(requests, engine.config.vocab_size)
    fields = [dict(ask.fields) for ask in asks]
    prompts = [one.pop("prompt") for one in fields]
    answers = offline.generate(prompts, [SamplingParams(**one) for one in fields])
    expected = [one.token_ids for one in answers]
    engine.scheduler.forget_prefixes()
    compiled = engine.num_programs, engine.compile_seconds
    heard, memory, arrays = [], [], []
    with running_server(offline, max_waiting=CLIENTS) as server:
        for start in range(0, requests, quarter := requests // 4):
            some = asks[start : start + quarter]
            heard += asyncio.run(ask_all(server.port, some, CLIENTS))[0]
            server.wait_until_idle()  # no page is held
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]))  # resident pages
            arrays.append(len(jax.live_arrays()))
    assert (engine.num_programs, engine.compile_seconds) == compiled
    assert {one.error for one in heard} == {None}
    stayed = [number for number, one in enumerate(heard) if one.finish_reason is not None]
    assert requests / 2 < len(stayed) < requests
    assert [heard[number].token_ids for number in stayed] == [expected[n] for n in stayed]
    assert all(
        one.token_ids == ids[: len(one.token_ids)] for one, ids in zip(heard, expected, strict=True)
    )
    assert arrays[-1] <= arrays[0]
    assert memory[-1] <= memory[0] * (1 + GROWTH_ALLOWED)
