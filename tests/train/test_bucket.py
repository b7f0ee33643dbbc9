"""Runs in a bucket are as on a disk; storage that refuses is told by all, and loses nothing."""

import contextlib
import random
import threading
import time

import pytest

from tests.emulated_bucket import clients
from tests.examples.checkpoints import assert_same_bits
from tests.examples.tiny_run import (
    free_port,
    metric_lines,
    run_hosts,
    sentences,
    start_command,
    tiny_recipe,
    write_recipe,
)
from tests.train.test_checkpoint import assert_is_step, biggest_file, read, state, write
from train.checkpoint import Checkpoints
from train.run_files import RunFiles
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.orbax import whole_steps
from wedlm_jax.errors import STORAGE_FAILED, StorageFailure
from wedlm_jax.host.storage import as_path

LIMIT_S = 300


def remote_values(folder):
    checkpoint = HFCheckpoint(folder)
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


def test_a_profile_of_another_process_reaches_the_bucket(bucket, monkeypatch):
    monkeypatch.setattr("train.run_files.is_first", lambda: False)
    output = as_path(f"{bucket}/runs/profiled")
    files = RunFiles(output)
    (files.folder / "profile").mkdir()
    (files.folder / "profile" / "host.xplane.pb").write_bytes(b"\0steps")
    files.close()
    assert (output / "profile" / "host.xplane.pb").read_bytes() == b"\0steps"
    assert not files.folder.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "processes", "kills", "steps"),
    [("disk", 1, 3, 12), ("disk", 1, 10, 30), ("bucket", 2, 1, 8), ("bucket", 2, 20, 100)],
)
def test_a_run_killed_at_random_is_the_run_that_was_never_killed(
    request, tokenizer_folder, tmp_path, where, processes, kills, steps
):
    """One of its processes dies at any moment, and the other with it, as a launcher has it."""
    chance = random.Random(kills)
    root = tmp_path if where == "disk" else f"{request.getfixturevalue('bucket')}/runs/{kills}"
    runs = {name: f"{root}/{name}" for name in ("whole", "killed")}
    settings = {"steps": steps, "checkpoint_every": 2}
    recipes = {
        name: write_recipe(tiny_recipe(run, tokenizer_folder, **settings), tmp_path / f"{name}-in")
        for name, run in runs.items()
    }

    def start(name):
        arguments, own = ["--config", str(recipes[name])], [{}]
        if processes > 1:
            arguments += ["--num-processes", "2", "--coordinator", f"localhost:{free_port()}"]
            arguments.append("--process-id")
            own = [{"environment": clients(i)} for i in range(2)]
        return [
            start_command([*arguments, *[str(i)] * (processes > 1)], said(name, i), **more)
            for i, more in enumerate(own)
        ]

    def said(name, i=0):
        return tmp_path / f"{name}{i}.txt"

    def ended(name):
        children = start(name)
        for child in children:
            child.join(LIMIT_S)
        told = [said(name, i).read_text() for i in range(processes)]
        assert [child.exitcode for child in children] == [0] * processes, told

    ended("whole")
    for kill in range(kills):
        children = start("killed")
        wait_until(lambda kill=kill: attempts(said("killed")) > kill)
        # As it begins, or behind one or two states more: never so many that it comes to its end.
        before, more = newest_state(runs["killed"]), chance.randrange(3)
        wait_until(lambda wanted=before + 2 * more: newest_state(runs["killed"]) >= wanted)
        time.sleep(chance.random() * 0.3 * processes)
        assert {child.exitcode for child in children} == {None}, said("killed").read_text()
        chance.shuffle(children)
        for child in children:
            child.kill()
            child.join(chance.random())
        for child in children:
            child.join()
    ended("killed")
    assert_same_bits(*(remote_values(f"{run}/hf") for run in runs.values()))
    logs = [metric_lines(as_path(run)) for run in runs.values()]
    assert [line["step"] for line in logs[0]] == list(range(1, steps + 1))
    assert logs[1] == logs[0]


def attempts(said):
    """How often a run has come to its first step."""
    return said.read_text().count("memory of a device") if said.exists() else 0


def newest_state(run):
    """The step of the newest state that is whole; 0 where there is none."""
    return max(whole_steps(as_path(run) / "checkpoints"), default=0)


def wait_until(happened):
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


AT_ONCE = {"train.checkpoint.PAUSES_S": (0, 0, 0), "wedlm_jax.host.storage.PAUSES_S": (0,)}


@pytest.fixture
def no_pauses(monkeypatch):
    for name, pauses in AT_ONCE.items():
        monkeypatch.setattr(name, pauses)


def loop(path):
    """A link to itself, which no one may open: an error as with EIO, ESTALE or EACCES."""
    path.unlink(missing_ok=True)
    path.symlink_to(path)


# --- states that cannot be written ---------------------------------------------------------


OF_A_STATE = ("default/ocdbt.process_0/", "default/manifest", "commit_success")


