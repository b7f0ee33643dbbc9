"""The drawings are those that docs/drawings.py draws."""

import pytest

from docs.drawings import DRAWINGS, FOLDER


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_up_to_date(name):
    drawn = DRAWINGS[name]().svg()
    kept = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == drawn, "run `python -m docs.drawings`"


def test_there_are_no_others():
    assert {file.stem for file in FOLDER.iterdir()} == set(DRAWINGS)
