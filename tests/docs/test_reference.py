"""docs/reference.md and the drawings are what the code says."""

import dataclasses

import pytest

from docs.drawings import DRAWINGS, FOLDER
from docs.losses import main
from docs.reference import PAGE, page
from tests.examples.data import write_jsonl
from train.recipe.config import TrainConfig
from wedlm_jax.__main__ import SUBCOMMANDS
from wedlm_jax.params import OPTIONS


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m docs.reference`"


def test_every_command_and_field_is_there():
    text = PAGE.read_text(encoding="utf-8")
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    plain = [name for name in names if f"| `{name}` |" in text or f"| `{name}." in text]
    assert plain == names
    assert all(f"| `{name}` |" in text for name in OPTIONS)
    assert all(f"### wedlm {name}\n" in text for name in SUBCOMMANDS)


def test_drawings_are_up_to_date():
    drawn = {name: draw().svg() for name, draw in DRAWINGS.items()}
    kept = {file.stem: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    assert kept == drawn, "run `python -m docs.drawings`"


def test_each_run_is_a_line_of_each_panel(tmp_path, capsys):
    for name, offset in (("one", 0.0), ("two", 1.0)):
        (tmp_path / name).mkdir()
        lines = [{"step": n, "mlm_loss": 9 - n + offset, "ar_loss": 1.0} for n in range(1, 13)]
        write_jsonl(tmp_path / name / "metrics.jsonl", lines)
    plot = tmp_path / "out.svg"
    assert main([str(tmp_path / "one"), str(tmp_path / "two"), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "one: masked tokens 1.5000" in said
    assert "two: masked tokens 2.5000" in said
    drawn = plot.read_text()
    assert all(text in drawn for text in (">one<", ">two<", "masked tokens", "next tokens"))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "three"), "--plot", str(plot)])
    assert "three: no metrics.jsonl here" in capsys.readouterr().err
