"""The first pass: shards, digests, and ids that come twice."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.job.input import Place, RecordIndex, _repeated, build_index, read_from
from tests.infer.job.job_examples import lines
from wedlm_jax.records.files import JSONL, RecordFile


def file_of(path: Path, content: bytes) -> RecordFile:
    path.write_bytes(content)
    return RecordFile(path, str(path), path.name, JSONL)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_shard_begins_where_its_first_row_does(tmp_path: Path, size: int) -> None:
    rows = [{"id": i, "prompt": "naïve"} for i in range(11)]
    files = [
        file_of(tmp_path / "a", b"\xef\xbb\xbf" + lines(rows[:4]) + b"\n \n" + lines(rows[4:5])),
        file_of(tmp_path / "b", b"\n\n"),
        file_of(tmp_path / "c", lines(rows[5:])[:-1]),
    ]
    index = build_index(files, size)
    assert index.records == 11
    assert [shard.first for shard in index.shards] == list(range(0, 11, size))
    assert sum(shard.records for shard in index.shards) == 11
    assert index.sizes == tuple(file.path.stat().st_size for file in files)
    for shard in index.shards:
        places, contents = zip(*read_from(files, shard.place), strict=True)
        assert places[0] == shard.place
        assert [json.loads(content)["id"] for content in contents] == list(range(shard.first, 11))
        for place, content in zip(places, contents, strict=True):
            raw = files[place.file].path.read_bytes().split(b"\n")
            assert raw[place.line - 1].removeprefix(b"\xef\xbb\xbf") == content.rstrip(b"\n")


def test_the_digest_tells_inputs_apart_and_not_where_they_are(tmp_path: Path) -> None:
    a, b = lines([{"prompt": "a"}]), lines([{"prompt": "b"}])

    def digest(*contents: bytes, names: str = "xyz") -> str:
        named = zip(names, contents, strict=False)
        return build_index([file_of(tmp_path / n, c) for n, c in named], 5).digest

    assert digest(a) == digest(a, names="q") != digest(b)
    several = [
        digest(a, b),
        digest(b, a),
        digest(a + b),
        digest(a, b, names="pq"),
        digest(a, b, b""),
    ]
    assert len(set(several)) == len(several)
    assert digest(a, b) == several[0]


def brute_force(digests: list[int]) -> dict[int, int]:
    first: dict[int, int] = {}
    return {i: first[x] for i, x in enumerate(digests) if first.setdefault(x, i) != i}


@pytest.mark.parametrize("kinds", [1, 2, 10, 1000])
def test_repeated_finds_the_first_of_each(kinds: int) -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        digests = draw.integers(0, kinds, draw.integers(0, 50)).astype(np.uint64)
        repeated, originals = _repeated(digests)
        assert (np.diff(repeated) > 0).all()
        found = dict(zip(repeated.tolist(), originals.tolist(), strict=True))
        assert found == brute_force(digests.tolist())
        index = RecordIndex(len(digests), "", (), 1, (), repeated, originals)
        for i in range(len(digests)):
            assert index.original(i) == found.get(i)


def test_which_rows_claim_which_id(tmp_path: Path) -> None:
    claims: list[tuple[Any, int | None]] = [
        ({"id": "a"}, None),
        ({"id": 4}, None),
        ("no object", None),
        ({"prompt": "its number is 4"}, 1),
        ({"id": "4"}, None),
        ({"id": 3}, None),  # record 3 is no object, and has claimed nothing
        ({"id": True}, None),
        ({"id": True}, None),
        ({"id": 1.0}, None),
        ({"id": "a", "prompt": "x", "bad": 1}, 0),
    ]
    file = file_of(tmp_path / "x", lines([record for record, _ in claims]))
    index = build_index([file], 3)
    assert [index.original(i) for i in range(len(claims))] == [first for _, first in claims]


def test_memory_is_a_few_bytes_a_row(tmp_path: Path) -> None:
    count = 10_000
    file = file_of(
        tmp_path / "x", lines([{"id": f"record {i}", "prompt": "a" * 100} for i in range(count)])
    )
    told: list[int] = []
    tracemalloc.start()
    try:
        index = build_index([file], 1000, told.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert index.records == count
    assert index.shards[-1].place == Place(0, index.shards[-1].place.at, count - 999)
    # Digests, sorted and not, the order of them, and flags.
    assert peak < 60 * count + 300_000, f"{peak / count:.0f} bytes a row"
