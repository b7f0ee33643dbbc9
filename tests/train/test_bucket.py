"""Runs whose folder is in a bucket: as on a disk, bit by bit, and killed at any moment."""

import random
import time

import pytest

from tests.emulated_bucket import bucket as bucket
from tests.emulated_bucket import clients
from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.tiny_run import (
    free_port,
    metric_lines,
    run_until_killed,
    start_command,
    tiny_recipe,
    write_recipe,
)
from train.loop import train as run_training
from train.recipe.config import DataSection, ModelSection
from train.run_files import RunFiles
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.host.storage import as_path

LIMIT_S = 300


def remote_values(folder):
    checkpoint = HFCheckpoint(folder)
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


@pytest.mark.full
def test_a_run_in_a_bucket_stopped_and_resumed_is_the_run_on_a_disk(
    bucket, finished, tokenizer_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run = f"{bucket}/runs/stopped"
    config = tiny_recipe(run, tokenizer_folder, checkpoint_every=2)
    run_until_killed(config, 3)
    assert not as_path(f"{run}/hf").exists()
    capsys.readouterr()
    run_training(config)
    assert "resumed from step 2" in capsys.readouterr().out
    assert metric_lines(as_path(run)) == metric_lines(finished)
    expected = hf_values(finished / "hf")
    assert_same_bits(remote_values(f"{run}/hf"), expected)
    # Its newest state is exported as one on a disk is, and its model is where others start from.
    convert(run, tmp_path / "exported")
    assert_same_bits(hf_values(tmp_path / "exported"), expected)
    start = ModelSection(init_from=f"{run}/hf")
    second = {"steps": 2, "model": start, "data": DataSection(sources=config.data.sources)}
    run_training(tiny_recipe(tmp_path / "second", None, **second))
    assert list(tmp_path.glob("gs:*")) == []


def test_a_profile_of_another_process_reaches_the_bucket(bucket, monkeypatch):
    monkeypatch.setattr("train.run_files.is_first", lambda: False)
    output = as_path(f"{bucket}/runs/profiled")
    files = RunFiles(output)
    (files.folder / "profile").mkdir()
    (files.folder / "profile" / "host.xplane.pb").write_bytes(b"\0steps")
    files.close()
    assert (output / "profile" / "host.xplane.pb").read_bytes() == b"\0steps"
    assert not files.folder.exists()


def test_the_bucket_tells_generations(bucket):
    """Without them a run failed now and then, with "Malformed StorageGeneration"."""
    ts = pytest.importorskip("tensorstore")

    def opened():
        spec = {"driver": "ocdbt", "base": f"{bucket}/generations/"}
        return ts.KvStore.open(spec, context=ts.Context()).result()

    opened().write("first", b"1").result()
    other = opened()
    assert other.read("first").result().value == b"1"
    other.write("second", b"2").result()  # of a manifest that another has written
    assert sorted(opened().list().result()) == [b"first", b"second"]


@pytest.mark.full
@pytest.mark.parametrize(("kills", "steps"), [(1, 8), (20, 100)])
def test_two_processes_killed_at_random_are_those_that_were_never_killed(
    bucket, tokenizer_folder, tmp_path, kills, steps
):
    """One of them dies at any moment, and the other with it, as a launcher has it."""
    chance = random.Random(kills)
    runs = {name: f"{bucket}/runs/{name}-{kills}" for name in ("whole", "killed")}
    recipes = {
        name: write_recipe(
            tiny_recipe(run, tokenizer_folder, steps=steps, checkpoint_every=2), tmp_path / name
        )
        for name, run in runs.items()
    }

    def start(name):
        common = ["--config", str(recipes[name]), "--num-processes", "2"]
        common += ["--coordinator", f"localhost:{free_port()}", "--process-id"]
        return [
            start_command([*common, str(i)], tmp_path / f"{name}{i}.txt", environment=clients(i))
            for i in range(2)
        ]

    def ended(name):
        children = start(name)
        for child in children:
            child.join(LIMIT_S)
        said = [(tmp_path / f"{name}{i}.txt").read_text() for i in range(2)]
        assert [child.exitcode for child in children] == [0, 0], said

    ended("whole")
    for kill in range(kills):
        children, said = start("killed"), tmp_path / "killed0.txt"
        wait_until(lambda said=said, kill=kill: attempts(said) > kill)
        # As it begins, or behind one or two states more: never so many that it comes to its end.
        before, more = newest_state(runs["killed"]), chance.randrange(3)
        wait_until(lambda wanted=before + 2 * more: newest_state(runs["killed"]) >= wanted)
        time.sleep(chance.random())
        assert {child.exitcode for child in children} == {None}, said.read_text()
        first = chance.randrange(2)
        children[first].kill()
        children[1 - first].join(chance.random())
        children[1 - first].kill()
        for child in children:
            child.join()
    ended("killed")
    values = [remote_values(f"{run}/hf") for run in runs.values()]
    assert_same_bits(*values)
    logs = [metric_lines(as_path(run)) for run in runs.values()]
    assert [line["step"] for line in logs[0]] == list(range(1, steps + 1))
    assert logs[1] == logs[0]


def attempts(said):
    """How often a run has come to its first step."""
    return said.read_text().count("memory of a device") if said.exists() else 0


def newest_state(run):
    """The step of the newest state that is whole; 0 where there is none."""
    states = (as_path(run) / "checkpoints").glob("*/commit_success.txt")
    return max((int(state.parent.name) for state in states), default=0)


def wait_until(happened):
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)
