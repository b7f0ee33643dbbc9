"""Places for sequences, and when a refused caller is to come again."""

from __future__ import annotations

import pytest

from infer.serve import calls as capacity
from infer.serve.calls import Capacity
from infer.serve.errors import ApiError


def test_no_more_than_there_are_places() -> None:
    places = Capacity(running=2, queued=3)
    places.check(5)
    places.enter(4)
    with pytest.raises(ApiError) as full:
        places.enter(2)
    assert (full.value.status, full.value.headers["Retry-After"]) == (429, "1")
    places.enter(1)
    places.leave(5)
    places.enter(5)
    with pytest.raises(ApiError, match="6 completions are asked for; this server takes 5") as never:
        places.check(6)
    assert never.value.status == 400


def test_retry_after_follows_how_soon_others_were_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(capacity.time, "monotonic", lambda: now)
    places = Capacity(running=4, queued=4)
    places.enter(8)
    for _ in range(4):
        now += 10
        places.leave(1)
        places.enter(1)
    now += 10
    with pytest.raises(ApiError) as full:
        places.enter(3)
    # Four in 40 seconds: three more take 30.
    assert full.value.headers["Retry-After"] == "30"
    with pytest.raises(ApiError) as full:
        places.enter(8)
    assert full.value.headers["Retry-After"] == "60"
