"""Seeds of the samples of a prompt."""

from __future__ import annotations

from wedlm_jax.samples import sample_seed


def test_the_first_sample_has_the_prompt_s_seed_and_the_others_their_own() -> None:
    seeds = [sample_seed(seed, i) for seed in range(20) for i in range(20)]
    assert seeds[::20] == list(range(20))
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**32 for seed in seeds)
    # Of this version and every later one.
    assert [sample_seed(7, i) for i in range(3)] == [7, 369571992, 1009178997]
