"""Compressed files of records: the job is that of the same records unpacked."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest

from infer.job import input as job_input
from tests.infer.job.job_examples import contents, lines, results, run, stop_after, words

RECORDS = [{"id": f"r{i}", **one} for i, one in enumerate(words(23))]


def packed(content: bytes, ending: str) -> bytes:
    if ending == "gz":
        return gzip.compress(content)
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return bytes(sink.getvalue())


def write_packed(ending: str) -> str:
    name = f"in.jsonl.{ending}"
    # Two members, one after the other, as `cat` joins them.
    halves = [lines(RECORDS[:9]), lines(RECORDS[9:])]
    Path(name).write_bytes(b"".join(packed(half, ending) for half in halves))
    Path("in.jsonl").write_bytes(b"".join(halves))
    return name


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_results_are_those_of_the_file_unpacked(
    work: Path, model: Path, quick: None, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_packed(ending)
    assert run(model, "--shard-size", "2", output="plain") == 0
    stop_after(2, KeyboardInterrupt(), monkeypatch)
    assert run(model, "--shard-size", "2", input=name, output="out") == 130
    hosts = ["--num-hosts", "2", "--host-id"]
    assert [run(model, *hosts, i, input=name, output="out") for i in "01"] == [0, 0]
    assert contents("out") == contents("plain")
    assert [one["id"] for one in results("out")] == [one["id"] for one in RECORDS]


@pytest.mark.parametrize("host", ["0", "1"])
def test_a_file_is_unpacked_once_for_all_shards_of_a_host(
    work: Path, model: Path, quick: None, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, opened = write_packed("gz"), list[Any]()
    read = job_input.read_from

    def noting(*arguments: Any) -> Any:
        opened.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(job_input, "read_from", noting)
    run(model, "--shard-size", "2", "--num-hosts", "2", "--host-id", host, input=name, output="out")
    assert len(opened) == 1


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("how", ["cut", "no", "broken"])
def test_damaged_files_are_named(
    work: Path,
    model: Path,
    never_decodes: None,
    ending: str,
    how: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = write_packed(ending)
    whole = Path(name).read_bytes()
    cut, middle = whole[:-9], len(whole) // 4
    broken = whole[:middle] + whole[middle + 7 :]
    Path(name).write_bytes({"cut": cut, "no": lines(RECORDS), "broken": broken}[how])
    assert run(model, input=name) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"wedlm generate: {name}: the compressed data is damaged (")
    assert said.count("\n") == 1
    assert not Path("out.jsonl").exists()


def test_without_pyarrow_one_sentence_says_how_to_get_it(
    work: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write_packed("zst")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(model, input=name) == 2
    said = capsys.readouterr().err
    assert f"{name}: zstd files need pyarrow, which is not installed: pip install" in said
