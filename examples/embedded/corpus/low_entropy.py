"""Answers that the prompt fixes to the last character: counting, tables, copies, formats.

A model that has learned the format is sure of nearly every token, so a window of 16 masks can
be filled in one or two forwards. Lists have a fixed length, and a copied word is known by its
role (the colour, the city): finding the end of a list, or the word after the previous one, is
more than a model of a million parameters can learn in an hour, and a mask that does not know its
place cannot be filled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from examples.embedded.corpus.words import ANIMALS, CITIES, COLORS, JOBS, NAMES, PLACES

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEPS = (1, 2, 3, 5)
LARGEST_COUNT = 100
COUNT_TERMS = 15
LETTER_RUN = 12
SUM_ROWS = 6
DOINGS = ("sits", "sleeps", "waits", "runs", "walks", "sings", "hides", "rests")
RELATIONS = ("near", "behind", "under", "above", "beside", "before")
SCHEMAS = (
    ("name", "age", "city", "job"),
    ("name", "pet", "colour", "city"),
    ("name", "job", "city", "pet", "age"),
    ("name", "colour", "pet", "age", "job", "city"),
)


def count(rng: random.Random) -> tuple[str, str]:
    """Counts up or down in equal steps, always with the same number of terms."""
    step = rng.choice(STEPS)
    low = rng.randint(0, LARGEST_COUNT - step * (COUNT_TERMS - 1))
    values = [low + step * i for i in range(COUNT_TERMS)]
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
    """Writes part of one multiplication table, one product per line; nothing above 10 x 10."""
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
    """Writes the same small sum or difference for a run of numbers: arithmetic with a steady
    shape."""
    n = rng.randint(2, 9)
    first = rng.randint(n, 20)
    sign, value = rng.choice((("+", n), ("-", -n)))
    verb = {"+": "Add {} to", "-": "Take {} from"}[sign]
    prompt = (verb + rng.choice((" each number from {} to {}.", " the numbers {} to {}."))).format(
        n, first, first + SUM_ROWS - 1
    )
    lines = (f"{i} {sign} {n} = {i + value}" for i in range(first, first + SUM_ROWS))
    return prompt, "\n".join(lines)


def copy_line(rng: random.Random) -> tuple[str, str]:
    """Writes one sentence several times, once per line."""
    times = rng.randint(3, 6)
    line = (
        f"The {rng.choice(COLORS)} {rng.choice(ANIMALS)} {rng.choice(DOINGS)} "
        f"{rng.choice(RELATIONS)} the {rng.choice(COLORS)} {rng.choice(PLACES)}."
    )
    prompt = rng.choice(("Write this line {} times:\n{}", "Repeat {} times:\n{}"))
    return prompt.format(times, line), "\n".join([line] * times)


def _record(rng: random.Random) -> dict[str, str | int]:
    """Draws the fields of one of a few schemas, in their order."""
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
    """Writes the fields of a record as a Markdown table, one per row."""
    record = _record(rng)
    fields = ", ".join(f"{key} {value}" for key, value in record.items())
    rows = "\n".join(f"| {key} | {value} |" for key, value in record.items())
    return f"Make a table: {fields}", f"| field | value |\n| --- | --- |\n{rows}"


def json_records(rng: random.Random) -> tuple[str, str]:
    """Writes the fields of a record as JSON."""
    record = _record(rng)
    fields = ", ".join(f"{key} {json.dumps(value)}" for key, value in record.items())
    return f"Turn into JSON: {fields}", json.dumps(record, indent=2)


def letters(rng: random.Random) -> tuple[str, str]:
    """Writes a run of the alphabet of fixed length, forwards or backwards."""
    start = rng.randint(0, len(LETTERS) - LETTER_RUN)
    run = list(LETTERS[start : start + LETTER_RUN])
    if rng.random() < 0.5:
        run = [letter.upper() for letter in run]
    if rng.random() < 0.5:
        run.reverse()
    form, separator = rng.choice((("with commas", ", "), ("with dashes", " - ")))
    prompt = rng.choice(
        ("Write the letters from {} to {} {}.", "List {} to {} {}.", "Letters {} to {}, {}.")
    )
    return prompt.format(run[0], run[-1], form), separator.join(run)


_DRAWS = (count, times_table, sum_table, copy_line, markdown, json_records, letters)
KINDS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = MappingProxyType(
    {draw.__name__: draw for draw in _DRAWS}
)
