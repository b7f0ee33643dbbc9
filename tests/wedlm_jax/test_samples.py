"""Samples of a prompt: their seeds, and that they are gathered in order."""

from __future__ import annotations

import random

from wedlm_jax.samples import Samples, sample_seed
from wedlm_jax.params import SamplingParams

PARAMS = SamplingParams(temperature=1.0, seed=5)


def test_the_first_sample_has_the_prompt_s_seed_and_the_others_their_own() -> None:
    seeds = [sample_seed(seed, i) for seed in range(20) for i in range(20)]
    assert seeds[::20] == list(range(20))
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**32 for seed in seeds)
    # Of this version and every later one.
    assert [sample_seed(7, i) for i in range(3)] == [7, 369571992, 1009178997]


def test_samples_come_back_whole_and_in_order() -> None:
    prompts = [("a", PARAMS), ("b", SamplingParams(temperature=1.0, n=3, seed=9)), ("c", PARAMS)]
    samples: Samples[str, str] = Samples(prompts)
    rows = list(samples.rows())
    assert [prompt for prompt, _ in rows] == ["a", "b", "b", "b", "c"]
    assert rows[0][1] is PARAMS
    assert [params.seed for _, params in rows[1:4]] == [sample_seed(9, i) for i in range(3)]
    assert {params.n for _, params in rows} == {1}
    order = list(range(5))
    random.Random(1).shuffle(order)
    whole = [samples.finish(row, f"{rows[row][0]}{row}") for row in order]
    assert sorted(item for item in whole if item is not None) == [
        (0, ["a0"]), (1, ["b1", "b2", "b3"]), (2, ["c4"]),
    ]  # fmt: skip
