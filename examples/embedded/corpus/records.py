"""Samples as lines of JSON: questions to ask, or conversations to train on."""

from __future__ import annotations

from typing import Any

from examples.embedded.corpus import Sample

MATCH = {"low_entropy": "exact", "reasoning": "last_line", "prose": None}
"""By regime, what of an answer is compared: prose has no right answers."""


def as_question(sample: Sample) -> dict[str, Any]:
    """Returns the record that asks for the sample's answer in a chat, as
    `wedlm_jax.records.questions` reads it."""
    return {
        "regime": sample.regime,
        "kind": sample.kind,
        "messages": [{"role": "user", "content": sample.prompt}],
        "answer": sample.answer,
        "match": MATCH[sample.regime],
    }


def as_conversation(sample: Sample) -> dict[str, Any]:
    """Returns the record that `wedlm tokenize` reads: a question and its answer."""
    question = {"role": "user", "content": sample.prompt}
    return {"messages": [question, {"role": "assistant", "content": sample.answer}]}