@pytest.mark.parametrize(
    "part", ["default/", *(pytest.param(part, marks=pytest.mark.full) for part in OF_A_STATE)]
)
def test_a_state_that_cannot_be_written_is_told_and_the_third_time_in_a_row_it_ends_the_run(
    bucket, no_pauses, part, capsys
):
    folder = as_path(f"{bucket}/later{len(part)}")
    checkpoints = Checkpoints(folder, 5)
    checkpoints.save(state(2), whole=True)
    assert not checkpoints.failed()
    with bucket.refusing(f"POST .*{folder.name}/4/{part}", 403):
        checkpoints.save(state(4))
        wait_until(checkpoints.failed)
        assert not checkpoints.failed()  # it is told once
        assert checkpoints.steps() == [2]
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert "the state of step 4 could not be written (" in said.out
        assert "Forbidden" in said.out
        assert "; attempt 2 of 3 in 0 s" in said.out
        # A state that was written in between begins the count anew.
        for step in (4, 6, 4, 4, 8):
            checkpoints.save(state(step))
        with pytest.raises(StorageFailure, match=r"step 4 could not .* last of 3 attempts; the s"):
            checkpoints.save(state(4), whole=True)
    checkpoints.close()
    assert_is_step(read(folder)[0], 8)


def test_where_nothing_can_be_written_no_thread_of_orbax_waits_for_it(tmp_path, no_pauses):
    checkpoints = Checkpoints(tmp_path / "states", 5)
    checkpoints.save(state(2), whole=True)
    (tmp_path / "states").rename(tmp_path / "moved")
    loop(tmp_path / "states")
    before = set(threading.enumerate())
    with pytest.raises(StorageFailure, match=r"step 4 could not be written \(.*Too many levels"):
        checkpoints.save(state(4), whole=True)
    # Threads of the state before may have ended meanwhile.
    assert set(threading.enumerate()) <= before
    checkpoints.close()
    assert_is_step(read(tmp_path / "moved")[0], 2)


@pytest.mark.full
def test_what_fails_on_one_host_is_told_by_all_and_the_same_command_goes_on(
    bucket, finished, tokenizer_folder, tmp_path
):
    """The others stood still once, until somebody ended them."""
    run = f"{bucket}/runs/refused"
    config = tiny_recipe(run, tokenizer_folder, checkpoint_every=1)
    recipe = ["--config", str(write_recipe(config, tmp_path))]
    own = {"environment": [clients(i) for i in range(2)], "constants": [AT_ONCE] * 2}

    # One state is left out, the next is written; then none is.
    with bucket.refusing("POST /host1/.*refused/checkpoints/[134]/", 403):
        found, said = run_hosts(recipe, tmp_path, limit=120, **own)
    assert found == [STORAGE_FAILED] * 2, said
    assert "state of step 1 could not be written (host 1 of 2: PERMISSION_DENIED" in said[0]
    for text in said:
        [sentence] = sentences(text)
        assert "step 4 could not be written (host 1 of 2: PERMISSION_DENIED" in sentence
        assert "Forbidden" in sentence
    states = as_path(f"{run}/checkpoints")
    assert (states / "2" / "commit_success.txt").exists()
    assert not (states / "4" / "commit_success.txt").exists()

    with bucket.refusing("GET /host1/.*refused/checkpoints/2/", 403):
        found, said = run_hosts(recipe, tmp_path, limit=120, **own)
    assert found == [STORAGE_FAILED] * 2, said
    for text in said:
        [sentence] = sentences(text)
        assert "host 1 of 2: gs://bucket/runs/refused/checkpoints/2/" in sentence
        assert "cannot be read, and is left as it is (PERMISSION_DENIED" in sentence

    found, said = run_hosts(recipe, tmp_path, limit=120, **own)
    assert found == [0, 0], said
    assert "resumed from step 2" in said[0]
    assert not list(states.glob("*.damaged"))
    for one, two in zip(metric_lines(finished), metric_lines(as_path(run)), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


# --- states that cannot be read ------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("disk", "_METADATA"),
        ("bucket", "d/"),
        *(
            pytest.param(place, name, marks=pytest.mark.full)
            for place, names in {
                "disk": ("manifest.ocdbt", ""),
                "bucket": ("_METADATA", "manifest.ocdbt", ""),
            }.items()
            for name in names
        ),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    request, tmp_path, no_pauses, place, name, capsys
):
    folder = tmp_path / "states"
    if place == "bucket":
        bucket = request.getfixturevalue("bucket")
        folder = as_path(f"{bucket}/refused{len(name)}")
    write(folder, 2, 4)
    with contextlib.ExitStack() as until_read:
        if place == "bucket":
            refused = f"GET .*{folder.name}/4/default/{name}"
            until_read.enter_context(bucket.refusing(refused, 403))
        else:
            file = folder / "4/default" / name if name else biggest_file(folder / "4")
            until_read.callback(file.write_bytes, file.read_bytes())
            until_read.callback(file.unlink)
            loop(file)
        with pytest.raises(StorageFailure, match="/4/default: cannot be read, and is left as it"):
            read(folder)
    assert capsys.readouterr().err.count("; retrying in 0 s") == 1
    found, said = read(folder)
    assert_is_step(found, 4)
    assert said == []


def test_a_read_that_succeeds_the_second_time_is_told(bucket, no_pauses, capsys):
    folder = as_path(f"{bucket}/states")
    write(folder, 2)
    with bucket.refusing("GET .*states/2/default/manifest.ocdbt", 403, times=1):
        found, said = read(folder)
    assert_is_step(found, 2)
    assert said == []
    told = capsys.readouterr().err
    assert "states/2/default: PERMISSION_DENIED" in told
    assert told.count("retrying in 0 s") == 1
