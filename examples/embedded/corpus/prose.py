"""Free prose on a given subject: stories, descriptions, letters, weather notes, dialogues.

Sentences come in a random choice and order and branch at nearly every content word, so that no
model can be sure of more than a token or two ahead. The subject of the prompt stays the subject
of the text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from examples.embedded.corpus.grammar import GRAMMAR
from examples.embedded.corpus.words import ANIMALS, CITIES, NAMES, PLACES, SEASONS

_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")


def expand(template: str, rng: random.Random, subject: Mapping[str, str]) -> str:
    """Writes a sentence: slots that the subject names take it, others a random alternative."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in subject:
            return subject[name]
        return _SLOT.sub(fill, rng.choice(GRAMMAR[name]))

    text = _ARTICLE.sub(r"\1n ", _SLOT.sub(fill, template))
    first = next(i for i, letter in enumerate(text) if letter.isalpha())
    return text[:first] + text[first].upper() + text[first + 1 :]


def passage(
    form: str, rng: random.Random, subject: Mapping[str, str], least: int, most: int
) -> str:
    """Writes an opening, some different middle sentences in any order, and a close."""
    middles = rng.sample(GRAMMAR[f"{form}_mid"], rng.randint(least, most))
    templates = [
        rng.choice(GRAMMAR[f"{form}_open"]),
        *middles,
        rng.choice(GRAMMAR[f"{form}_close"]),
    ]
    return " ".join(expand(template, rng, subject) for template in templates)


def story(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(ANIMALS), rng.choice(PLACES)
    ask = rng.choice(("Write a short story about", "Tell me a story about", "Tell a tale of"))
    return f"{ask} a {a} and a {b}.", passage("story", rng, {"a": a, "b": b}, 2, 4)


def place(rng: random.Random) -> tuple[str, str]:
    a, b, city = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(CITIES)
    ask = rng.choice(("Describe a", "Write about a", "Tell me about a"))
    text = passage("place", rng, {"a": a, "b": b, "city": city}, 2, 4)
    return f"{ask} {b} near {city}, with a {a}.", text


def letter(rng: random.Random) -> tuple[str, str]:
    n, m = rng.sample(NAMES, 2)
    a, b, city = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(CITIES)
    text = passage("letter", rng, {"a": a, "b": b, "city": city}, 2, 3)
    return f"Write a letter from {n} to {m} about the {b}.", f"Dear {m},\n{text}\nYours, {n}"


def weather(rng: random.Random) -> tuple[str, str]:
    a, b, city = rng.choice(SEASONS), rng.choice(PLACES), rng.choice(CITIES)
    ask = rng.choice(("Write a note on the weather in", "Describe a day in"))
    text = passage("weather", rng, {"a": a, "b": b, "city": city}, 2, 4)
    return f"{ask} {city} in {a}, by the {b}.", text


def dialogue(rng: random.Random) -> tuple[str, str]:
    n, m = rng.sample(NAMES, 2)
    subject = {"a": rng.choice(ANIMALS), "b": rng.choice(PLACES)}
    lines = [f"{expand('{greet}', rng, subject)}, {m}."]
    slots = [
        "ask",
        "reply",
        *(rng.choice(("ask", "reply", "turn")) for _ in range(rng.randint(1, 3))),
    ]
    lines += [expand("{" + slot + "}", rng, subject) for slot in slots]
    text = "\n".join(f"{(n, m)[i % 2]}: {line}" for i, line in enumerate(lines))
    return f"Write a talk between {n} and {m} about a {subject['a']} and a {subject['b']}.", text


KINDS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = MappingProxyType(
    {"story": story, "place": place, "letter": letter, "weather": weather, "dialogue": dialogue}
)
