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

from train.corpus.grammar import GRAMMAR
from train.corpus.words import ANIMALS, CITIES, NAMES, PLACES

SEASONS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December", "spring", "summer", "autumn", "winter",
)  # fmt: skip

_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")


def expand(slot: str, rng: random.Random, subject: Mapping[str, str]) -> str:
    """One sentence of a slot: the subject where it is named, else a random alternative."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in subject:
            return subject[name]
        return _SLOT.sub(fill, rng.choice(GRAMMAR[name]))

    text = _ARTICLE.sub(r"\1n ", _SLOT.sub(fill, rng.choice(GRAMMAR[slot])))
    first = next(i for i, letter in enumerate(text) if letter.isalpha())
    return text[:first] + text[first].upper() + text[first + 1 :]


def passage(
    form: str, rng: random.Random, subject: Mapping[str, str], least: int, most: int
) -> str:
    """An opening, some different middle sentences in any order, and a close."""
    middles = rng.sample(GRAMMAR[f"{form}_mid"], rng.randint(least, most))
    whole = [expand(f"{form}_open", rng, subject)]
    whole += [_sentence(middle, rng, subject) for middle in middles]
    return " ".join([*whole, expand(f"{form}_close", rng, subject)])
