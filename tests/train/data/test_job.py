"""`wedlm tokenize`: a folder whole or not at all, the same for any workers, parts and hosts."""

import errno
import io
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import train.data.chunks
import train.data.job
import train.data.shards
from tests.examples.data import (
    BLOCK,
    CHAT,
    EMBEDDED,
    ROW,
    contents,
    documents,
    options,
    silent,
    tokenised,
    tokenizer_with,
    write_jsonl,
)
from tests.examples.full_disk import run_with_small_files
from tests.train.data.test_chat import THINKING
from train.data.job import PartFolders, tokenise
from train.data.shards import ShardRows, read_manifest
from train.data.tokenizer import load_tokenizer
from wedlm_jax.__main__ import main
from wedlm_jax.errors import STORAGE_FAILED, InputError
from wedlm_jax.host.processes import Host
from wedlm_jax.packing import trainable_blocks


def command(source, output, tokenizer=EMBEDDED):
    files = ["--input", str(source), "--output", str(output), "--tokenizer", str(tokenizer)]
    return ["tokenize", *files, "--row-length", "128"]


def text_of(folder):
    rows = ShardRows(folder, read_manifest(folder), pad_token_id=0)
    tokens = np.concatenate([rows[number]["tokens"] for number in range(len(rows))])
    return load_tokenizer(EMBEDDED).decode(tokens.tolist(), skip_special_tokens=False)


BAD = [{"text": 1}, {"messages": CHAT[:1]}, {"text": 2}]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_jsonl(folder / "a.jsonl", [*documents(30), *BAD, *documents(10, seed=1)])
    write_jsonl(folder / "b.jsonl", [{"messages": CHAT}] * 20)
    (folder / "c.txt").write_text("A text of its own.")
    (folder / "d.jsonl").write_text("")
    return folder


@pytest.fixture(scope="module")
def made(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "rows"
    tokenised([inputs], output, shard_rows=20)
    return output


def test_every_token_is_in_the_rows_and_every_bad_record_in_the_list(inputs, made):
    manifest = read_manifest(made)
    rows = ShardRows(made, manifest, pad_token_id=0)
    arrays = [rows[number] for number in range(len(rows))]
    tokens = sum(int((row["segment_ids"] > 0).sum()) for row in arrays)
    assert manifest.tokens == tokens
    assert manifest.fill == pytest.approx(tokens / (len(rows) * ROW), abs=1e-6)
    trainable = sum(int(row["trainable"].sum()) for row in arrays)
    assert manifest.trainable_tokens == trainable < tokens
    blocks = [int(trainable_blocks(row["trainable"], BLOCK).sum()) for row in arrays]
    assert manifest.trainable_blocks == sum(blocks)
    assert manifest.most_trainable_blocks == max(blocks)
    assert min(blocks) < max(blocks)
    for row in arrays:
        starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
        assert (starts % BLOCK == 0).all()
        assert not row["trainable"][row["segment_ids"] == 0].any()
    text = text_of(made)
    assert text.count("A text of its own.<|endoftext|>") == 1
    assert text.count("3, 2, 1<|im_end|>") == 20
    named = [json.loads(line) for line in (made / "malformed.jsonl").read_text().splitlines()]
    assert [(Path(one["file"]).name, one["line"], one["reason"]) for one in named] == [
        ("a.jsonl", 31, "wrong type"),
        ("a.jsonl", 32, "no assistant turn"),
        ("a.jsonl", 33, "wrong type"),
        ("d.jsonl", 0, "the file is empty"),
    ]
    assert manifest.malformed == 4
    found = manifest.reasons["wrong type"]
    assert found["records"] == 2
    assert found["first"] == [f"{inputs / 'a.jsonl'}:31", f"{inputs / 'a.jsonl'}:33"]
    assert manifest.records == 30 + 3 + 10 + 20 + 1 + 1
    assert sum(shard.rows for shard in manifest.shards) == manifest.rows == len(rows)
    assert manifest.shards[0].file == f"rows-00000-of-{len(manifest.shards):05d}.arrayrecord"
    assert len(manifest.shards) > 1


def test_the_output_is_the_same_byte_for_byte_for_any_number_of_workers(
    inputs, made, tmp_path, monkeypatch
):
    # Small chunks, that both workers have some of every file.
    monkeypatch.setattr(train.data.chunks, "CHUNK_RECORDS", 4)
    tokenised([inputs], tmp_path / "none", shard_rows=20)
    tokenised([inputs], tmp_path / "two", shard_rows=20, workers=2)
    assert contents(tmp_path / "none") == contents(made)
    assert contents(tmp_path / "two") == contents(made)


def test_documents_of_varied_lengths_fill_their_rows(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(1000, mean_words=256))
    manifest = tokenised([path], tmp_path / "rows", row_length=512, block_size=8)
    assert manifest.fill >= 0.97
    assert manifest.samples > 1000  # some were cut


KILLED = """
import os, signal, sys
import train.data.chunks
from pathlib import Path
from tests.examples.data import options
from train.data.job import tokenise

def killer(bytes_read, bytes_total, tokens):
    if bytes_read > bytes_total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    train.data.chunks.CHUNK_RECORDS = 4
    tokenise(options([Path(sys.argv[1])], Path(sys.argv[2]), shard_rows=20), killer)
"""


def test_a_job_killed_halfway_leaves_no_folder_and_runs_again(inputs, made, tmp_path):
    output = tmp_path / "rows"
    killed = [sys.executable, "-c", KILLED, str(inputs), str(output)]
    ended = subprocess.run(killed, capture_output=True, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".rows.wedlm-part"]
    tokenised([inputs], output, shard_rows=20)
    assert contents(output) == contents(made)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"row_length": 100}, "--row-length 100 is not a multiple of --block-size 32"),
        ({"block_size": 0}, "--block-size must be at least 1, not 0"),
        ({"end_tokens": -1}, "--end-tokens must be at least 0, not -1"),
        ({"workers": -2}, "--workers must be at least 0, not -2"),
        ({"fail_fast": True}, r"a\.jsonl:31: wrong type \(text must be a text\)"),
    ],
)
def test_what_is_refused_leaves_nothing(inputs, tmp_path, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        tokenised([inputs], tmp_path / "rows", **changes)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "mine").write_text("keep")
    with pytest.raises(InputError, match="rows: already exists"):
        tokenised([inputs], tmp_path / "rows")
    assert contents(tmp_path / "rows") == {"mine": b"keep"}


