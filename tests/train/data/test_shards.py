"""Packed rows on disk: what is written is read and shown, and what is damaged is named."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.embedded.corpus import generate
from tests.examples.data import BLOCK, CHAT, EMBEDDED, ROW, documents, tokenised, write_jsonl
from train.data.batches import TrainBatches
from train.data.shards import (
    ShardRows,
    decode_row,
    encode_row,
    read_manifest,
    read_rows,
    tokenizer_fingerprint,
)
from train.data.sources import open_sources
from train.data.tokenizer import train_tokenizer
from train.recipe.config import DataSection, PhaseSection, TrainConfig
from train.recipe.phases import phases_of
from wedlm_jax.__main__ import main
from wedlm_jax.errors import InputError
from wedlm_jax.packing import TokenisedSample, row_arrays

SIZES = {"row_length": 64, "block_size": 8, "pad_token_id": 3}


@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.integers(0, 2**31))
def test_a_row_comes_back_as_it_was_packed(sizes, seed):
    random = np.random.default_rng(seed)
    samples = [
        TokenisedSample(random.integers(0, 2**31 - 1, n).astype(np.int32), random.random(n) < 0.5)
        for n in sizes
    ]
    decoded = decode_row(encode_row(samples), **SIZES)
    expected = row_arrays(samples, **SIZES)
    assert decoded.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(decoded[name], array, strict=True)


@pytest.mark.parametrize(
    "record",
    [b"", b"\1\0\0", b"\0\0\0\0", b"\xff\xff\xff\xff" + bytes(40), b"\1\0\0\0\2\0\0\0" + bytes(4)],
)
def test_bytes_that_are_no_row_are_refused(record):
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever text; the reader names the row
        decode_row(record, **SIZES)
    longer = TokenisedSample(np.arange(65, dtype=np.int32), np.ones(65, bool))
    with pytest.raises(ValueError, match="1 samples take 72 tokens of 64"):
        decode_row(encode_row([longer]), **SIZES)


@pytest.fixture
def folder(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(40))
    tokenised([path], tmp_path / "rows", shard_rows=15)
    return tmp_path / "rows"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


def recipe(sources, **changes):
    fields = {"steps": 5, "rows": 4, "row_length": ROW, "block_size": BLOCK, **changes}
    return TrainConfig(data=DataSection(sources=sources), **fields)


def test_a_damaged_row_is_named_when_it_is_read(folder):
    manifest = read_manifest(folder)
    shard = folder / manifest.shards[1].file
    content = bytearray(shard.read_bytes())
    content[200:1200] = bytes(1000)  # behind the file's own header
    shard.write_bytes(bytes(content))
    rows = ShardRows(folder, read_manifest(folder), 0)
    assert len(rows[14]["tokens"]) == ROW
    with pytest.raises(InputError, match=r"rows: row \d+ cannot be read"):
        _ = [rows[number] for number in range(15, len(rows))]


def test_a_folder_that_is_not_whole_is_refused_by_name(folder, tmp_path):
    def refused(place, reason):
        with pytest.raises(InputError, match=reason):
            read_manifest(place)

    refused(tmp_path, r"no dataset\.json in this folder; `wedlm tokenize` makes one")
    refused(tmp_path / "a.jsonl", r"a.jsonl: is a file; run `wedlm tokenize --input ")
    shard = folder / read_manifest(folder).shards[0].file
    shard.write_bytes(b"cut")
    refused(folder, r"rows-00000-of-.*: has 3 bytes, but .* says")
    shard.unlink()
    refused(folder, r"rows-00000-of-.*: is missing, but")
    fields = json.loads((folder / "dataset.json").read_text())
    for broken, reason in (
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        (json.dumps({**fields, "version": 2}), "version 2; only version 1 is supported"),
        (json.dumps({**fields, "colour": 1}), "not a manifest"),
        (json.dumps({k: fields[k] for k in fields if k != "added_tokens"}), "not a manifest"),
    ):
        (folder / "dataset.json").write_text(broken)
        refused(folder, reason)


def test_rows_of_other_sizes_or_of_another_tokenizer_are_refused(folder, tokenizer):
    other = train_tokenizer((sample.answer for sample in generate(0, 50, split="train")), 300)
    for changes, opened_with, reason in (
        ({"row_length": 256}, tokenizer, "row-length 128, but row_length is 256 in the recipe; se"),
        ({"block_size": 16}, tokenizer, "block-size 32, but block_size is 16 in the recipe"),
        ({}, other, "rows: made with another tokenizer"),
    ):
        with pytest.raises(InputError, match=reason):
            open_sources(recipe({str(folder): 1.0}, **changes), opened_with, 0)


def test_a_fingerprint_is_of_the_tokenizer_and_not_of_its_file(tokenizer):
    content = json.loads((EMBEDDED / "tokenizer.json").read_text())
    same = Tokenizer.from_str(json.dumps(content, indent=7, sort_keys=True))
    assert tokenizer_fingerprint(same) == tokenizer_fingerprint(tokenizer)
    content["model"]["merges"] = content["model"]["merges"][:-200]
    other = Tokenizer.from_str(json.dumps(content))
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)


def test_a_run_reads_its_sources_by_weight(folder, tokenizer, tmp_path, capsys):
    counted = write_jsonl(tmp_path / "ones.jsonl", [{"token_ids": [7] * 100}] * 30)
    tokenised([counted], tmp_path / "ones")
    sources = {str(folder): 1.0, str(tmp_path / "ones"): 3.0}
    whole = recipe(sources, phases=[PhaseSection(from_step=2, learning_rate=1e-3)])
    data = open_sources(whole, tokenizer, pad_token_id=0)
    told = [line for line in capsys.readouterr().out.splitlines() if " of the rows; " in line]
    assert len(told) == 2, "each once, whatever phases read"
    assert "ones: 75.0% of the rows; 30 rows, 3,000 tokens" in told[1]
    with pytest.raises(InputError, match="a step takes 1,000 packed rows"):
        open_sources(dataclasses.replace(whole, rows=1000), tokenizer, 0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with TrainBatches(phases_of(whole), data, place) as batches:
        read = list(batches)
        named = batches.read_from(2)[0]
    assert read[0].tokens.shape == (1, 4, ROW)
    found = [
        row_arrays(samples, row_length=ROW, block_size=BLOCK, pad_token_id=0)["tokens"]
        for file, numbers in named.items()
        for samples in read_rows(Path(file), numbers)
    ]
    assert len(found) == 4
    assert set(map(tuple, found)) == set(map(tuple, np.asarray(read[2].tokens[0])))
    sevens = np.concatenate([np.asarray(rows.tokens[0, :, 0]) == 7 for rows in read])
    assert sevens.sum() == 15
    assert int(read[0].positions.max()) <= ROW


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
        ("text.arrayrecord", "0", "text.arrayrecord: not a file of packed rows"),
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
