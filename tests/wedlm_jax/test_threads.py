"""One `LLM` used by several threads: each gets the answers that it gets alone."""

import gc
import threading
import time

import pytest

from tests.examples.decode import as_if_first
from tests.examples.tiny_checkpoint import PROMPTS
from tests.wedlm_jax.engine.accounts import check_accounts
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

PARAMS = [
    SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(mode="paper", max_tokens=24, logprobs=1, ignore_eos=True),
    SamplingParams(mode="ar", max_tokens=24, stop=("never",)),
]
SECONDS = 240
"""After which a thread counts as stuck."""


@pytest.fixture(autouse=True)
def _a_forward_per_burst(monkeypatch):
    """Short answers would be done in the first burst of a stream."""
    monkeypatch.setattr("wedlm_jax.llm.STREAM_SECONDS", 1e-9)


@pytest.fixture(scope="module")
def llm(checkpoint):
    llm = LLM(checkpoint, window_size=4, max_batch_size=4, deterministic=True)
    llm.warm_up(PARAMS)
    return llm


def answers(llm, prompts, params):
    return [as_if_first(one) for one in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(llm):
    """Of all prompts, with each of the parameters."""
    return [answers(llm, PROMPTS, params) for params in PARAMS]


def assert_idle(llm):
    """Aborts take effect at the next step."""
    deadline = time.monotonic() + SECONDS
    while llm._loop.is_busy:
        assert time.monotonic() < deadline, "something is still under way"
        time.sleep(0.001)
    assert not llm.engine.has_work


def together(tasks):
    """Runs tasks in threads that begin at once; returns what they return, or raise."""
    results = [None] * len(tasks)
    begin = threading.Barrier(len(tasks))

    def run(number):
        begin.wait()
        try:
            results[number] = tasks[number]()
        except Exception as error:
            results[number] = error

    threads = [
        threading.Thread(target=run, args=[number], daemon=True) for number in range(len(tasks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "stuck"
    return results


def test_threads_that_generate_stream_and_score_at_once(llm, expected):
    ids = [llm.as_ids(prompt) for prompt in PROMPTS]
    whole = [[one.token_ids for one in some] for some in expected]
    scored = llm.score(ids, whole[0])

    def generated(number):
        return [answers(llm, PROMPTS, PARAMS[number]) for _ in range(3)]

    def streamed(number):
        found = []
        for prompt in PROMPTS:
            chunks = list(llm.stream(prompt, PARAMS[number]))
            assert "".join(chunk.text for chunk in chunks) == chunks[-1].completion.text
            found.append(as_if_first(chunks[-1].completion))
        return found

    def score():
        return [llm.score(ids, whole[0]) for _ in range(3)]

    numbers = range(len(PARAMS))
    results = together(
        [
            *(lambda number=number: generated(number) for number in numbers),
            *(lambda number=number: streamed(number) for number in numbers),
            score,
        ]
    )
    for number in numbers:
        assert results[number] == [expected[number]] * 3
        assert results[len(PARAMS) + number] == expected[number]
    assert results[-1] == [scored] * 3
    assert_idle(llm)
    check_accounts(llm.engine.scheduler)


def test_a_stream_that_nobody_reads_holds_up_nobody(llm, expected):
    left = llm.stream(PROMPTS[0], PARAMS[0])
    first = next(left)
    (found,) = together([lambda: answers(llm, PROMPTS, PARAMS[1])])
    assert found == expected[1]
    # It goes on where it was, in another thread, or is closed there.
    (rest,) = together([lambda: list(left)])
    assert as_if_first([first, *rest][-1].completion) == expected[0][0]
    left = llm.stream(PROMPTS[0], PARAMS[0])
    next(left)
    together([left.close])
    assert_idle(llm)


@pytest.mark.full
def test_a_stream_may_be_collected_within_a_step(llm, expected, monkeypatch):
    """A collector runs generators' last lines anywhere: in a thread that has the turn, too."""
    left = [llm.stream(PROMPTS[0], PARAMS[0])]
    next(left[0])
    step = llm.engine.step

    def collecting(*arguments, **options):
        left.clear()
        gc.collect()
        return step(*arguments, **options)

    monkeypatch.setattr(llm.engine, "step", collecting)
    (found,) = together([lambda: answers(llm, PROMPTS[:2], PARAMS[1])])
    assert found == expected[1][:2]
    assert_idle(llm)