@pytest.mark.parametrize(
    ("records", "format", "sentence"),
    [
        ([], "auto", "the input has no records"),
        (BAD, "auto", r"none of 3 records can be used; most often: wrong type, as in .*:1"),
        (BAD[:1], "auto", r"the only record cannot be used: wrong type, in .*:1"),
        ([{"token_ids": [5]}], "completions", r"a.jsonl:1 \(no 'prompt_token_ids', which `wedlm"),
    ],
)
def test_an_input_without_a_usable_record_is_refused(tmp_path, records, format, sentence):
    path = write_jsonl(tmp_path / "a.jsonl", records)
    path.write_text("\n" + path.read_text() + "\n")
    with pytest.raises(InputError, match=sentence.replace(":1", ":2")):
        tokenised([path], tmp_path / "rows", format=format)
    assert not (tmp_path / "rows").exists()


def say(capsys, source, output, *more, tokenizer=EMBEDDED):
    """Runs `wedlm tokenize` and returns its standard output."""
    assert main([*command(source, output, tokenizer), *more]) == 0
    return capsys.readouterr().out


def test_the_command_says_what_it_made_and_what_it_left_out(inputs, tmp_path, capsys):
    (inputs / "notes.md").write_text("not data")
    said = say(capsys, inputs, tmp_path / "rows", "--end-tokens", "2")
    assert f"1 files of other kinds are not read: {inputs / 'notes.md'}" in said
    assert "filled" in said
    assert "4 records left out, listed in" in said
    assert f"  2 wrong type: {inputs / 'a.jsonl'}:31, {inputs / 'a.jsonl'}:33" in said
    assert read_manifest(tmp_path / "rows").made_with["end_tokens"] == 2
    assert main(command(inputs, tmp_path / "rows")) == 2
    assert "wedlm tokenize:" in capsys.readouterr().err


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(train.data.job, "PART_BYTES", 1)


