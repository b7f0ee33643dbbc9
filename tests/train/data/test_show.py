"""`wedlm rows`: what a packed row says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.examples.data import CHAT, EMBEDDED, tokenised, write_jsonl
from train.data.manifest import read_manifest
from train.data.show import read_rows
from train.data.synthetic import PackedDataset, load_dataset, save_dataset
from wedlm_jax.__main__ import main
from wedlm_jax.packing import TokenisedSample, row_arrays


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    records = [{"text": "A text of its own."}, {"messages": CHAT}]
    tokenised([write_jsonl(folder / "a.jsonl", records)], folder / "rows")
    return folder / "rows" / read_manifest(folder / "rows").shards[0].file


def test_the_samples_of_a_row_are_told_with_their_text(
    shard: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rows", str(shard), "0", "--tokenizer", str(EMBEDDED)]) == 0
    said = capsys.readouterr().out
    assert "== row 0, sample 1 of 2: " in said
    assert "A text of its own.<|endoftext|>" in said
    assert "3, 2, 1<|im_end|>" in said


def test_rows_of_the_synthetic_corpus_come_apart_as_they_were_packed(tmp_path: Path) -> None:
    samples = [
        TokenisedSample(np.arange(5, 5 + n, dtype=np.int32), np.arange(n) > 1) for n in (3, 9, 4)
    ]
    row = row_arrays(samples, row_length=32, block_size=4, pad_token_id=0)
    arrays = {name: np.stack([np.zeros_like(x), x]) for name, x in row.items()}
    save_dataset(PackedDataset(arrays, 0.5, 3, 0), tmp_path / "rows.npz")
    [found] = read_rows(tmp_path / "rows.npz", [1])
    for one, wanted in zip(found, samples, strict=True):
        np.testing.assert_array_equal(one.tokens, wanted.tokens)
        np.testing.assert_array_equal(one.trainable, wanted.trainable)
    [(rows, _)] = load_dataset(tmp_path / "rows.npz").row_sets()
    assert rows.place(1) == (str(tmp_path / "rows.npz"), 1)


@pytest.mark.parametrize(
    ("file", "row", "sentence"),
    [
        ("none.npz", "0", "none.npz: no such file"),
        ("text.npz", "0", "text.npz: no file of packed rows"),
        ("text.arrayrecord", "0", "text.arrayrecord: no file of packed rows"),
        ("", "7", "no row 7; it has rows 0 to 0"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    shard: Path,
    tmp_path: Path,
    file: str,
    row: str,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("text.npz", "text.arrayrecord"):
        (tmp_path / name).write_text("not rows")
    path = tmp_path / file if file else shard
    assert main(["rows", str(path), row, "--tokenizer", str(EMBEDDED)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
