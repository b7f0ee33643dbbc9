"""What messages are made of: hints, short texts, and the command that installs an extra."""

from __future__ import annotations

import sys

import pytest

from wedlm_jax.errors import InputError, did_you_mean, require_extra, shortened


def test_the_nearest_name_is_meant_or_all_are_named() -> None:
    assert did_you_mean("temprature", ["temperature", "top_p"]) == "did you mean 'temperature'?"
    assert did_you_mean("x", ["temperature", "top_p"]) == "there are temperature, top_p"


def test_a_text_is_put_on_one_line_and_cut() -> None:
    assert shortened(" a\n b ") == "a b"
    assert shortened("x" * 30, 10) == "x" * 7 + "..."


def test_a_missing_extra_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extra("this", "test", "json", "pytest")
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(InputError) as caught:
        require_extra("this", "int8", "json", "qwix")
    assert str(caught.value) == (
        'this needs qwix, which is not installed: pip install "wedlm-jax[int8]"'
    )
    with pytest.raises(InputError, match="needs qwix and no_such_package, which are not installed"):
        require_extra("this", "int8", "qwix", "no_such_package")
