"""Where records come from: files, folders, pipes; and what cannot be read or written."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.infer.job.job_examples import lines, results, run, words, write
from wedlm_jax.__main__ import main


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a"}\n{"prompt": "mat"}\n',
        '{"prompt": "a"}\n{"prompt": "mat"}',
        '\ufeff{"prompt": "a"}\r\n\r\n   \n{"prompt": "mat"}\r\n\n',
    ],
)
def test_line_ends_blank_lines_and_a_byte_order_mark(
    work: Path, model: Path, quick: None, decoded: list[Any], content: str
) -> None:
    Path("in.jsonl").write_bytes(content.encode("utf-8"))
    assert run(model, "--shard-size", "1") == 0
    assert [record["id"] for record in results()] == [1, 2]
    write([{"prompt": "a"}, {"prompt": "mat"}])
    assert run(model, output="plain.jsonl") == 0
    assert results("plain.jsonl") == results()


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_input_without_a_record_is_refused_before_a_model_is_loaded(
    work: Path, content: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_text(content)
    assert run(work / "never-loaded", output=output) == 2
    said = "wedlm generate: in.jsonl: has no records\n"
    assert capsys.readouterr().err == said
    assert not Path(output).exists()


def test_files_and_folders_are_one_row_after_the_other(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"id": f"{i}", "prompt": "a"} for i in range(12)]
    records[7] = {"id": "7"}
    write(records[:2], "first.jsonl")
    write(records[2:3], "folder/a.jsonl")
    write([], "folder/b.jsonl")
    write(records[3:8], "folder/b/c.jsonl")
    write(records[8:9], "folder/z.JSONL")
    write(records[9:], "prompts")
    write([{"id": "never"}], "folder/.hidden/x.jsonl")
    write([{"id": "never"}], "folder/notes.md")
    inputs = ["first.jsonl", "folder", "prompts"]
    command = ["generate", "--model", str(model), "--max-tokens", "24", "--window-size", "4"]
    more = ["--batch-size", "4", "--shard-size", "4"]
    assert main([*command, *more, "--input", *inputs, "--output", "out"]) == 0
    done = results("out")
    assert [record["id"] for record in done] == [record["id"] for record in records]
    assert (done[7]["line"], done[7]["file"]) == (5, "folder/b/c.jsonl")
    assert "1 file in the folders, neither .jsonl nor .parquet, not read" in capsys.readouterr().err

    # Moved as a whole, the input is the same.
    (work / "moved").mkdir()
    for name in inputs:
        Path(name).rename(work / "moved" / name)
    again = [f"{work}/moved/{name}" for name in inputs]
    assert main([*command, *more, "--input", *again, "--output", "out"]) == 0
    # In another order it is not.
    assert main([*command, *more, "--input", *again[::-1], "--output", "out"]) == 2


@pytest.mark.parametrize("name", ["-", "fifo"])
def test_a_pipe_is_kept_until_the_job_ends(
    work: Path,
    model: Path,
    quick: None,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = lines([*words(7), {"promt": "a"}])

    def piped() -> int:
        if name == "-":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
            return run(model, "--shard-size", "3", input="-", output="out")
        if not Path("fifo").exists():
            os.mkfifo("fifo")
        writer = threading.Thread(target=lambda: Path("fifo").write_bytes(content))
        writer.start()
        try:
            return run(model, "--shard-size", "3", input="fifo", output="out")
        finally:
            writer.join()

    with monkeypatch.context() as patch:
        patch.setattr(
            "infer.job.job.decode_share",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        assert piped() == 130
    (spooled,) = Path("out").glob("spooled-*.jsonl")
    assert spooled.read_bytes() == content
    # A job of a pipe goes on from the pipe, or from what was kept of it.
    assert run(model, input=str(spooled), output="out") == 0
    records = results("out")
    assert [record["id"] for record in records] == list(range(1, 9))
    assert records[7]["line"] == 8
    assert not spooled.exists()
    for _ in range(2):
        assert piped() == 0
        assert results("out") == records
        assert not list(Path("out").glob("spooled-*"))
    write(words(2), "more.jsonl")
    assert main(["generate", "--input", name, "more.jsonl", "--output", "out"]) == 2
    assert "a pipe is read alone, without other input" in capsys.readouterr().err
    assert run(model, "--num-hosts", "2", "--host-id", "0", input=name, output="out") == 2
    assert "one pipe is not read by several hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("input_file", "output_file", "message"),
    [
        ("missing.jsonl", "out.jsonl", "missing.jsonl: no such file or folder"),
        (
            "empty",
            "out.jsonl",
            "empty: no .jsonl, .jsonl.gz, .jsonl.zst or .parquet file is in this folder",
        ),
        ("in.jsonl.bz2", "out.jsonl", "in.jsonl.bz2: is compressed; unpack it, or pipe what it"),
        ("in.jsonl", "missing/out.jsonl", "missing/out.jsonl: no such folder, missing"),
        ("in.jsonl", "folder.jsonl", "folder.jsonl: exists and is not a file"),
        ("in.jsonl", "out.csv", "out.csv: expected a folder, or a .jsonl or .parquet file, as out"),
        ("in.jsonl", "in.jsonl", "in.jsonl: input and output are the same file"),
        ("in.jsonl", "link.jsonl", "link.jsonl: input and output are the same file"),
        ("in.jsonl", "a-file", "a-file: is a file; the output needs a folder of this name"),
        ("in.jsonl", "folder", "folder: expected a new folder, or a job's, but it contains"),
        ("folder", "folder", "folder/in.jsonl: the input is inside the output folder"),
        ("folder", "folder/out", "folder/out: the output is inside the input folder folder"),
        ("folder", "folder/out.jsonl", "folder/out.jsonl: the output is inside the input folder"),
        ("folder/in.jsonl", "folder", "folder/in.jsonl: the input is inside the output folder"),
    ],
)
def test_paths_that_cannot_be_used(
    work: Path,
    model: Path,
    quick: None,
    input_file: str,
    output_file: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("in.jsonl", "a-file", "folder/in.jsonl", "in.jsonl.bz2"):
        write(words(), name)
    Path("folder.jsonl").mkdir()
    Path("empty").mkdir()
    Path("link.jsonl").symlink_to(work / "in.jsonl")
    before = sorted(work.rglob("*"))
    assert run(model, input=input_file, output=output_file) == 2
    assert message in capsys.readouterr().err
    assert sorted(work.rglob("*")) == before
    assert Path("in.jsonl").read_bytes() == lines(words())


def test_a_file_named_twice(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(words(2), "folder/in.jsonl")
    inputs = ["--input", "folder", "--input", "folder/in.jsonl"]
    assert main(["generate", *inputs, "--output", "out"]) == 2
    assert "folder/in.jsonl: is named twice as input" in capsys.readouterr().err


def test_an_input_that_changes_while_the_job_runs(
    work: Path,
    model: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from infer import generate

    write(words(8))
    load = generate.load

    def changing(options: dict[str, Any]) -> Any:
        write(words(7))
        return load(options)

    monkeypatch.setattr(generate, "load", changing)
    assert run(model) == 2
    assert "in.jsonl: has changed while the job was running" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
