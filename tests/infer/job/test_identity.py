"""What tells one job from another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from infer.job.part_file import FORMAT
from infer.job.shard_folder import Identity, folder_digest

JOB = Identity("i", "c", {"chat": False, "params": {"stop": ("a",), "seed": 0}}, 1000, 5)


def test_an_identity_is_read_back_as_it_was_written() -> None:
    written = json.loads(json.dumps(JOB.as_json()))
    again = Identity.from_json({**written, "wedlm_generate": FORMAT})
    assert again.as_json() == JOB.as_json()
    assert again.digest == JOB.digest


def test_differences_name_every_setting() -> None:
    other = Identity("j", "c", {"chat": True, "params": {"stop": (), "seed": 0}}, 10, 4)
    assert JOB.differences(other.as_json()) == (
        "the input differs, chat is True there and False here, stop is [] there and ['a'] "
        "here, shard_size is 10 there and 1000 here"
    )
    assert JOB.differences(JOB.as_json()) == ""
    assert other.digest != JOB.digest


def test_checkpoint_may_be_moved_but_not_changed(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "notes.md").write_text("no part of the model")
    assert folder_digest(copy) == folder_digest(model)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert folder_digest(copy) != folder_digest(model)


def test_large_checkpoints_are_sampled_to_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.job.shard_folder.WHOLE_FILE", 100)
    monkeypatch.setattr("infer.job.shard_folder.SAMPLES", 4)
    monkeypatch.setattr("infer.job.shard_folder.SAMPLE_SIZE", 8)
    path = tmp_path / "model.safetensors"

    def digest(place: int | None) -> str:
        content = bytearray(101)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        return folder_digest(tmp_path)

    seen = [place for place in range(101) if digest(place) != digest(None)]
    assert seen == [*range(8), *range(31, 39), *range(62, 70), *range(93, 101)]