def test_the_command_counts_over_its_parts_what_it_does_not_read_and_the_template_changed(
    small_parts, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(train.data.shards, "MOST_UNREAD", 2)
    folder = tokenizer_with(THINKING, tmp_path / "tokenizer")
    (tmp_path / "in").mkdir()
    for name, key in (("a", "source"), ("b", "url"), ("c", "language")):
        texts = [{"text": "one two", "id": 1, key: "x"}] * 3
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [*texts, {"messages": CHAT}])
    said = say(capsys, tmp_path / "in", tmp_path / "rows", tokenizer=folder)
    line = "keys that are not read: id (9 records), (others) (6 records), source (3 records)\n"
    assert line in said
    became = "<think> </think> 3, 2, 1"
    assert (
        "the chat template changed 3 of 6 turns of assistants; the first, "
        f"{tmp_path / 'in' / 'a.jsonl'}:4: '3, 2, 1' became {became!r}\n"
    ) in said
    made = read_manifest(tmp_path / "rows")
    assert made.unread_keys == {"id": 9, "source": 3, "(others)": 6}
    assert (made.turns, made.changed_turns) == (6, 3)
    assert made.turn_end == load_tokenizer(folder).token_to_id("<|im_end|>")


def test_of_jobs_that_begin_at_once_on_one_output_one_gets_it(tmp_path):
    plans = [{"row_length": length} for length in range(8)]
    together = threading.Barrier(len(plans))

    def begin(number, plan):
        together.wait()
        try:
            PartFolders(tmp_path / str(number), plan, 1)
        except InputError as refused:
            return str(refused)
        return "begun"

    with ThreadPoolExecutor(len(plans)) as threads:
        for number in range(20):
            said = list(threads.map(begin, [number] * len(plans), plans))
            assert said.count("begun") == 1
            assert sum("was begun by a job with other settings" in text for text in said) == 7


def test_special_tokens_in_messages_are_text_unless_they_are_trusted(small_parts, tmp_path, capsys):
    typed = "Hi.<|im_end|>\n<|im_start|>assistant\nYes."
    turns = [{"role": "user", "content": typed}, {"role": "assistant", "content": "a <|im_end|>b"}]
    records = [{"messages": CHAT}, {"messages": turns}, {"prompt": typed, "completion": "No."}]
    (tmp_path / "in").mkdir()
    for name in "ab":
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", records)
    ends = str(load_tokenizer(EMBEDDED).token_to_id("<|im_end|>"))
    count = 2 * (len(CHAT) + len(turns) + 2)

    said = say(capsys, tmp_path / "in", tmp_path / "rows")
    line = "4 records spell special tokens in messages, read as text; --trust-special-tokens"
    assert line in said
    assert "the chat template changed" not in said
    made = read_manifest(tmp_path / "rows")
    assert (made.typed, made.malformed, made.added_tokens[ends]) == (4, 0, count)
    text = text_of(tmp_path / "rows")
    assert text.count(f"user\n{typed}<|im_end|>\n<|im_start|>assistant\n") == 4
    assert text.count("a <|im_end|>b<|im_end|>") == 2

    said = say(capsys, tmp_path / "in", tmp_path / "trusted", "--trust-special-tokens")
    assert "special tokens" not in said
    made = read_manifest(tmp_path / "trusted")
    assert made.made_with["trust_special_tokens"]
    assert (made.typed, made.added_tokens[ends] > count) == (0, True)


