"""A seeded text corpus in three regimes of entropy.

A diffusion language model fills as many positions at once as it is sure of. The corpus makes
that visible with a model small enough for a laptop: `low_entropy` answers follow from the
prompt alone (copying, counting, formatting), `reasoning` answers have fixed wording and
computed numbers, and `prose` answers are free.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from examples.embedded.corpus import low_entropy, prose, reasoning

Split = Literal["train", "heldout"]
Draw = Callable[[random.Random], tuple[str, str]]
"""Draws one (prompt, answer) from a random stream; everything it needs comes from the stream."""

REGIMES: tuple[str, ...] = ("low_entropy", "reasoning", "prose")

KINDS: Mapping[str, Mapping[str, Draw]] = MappingProxyType(
    {"low_entropy": low_entropy.KINDS, "reasoning": reasoning.KINDS, "prose": prose.KINDS}
)
"""Regime, then kind, then the function that draws a sample of it."""

DEFAULT_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"low_entropy": 0.30, "reasoning": 0.45, "prose": 0.25}
)
"""Shares of the samples. Reasoning takes the most learning, so it comes most often."""

HELDOUT_ONE_IN = 20


MATCH = {"low_entropy": "exact", "reasoning": "last_line", "prose": None}
"""By regime, the part of an answer that is compared: prose has no right answers."""


class Sample(NamedTuple):
    """A prompt with its answer."""

    regime: str
    kind: str
    prompt: str
    answer: str

    def as_question(self) -> dict[str, Any]:
        """Returns the record that asks for the answer in a chat, as
        `wedlm_jax.records.questions` reads it."""
        return {
            "regime": self.regime,
            "kind": self.kind,
            "messages": [{"role": "user", "content": self.prompt}],
            "answer": self.answer,
            "match": MATCH[self.regime],
        }

    def as_conversation(self) -> dict[str, Any]:
        """Returns the record that `wedlm tokenize` reads: a question and its answer."""
        question = {"role": "user", "content": self.prompt}
        return {"messages": [question, {"role": "assistant", "content": self.answer}]}


def is_heldout(prompt: str) -> bool:
    """Returns whether a prompt is held out, which depends on its text alone."""
    digest = hashlib.blake2b(prompt.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0


def generate(
    seed: int,
    count: int,
    *,
    split: Split,
    weights: Mapping[str, float] | None = None,
) -> Iterator[Sample]:
    """Yields `count` samples of a split; the same arguments give the same samples.

    The splits share no prompt, whatever the seeds, because a prompt's hash decides where it
    belongs. `weights` are relative shares of the regimes; a regime left out does not occur.

    Raises:
        ValueError: for an unknown split or regime, a negative count, or weights that are
            negative or all zero.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', not {split!r}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    shares = _shares(DEFAULT_WEIGHTS if weights is None else weights)
    return _stream(random.Random(seed), count, split == "heldout", shares)


def _shares(weights: Mapping[str, float]) -> list[float]:
    """Returns the weights in the order of REGIMES, so that the caller's order changes nothing."""
    unknown = sorted(set(weights) - set(REGIMES))
    if unknown:
        raise ValueError(f"weights name unknown regimes {unknown}; known are {list(REGIMES)}")
    shares = [float(weights.get(regime, 0.0)) for regime in REGIMES]
    if min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"weights must be non-negative with a positive sum, got {dict(weights)}")
    return shares


def _stream(rng: random.Random, count: int, heldout: bool, shares: list[float]) -> Iterator[Sample]:
    kinds = {regime: tuple(KINDS[regime].items()) for regime in REGIMES}
    made = 0
    while made < count:
        regime = rng.choices(REGIMES, shares)[0]
        kind, draw = rng.choice(kinds[regime])
        prompt, answer = draw(rng)
        if is_heldout(prompt) != heldout:
            continue
        made += 1
        yield Sample(regime, kind, prompt, answer)
