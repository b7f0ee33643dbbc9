"""Answers that the prompt fixes to the last character: counting, tables, copies, formats.

A model that has learned the format is sure of nearly every token, so a window of 16 masks can
be filled in one or two forwards.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from train.corpus.words import ANIMALS, CITIES, COLORS, JOBS, NAMES, PLACES, SHORT_NOUNS, THINGS

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEPS = (1, 2, 2, 3, 4, 5, 5, 10)
LARGEST_COUNT = 100
DOINGS = ("sits", "sleeps", "waits", "runs", "walks", "sings", "hides", "rests")
RELATIONS = ("near", "behind", "under", "above", "beside", "before")
SCHEMAS = (
    ("name", "age", "city", "job"),
    ("name", "pet", "colour", "city"),
    ("name", "job", "city", "pet", "age"),
    ("name", "colour", "pet", "age", "job", "city"),
)
WORD_POOLS = (SHORT_NOUNS, ANIMALS, COLORS, PLACES, THINGS)


def count(rng: random.Random) -> tuple[str, str]:
    """Counting up or down in equal steps."""
    step = rng.choice(STEPS)
    terms = rng.randint(10, min(20, LARGEST_COUNT // step))
    low = rng.randint(0, LARGEST_COUNT - step * (terms - 1))
    values = [low + step * i for i in range(terms)]
    if rng.random() < 0.4:
        values.reverse()
    prompt = rng.choice(
        (
            "Count from {} to {} in steps of {}.",
            "Write the numbers from {} to {}, step {}.",
            "List the numbers from {} to {} by {}.",
        )
    ).format(values[0], values[-1], step)
    return prompt, ", ".join(map(str, values))


def times_table(rng: random.Random) -> tuple[str, str]:
    """A part of one multiplication table, a line each; nothing above 10 x 10."""
    n, rows = rng.randint(2, 10), rng.randint(5, 9)
    first = rng.randint(1, 11 - rows)
    prompt = rng.choice(
        (
            "Write the {} times table from {} to {}.",
            "Show the multiplication table of {} from {} to {}.",
            "Multiply {} by each number from {} to {}.",
            "List the products of {} with the numbers {} to {}.",
        )
    ).format(n, first, first + rows - 1)
    return prompt, "\n".join(f"{n} x {i} = {n * i}" for i in range(first, first + rows))


def sum_table(rng: random.Random) -> tuple[str, str]:
    """The same small sum or difference for a run of numbers: arithmetic with a steady shape."""
    n, rows = rng.randint(2, 15), rng.randint(5, 8)
    if rng.random() < 0.5:
        first = rng.randint(1, 50)
        prompt = rng.choice(("Add {} to each number from {} to {}.", "Plus {}: from {} to {}."))
        lines = [f"{i} + {n} = {i + n}" for i in range(first, first + rows)]
    else:
        first = n + rng.randint(0, 50)
        prompt = rng.choice(("Take {} from each number from {} to {}.", "Minus {}: from {} to {}."))
        lines = [f"{i} - {n} = {i - n}" for i in range(first, first + rows)]
    return prompt.format(n, first, first + rows - 1), "\n".join(lines)


def copy_line(rng: random.Random) -> tuple[str, str]:
    """One sentence written several times, a line each."""
    times = rng.randint(3, 6)
    line = (
        f"The {rng.choice(COLORS)} {rng.choice(ANIMALS)} {rng.choice(DOINGS)} "
        f"{rng.choice(RELATIONS)} the {rng.choice(COLORS)} {rng.choice(PLACES)}."
    )
    prompt = rng.choice(("Write this line {} times:\n{}", "Repeat {} times:\n{}"))
    return prompt.format(times, line), "\n".join([line] * times)


def copy_list(rng: random.Random) -> tuple[str, str]:
    """A short list of unrelated words copied on several lines."""
    items = rng.sample(rng.choice(WORD_POOLS), rng.randint(5, 8))
    times = rng.randint(3, 5)
    line = "- " + " ".join(items)
    prompt = rng.choice(("Copy this list {} times:\n{}", "Write this list on {} lines:\n{}"))
    return prompt.format(times, line), "\n".join([line] * times)


def _record(rng: random.Random) -> dict[str, str | int]:
    """The fields of one of a few schemas, in their order."""
    drawers: dict[str, Callable[[], str | int]] = {
        "name": lambda: rng.choice(NAMES),
        "age": lambda: rng.randint(5, 90),
        "city": lambda: rng.choice(CITIES),
        "job": lambda: rng.choice(JOBS),
        "pet": lambda: rng.choice(ANIMALS),
        "colour": lambda: rng.choice(COLORS),
    }
    return {key: drawers[key]() for key in rng.choice(SCHEMAS)}


def markdown(rng: random.Random) -> tuple[str, str]:
    """The fields of a record as a Markdown table, a row each."""
    record = _record(rng)
    fields = ", ".join(f"{key} {value}" for key, value in record.items())
    rows = "\n".join(f"| {key} | {value} |" for key, value in record.items())
    return f"Make a table: {fields}", f"| field | value |\n| --- | --- |\n{rows}"


def json_records(rng: random.Random) -> tuple[str, str]:
    """The fields of a record as JSON."""
    record = _record(rng)
    fields = ", ".join(f"{key} {json.dumps(value)}" for key, value in record.items())
    return f"Turn into JSON: {fields}", json.dumps(record, indent=2)


def pattern(rng: random.Random) -> tuple[str, str]:
    """A few items repeated in turn on numbered lines."""
    items = " ".join(
        rng.sample(rng.choice((COLORS, SHORT_NOUNS, tuple(LETTERS))), rng.randint(2, 4))
    )
    rounds = rng.randint(6, 10)
    prompt = rng.choice(("Repeat the pattern {} times: {}", "Write {} numbered rounds of: {}"))
    return prompt.format(rounds, items), "\n".join(f"{i}. {items}" for i in range(1, rounds + 1))


def letters(rng: random.Random) -> tuple[str, str]:
    """A run of the alphabet, forwards or backwards, with or without numbers."""
    size = rng.randint(12, 26)
    start = rng.randint(0, 26 - size)
    run = list(LETTERS[start : start + size])
    if rng.random() < 0.5:
        run = [letter.upper() for letter in run]
    if rng.random() < 0.5:
        run.reverse()
    first, last = run[0], run[-1]
    form = rng.choice(("with commas", "with numbers", "with dashes"))
    if form == "with numbers":
        run = [f"{letter}{i}" for i, letter in enumerate(run[:16], 1)]
        last = run[-1][0]
    separator = {"with commas": ", ", "with dashes": " - "}.get(form, " ")
    prompt = rng.choice(
        ("Write the letters from {} to {} {}.", "List {} to {} {}.", "Letters {} to {}, {}.")
    )
    return prompt.format(first, last, form), separator.join(run)


KINDS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = MappingProxyType(
    {
        "count": count,
        "times_table": times_table,
        "sum_table": sum_table,
        "copy_line": copy_line,
        "copy_list": copy_list,
        "markdown": markdown,
        "json_records": json_records,
        "pattern": pattern,
        "letters": letters,
    }
)
