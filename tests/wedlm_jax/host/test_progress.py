"""The bar of all commands: what it says in a terminal, and where there is none."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from wedlm_jax.host.progress import COMPILING, MEASURING, BusyNotice, ProgressBar, clock, ticking


@pytest.fixture
def now(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("wedlm_jax.host.progress.time.monotonic", lambda: now[0])
    return now


def plain():
    return Console(file=io.StringIO(), width=40, force_terminal=False)


def terminal():
    return Console(file=io.StringIO(), width=120, force_terminal=True)


def output(console):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")],
)
def test_clock(seconds, shown):
    assert clock(seconds) == shown


def test_rate_and_time_left_count_what_this_bar_has_seen(now):
    bar = ProgressBar("records", total=100, done=20, console=plain())
    assert bar.line() == "20 of 100 records, 0.0 records/s"
    with bar:
        now[0] += 16
        bar.update(60)
    assert bar.line() == "60 of 100 records, 2.5 records/s, 0:16 left"
    assert bar.line("10 tokens/s", 3) == "60 of 100 records, 10 tokens/s, 0:03 left"
    # The rate agrees with the time left that is given.
    assert bar.line(seconds_left=8) == "60 of 100 records, 5.0 records/s, 0:08 left"
    bar.update(100)
    assert bar.line() == "100 of 100 records, 5.0 records/s"
    now[0] += 24  # of which the last estimate knew nothing, such as compiling
    assert bar.line(seconds_left=0) == "100 of 100 records, 5.0 records/s"


def test_a_total_may_come_later_and_a_share_be_shown():
    bar = ProgressBar("bytes", percent=True, console=plain())
    assert bar.line("x") == "0 bytes, x"
    bar.update(1, total=3, seconds_left=5)
    assert bar.line("x", 5) == "33.3%, x, 0:05 left"


def test_without_a_terminal_a_line_now_and_then(now):
    console = plain()
    with ProgressBar("steps", total=20, console=console, every=5.0) as bar:
        for step in range(1, 13):
            now[0] += 1
            bar.update(step, text="a [bold]text[/] that is far longer than the console is wide")
    lines = output(console).splitlines()
    assert [line.partition(",")[0] for line in lines] == ["5 of 20 steps", "10 of 20 steps"]
    assert all("a [bold]text[/] that is far longer" in line for line in lines)


def test_every_update_is_a_line_or_none_is(now):
    for every, count in ((0.0, 3), (None, 0)):
        console = plain()
        with ProgressBar("steps", total=3, console=console, every=every) as bar:
            for _ in range(3):
                bar.advance()
        assert len(output(console).splitlines()) == count


COMPILED = [
    "compiling a program, 0 s so far",
    "compiled a program in 0 s; kept for the next time in programs",
]


@pytest.mark.parametrize(
    ("work", "after", "lines"),
    [
        (COMPILING, 0.0, COMPILED),
        (COMPILING, 60.0, []),
        (MEASURING, 0.0, ["measuring what forwards cost, 0 s so far"]),
    ],
)
def test_what_takes_long_is_told_with_its_time(work, after, lines, monkeypatch):
    monkeypatch.setattr("wedlm_jax.host.progress.FIRST_LINE_S", after)
    console = plain()
    with BusyNotice(Path("programs"), console)(work):
        pass
    assert output(console).splitlines() == lines


@pytest.mark.parametrize(("after", "shown"), [(0.0, True), (60.0, False)])
@pytest.mark.parametrize("made", [terminal, plain])
def test_a_line_that_is_being_written_ends_before_anything_is_shown(
    made, after, shown, monkeypatch
):
    for name in ("SHOWN_S", "FIRST_LINE_S"):
        monkeypatch.setattr(f"wedlm_jax.host.progress.{name}", after)
    console = made()
    console.file.write("an answ")
    notice = BusyNotice(console=console)
    notice.before = lambda: console.file.write("|")
    with notice(MEASURING):
        pass
    assert output(console).startswith("an answ|" if shown else "an answ")
    assert (MEASURING in output(console)) is shown
    assert output(console).count("|") == shown


def test_what_takes_long_is_told_behind_the_count(monkeypatch):
    monkeypatch.setattr("wedlm_jax.host.progress.FIRST_LINE_S", 0.0)
    console = plain()
    with ProgressBar("steps", total=4, console=console) as bar, bar.saying("{:.0f} s".format):
        pass
    assert output(console) == "0 of 4 steps, 0 s\n"


def test_a_bar_in_a_terminal_and_what_stood_beside_it_comes_back():
    console = terminal()
    with ProgressBar("steps", total=4, title="before", console=console) as bar:
        bar.update(1, text="fast", title="after", seconds_left=7)
        with bar.saying("evaluating, {:.0f} s".format):
            pass
        bar.move(2)
    last = output(console).splitlines()[-1]
    for shown in ("2 of 4 steps, fast, 0:07 left", "after", "━"):
        assert shown in last


def test_it_ticks_while_the_block_is_busy():
    ticks = []
    with ticking(ticks.append, every=0.01):
        deadline = time.monotonic() + 20
        while len(ticks) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
    count = len(ticks)
    assert count >= 4
    assert ticks == sorted(ticks)
    time.sleep(0.05)
    assert len(ticks) == count, "it ends with the block"


def test_where_there_is_no_bar_what_stands_still_is_seldom_repeated(now):
    console = plain()
    with ProgressBar("records", total=9, console=console, every=5) as bar:
        for _ in range(25):
            now[0] += 5
            bar.update(0, text="no tokens")
        now[0] += 5
        bar.update(1, text="no tokens", seconds_left=8)
    lines = output(console).splitlines()
    assert lines == ["0 of 9 records, no tokens"] * 3 + ["1 of 9 records, no tokens, 0:08 left"]
