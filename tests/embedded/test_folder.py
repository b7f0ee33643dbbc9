"""`python -m examples.embedded`: the folder of the embedded model, made from a run's export."""

import pytest

import examples.embedded.__main__ as embedded
from examples.embedded.corpus import REGIMES, is_heldout
from tests.examples.checkpoints import hf_values
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from wedlm_jax.errors import InputError
from wedlm_jax.records.questions import read_questions


def test_weights_are_rounded_and_questions_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "QUESTIONS", {"low_entropy": 4, "reasoning": 3, "prose": 2})
    trained = write_tiny_checkpoint(tmp_path / "hf")
    folder = tmp_path / "embedded"
    folder.mkdir()
    (folder / "README.md").write_text("the card\n", encoding="utf-8")
    assert embedded.main([str(trained), str(folder)]) == 0
    before, after = hf_values(trained), hf_values(folder)
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert value.dtype.name == "bfloat16"
        assert (value == before[name].astype(value.dtype)).all()
    regimes = read_questions(folder / "heldout.jsonl")
    assert {name: len(some) for name, some in regimes.items()} == embedded.QUESTIONS
    assert list(regimes) == list(REGIMES)
    assert all(is_heldout(one.prompt) for some in regimes.values() for one in some)
    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((folder / name).read_bytes() == (trained / name).read_bytes() for name in names)
    assert (folder / "README.md").read_text(encoding="utf-8") == "the card\n"
    assert not list(tmp_path.glob("tmp*")), "nothing is left beside the folder"


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        embedded.main([str(tmp_path / "nowhere"), str(tmp_path / "embedded")])
