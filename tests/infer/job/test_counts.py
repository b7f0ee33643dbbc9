"""The numbers that tell how far a job is."""

from __future__ import annotations

import io
import math

from rich.console import Console

from infer.job.result_record import Counts
from infer.job.shard_decoder import JobProgress
from wedlm_jax.host.progress import ProgressBar

DONE = Counts(rows=40, error_rows=3, tokens=700, num_forwards=180, num_token_instances=2800)
HALF = JobProgress(
    done=60,
    earlier=20,
    total=100,
    tokens=800,
    forwards=200,
    finished=DONE,
    seconds=16.0,
    compile_seconds=9.0,
)
SPEED = "50 tokens/s, 4.00 tokens per forward, p_cache 0.25"


def shown(progress: JobProgress) -> str:
    console = Console(file=io.StringIO(), force_terminal=False)
    with ProgressBar("records", console=console, every=0.0) as bar:
        progress.show(bar)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_count_this_run_only() -> None:
    assert HALF.tokens_per_second == 50
    assert HALF.tokens_per_forward == 4
    assert HALF.seconds_left == 16.0, "40 records took 16 seconds, and 40 are left"
    assert shown(HALF) == f"60 of 100 records, 3 bad, {SPEED}, 0:16 left\n"
    assert HALF.as_json() == {
        "rows": 40,
        "error_rows": 3,
        "tokens": 700,
        "num_forwards": 180,
        "num_token_instances": 2800,
        "mask_drafts": 0,
        "mask_drafts_accepted": 0,
        "lookup_drafts": 0,
        "lookup_drafts_accepted": 0,
        "seconds": 16.0,
        "compile_seconds": 9.0,
        "tokens_per_second": 50.0,
    }


def test_nothing_is_known_before_the_first_record() -> None:
    first = JobProgress(20, 20, 100, 0, 0, Counts(), 0.0, 9.0)
    assert first.seconds_left == math.inf
    assert shown(first) == "20 of 100 records, 0 tokens/s, 0.00 tokens per forward\n"
