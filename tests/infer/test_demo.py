"""The demo shows every prompt, measures decoders, explains its columns, and draws a picture."""

import re

import pytest

import infer.demo
from infer.score import columns
from tests.infer.few_questions import PROMPTS, write_questions
from wedlm_jax.errors import InputError


@pytest.fixture(autouse=True)
def embedded(checkpoint, tmp_path, monkeypatch):
    """A tiny model and few questions in the place of the embedded ones."""
    path = write_questions(tmp_path / "heldout.jsonl")
    monkeypatch.setattr("wedlm_jax.checkpoint.open.EMBEDDED_MODEL", checkpoint)
    monkeypatch.setattr("infer.evaluate.EMBEDDED_QUESTIONS", path)


def test_without_a_terminal_it_prints_plain_lines(capsys):
    assert infer.demo.main(["--samples", "4"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert all(f"> {prompt}" in printed for prompt in PROMPTS)
    assert printed.count(" forwards (AR: ") == 2 * len(PROMPTS)
    assert "wrong: expected 'no'" in printed
    table, explained = printed.split(" measured ")[1].split("\n\n", 1)
    assert "paper τ=0.4" in table
    assert max(map(len, table.splitlines())) <= 80
    for name, meaning in columns("AR").items():
        words = (
            re.escape(name.replace("/\n", "/").replace("\n", " "))
            + r"\s+"
            + re.escape(meaning[:30])
        )
        assert re.search(words, explained), name


@pytest.mark.full
def test_the_picture_has_a_line_for_each_forward(tmp_path, capsys):
    picture = tmp_path / "demo.svg"
    assert infer.demo.main(["--record", str(picture)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {picture}\n")
    drawn = picture.read_text(encoding="utf-8").replace("&#160;", " ")
    assert drawn.startswith("<svg")
    assert "url(" not in drawn.replace("url(#", ""), "loads something from elsewhere"
    forwards = [int(n) for n in re.findall(r">forward (\d+)", drawn)]
    assert forwards[0] == 1
    assert len(re.findall(r"\(AR: \d+\)", drawn)) == 2
    first = drawn
    assert infer.demo.main(["--record", str(picture)]) == 0
    assert picture.read_text(encoding="utf-8").replace("&#160;", " ") == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--samples 1", "--samples: expected at least 4, not 1"),
        ("--seconds -1", "--seconds: expected 0 to 60, not -1"),
        ("--seconds nan", "--seconds"),
        ("--record demo.png", "--record demo.png: expected an .svg file"),
        ("--record no/such/demo.svg", "--record no/such/demo.svg: expected"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        infer.demo.main(arguments.split())
