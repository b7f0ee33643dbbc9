"""`wedlm train` on the command line: help, overrides, and exit status 2 for bad input."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import train.loop
from train.recipe.config import describe
from train.recipe.phases import largest_phase
from wedlm_jax.__main__ import main


@pytest.fixture
def asked_for(monkeypatch):
    """The configurations of the runs that the command starts, none of which trains."""
    configs = []

    def record(config, *, allow_changed=False):
        configs.append(config)
        return Path(config.output) / "hf"

    monkeypatch.setattr(train.loop, "train", record)
    return configs


def recipe(folder, text="steps: 5\n"):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_recipe_and_overrides_reach_the_loop(asked_for, tmp_path, capsys):
    status = main(["train", "--config", recipe(tmp_path), "rows=3", "output=some/run"])
    assert status == 0
    assert [(c.steps, c.rows) for c in asked_for] == [(5, 3)]
    assert capsys.readouterr().out.split() == ["exported", str(Path("some/run/hf"))]


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line for line in lines if line.startswith("  ") and line.split()}
    for name, default, meaning in describe():
        assert meaning in named[name]
        assert named[name].endswith(f"[{default}]")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("stpes: 5", [], "unknown key 'stpes'; did you mean 'steps'?"),
        ("steps: 5", ["rows=none"], "override 'rows=none': rows: expected an integer, not 'none'"),
        ("steps: 5", ["optimizer=adam"], "optimizer: expected fields of its own, such as"),
        ("steps: 5", ["data.sources=x"], "data.sources: expected a mapping, such as"),
        ("steps: 5", ["rows"], "override 'rows': expected key=value"),
        ("steps: 5", ["row_length=33"], "row_length 33 is not a multiple of block_size 32"),
    ],
)
def test_bad_input_is_one_line_and_status_2(asked_for, tmp_path, capsys, text, overrides, message):
    assert main(["train", "--config", recipe(tmp_path, text), *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wedlm train: ")
    assert message in error
    assert error.count("\n") == 1
    assert not asked_for


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--steps=5", "unrecognized arguments: --steps=5; fields are given as steps=VALUE\n"),
        ("--row-length", "unrecognized arguments: --row-length; fields are given as row_length="),
        ("--confg", "unrecognized arguments: --confg; did you mean --config?\n"),
    ],
)
def test_a_field_given_as_an_option_is_told_as_a_field(tmp_path, capsys, option, said):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", recipe(tmp_path, "steps: 5"), option])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_recipe_is_status_2(capsys, tmp_path):
    assert main(["train", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: no such configuration file" in capsys.readouterr().err


def test_no_recipe_at_all_is_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 2
    assert "--config" in capsys.readouterr().err


def test_every_size_of_batch_is_compiled_once_as_the_largest_is(tmp_path, monkeypatch, capsys):
    def compiled(config, topology, sources):
        assert sources == 1
        own = largest_phase(config).config
        assert config.loss.remat == ("auto" if own.rows == largest else "gate")
        # The largest is found to fit in two micro-batches, so the others are cut as it is.
        assert own.accumulation == (1 if own.rows == largest else 2)
        return SimpleNamespace(text=f"{own.rows} on {topology}", remat="gate", accumulation=2)

    monkeypatch.setattr("train.compile_only.compile_step", compiled)
    monkeypatch.setattr("train.compile_only.describe", lambda step: step.text)
    arguments = ["train", "--compile-only", "--config", recipe(tmp_path, "steps: 50\nrows: 2\n")]
    largest = 2
    assert main(arguments) == 0
    assert capsys.readouterr().out == "2 on v5p:4x4x4\n"
    phases = "[{from_step: 5, learning_rate: 1}, {from_step: 9, rows: 4}, {from_step: 20, rows: 2}]"
    largest = 4
    assert main([*arguments, f"phases={phases}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "from step 0:",
        "1 on v5p:4x4x4",
        "from step 9:",
        "4 on v5p:4x4x4",
    ]
