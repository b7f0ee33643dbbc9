"""What a server under load is judged by; the server itself is tested in tests/infer/serve."""

from __future__ import annotations

import dataclasses

import pytest

from infer.bench.load_client import Heard
from infer.bench.serve_load import GROWTH_ALLOWED, Soundness, _load, main
from wedlm_jax.errors import InputError

SOUND = Soundness(answers=9, left=3, wrong=0, errors=[], pages_held=0, growth=GROWTH_ALLOWED)


@pytest.mark.parametrize(
    "fault",
    [{"wrong": 1}, {"errors": ["it broke"]}, {"pages_held": 2}, {"growth": GROWTH_ALLOWED + 0.01}],
    ids=str,
)
def test_a_server_is_sound_if_nothing_was_wrong(fault: dict) -> None:
    assert SOUND.is_sound
    assert not dataclasses.replace(SOUND, **fault).is_sound


def test_speeds_are_of_all_answers_together() -> None:
    heard = [Heard([1] * 3, first, [0.5, 1.5], "length") for first in (1.0, 2.0, 9.0)]
    load = _load(2, heard, 4.5, (8.0, 4.0), 0.1)
    assert (load.requests, load.tokens_per_second) == (3, 2.0)
    assert (load.ratio, load.ratio_as_wide) == (0.25, 0.5)
    assert load.first == pytest.approx((2.0, 8.3))
    assert load.between == pytest.approx((1.0, 1.5))


def test_a_call_that_failed_is_named() -> None:
    heard = [Heard([1], finish_reason="stop"), Heard(error="it broke"), Heard(error="it too")]
    with pytest.raises(InputError, match="2 calls failed; the first: it broke"):
        _load(1, heard, 1.0, (1.0, 1.0), 0.1)


def test_no_clients_are_refused() -> None:
    with pytest.raises(InputError, match="expected at least 1"):
        main(["--clients", "4", "0"])
