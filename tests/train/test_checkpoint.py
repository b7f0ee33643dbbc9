"""Checkpoints on disk: whole or set aside, kept or dropped."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from train.checkpoint import Checkpoints, checksums
from train.step import TrainState
from wedlm_jax.errors import InputError
from wedlm_jax.host.storage import as_path


def state(step):
    key = jax.random.key(step)
    parameters = {
        "kernel": jax.random.normal(key, (64, 32)),
        "half": jnp.full((7,), step, jnp.bfloat16),
    }
    return TrainState(jnp.int32(step), parameters, (jnp.zeros((3,)),))


def write(folder, *steps, keep=5, keep_every=0):
    checkpoints = Checkpoints(folder, keep, keep_every)
    for step in steps:
        checkpoints.save(state(step))
    checkpoints.close()


def read(folder):
    said = []
    checkpoints = Checkpoints(folder, 5)
    try:
        return checkpoints.restore(state(0), said.append), said
    finally:
        checkpoints.close()


def assert_is_step(found, step):
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(state(step)), strict=True):
        np.testing.assert_array_equal(got, expected)


def biggest_file(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_a_relative_folder_serves_as_an_absolute_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read(Path("runs/mine")) == (None, []), "no states are no error"
    write(Path("runs/mine"), 3, 5)
    found, told = read(Path("runs/mine"))
    assert_is_step(found, 5)
    assert told == []


def test_a_state_that_orbax_alone_has_written_is_read(tmp_path):
    """Runs that exist must stay readable whatever this code becomes."""
    arrays = {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(state(7)))}
    manager = ocp.CheckpointManager(tmp_path)
    manager.save(7, args=ocp.args.StandardSave({**arrays, "checksums": checksums(arrays)}))
    manager.close()
    found, told = read(tmp_path)
    assert_is_step(found, 7)
    assert told == []


def numbers(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


@pytest.mark.parametrize("place", ["disk", pytest.param("bucket", marks=pytest.mark.full)])
def test_what_is_kept_for_good_stays_over_restarts(request, tmp_path, place):
    folder = tmp_path
    if place == "bucket":
        folder = as_path(f"{request.getfixturevalue('bucket')}/checkpoints")
    for steps in ((1, 2, 3), (4, 5), (6, 7)):
        write(folder, *steps, keep=1, keep_every=3)
    assert numbers(folder) == [3, 6, 7]
    found, _ = read(folder)
    assert_is_step(found, 7)
    write(folder, 12, 13, 14, keep=1)  # who keeps none for good drops them
    assert numbers(folder) == [14]


def test_what_is_kept_is_said(tmp_path):
    def said(keep_every):
        checkpoints = Checkpoints(tmp_path, 2, keep_every)
        checkpoints.close()
        return checkpoints.kept(200)

    newest = "a state every 200 steps; the newest 2 are kept"
    assert said(0) == newest
    assert said(1000) == f"{newest}, and all at multiples of 1,000"
    assert said(500) == (
        f"{newest}, and all at multiples of 1,000: keep_every=500 is not a multiple of "
        "checkpoint_every"
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "moments", "said"),
    [
        ((64, 32), "bfloat16", 1, "is float32 where this recipe has bfloat16; "),
        ((32, 64), "float32", 1, r"shape \[64, 32\] where this recipe has \[32, 64\]; "),
        ((64, 48), "float32", 1, r"shape \[64, 32\] where this recipe has \[64, 48\]; "),
        ((64, 32), "float32", 2, "7 arrays where this recipe has 8; "),
        ((64, 32), "float32", 0, "7 arrays where this recipe has 6; "),
    ],
)
def test_a_state_of_something_else_is_refused(tmp_path, shape, dtype, moments, said):
    write(tmp_path, 2)
    parameters = {"kernel": jnp.zeros(shape, dtype), "half": jnp.zeros(7, jnp.bfloat16)}
    other = TrainState(jnp.int32(0), parameters, (jnp.zeros(3),) * moments)
    checkpoints = Checkpoints(tmp_path, 5)
    with pytest.raises(InputError, match=f"{tmp_path}/2/.*{said}.* use another output$"):
        checkpoints.restore(other)
    checkpoints.close()
    assert numbers(tmp_path) == [2]
    assert_is_step(read(tmp_path)[0], 2)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [cut, flip, *(pytest.param(x, marks=pytest.mark.full) for x in (Path.unlink, empty))]
)
def test_a_damaged_state_is_told_and_the_one_before_it_is_used(tmp_path, damage):
    write(tmp_path, 2, 4)
    damage(biggest_file(tmp_path / "4"))
    found, said = read(tmp_path)
    assert_is_step(found, 2)
    assert len(said) == 1
    assert str(tmp_path / "4") in said[0]
    assert "the state before it is tried" in said[0]
    # Its step can be written again, and what was damaged is still there to be looked at.
    write(tmp_path, 4)
    assert_is_step(read(tmp_path)[0], 4)
    assert (tmp_path / "4.damaged").is_dir()
    # When all are damaged, the run does not begin anew in silence.
    for step in ("2", "4"):
        damage(biggest_file(tmp_path / step))
    for _ in ("the run", "the same command again"):
        with pytest.raises(InputError, match="every state is damaged"):
            read(tmp_path)


def test_a_checksum_sees_each_bit_and_each_place():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    first = int(checksums({"x": jnp.asarray(x)})[0])
    for index in np.ndindex(*x.shape):
        changed = x.copy()
        changed[index] = np.nextafter(changed[index], np.float32(np.inf))
        assert int(checksums({"x": jnp.asarray(changed)})[0]) != first
    for axis in range(3):
        assert int(checksums({"x": jnp.asarray(np.flip(x, axis))})[0]) != first
