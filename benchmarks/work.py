"""Turns questions into work to decode, the same every time."""

from __future__ import annotations

from itertools import chain, cycle, islice

import numpy as np

from infer.bench.subject import Regimes, Subject, Work
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import Question

MAX_TOKENS = 160
"""Longer than any answer of the corpus."""
LENGTHS = (4, 160)
"""Mixed completions are cut at a length between these, drawn log-uniformly: most are short, some
long, like those of different users."""
SHOTS = 5
LONG_ONE_IN = 8
"""One in this many mixed prompts follows answered questions, different ones each time."""


def long_answers(subject: Subject, regimes: Regimes, count: int, mode: str) -> Work:
    """Returns the questions with the longest answers, regimes in turns, answered to their ends:
    what a model generates after the end is not text, and would not cost what text costs."""
    longest = {
        regime: sorted(questions, key=lambda one: -len(one.answer))
        for regime, questions in regimes.items()
    }
    params = SamplingParams(mode=mode, max_tokens=MAX_TOKENS)
    return [(subject.ask(one), params) for one in _by_turns(longest, count)]


def mixed(subject: Subject, regimes: Regimes, count: int, mode: str) -> Work:
    """Returns questions of all regimes in turns, short and long, each with its own limit."""
    rng = np.random.default_rng(0)
    asked = _by_turns(regimes, count)
    shots = cycle(_by_turns(regimes, max(SHOTS * (1 + count // LONG_ONE_IN), len(asked))))
    work: Work = []
    for number, question in enumerate(asked):
        limit = round(float(np.exp(rng.uniform(*np.log(LENGTHS)))))
        before = islice(shots, 0 if number % LONG_ONE_IN else SHOTS)
        params = SamplingParams(mode=mode, max_tokens=limit, ignore_eos=True)
        work.append((subject.ask(question, *before), params))
    return work


def _by_turns(regimes: Regimes, count: int) -> list[Question]:
    turns = zip(*map(cycle, regimes.values()), strict=True)
    return list(islice(chain.from_iterable(turns), count))