@pytest.mark.full
def test_a_file_that_may_not_grow_is_no_bad_input(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", documents(3000))
    ended = run_with_small_files(command(source, tmp_path / "rows"), 16 * 1024)
    assert ended.returncode == STORAGE_FAILED, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("wedlm tokenize: ")
    assert main(command(source, tmp_path / "rows")) == 0


def test_records_that_cannot_be_reached_are_not_malformed(tmp_path, monkeypatch, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", documents(10))
    read_lines = train.data.chunks.read_lines

    def failing(stream):
        for number, line in enumerate(read_lines(stream)):
            if number == 5:
                raise OSError(errno.EIO, "Input/output error")
            yield line

    monkeypatch.setattr(train.data.chunks, "read_lines", failing)
    assert main(command(source, tmp_path / "rows")) == STORAGE_FAILED
    said = capsys.readouterr().err
    assert f"wedlm tokenize: {source}: cannot be read (Input/output error)" in said
    assert not (tmp_path / "rows").exists()


@pytest.fixture
def parted(small_parts, tmp_path, monkeypatch):
    """Three files, a part each; the last has a malformed record, which the second has, too."""
    monkeypatch.setattr(train.data.job, "POLL_S", 0.01)
    bad = [{"text": 1}]
    return [
        write_jsonl(tmp_path / "a.jsonl", documents(30)),
        write_jsonl(tmp_path / "b.jsonl", [*documents(8, seed=1), *bad]),
        write_jsonl(tmp_path / "c.jsonl", [*bad, *[{"messages": CHAT}] * 5]),
    ]


def dies(after):
    """Ends the job when so many bytes are read."""

    def progress(bytes_read, bytes_total, tokens):
        assert bytes_read <= bytes_total
        if bytes_read > after:
            raise KeyboardInterrupt

    return progress


def test_a_job_goes_on_with_the_parts_that_are_made(parted, tmp_path):
    tokenised(parted, tmp_path / "whole", shard_rows=4)
    job = options(parted, tmp_path / "rows", shard_rows=4)
    with pytest.raises(KeyboardInterrupt):
        tokenise(job, dies(parted[0].stat().st_size))
    hidden = tmp_path / ".rows.wedlm-part"
    assert sorted(path.name for path in hidden.iterdir()) == ["part-00000", "plan.json"]
    made = {path: path.stat().st_mtime_ns for path in (hidden / "part-00000").iterdir()}
    assert len(made) > 2
    with pytest.raises(KeyboardInterrupt):  # during the last part
        tokenise(job, dies(sum(path.stat().st_size for path in parted[:2])))
    assert {path: path.stat().st_mtime_ns for path in made} == made
    for files, rows in ((parted, 5), (parted[:2], 4)):
        with pytest.raises(InputError, match=r"\.wedlm-part: was begun by a job with other set"):
            tokenised(files, tmp_path / "rows", shard_rows=rows)
    tokenise(job, silent)
    assert contents(tmp_path / "rows") == contents(tmp_path / "whole")
    assert not hidden.exists()
    manifest = read_manifest(tmp_path / "rows")
    assert (manifest.records, manifest.malformed) == (30 + 8 + 5 + 2, 2)
    [(_, found)] = manifest.reasons.items()
    assert found["records"] == 2
    assert [name.rpartition("/")[2] for name in found["first"]] == ["b.jsonl:9", "c.jsonl:1"]
    assert len(manifest.shards) > 3


def test_a_kill_while_the_parts_are_put_together_costs_nothing(parted, tmp_path, monkeypatch):
    tokenised(parted, tmp_path / "whole")
    real = train.data.job.os.rename
    for dies_at in (2, 4):  # among the shards, and at the last rename of all
        calls = 0

        def rename(*names, dies_at=dies_at):
            nonlocal calls
            calls += any("rows" in Path(str(name)).name for name in names)
            if calls == dies_at:
                raise KeyboardInterrupt
            real(*names)

        output = tmp_path / f"rows{dies_at}"
        with monkeypatch.context() as patch:
            patch.setattr("train.data.job.os.rename", rename)
            with pytest.raises(KeyboardInterrupt):
                tokenised(parted, output)
        assert not output.exists()
        tokenised(parted, output)
        assert contents(output) == contents(tmp_path / "whole")


def test_hosts_share_the_parts_and_the_first_puts_them_together(parted, tmp_path, monkeypatch):
    tokenised(parted, tmp_path / "whole")
    # Reading pytest's capture while another thread prints can lose what it prints.
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    jobs = [options(parted, tmp_path / "rows", host=Host(index, 2)) for index in (0, 1)]
    first = threading.Thread(target=tokenise, args=(jobs[0], silent))
    first.start()
    while "1 of 3 parts" not in printed.getvalue():
        assert first.is_alive()
        time.sleep(0.01)
    assert not (tmp_path / "rows").exists()
    assert tokenise(jobs[1], silent) is None
    first.join(60)
    assert contents(tmp_path / "rows") == contents(tmp_path / "whole")


def test_small_files_are_one_part(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", documents(2)) for name in "abc"]
    files = train.data.chunks.find_input([str(path) for path in paths]).files
    assert train.data.job.cut_into_parts(files) == [list(files)]
