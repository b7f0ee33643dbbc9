"""`wedlm bench` on a tiny checkpoint: what is compared decodes the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import infer.bench
from infer.bench import few_shot, mixed_lengths
from infer.heldout import read_questions
from infer.speed import Speed
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "heldout.jsonl"
    rows = [
        {"regime": regime, "kind": "k", "prompt": f"{i} +", "answer": "2", "match": match}
        for regime, match in (("prose", None), ("reasoning", "text"))
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_work_is_the_same_every_time(checkpoint: Path, questions: Path) -> None:
    llm, regimes = LLM(checkpoint, window_size=0), read_questions(questions)
    work = mixed_lengths(llm, regimes, 20)
    assert work == mixed_lengths(llm, regimes, 20)
    limits = {params.max_tokens for _, params in work}
    assert 4 <= min(limits) < 20 < max(limits) <= 160
    prompts = [tuple(prompt) for prompt, _ in few_shot(llm, regimes, 6)]
    shared = min(len(prompt) for prompt in prompts) - 24
    assert len(set(prompts)) == 3, "what is left behind the shots"
    assert len({prompt[:shared] for prompt in prompts}) == 1


def test_the_command_compares_and_draws(
    checkpoint: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(infer.bench, "LENGTHS", (2, 8))
    output, plot = tmp_path / "speeds.json", tmp_path / "speeds.svg"
    arguments = f"--model {checkpoint} --questions {questions} --rows 2 --prompts 5 --passes 2 "
    arguments += f"--window-size 0 2 --fixed-window 2 --output {output} --plot {plot}"
    assert infer.bench.main(arguments.split()) == 0
    speeds = {row["way"]: Speed(**row) for row in json.loads(output.read_text(encoding="utf-8"))}
    fixed, continuous, each, once, alike, several, ar, paper, verified = speeds.values()
    assert all(len(s.seconds) == 2 and min(s.seconds) > 0 for s in speeds.values())
    assert (fixed.tokens, fixed.forwards) == (continuous.tokens, continuous.forwards)
    assert (each.tokens, each.forwards) == (once.tokens, once.forwards)
    assert (alike.tokens, alike.forwards) == (several.tokens, several.forwards)
    assert ar.tokens == paper.tokens == verified.tokens == fixed.tokens
    assert ar.forwards == ar.tokens - 5 >= verified.forwards
    printed, drawn = capsys.readouterr().out, plot.read_text(encoding="utf-8")
    assert all(way in printed and way in drawn for way in speeds)


def test_some_comparisons_alone(
    checkpoint: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer.bench, "LENGTHS", (2, 4))
    output = tmp_path / "speeds.json"
    arguments = f"--model {checkpoint} --questions {questions} --rows 1 --prompts 2 --passes 1 "
    arguments += f"--compare windows --window-size 0 2 --mode verified --output {output}"
    assert infer.bench.main(arguments.split()) == 0
    ways = [row["way"] for row in json.loads(output.read_text(encoding="utf-8"))]
    assert ways == ["AR", "W = 2, verified"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--rows 0", "--rows"),
        ("--passes 0", "--passes"),
        ("--prompts 0", "--prompts"),
        ("--prompts -3", "--prompts"),
        ("--window-size four", "'four'"),
        ("--questions nowhere.jsonl", "nowhere.jsonl"),
        ("--plot speeds.bmp", "ends with one of"),
        ("--output /no/such/speeds.json", "no such folder"),
    ],
)
def test_bad_options_are_refused(arguments: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        infer.bench.main(arguments.split())
