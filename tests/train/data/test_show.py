"""`wedlm rows`: what a packed row says."""

import pytest

from tests.examples.data import CHAT, EMBEDDED, tokenised, write_jsonl
from train.data.manifest import read_manifest
from wedlm_jax.__main__ import main


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    records = [{"text": "A text of its own."}, {"messages": CHAT}]
    tokenised([write_jsonl(folder / "a.jsonl", records)], folder / "rows")
    return folder / "rows" / read_manifest(folder / "rows").shards[0].file


def test_the_samples_of_a_row_are_told_with_their_text(shard, capsys):
    assert main(["rows", str(shard), "0", "--tokenizer", str(EMBEDDED)]) == 0
    said = capsys.readouterr().out
    assert "== row 0, sample 1 of 2: " in said
    assert "A text of its own.<|endoftext|>" in said
    assert "3, 2, 1<|im_end|>" in said


@pytest.mark.parametrize(
    ("file", "row", "sentence"),
    [
        ("none.arrayrecord", "0", "none.arrayrecord: no such file"),
        ("text.arrayrecord", "0", "text.arrayrecord: no file of packed rows"),
        ("", "7", "no row 7; it has rows 0 to 0"),
    ],
)
def test_what_is_not_there_is_one_sentence(shard, tmp_path, file, row, sentence, capsys):
    (tmp_path / "text.arrayrecord").write_text("not rows")
    path = tmp_path / file if file else shard
    assert main(["rows", str(path), row, "--tokenizer", str(EMBEDDED)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
