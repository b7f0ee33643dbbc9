"""Files, folders and pipes of records, their index, and input and output that are refused."""

import gzip
import io
import json
import os
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from infer.job import input as job_input
from infer.job.input import Place, build_index, read_from
from tests.infer.job.job_examples import (
    contents,
    interrupt,
    lines,
    results,
    run,
    stop_after,
    words,
    write,
    write_parquet,
)
from wedlm_jax.records.files import JSONL, RecordFile


def test_files_and_folders_are_one_row_after_the_other(work, model, quick, capsys):
    records = [{"id": f"{i}", "prompt": "a"} for i in range(12)]
    records[7] = {"id": "7"}
    write(records[:2], "first.jsonl")
    write_parquet(records[2:3], "folder/a.parquet")
    write([], "folder/b.jsonl")
    write(records[3:8], "folder/b/c.jsonl")
    write(records[8:9], "folder/z.JSONL")
    write(records[9:], "prompts")
    write([{"id": "never"}], "folder/.hidden/x.jsonl")
    write([{"id": "never"}], "folder/notes.md")
    inputs = ["first.jsonl", "folder", "prompts"]
    assert run(model, "--shard-size", "4", input=" ".join(inputs), output="out") == 0
    done = results("out")
    assert [record["id"] for record in done] == [record["id"] for record in records]
    assert (done[7]["line"], done[7]["file"]) == (5, "folder/b/c.jsonl")
    assert "1 file in the folders not read: neither .jsonl nor .parquet" in capsys.readouterr().err

    # Moved as a whole, the input is the same.
    (work / "moved").mkdir()
    for name in inputs:
        Path(name).rename(work / "moved" / name)
    again = [f"{work}/moved/{name}" for name in inputs]
    assert run(model, input=" ".join(again), output="out") == 0
    # In another order it is not.
    assert run(model, input=" ".join(again[::-1]), output="out") == 2


@pytest.mark.parametrize("name", ["-", "fifo"])
def test_a_pipe_is_kept_until_the_job_ends(model, quick, name, monkeypatch, refusal):
    content = lines([*words(7), {"promt": "a"}])

    def piped(*options):
        if name == "-":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
            return run(model, "--shard-size", "3", *options, input="-", output="out")
        if not Path("fifo").exists():
            os.mkfifo("fifo")
        writer = threading.Thread(target=lambda: Path("fifo").write_bytes(content))
        writer.start()
        try:
            return run(model, "--shard-size", "3", *options, input="fifo", output="out")
        finally:
            writer.join()

    with monkeypatch.context() as patch:
        stop_after(0, KeyboardInterrupt(), patch)
        assert piped() == 130
    (spooled,) = Path("out").glob("spooled-*.jsonl")
    assert spooled.read_bytes() == content
    assert piped("--seed", "7") == 2  # another job with the same input is refused, and keeps it
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
    alone = "a pipe is read alone, without other input"
    assert alone in refusal(input=f"{name} more.jsonl", output="out")
    several = refusal("--num-hosts", "2", "--host-id", "0", input=name, output="out")
    assert "several hosts cannot read one pipe" in several


IS_DAMAGED = "the compressed data is damaged ("
NO_COLUMN = "expected a column prompt, prompt_token_ids or messages; there are id, words"
NO_FILE = "empty: no .jsonl, .jsonl.gz, .jsonl.zst or .parquet file is in this folder"
REFUSED = [
    ("missing.jsonl", "out.jsonl", "missing.jsonl: no such file or folder"),
    ("empty", "out.jsonl", NO_FILE),
    ("nothing.jsonl", "out.jsonl", "nothing.jsonl: has no records"),
    ("blank.jsonl", "out", "blank.jsonl: has no records"),
    ("in.jsonl.bz2", "out.jsonl", "in.jsonl.bz2: is compressed; unpack it, or pipe its contents"),
    ("no-parquet.parquet", "out.jsonl", "no-parquet.parquet: cannot be read as Parquet ("),
    ("words.parquet", "out.jsonl", NO_COLUMN),
    ("folder folder/in.jsonl", "out", "folder/in.jsonl: is named twice as input"),
    ("in.jsonl", "missing/out.jsonl", "missing/out.jsonl: no such folder, missing"),
    ("in.jsonl", "folder.jsonl", "folder.jsonl: exists and is not a file"),
    ("in.jsonl", "out.csv", "out.csv: expected a folder, or a .jsonl or .parquet file, as out"),
    ("in.jsonl", "in.jsonl", "in.jsonl: input and output are the same file"),
    ("in.jsonl", "link.jsonl", "link.jsonl: input and output are the same file"),
    ("in.jsonl", "a-file", "a-file: is a file; the output needs a folder of this name"),
    ("folder", "folder", "folder/in.jsonl: the input is inside the output folder"),
    ("folder", "folder/out", "folder/out: the output is inside the input folder folder"),
    ("folder", "folder/out.jsonl", "folder/out.jsonl: the output is inside the input folder"),
    ("folder/in.jsonl", "folder", "folder/in.jsonl: the input is inside the output folder"),
    *(
        (f"{how}.jsonl.{ending}", "out.jsonl", f"{how}.jsonl.{ending}: {IS_DAMAGED}")
        for how in ("cut", "no", "broken")
        for ending in ("gz", "zst")
    ),
]


