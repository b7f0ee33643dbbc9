"""What `wedlm bench --compare identity` counts as different, and that it finds none on a tiny
model."""

import dataclasses

import pytest

from infer.bench.identity import first_differences
from infer.evaluate import EMBEDDED_QUESTIONS
from tests.infer.bench.conftest import compared
from wedlm_jax.completion import Completion

ONE = Completion("", [0, 1, 2], "length", 2, 8)


def test_the_first_place_that_differs():
    for token_ids, place in (([0, 9, 9], 1), ([0, 1], 2), ([0, 1, 2, 3], 3), ([0, 1, 2], None)):
        other = dataclasses.replace(ONE, token_ids=token_ids)
        expected = {} if place is None else {1: place}
        assert first_differences([ONE, ONE], [ONE, other]) == expected


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_verified_is_autoregressive_on_a_tiny_model(checkpoint, tmp_path, temperature, capsys):
    arguments = f"--model {checkpoint} --questions {EMBEDDED_QUESTIONS} --prompts 6 --batch-size 4 "
    arguments += f"--window-size 0 2 --max-tokens 8 --temperature {temperature} "
    ar, verified = compared("identity", tmp_path, arguments + "--regime reasoning prose")
    assert (ar["way"], verified["way"]) == ("AR", "masks, W = 2")
    assert ar["median_margin"] > 0
    assert ar["prompts"] == verified["prompts"] == 6
    assert ar["tokens"] == verified["tokens"]
    assert verified["differ"] == 0
    assert verified["median_margin"] is verified["largest_margin"] is None
    assert "masks, W = 2" in capsys.readouterr().out


def test_drafts_from_the_text_are_compared_where_there_are_no_masks(stock, tmp_path):
    arguments = f"--model {stock} --questions {EMBEDDED_QUESTIONS} --prompts 3 --batch-size 4 "
    arguments += "--max-tokens 24 --regime prose --draft lookup"
    ar, always = compared("identity", tmp_path, arguments)
    assert [one["way"] for one in (ar, always)] == ["AR", "lookup, always"]
    assert ar["tokens"] == always["tokens"]
    assert always["differ"] == 0
    # Random weights repeat themselves, which is what drafts from a text live on.
    assert always["tokens_per_forward"] > ar["tokens_per_forward"]
