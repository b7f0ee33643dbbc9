"""The frame of benchmarks: their turns, their tables, and what they write."""

import dataclasses
import json

import jax
import pytest

from infer.bench.measure import Report, by_turns, table
from infer.bench.speeds import Speed, speed_table
from infer.score import ratios_by_turns
from wedlm_jax.errors import InputError

AR = Speed("AR", "prose", 8, 24, 1000, 1000, [1.0, 4.0, 2.0], 0.0)


def test_every_second_pass_goes_backwards():
    calls = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert by_turns(ways, 2, "") == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert calls == list("abbaab")


def test_figures_are_written_as_they_come(tmp_path, capsys):
    output = tmp_path / "figures.json"
    report = Report(str(output))
    report.add("speed", [AR])
    assert json.loads(output.read_text(encoding="utf-8"))["speed"] == [dataclasses.asdict(AR)]
    report.add("speed", [{"metres": 2.5}], table("of it", [{"way": "a way"}]))
    report.add("speed", [], "| [wide] |" * 30)
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["speed"] == [dataclasses.asdict(AR), {"metres": 2.5}]
    assert written["machine"]["jax"] == jax.__version__
    assert written["machine"]["cores"] >= 1
    printed = capsys.readouterr().out
    assert "of it" in printed
    assert "a way" in printed
    assert "| [wide] |" * 30 in printed, "neither wrapped nor taken for markup"
    with pytest.raises(InputError, match="no such folder"):
        Report("/no/such/figures.json")


def test_a_table_shows_medians_and_leaves_out_what_is_not_there():
    rows = [
        {"way": "a", "ms": [3.0, 1.0, 2.0], "×": 1234.5, "n": 1234, "none": None},
        {"way": "b", "ms": [], "×": float("nan")},
        {"way": "c", "ms": [0.0123], "×": 0.0, "n": "text"},
    ]
    made = table("of three", rows)
    assert [column.header for column in made.columns] == ["", "ms", "×", "n", "none"]
    assert [list(column.cells) for column in made.columns] == [
        ["a", "b", "c"],
        ["2.00", "", "0.0123"],
        ["1,234", "", "0"],
        ["1,234", "", "text"],
        ["", "", ""],
    ]


def test_a_speed_is_against_the_same_turn_and_says_how_far_turns_differ():
    """A machine that is slow for one turn is so for all that take it."""
    masks = dataclasses.replace(AR, way="W = 16", forwards=500, seconds=[0.5, 4.0, 1.6])
    assert ratios_by_turns(masks, AR) == [2.0, 1.0, 1.25]
    shown = speed_table([AR, masks])
    assert list(shown.columns[2].cells) == ["1.00×", "1.25× (1.00–2.00)"]
    assert shown.caption is None
    assert speed_table([dataclasses.replace(AR, seconds=[0.2, 0.2])]).caption == (
        "passes of 0.2 s are too short to trust: more --prompts make them longer"
    )