@pytest.mark.parametrize(("inputs", "output", "message"), REFUSED)
def test_paths_and_files_that_cannot_be_used(work, inputs, output, message, capsys):
    """Told in one line, before a model is loaded, with nothing written."""
    for name in ("in.jsonl", "a-file", "folder/in.jsonl", "in.jsonl.bz2"):
        write(words(), name)
    write([], "nothing.jsonl")
    Path("blank.jsonl").write_text("\n  \n")
    Path("folder.jsonl").mkdir()
    Path("empty").mkdir()
    Path("link.jsonl").symlink_to(work / "in.jsonl")
    Path("no-parquet.parquet").write_bytes(b"PAR1 no")
    write_parquet([{"id": 1, "words": "a"}], "words.parquet")
    for ending in ("gz", "zst"):
        whole = Path(write_packed(ending, "whole")).read_bytes()
        cut, middle = whole[:-9], len(whole) // 4
        broken = whole[:middle] + whole[middle + 7 :]
        for how, content in (("cut", cut), ("no", lines(RECORDS)), ("broken", broken)):
            Path(f"{how}.jsonl.{ending}").write_bytes(content)
    before = {path: path.is_file() and path.read_bytes() for path in work.rglob("*")}
    assert run("never-loaded", input=inputs, output=output) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("wedlm generate: ")
    assert message in printed
    assert printed.count("\n") == 1
    assert {path: path.is_file() and path.read_bytes() for path in work.rglob("*")} == before


def test_an_input_that_changes_while_the_job_runs(quick, monkeypatch, refusal):
    from infer import generate

    write(words(8))
    load = generate.load

    def changing(options):
        write(words(7))
        return load(options)

    monkeypatch.setattr(generate, "load", changing)
    assert "in.jsonl: has changed while the job was running" in refusal()
    assert not Path("out.jsonl").exists()


