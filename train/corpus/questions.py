"""Samples as questions: lines of JSON that `infer.heldout` reads."""

from __future__ import annotations

from train.corpus import Sample

MATCH = {"low_entropy": "text", "reasoning": "last_line", "prose": None}
"""By regime, what of an answer is compared: prose has no right answers."""


def as_question(sample: Sample) -> dict[str, str | None]:
    return {
        "regime": sample.regime,
        "kind": sample.kind,
        "prompt": sample.prompt,
        "answer": sample.answer,
        "match": MATCH[sample.regime],
    }
