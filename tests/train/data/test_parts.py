"""A job in parts: resumed, shared by hosts, and the same in the end."""

import threading
from pathlib import Path

import pytest

import train.data.parts
from tests.examples.data import CHAT, Silent, contents, documents, options, tokenised, write_jsonl
from train.data.job import tokenise
from train.data.manifest import read_manifest
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import Host


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Three files, a part each; the last has a malformed record, which the second has, too."""
    monkeypatch.setattr(train.data.parts, "PART_BYTES", 1)
    monkeypatch.setattr(train.data.parts, "POLL_S", 0.01)
    bad = [{"text": 1}]
    return [
        write_jsonl(tmp_path / "a.jsonl", documents(30)),
        write_jsonl(tmp_path / "b.jsonl", [*documents(8, seed=1), *bad]),
        write_jsonl(tmp_path / "c.jsonl", [*bad, *[{"messages": CHAT}] * 5]),
    ]


class Dies(Silent):
    """Ends the job when so many bytes are read."""

    def __init__(self, after):
        self.after = after

    def progress(self, bytes_read, bytes_total, tokens):
        assert bytes_read <= bytes_total
        if bytes_read > self.after:
            raise KeyboardInterrupt


def test_a_job_goes_on_with_the_parts_that_are_made(inputs, tmp_path):
    tokenised(inputs, tmp_path / "whole", shard_rows=4)
    job = options(inputs, tmp_path / "rows", shard_rows=4)
    with pytest.raises(KeyboardInterrupt):
        tokenise(job, Dies(inputs[0].stat().st_size))
    hidden = tmp_path / ".rows.wedlm-part"
    assert sorted(path.name for path in hidden.iterdir()) == ["part-00000", "plan.json"]
    made = {path: path.stat().st_mtime_ns for path in (hidden / "part-00000").iterdir()}
    assert len(made) > 2
    with pytest.raises(KeyboardInterrupt):  # during the last part
        tokenise(job, Dies(sum(path.stat().st_size for path in inputs[:2])))
    assert {path: path.stat().st_mtime_ns for path in made} == made
    with pytest.raises(InputError, match=r"\.wedlm-part: was begun by a job of other settings"):
        tokenised(inputs, tmp_path / "rows", shard_rows=5)
    with pytest.raises(InputError, match=r"\.wedlm-part: was begun by a job of other settings"):
        tokenised(inputs[:2], tmp_path / "rows", shard_rows=4)
    tokenise(job, Silent())
    assert contents(tmp_path / "rows") == contents(tmp_path / "whole")
    assert not hidden.exists()
    manifest = read_manifest(tmp_path / "rows")
    assert (manifest.records, manifest.malformed) == (30 + 8 + 5 + 2, 2)
    [(_, found)] = manifest.reasons.items()
    assert found["records"] == 2
    assert [name.rpartition("/")[2] for name in found["first"]] == ["b.jsonl:9", "c.jsonl:1"]
    assert sum(shard.rows for shard in manifest.shards) == manifest.rows
    assert len(manifest.shards) > 3


def test_a_kill_while_the_parts_are_put_together_costs_nothing(inputs, tmp_path, monkeypatch):
    tokenised(inputs, tmp_path / "whole")
    real = train.data.parts.os.rename
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
            patch.setattr("train.data.parts.os.rename", rename)
            with pytest.raises(KeyboardInterrupt):
                tokenised(inputs, output)
        assert not output.exists()
        tokenised(inputs, output)
        assert contents(output) == contents(tmp_path / "whole")


def test_hosts_share_the_parts_and_the_first_puts_them_together(inputs, tmp_path, capsys):
    tokenised(inputs, tmp_path / "whole")
    jobs = [options(inputs, tmp_path / "rows", host=Host(index, 2)) for index in (0, 1)]
    first = threading.Thread(target=tokenise, args=(jobs[0], Silent()))
    first.start()
    while "1 of 3 parts" not in capsys.readouterr().out:
        assert first.is_alive()
    assert not (tmp_path / "rows").exists()
    assert tokenise(jobs[1], Silent()) is None
    first.join(60)
    assert contents(tmp_path / "rows") == contents(tmp_path / "whole")


def test_small_files_are_one_part(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", documents(2)) for name in "abc"]
    files = train.data.chunks.find_input([str(path) for path in paths]).files
    assert train.data.parts.cut_into_parts(files) == [list(files)]
