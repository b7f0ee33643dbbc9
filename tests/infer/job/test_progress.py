"""The numbers and lines that tell how far a job is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from infer.job.progress import Standing, clock, progress
from infer.job.result_rows import Counts

DONE = Counts(rows=40, error_rows=3, tokens=700, num_forwards=180, num_token_instances=2800)
HALF = Standing(
    rows=60,
    earlier=20,
    total=100,
    tokens=800,
    forwards=200,
    finished=DONE,
    seconds=16.0,
    compile_seconds=9.0,
)
SPEED = "50 tokens/s, 4.00 tokens per forward, p_cache 0.25"


def test_rates_count_this_run_only() -> None:
    assert HALF.tokens_per_second == 50
    assert HALF.tokens_per_forward == 4
    assert HALF.seconds_left == 16.0, "40 rows took 16 seconds, and 40 are left"
    assert HALF.line() == f"60 of 100 rows (3 bad), {SPEED}, 0:16 left"
    assert HALF.as_json() == {
        "rows": 40,
        "error_rows": 3,
        "tokens": 700,
        "num_forwards": 180,
        "num_token_instances": 2800,
        "seconds": 16.0,
        "compile_seconds": 9.0,
        "tokens_per_second": 50.0,
    }


def test_nothing_is_known_before_the_first_row() -> None:
    first = Standing(20, 20, 100, 0, 0, Counts(), 0.0, 9.0)
    assert first.seconds_left is None
    assert first.line() == "20 of 100 rows, 0 tokens/s, 0.00 tokens per forward, ? left"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "?"), (0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")],
)
def test_clock(seconds: float | None, shown: str) -> None:
    assert clock(seconds) == shown


def test_without_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("infer.job.progress.time.monotonic", lambda: now)
    out = io.StringIO()
    with progress(Console(file=out, width=200, force_terminal=False)) as show:
        for second in range(12):
            now = float(second)
            show(HALF)
    assert out.getvalue() == f"{HALF.line()}\n" * 2, "at 5 and at 10 seconds"


def test_in_a_terminal_a_bar() -> None:
    out = io.StringIO()
    with progress(Console(file=out, force_terminal=True, width=120)) as show:
        show(HALF)
    assert "60/100" in out.getvalue()
    assert f"{SPEED}  0:16 left" in out.getvalue()
