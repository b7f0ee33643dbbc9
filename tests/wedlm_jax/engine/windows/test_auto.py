"""Windows by load against every fixed width, on made-up texts and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from tests.wedlm_jax.engine.simulated_decoding import (
    CPU_COSTS,
    ESSAY,
    LOW_ENTROPY,
    PROSE,
    REASONING,
    TPU_COSTS,
    Script,
    Simulation,
    Text,
)
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.scheduling.sequence import SequenceState
from wedlm_jax.engine.windows.auto import AutoWindows
from wedlm_jax.engine.windows.choice import FixedWindows
from wedlm_jax.engine.windows.cost import CostTable, measure
from wedlm_jax.params import SamplingParams

WIDTHS = (0, 2, 4, 8, 16, 32)
DEVICES = {"cpu": CPU_COSTS, "tpu": TPU_COSTS}
TEXTS: dict[str, tuple[Text, ...]] = {
    "low entropy": (LOW_ENTROPY,),
    "reasoning": (REASONING,),
    "prose": (PROSE,),
    "mixed": (LOW_ENTROPY, REASONING, PROSE),
}
COUNT = {1: 60, 8: 64, 32: 128, 128: 256}


def scripts(texts: Sequence[Text], count: int, seed: int) -> list[Script]:
    rng = np.random.default_rng(seed)
    return [Script(texts[i % len(texts)], rng) for i in range(count)]


def noise(seed: int) -> Callable[[float], float]:
    """Other work on the machine: a third more or less, and now and then ten times as much."""
    rng = np.random.default_rng(seed)
    return lambda seconds: seconds * rng.uniform(0.7, 1.3) * (10 if rng.random() < 0.03 else 1)


def quiet(seconds: float) -> float:
    return seconds


def auto(widest: int, sequences: int, costs: CostTable, replicas: int = 1) -> AutoWindows:
    return AutoWindows(widest, sequences, costs, replicas=replicas)


def table(device: str, slower: Callable[[float], float] = quiet) -> CostTable:
    costs = DEVICES[device]
    return measure(lambda size: slower(costs[size] / 1000), sorted(costs), clock=lambda: 0.0)


@cache
def fixed_speeds(device: str, sequences: int, text: str, mode: str) -> dict[int, float]:
    """Tokens a second of each width."""
    work = scripts(TEXTS[text], COUNT[sequences], 1)
    return {
        width: Simulation(FixedWindows(width), DEVICES[device], sequences, mode=mode).decode(work)
        for width in WIDTHS
    }


def share_of_best(
    device: str, sequences: int, text: str, *, mode: str = "verified", seed: int | None = None
) -> float:
    """Speed over that of the best width, when other texts like these were decoded before."""
    slower = quiet if seed is None else noise(seed)
    windows = auto(32, sequences, table(device, slower))
    simulation = Simulation(windows, DEVICES[device], sequences, noise=slower, mode=mode)
    simulation.decode(scripts(TEXTS[text], COUNT[sequences], 0))
    speed = simulation.decode(scripts(TEXTS[text], COUNT[sequences], 1))
    return speed / max(fixed_speeds(device, sequences, text, mode).values())


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sequences", COUNT)
def test_nearly_as_fast_as_the_best_width_whatever_the_text(device: str, sequences: int) -> None:
    shares = [share_of_best(device, sequences, text) for text in TEXTS]
    assert np.mean(shares) > 0.975, shares
    assert min(shares) > 0.94, shares


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sequences", [1, 8])
def test_nor_does_other_work_on_the_machine_lead_it_astray(device: str, sequences: int) -> None:
    shares = [
        share_of_best(device, sequences, text, seed=seed) for text in TEXTS for seed in range(2)
    ]
    assert np.mean(shares) > 0.965, shares
    assert min(shares) > 0.9, shares


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_where_windows_fill_as_the_paper_says(device: str) -> None:
    shares = [share_of_best(device, 8, text, mode="paper") for text in TEXTS]
    assert np.mean(shares) > 0.975, shares
    assert min(shares) > 0.94, shares


def test_the_regimes_differ_in_what_is_best() -> None:
    """Or the tests above would say little."""
    best = {
        (device, text): max(speeds, key=lambda width: speeds[width])
        for device in DEVICES
        for text in ("low entropy", "prose")
        for speeds in [fixed_speeds(device, 1, text, "verified")]
    }
    assert best == {
        ("cpu", "low entropy"): 8,
        ("cpu", "prose"): 2,
        ("tpu", "low entropy"): 32,
        ("tpu", "prose"): 16,
    }
    assert max(fixed_speeds("cpu", 8, "prose", "verified"), key=lambda w: -w) == 0
    crowd = fixed_speeds("cpu", 8, "prose", "verified")
    assert crowd[0] > 1.3 * max(crowd[width] for width in WIDTHS[1:])


def test_another_text_gets_other_windows() -> None:
    windows = auto(32, 1, table("cpu"))
    simulation = Simulation(windows, CPU_COSTS, 1)
    for texts, narrow in (((REASONING,), False), ((PROSE,), True), ((REASONING,), False)):
        simulation.decode(scripts(texts, 80, 0))
        last = [chosen[0] for chosen in simulation.chosen[-20:]]
        share = np.mean([width <= 4 for width in last])
        assert share > 0.7 if narrow else share < 0.3


def test_more_sequences_get_narrower_windows_at_once() -> None:
    """Eight on a CPU decode autoregressively, one does not; and back."""
    windows = auto(32, 8, table("cpu"))
    simulation = Simulation(windows, CPU_COSTS, 8)
    for _ in range(3):
        simulation.decode(scripts((REASONING,), 16, 1))
        simulation.decode(scripts((REASONING,), 1, 2))
        assert simulation.chosen[-1][0] >= 4
    first = simulation.chosen[-2 - len(simulation.chosen) // 3 :]
    crowds = [chosen for chosen in first if len(chosen) == 8]
    assert np.mean([width == 0 for chosen in crowds for width in chosen]) > 0.9


def test_easy_and_hard_sequences_get_their_own_windows() -> None:
    """By the second burst, while both kinds run; and that is about as fast as any one width."""
    hard = Text(0.3, 0.9, 0.3, 400)
    windows = auto(32, 16, table("tpu"))
    costs = {size: 1.0 + 0.004 * size for size in CPU_COSTS}
    windows.costs = CostTable(list(costs), [cost / 1000 for cost in costs.values()])
    simulation = Simulation(windows, costs, 16)
    work = scripts((ESSAY, hard), 32, 0)
    speed = simulation.decode(work)
    widths = np.array(simulation.chosen[1])
    assert (widths[::2] >= 4).sum() >= 6
    assert (widths[1::2] <= 2).sum() >= 6
    fixed = [Simulation(FixedWindows(width), costs, 16).decode(work) for width in WIDTHS]
    assert speed > 0.94 * max(fixed)


def state(
    number: int, index: int, window: int | None = None, mode: str = "verified"
) -> SequenceState:
    params = SamplingParams(mode=mode, max_tokens=64)
    sequence = SequenceState(Request(number, [1, 2, 3], params, window), number)
    sequence.index = index
    return sequence


def test_requests_that_name_a_window_get_it_and_autoregressive_ones_get_none() -> None:
    windows = auto(32, 4, table("tpu"))
    requests = [state(0, 0, 5), state(1, 1, mode="ar"), state(2, 2, 0), state(3, 3)]
    assert [windows.widest(one.request) for one in requests] == [5, 0, 0, 32]
    assert list(windows.choose(requests))[:3] == [5, 0, 0]
    assert windows.choose(requests)[3] in WIDTHS
    alone = auto(32, 4, table("tpu"))
    assert list(alone.choose(requests[:3])) == [5, 0, 0]


def test_no_window_is_wider_than_the_engine_or_the_rest_of_the_completion() -> None:
    assert max(auto(6, 1, table("tpu")).choose([state(0, 0)])) <= 6
    short = state(0, 0)
    short.text.extend([1] * 62)
    assert auto(32, 1, table("tpu")).choose([short])[0] <= 4


def test_a_request_that_comes_again_is_a_new_sequence() -> None:
    windows = auto(32, 1, table("tpu"))
    first = state(0, 0)
    chosen = list(windows.choose([first]))
    first.text.extend([1] * 63)
    assert windows._sequences.whose[0] == (first, 0)
    windows._sequences.counts[0, 0] = 63
    again = SequenceState(first.request, 1)
    again.index = 0
    assert list(windows.choose([again])) == chosen


def test_replicas_are_weighed_apart() -> None:
    """A crowd on one of them makes nothing dearer on the other."""
    windows = auto(32, 8, table("cpu"), replicas=2)
    crowd = [state(i, i) for i in range(8)]
    alone = state(8, 8)  # of the second replica
    chosen = windows.choose([*crowd, alone])
    assert chosen[8] == auto(32, 8, table("cpu"), replicas=2).choose([alone])[0]


def test_without_costs_nothing_is_chosen() -> None:
    with pytest.raises(AssertionError, match="costs of forwards"):
        AutoWindows(32, 1).choose([state(0, 0)])
