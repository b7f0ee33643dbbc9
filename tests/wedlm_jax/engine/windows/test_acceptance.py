"""What windows commit: learnt at one width, said of all."""

from __future__ import annotations

import numpy as np
import pytest

from wedlm_jax.engine.windows.acceptance import NUM_TYPES, Acceptance

WIDTHS = np.array([0, 2, 4, 8, 16, 32])
EMBEDDED = {
    "low entropy": (1.986, 3.639, 6.088, 8.458, 9.157),
    "reasoning": (1.970, 3.569, 5.895, 8.389, 8.079),
    "prose": (1.577, 1.987, 2.139, 2.142, 2.142),
}
"""Tokens a forward of the embedded model, verified, by width from 2."""


def decode(
    acceptance: Acceptance,
    rates: tuple[float, ...],
    width: int,
    sequences: int,
    *,
    forwards: int = 16,
    seed: int = 0,
) -> np.ndarray:
    """Sequences that commit so many tokens a forward, all with one width. Returns what is known of
    each."""
    rng = np.random.default_rng(seed)
    own = np.zeros((sequences, NUM_TYPES))
    columns = np.full(len(own), int(np.searchsorted(WIDTHS, width)))
    mean = np.array(rates)[columns - 1] * forwards
    tokens = np.maximum(rng.normal(mean, 0.5 * mean / forwards**0.5), 1)
    used = forwards * (WIDTHS[columns] + 1.0) + tokens
    acceptance.learn(own, columns, tokens, np.full(len(own), float(forwards)), used)
    return own


def expected_of_new(acceptance: Acceptance) -> np.ndarray:
    return acceptance.expected(np.zeros((1, NUM_TYPES)))[0]


def test_types_are_ordered_and_a_window_commits_at_most_its_width() -> None:
    expected = Acceptance(WIDTHS).expected_by_type
    assert (np.diff(expected[:, 1:], axis=0) > 0).all()
    assert (np.diff(expected[:, 1:], axis=1) >= 0).all()
    assert (expected[:, 1:] <= WIDTHS[1:]).all()
    assert (expected >= 1).all()


@pytest.mark.parametrize("text", EMBEDDED)
def test_one_width_tells_the_others_as_measured_on_the_embedded_model(text: str) -> None:
    """Half the wider width too much is a neighbouring width at worst: 12 %."""
    acceptance = Acceptance(WIDTHS)
    rates = EMBEDDED[text]
    for seed in range(6):
        own = decode(acceptance, rates, 16, 32, seed=seed)
    expected = acceptance.expected(own).mean(axis=0)[1:5]
    assert expected == pytest.approx(rates[:4], rel=0.12)
    assert acceptance.expected(own)[:, 0] == pytest.approx(1)


def test_a_sequence_is_known_by_its_own_evidence_and_new_ones_by_the_others() -> None:
    acceptance = Acceptance(WIDTHS)
    for seed in range(8):
        easy = decode(acceptance, EMBEDDED["low entropy"], 16, 16, seed=seed)
        hard = decode(acceptance, EMBEDDED["prose"], 16, 16, seed=seed)
    at_16 = [float(acceptance.expected(own)[:, 4].mean()) for own in (easy, hard)]
    assert at_16[0] == pytest.approx(8.4, rel=0.15)
    assert at_16[1] == pytest.approx(2.1, rel=0.15)
    assert 3 < expected_of_new(acceptance)[4] < 6


def test_another_text_is_learnt_and_the_old_one_forgotten() -> None:
    acceptance = Acceptance(WIDTHS)
    for seed in range(20):
        decode(acceptance, EMBEDDED["low entropy"], 16, 16, seed=seed)
    for seed in range(10):
        decode(acceptance, EMBEDDED["prose"], 16, 16, seed=seed)
    assert expected_of_new(acceptance)[4] < 2.6


def test_hopes_fall_with_what_was_seen_and_rise_again() -> None:
    acceptance = Acceptance(WIDTHS)
    first = expected_of_new(acceptance)[4]
    for seed in range(4):
        decode(acceptance, EMBEDDED["prose"], 16, 4, seed=seed)
    seen = expected_of_new(acceptance)[4]
    for _ in range(1500):
        acceptance.fade()
    assert seen < 0.5 * first
    assert expected_of_new(acceptance)[4] == pytest.approx(first, rel=0.1)


def test_filled_slots_are_learnt() -> None:
    acceptance = Acceptance(WIDTHS)
    own = np.zeros((8, NUM_TYPES))
    columns, ones = np.full(8, 3), np.ones(8)
    for _ in range(20):
        acceptance.learn(own, columns, 40 * ones, 10 * ones, 10 * (8 + 6) * ones)
    filled = acceptance.filled(np.full((1, len(WIDTHS)), 4.0))[0]
    assert filled[3] == pytest.approx(6, rel=0.05)
    assert (filled <= WIDTHS).all()