def file_of(path, content):
    path.write_bytes(content)
    return RecordFile(path, str(path), path.name, JSONL)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_shard_begins_where_its_first_row_does(tmp_path, size):
    rows = [{"id": i, "prompt": "naïve"} for i in range(11)]
    fifth = lines(rows[4:5]).replace(b"\n", b"\r\n")
    files = [
        file_of(tmp_path / "a", b"\xef\xbb\xbf" + lines(rows[:4]) + b"\r\n \n" + fifth),
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


def test_the_digest_tells_inputs_apart_and_not_where_they_are(tmp_path):
    a, b = lines([{"prompt": "a"}]), lines([{"prompt": "b"}])

    def digest(*contents, names="xyz"):
        named = zip(names, contents, strict=False)
        return build_index([file_of(tmp_path / n, c) for n, c in named], 5).digest

    assert digest(a) == digest(a, names="q") != digest(b)
    several = [digest(a, b), digest(b, a), digest(a + b), digest(a, b, names="pq")]
    several.append(digest(a, b, b""))
    assert len(set(several)) == len(several)
    assert digest(a, b) == several[0]


def test_which_rows_claim_which_id(tmp_path):
    claims = [
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


def test_memory_is_a_few_bytes_a_row(tmp_path):
    count = 10_000
    file = file_of(
        tmp_path / "x", lines([{"id": f"record {i}", "prompt": "a" * 100} for i in range(count)])
    )
    told = []
    tracemalloc.start()
    try:
        index = build_index([file], 1000, told.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert index.records == count
    assert index.shards[-1].place == Place(0, index.shards[-1].place.at, count - 999)
    # Digests, sorted and not, the order of them, and flags.
    assert peak < 60 * count + 300_000, f"{peak / count:.0f} bytes per row"


RECORDS = [{"id": f"r{i}", **one} for i, one in enumerate(words(23))]


def packed(content, ending):
    if ending == "gz":
        return gzip.compress(content)
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return bytes(sink.getvalue())


def write_packed(ending, name="in"):
    name = f"{name}.jsonl.{ending}"
    # Two members, one after the other, as `cat` joins them.
    halves = [lines(RECORDS[:9]), lines(RECORDS[9:])]
    Path(name).write_bytes(b"".join(packed(half, ending) for half in halves))
    Path("in.jsonl").write_bytes(b"".join(halves))
    return name


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_results_are_those_of_the_file_unpacked(model, quick, ending, monkeypatch):
    """Which is unpacked once for all shards of a host."""
    name, opened = write_packed(ending), []
    assert run(model, "--shard-size", "2", output="plain") == 0
    interrupt(2, model, "--shard-size", "2", input=name, output="out")
    read = job_input.read_from

    def noting(*arguments):
        opened.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(job_input, "read_from", noting)
    for host in "01":
        opened.clear()
        hosts = ["--num-hosts", "2", "--host-id", host]
        assert run(model, *hosts, input=name, output="out") == 0
        assert len(opened) == 1
    assert contents("out") == contents("plain")
    assert [one["id"] for one in results("out")] == [one["id"] for one in RECORDS]


CHAT = [{"role": "user", "content": "hi"}]
ROWS = [
    {"id": "a", "prompt": "the cat"},
    {"id": "b", "prompt_token_ids": [70, 80, 90]},
    {"id": "c", "messages": CHAT},
    {"id": "d", "prompt": "mat", "sampling": {"temperature": 1.0, "seed": 4}},
    {"id": "e"},
    {"id": "f", "prompt": "mat", "sampling": {"top_p": 7.0}},
    {"prompt": "a"},
    {"id": "a", "prompt": "twice"},
    {"id": "g", "prompt_token_ids": [5000]},
    {"id": "h", "prompt": "mat", "sampling": {"temperature": 1.0, "n": 2, "logprobs": 1}},
]


@pytest.mark.parametrize("group", [1, 4])
def test_parquet_rows_are_those_of_jsonl(model, quick, group, capsys):
    sources = ["web", None] * (len(ROWS) // 2)
    write_parquet(ROWS, "in.parquet", group, source=sources)
    write([{**row, "source": one} for row, one in zip(ROWS, sources, strict=True)])
    assert run(model, output="plain.jsonl") == 0
    assert run(model, "--shard-size", "2", input="in.parquet") == 0
    assert results() == results("plain.jsonl")
    assert [record.get("line") for record in results()] == [None] * 4 + [5, 6, None, 8, 9, None]
    printed = capsys.readouterr().err
    assert printed.count("keys that are not read but copied to the output: source\n") == 2


def test_sampling_in_a_column_is_a_struct_or_a_text_of_json(model, quick):
    # Within a column every struct has the keys of all, null where a record has none.
    biases = [{"5": 1.0}, {"9": 2.0}, None, {}, {"5": None}]
    structs = [{"prompt": "a", "sampling": {"logit_bias": one}} for one in biases]
    write_parquet(structs, "structs.parquet")
    assert run(model, input="structs.parquet", output="structs.jsonl") == 0
    assert not [record for record in results("structs.jsonl") if "error" in record]
    texts = ['{"top_k": 5, "entropy_threshold": null}', '{"top_k": -2}', "no JSON", None]
    write_parquet([{"prompt": "a", "sampling": text} for text in texts], "in.parquet")
    write([{"prompt": "a", "sampling": {"top_k": 5, "entropy_threshold": None}}])
    assert run(model, output="plain.jsonl") == 0
    assert run(model, input="in.parquet") == 0
    first, second, third, last = results()
    assert [first] == results("plain.jsonl")
    assert second["error"].startswith("sampling.top_k: expected an integer")
    assert third["error"] == 'sampling: expected an object, not "no JSON"'
    assert "error" not in last


@pytest.mark.parametrize(
    ("name", "output", "what"),
    [
        ("in.parquet", "out.jsonl", "Parquet needs"),
        ("in.jsonl.zst", "out.jsonl", "in.jsonl.zst: zstd needs"),
        ("in.jsonl", "out.parquet", "Parquet needs"),
    ],
)
def test_without_pyarrow_one_sentence_says_how_to_get_it(name, output, what, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path(name).write_text('{"prompt": "a"}\n')
    assert run(Path("never-loaded"), input=name, output=output) == 2
    needed = 'pyarrow, which is not installed: pip install "wedlm-jax[data]"'
    assert capsys.readouterr().err == f"wedlm generate: {what} {needed}\n"
    assert os.listdir() == [name]
