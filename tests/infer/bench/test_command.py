"""`wedlm bench` on a tiny checkpoint: what is compared decodes the same work, and what is counted
is there."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from benchmarks.options import SHAPES
from infer.bench.command import main
from infer.bench.rival import RIVAL_ASSISTED, Rival, config_for_transformers
from infer.bench.speeds import AR, Speed, Way, window_ways
from infer.bench.subject import load_subject
from tests.infer.bench.conftest import compared
from tests.infer.few_questions import PROMPTS, write_questions
from wedlm_jax.engine.interface import Request
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("questions") / "few.jsonl")


def test_ar_has_no_modes():
    assert window_ways([4, 0, "auto"], ["paper", "verified"]) == [
        AR,
        Way("W = 4, paper", 4, mode="paper"),
        Way("W = auto, paper", "auto", mode="paper"),
        Way("W = 4, verified", 4),
        Way("W = auto, verified", "auto"),
    ]
    control = window_ways([0, 0, 4], ["verified"])
    assert [way.name for way in control] == ["AR", "AR again", "W = 4, verified"]
    assert len({way.engine for way in control}) == 3


@pytest.mark.full
def test_windows_are_compared_and_drawn(checkpoint, questions, tmp_path, capsys):
    plot = tmp_path / "speeds.svg"
    arguments = f"--model {checkpoint} --questions {questions} --batch-size 2 --passes 2 "
    arguments += f"--max-tokens 8 --window-size 0 2 --plot {plot}"
    speeds = [Speed(**record) for record in compared("windows", tmp_path, arguments)]
    assert [speed.way for speed in speeds] == ["AR", "W = 2, paper", "W = 2, verified"] * 2
    assert [speed.regime for speed in speeds] == ["low_entropy"] * 3 + ["prose"] * 3
    for ar, paper, verified in (speeds[:3], speeds[3:]):
        assert all(len(s.seconds) == 2 and min(s.seconds) > 0 for s in (ar, paper, verified))
        assert ar.tokens == verified.tokens, "verified says what AR says"
        assert ar.forwards == ar.tokens, "AR takes a forward for each token"
        assert verified.forwards <= verified.tokens
        assert 0 < paper.tokens <= len(PROMPTS) * 8
    printed, drawn = capsys.readouterr().out, plot.read_text(encoding="utf-8")
    assert all(speed.way in printed and speed.way in drawn for speed in speeds)


@pytest.mark.parametrize("kind", ["wedlm", "qwen3"])
@pytest.mark.full
def test_drafts_are_compared_by_where_they_come_from(
    kind, checkpoint, stock, questions, tmp_path, capsys
):
    model = checkpoint if kind == "wedlm" else stock
    arguments = f"--model {model} --questions {questions} --batch-size 2 --prompts 3 --passes 1 "
    arguments += "--max-tokens 8 --regime prose"
    speeds = [Speed(**record) for record in compared("drafts", tmp_path, arguments)]
    masks = ["masks, W = auto"] if kind == "wedlm" else []
    assert [speed.way for speed in speeds] == ["AR", *masks, "lookup, always", "auto"]
    assert len({speed.tokens for speed in speeds}) == 1, "drafts change no token"
    ar, always = speeds[0], speeds[-2]
    assert ar.forwards == ar.tokens
    assert not any(ar.drafts.values())
    assert always.drafts["lookup"] > 0 == always.drafts["masks"]
    assert always.forwards == always.tokens - always.drafts["lookup_accepted"]
    printed = capsys.readouterr().out
    # A narrow table breaks names between their words.
    assert all(word in printed for speed in speeds for word in speed.way.split())


@pytest.mark.full
def test_the_rival_says_what_we_say(checkpoint):
    pytest.importorskip("torch")
    subject = load_subject({"model": str(checkpoint), "dtype": "float32"})
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, 300, size).tolist() for size in (5, 11, 3)]
    params = SamplingParams(max_tokens=8)
    engine = subject.engine(0, 2)
    ours = engine.decode([Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    rival = Rival(subject, str(checkpoint))
    assert rival.decode(prompts, max_tokens=8, sequences=2) == [one.token_ids for one in ours]
    for drafter in rival.drafters:
        before = rival.forwards
        drafted = rival.decode(prompts, max_tokens=8, sequences=1, drafter=drafter)
        assert drafted == [one.token_ids for one in ours]
        assert 0 < rival.forwards - before <= sum(len(one.token_ids) for one in ours)
    assert drafter == RIVAL_ASSISTED
    tokens = sum(map(len, drafted))
    assert 2 * (rival.forwards - before) < tokens, "a model that drafts for itself is right"

    params = dataclasses.replace(params, mode="paper", entropy_threshold=5.0, max_tokens=20)
    engine = subject.engine(4, 2)
    ours = engine.decode([Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    before = rival.forwards
    whole = rival.recompute(prompts, window=4, params=params)
    assert whole == [one.token_ids for one in ours]
    forwards = sum(one.num_forwards for one in ours)
    assert rival.forwards - before == forwards < sum(map(len, whole))


@pytest.mark.full
def test_the_rivals_first_layers_draft_for_it(checkpoint):
    pytest.importorskip("torch")
    rival = Rival(load_subject({"dtype": "float32"}), "4")
    prompts = [list(range(100, 120)), list(range(50, 60))]
    decode = partial(rival.decode, prompts, max_tokens=12, sequences=1)
    counts = []
    for drafter in (None, RIVAL_ASSISTED):
        before = rival.forwards
        answers = decode(drafter=drafter)
        counts.append((answers, rival.forwards - before))
    assert counts[0][0] == counts[1][0]
    assert counts[0][1] == sum(map(len, counts[0][0])), "AR takes a forward for each token"
    assert counts[1][1] <= counts[0][1], "forwards of its first layers do not count"
    for assistant, message in {
        "6": "--assistant: expected fewer than the model's 6 layers",
        "nowhere": "--assistant: nowhere: no such",
        str(checkpoint): "they need the same tokenizer",
    }.items():
        with pytest.raises(InputError, match=message):
            Rival(load_subject({"dtype": "float32"}), assistant)


def test_a_shape_that_transformers_has_not():
    both = dataclasses.replace(SHAPES["qwen3-0.6b"], attention_bias=True)
    with pytest.raises(InputError, match="this model, which has qk_norm, attention_bias"):
        config_for_transformers(both, "float32")
    qwen2 = dataclasses.replace(both, qk_norm=False)
    assert config_for_transformers(qwen2, "float32")["model_type"] == "qwen2"


def test_the_help_says_which_comparison_has_which_option(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "one or more [windows 1 8 32 128, drafts 1 8 32, identity 64]" in text
    assert "--passes N windows, drafts: timed passes [3]" in text
    assert "--max-tokens N maximum tokens of a completion [160]" in text
