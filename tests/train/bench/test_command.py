"""`python -m train.bench`: its options, and small runs of what it compares (steps and pods have
tests of their own)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train.bench.input
from train.bench.__main__ import main
from train.bench.attention import AttentionCost
from train.bench.input import InputSpeed
from wedlm_jax.errors import InputError

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_backends_of_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "attention.json"
    arguments = "--compare attention --lengths 64 128 --time-up-to 64 --heads 4 --head-dim 8 "
    arguments += f"--attention dense streams --passes 2 --output {output}"
    assert main(arguments.split()) == 0
    costs = [AttentionCost(**record) for record in json.loads(output.read_text())["attention"]]
    assert [(cost.way, cost.length) for cost in costs] == [
        ("dense", 64),
        ("streams", 64),
        ("dense", 128),
        ("streams", 128),
    ]
    assert [len(cost.milliseconds) for cost in costs] == [2, 2, 0, 0]
    # Forward two products over all pairs, backward four.
    assert costs[2].flops == 6 * 2 * 4 * 8 * (2 * 128) ** 2
    assert costs[3].flops is not None
    assert costs[3].flops < costs[2].flops
    assert 0 < costs[3].temporary_bytes < costs[2].temporary_bytes
    assert "L = 128, 4 heads of 8" in capsys.readouterr().out


def test_ways_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.bench.input, "RANDOM_TOKENS", 64 * 40)
    output = tmp_path / "input.json"
    arguments = "--compare input --lengths 64 --workers 0 --rows 4 --batches 3 --passes 2"
    assert main([*arguments.split(), "--output", str(output)]) == 0
    [speed] = [InputSpeed(**record) for record in json.loads(output.read_text())["input"]]
    assert (speed.workers, speed.row_length) == (0, 64)
    assert len(speed.rows_per_second) == len(speed.cpu_milliseconds) == 2
    assert min(speed.rows_per_second) > 0
    assert speed.row_bytes > 64, "at least a byte a token"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--compare step --rows 0", "--rows: expected at least 1"),
        ("--compare step --lengths 512 100", "multiples of 32, not 100"),
        ("--compare attention --heads 6 --kv-heads 4", "multiple of --kv-heads"),
        ("--compare attention --workers 2", "--workers is an option of input, not of attention"),
        ("--compare input --workers -1", "--workers: expected at least 0"),
        ("--compare input --data /no/such/folder", "/no/such/folder"),
        ("--compare input --data here --lengths 64", "have their length"),
        ("--compare pods --recipe no.yaml", "no.yaml"),
        (
            "--compare pods --passes 2",
            "an option of step, prompts, attention and input, not of pods",
        ),
    ],
)
def test_bad_options_are_refused(arguments: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        main(arguments.split())


def test_as_a_command_a_refusal_is_a_sentence_and_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "train.bench", "--compare", "input", "--batches", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m train.bench: --batches: expected at least 1\n"
