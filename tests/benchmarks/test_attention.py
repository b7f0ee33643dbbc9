"""Backends of attention, compiled and timed on small rows; and a benchmark as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attention import main
from wedlm_jax.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_backends_of_attention(tmp_path, capsys):
    output = tmp_path / "attention.json"
    arguments = "--lengths 64 128 --time-up-to 64 --heads 4 --head-dim 8 "
    arguments += f"--attention dense streams --passes 2 --output {output}"
    assert main(arguments.split()) == 0
    costs = json.loads(output.read_text())["attention"]
    assert [(cost["way"], cost["length"]) for cost in costs] == [
        ("dense", 64),
        ("streams", 64),
        ("dense", 128),
        ("streams", 128),
    ]
    assert [len(cost["ms"]) for cost in costs] == [2, 2, 0, 0]
    # Forward two products over all pairs, backward four.
    dense, streams = costs[2:]
    assert dense["GFLOP"] * 1e9 == 6 * 2 * 4 * 8 * (2 * 128) ** 2
    assert streams["GFLOP"] < dense["GFLOP"]
    assert 0 < streams["memory, MiB"] < dense["memory, MiB"]
    assert "4 heads of 8, 2 KV heads, float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--lengths 512 100", "multiples of 32, not 100"),
        ("--heads 6 --kv-heads 4", "multiple of --kv-heads"),
    ],
)
def test_bad_options_are_refused(arguments, says):
    with pytest.raises(InputError, match=says):
        main(arguments.split())


def test_as_a_command_a_refusal_is_a_sentence_and_status_2():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention", "--lengths", "100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "python -m benchmarks.attention: --lengths: expected multiples of 32, not 100\n"
    )
