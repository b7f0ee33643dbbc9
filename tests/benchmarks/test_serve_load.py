"""What is said of a server under load; the server itself is tested in tests/infer/serve."""

from __future__ import annotations

import pytest

from benchmarks.load_client import Heard
from benchmarks.serve_load import load_of
from wedlm_jax.errors import InputError


def test_speeds_are_of_all_answers_together() -> None:
    heard = [Heard([1] * 3, first, [0.5, 1.5], "length") for first in (1.0, 2.0, 9.0)]
    load = load_of(2, heard, 4.5, (8.0, 4.0), 0.1)
    assert (load.requests, load.tokens_per_second) == (3, 2.0)
    row = load.row()
    assert (row["of the job's"], row["of one as wide"]) == (0.25, 0.5)
    assert row["between tokens, ms"] == "1000.0 (95 %: 1500.0)"
    assert load.first == pytest.approx((2.0, 8.3))
    assert load.between == pytest.approx((1.0, 1.5))


def test_a_call_that_failed_is_named() -> None:
    heard = [Heard([1], finish_reason="stop"), Heard(error="it broke"), Heard(error="it too")]
    with pytest.raises(InputError, match="2 calls failed; the first: it broke"):
        load_of(1, heard, 1.0, (1.0, 1.0), 0.1)
