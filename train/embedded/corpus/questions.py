"""Samples as questions: lines of JSON that `wedlm_jax.records.questions` reads."""

from __future__ import annotations

from typing import Any

from train.embedded.corpus import Sample

MATCH = {"low_entropy": "exact", "reasoning": "last_line", "prose": None}
"""By regime, what of an answer is compared: prose has no right answers."""


def as_question(sample: Sample) -> dict[str, Any]:
    """Returns the record that asks for the sample's answer in a chat."""
    return {
        "regime": sample.regime,
        "kind": sample.kind,
        "messages": [{"role": "user", "content": sample.prompt}],
        "answer": sample.answer,
        "match": MATCH[sample.regime],
    }
