"""What `python -m infer.identity` counts as different, and that it finds none on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from infer import identity
from wedlm_jax.completion import Completion
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.errors import InputError


def completion(*margins: float) -> Completion:
    """Tokens 0, 1, 2 ..., each so many nats above the next best."""
    places = [
        TokenLogprob(-0.1, [(token, -0.1), (9, -0.1 - nats)]) for token, nats in enumerate(margins)
    ]
    return Completion("", list(range(len(margins))), "length", 2, 8, places)


def test_a_difference_is_told_with_the_margin_where_it_begins() -> None:
    expected = [completion(1.0, 0.25, 3.0), completion(1.0, 2.0, 3.0)]
    other = dataclasses.replace(expected[0], token_ids=[0, 9, 9])
    found = identity.compare(expected, [other, expected[1]])
    assert found["differ"] == 1
    assert found["prompts"] == 2
    assert found["median_margin"] == found["largest_margin"] == pytest.approx(0.25)
    assert found["tokens_per_forward"] == 1.5
    assert identity.compare(expected, expected)["differ"] == 0


def test_verified_is_autoregressive_on_a_tiny_model(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    arguments = f"--model {checkpoint} --prompts 6 --windows 2 --max-tokens 8 --rows 4"
    assert identity.main([*arguments.split(), "--output", str(output)]) == 0
    [line] = [json.loads(text) for text in output.read_text(encoding="utf-8").splitlines()]
    assert (line["window"], line["prompts"], line["differ"]) == (2, 6, 0)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="--prompts"):
        identity.main(["--prompts", "0"])
