"""The frame of both benchmarks: their command lines, their turns, and what they write."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from rich.table import Table

from wedlm_jax.benchmark import Bar, BenchmarkParser, Outcome, Stopwatch, by_turns, report
from wedlm_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Length:
    metres: float


def parser() -> BenchmarkParser:
    made = BenchmarkParser(
        "measure",
        {"length": "of a thing\nfrom end to end", "weight": "of it", "age": "in days"},
        default="length",
        closing="Twice.",
        examples=["measure --compare weight"],
    )
    made.add("--passes", "timed", type=int)
    made.add("--unit", "of lengths", of=("length",))
    made.add("--scales", "to put it on", of=("weight", "age"))
    made.add("--twice", "", of=("weight",), action="store_true")
    return made


def test_the_help_says_which_comparison_has_which_option() -> None:
    text = " ".join(parser().format_help().split())
    assert "length of a thing from end to end weight of it" in text
    assert "--unit UNIT length: of lengths" in text
    assert "--scales SCALES all but length: to put it on" in text
    assert "--passes PASSES timed" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--compare length --scales old", "--scales is an option of weight and age, not of length"),
        (
            "--compare length age --twice",
            "--twice is an option of weight, not of length and age",
        ),
        ("--compare age --output /no/such/figures.json", "no such folder"),
    ],
)
def test_what_does_not_belong_together_is_refused(arguments: str, says: str) -> None:
    own = parser()
    with pytest.raises(InputError, match=says):
        own.check(own.parse_args(arguments.split()))


def test_options_of_any_comparison_that_is_made_are_taken() -> None:
    own = parser()
    options = own.parse_args(
        ["--compare", "length", "weight", "--unit", "m", "--twice", "--passes", "2"]
    )
    own.check(options)
    assert (options.unit, options.twice, options.scales) == ("m", True, None)


def test_by_turns_goes_round() -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}  # type: ignore[misc]
    assert by_turns(ways, 2, Bar(), "") == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert calls == list("ababab")


def test_figures_are_written_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "figures.json"
    table = Table("as long as it is")

    def compare(bar: Bar) -> Iterator[Outcome]:
        bar.expect(1)
        yield Outcome("length", [Length(1.5)])
        assert json.loads(output.read_text(encoding="utf-8"))["length"] == [{"metres": 1.5}]
        yield Outcome("length", [Length(2.5)], table)
        yield Outcome("length", [], "| [wide] |" * 30)

    assert report(compare, str(output)) == 0
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["length"] == [{"metres": 1.5}, {"metres": 2.5}]
    assert written["machine"]["jax"] == jax.__version__
    assert written["machine"]["cores"] >= 1
    printed = capsys.readouterr().out
    assert "as long as it is" in printed
    assert "| [wide] |" * 30 in printed, "neither wrapped nor taken for markup"


def test_what_does_not_hold_fails_after_all_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes = [Outcome("length", [], failure="too long"), Outcome("weight", [])]
    assert report(lambda _: outcomes, None) == 1
    assert capsys.readouterr().err.strip().endswith("too long")


def test_a_stopwatch_counts_calls_and_what_they_take() -> None:
    watch = Stopwatch()
    assert watch.around(lambda seconds: time.sleep(seconds) or 7)(0.01) == 7
    assert watch.calls == 1
    assert watch.seconds >= 0.01
    with pytest.raises(ZeroDivisionError):
        watch.around(lambda: 1 / 0)()
    assert watch.calls == 2
