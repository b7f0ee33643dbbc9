"""Progress, SIGTERM, and the number of bad records that ends a job."""

import io
import math
import os
import signal
import threading
from pathlib import Path

import pytest
from rich.console import Console

from infer.job import shard_decoder
from infer.job.result_record import Counts
from infer.job.shard_decoder import GracefulStop, JobProgress, JobStopped
from infer.job.shard_folder import STATS
from tests.infer.job.job_examples import ask_to_end, contents, results, run, words, write
from wedlm_jax.errors import BAD_DATA
from wedlm_jax.host.progress import ProgressBar

DONE = Counts(rows=40, error_rows=3, tokens=700, num_forwards=180, num_token_instances=2800)
HALF = JobProgress(
    total=100,
    earlier=15,
    elsewhere=5,
    finished=DONE,
    tokens=800,
    forwards=200,
    seconds=18.0,
    compile_seconds=9.0,
)
SPEED = "44 tokens/s, 4.00 tokens per forward, p_cache 0.25"


def shown(progress):
    console = Console(file=io.StringIO(), force_terminal=False)
    with ProgressBar("records", console=console, every=0.0) as bar:
        progress.show(bar)
    return console.file.getvalue()


def test_rates_count_this_run_only():
    assert HALF.seconds_left == 16.0, "45 records took 18 seconds, and 40 are left"
    assert shown(HALF) == f"60 of 100 records, 3 bad, {SPEED}, 0:16 left\n"
    first = JobProgress(100, earlier=20, compile_seconds=9.0)
    assert first.seconds_left == math.inf
    assert shown(first) == "20 of 100 records, 0 tokens/s, 0.00 tokens per forward\n"


def test_bad_records_do_not_tell_how_long_the_others_take():
    bad = JobProgress(100, finished=Counts(rows=8, error_rows=8), seconds=2.0)
    assert bad.seconds_left == math.inf
    bad.finished.rows += 2
    assert bad.seconds_left == 2.0 * 90 / 10


def test_the_second_ends_the_process_at_once(monkeypatch):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    with GracefulStop(grace=1000) as stop, stop.finishing():
        ask_to_end()
        assert ends == []
        ask_to_end()
    assert ends == [143]
    assert not issubclass(JobStopped, Exception), "handlers of errors let it pass"


def test_in_another_thread_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with GracefulStop() as stop, stop.finishing():
            stop.check()
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.fixture(autouse=True)
def _few_records(monkeypatch):
    monkeypatch.setattr(shard_decoder, "FIRST_RECORDS", 10)


BAD = [{"prompt": 5}]


def test_a_limit_ends_a_job_that_another_lets_go_on(model, quick, refusal):
    write([*words(3), *BAD, *words(3), *BAD, *words(2), *BAD, *words(9)])
    assert run(model, output="whole") == 0
    assert run(model, "--max-errors", "3", output="three") == 0
    options = ("--max-errors", "2", "--shard-size", "4")
    printed = refusal(*options, status=BAD_DATA, output="out")
    more = "wedlm generate: 3 records are bad, more than --max-errors 2, such as "
    assert printed.startswith(more)
    assert "in.jsonl line 11: prompt: expected a text, not 5; " in printed
    assert "records are kept in out; the same command continues from there" in printed
    assert not Path("out", STATS).exists()
    assert run(model, output="out") == 0
    assert contents("out") == contents("whole")


def test_the_first_records_end_a_job_if_all_are_bad(model, quick, refusal):
    write([*BAD * 12, *words(3)])
    expected = "all of the first 10 records are bad, such as in.jsonl line 10: prompt: expected a"
    assert expected in refusal(status=BAD_DATA)
    assert run(model) == 0, "given again it goes on: the first are kept"
    assert ["error" in record for record in results()] == [True] * 12 + [False] * 3


TWELVE_BAD = [*BAD * 12, *words(3)]


@pytest.mark.parametrize(
    ("records", "options", "status"),
    [
        (TWELVE_BAD, ["--max-errors", "12"], 0),
        (TWELVE_BAD, ["--max-errors", "500"], 0),
        ([*words(1), *BAD * 30], [], 0),
        (BAD * 3, [], BAD_DATA),
    ],
    ids=["just the limit", "a limit far away", "a good one first", "no good one"],
)
def test_bad_records_let_a_job_go_on_and_it_ends_so_each_time(
    model, quick, records, options, status
):
    write(records)
    for output in ("out.jsonl", "out", "out.jsonl", "out"):
        assert run(model, *options, output=output) == status
        assert ["error" in record for record in results(output)] == [one in BAD for one in records]
