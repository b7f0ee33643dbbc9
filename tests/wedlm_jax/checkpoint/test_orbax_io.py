"""States of a run and folders of arrays, as orbax keeps them."""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from wedlm_jax.checkpoint.orbax_io import (
    DamagedCheckpoint,
    DeferredArray,
    StepFolders,
    array_shapes,
    read_arrays,
    step_tree,
    write_arrays,
)
from wedlm_jax.errors import InputError

STATE = {"0000": jnp.int32(7), "0001": jnp.arange(12.0).reshape(3, 4), "0002": jnp.ones(5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with one state, written by orbax's own manager.

    Not by `StepFolders`: runs that exist must stay readable whatever this code becomes.
    """
    path = tmp_path / "checkpoints"
    manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(create=True))
    manager.save(7, args=ocp.args.StandardSave(STATE))
    manager.wait_until_finished()
    manager.close()
    return path


def test_restores_a_state_as_it_was(folder: Path) -> None:
    states = StepFolders(folder, keep=2)
    assert states.steps() == [7]
    restored = states.restore(7, jax.tree.map(jnp.zeros_like, STATE))
    states.close()
    assert restored.keys() == STATE.keys()
    for name, leaf in STATE.items():
        np.testing.assert_array_equal(restored[name], leaf)
        assert restored[name].dtype == leaf.dtype


def test_keeps_the_newest_states(folder: Path) -> None:
    states = StepFolders(folder, keep=2)
    for step in (8, 9):
        states.save(step, {**STATE, "0000": jnp.int32(step)})
    states.close()
    assert sorted(path.name for path in folder.iterdir()) == ["8", "9"]
    again = StepFolders(folder, keep=2)
    assert again.steps() == [9, 8]
    assert int(again.restore(9, STATE)["0000"]) == 9
    again.close()


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        ({**STATE, "0001": jnp.zeros((4, 3))}, r"array 0001 has shape \[3, 4\].*\[4, 3\]"),
        ({**STATE, "0001": jnp.zeros((6, 8))}, r"array 0001 has shape \[3, 4\].*\[6, 8\]"),
        ({**STATE, "0003": jnp.zeros(2)}, "3 arrays where this recipe has 4"),
        ({name: STATE[name] for name in ("0000", "0001")}, "3 arrays where this recipe has 2"),
    ],
)
def test_state_of_another_model_is_refused(folder: Path, like: dict, expected: str) -> None:
    states = StepFolders(folder, keep=2)
    with pytest.raises(InputError, match=expected) as error:
        states.restore(7, like)
    states.close()
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_nothing_to_restore(tmp_path: Path) -> None:
    states = StepFolders(tmp_path / "new", keep=2)
    assert states.steps() == []
    with pytest.raises(DamagedCheckpoint):
        states.restore(7, STATE)
    states.close()


def test_some_arrays_of_a_state(folder: Path) -> None:
    tree = step_tree(folder / "7")
    assert array_shapes(tree)["0001"] == ((3, 4), "float32")
    (read,) = read_arrays(tree, ["0001"]).items()
    assert read[0] == "0001"
    np.testing.assert_array_equal(read[1], STATE["0001"])


def test_arrays_keep_every_bit(tmp_path: Path) -> None:
    """All 65536 patterns of both halves, NaN payloads and negative zeros among them."""
    patterns = np.arange(2**16, dtype=np.uint16).reshape(2, -1)
    arrays = {
        "embed": patterns.view(ml_dtypes.bfloat16),
        "layers.mlp.kernel": patterns.view(np.float16),
        "layers.mlp.bias": np.array([-0.0, np.nan, np.inf, 1e-45], np.float32),
    }
    write_arrays(tmp_path / "orbax", arrays)
    back = read_arrays(tmp_path / "orbax")
    assert back.keys() == arrays.keys()
    for name, value in arrays.items():
        assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)
        assert back[name].tobytes() == value.tobytes()


def test_deferred_arrays_are_read_when_their_turn_has_come(tmp_path: Path) -> None:
    """However many there are: a few in memory."""
    seen: list[weakref.ref] = []
    most = 0

    def read() -> np.ndarray:
        nonlocal most
        values = np.full((8, 4), len(seen), np.float32)
        seen.append(weakref.ref(values))
        most = max(most, sum(ref() is not None for ref in seen))
        return values

    arrays = {f"a{i}": DeferredArray((8, 4), np.dtype(np.float32), read) for i in range(9)}
    write_arrays(tmp_path / "orbax", arrays)
    assert most <= 3
    back = read_arrays(tmp_path / "orbax")
    assert [float(back[f"a{i}"][0, 0]) for i in range(9)] == [*range(9)]


def test_reads_that_fail_late_are_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a damaged folder one sentence tells; what is no late read still reaches Python."""
    heard: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: heard.append(str(report.exc_value)))
    late: list[threading.Timer] = []

    def report(text: str) -> None:
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))  # type: ignore[arg-type]

    class Failing(ocp.PyTreeCheckpointHandler):
        def metadata(self, directory: Path) -> None:  # type: ignore[override]
            for text in ("Event loop is closed", "something else"):
                late.append(threading.Timer(0.1, report, [text]))
                late[-1].start()
            raise ValueError("cut off")

    monkeypatch.setattr(ocp, "PyTreeCheckpointHandler", Failing)
    with pytest.raises(InputError, match="cut off"):
        array_shapes(tmp_path)
    for timer in late:
        timer.join()
    assert heard == ["something else"]
    report("Event loop is closed")
    assert heard[1:] == ["Event loop is closed"]  # afterwards the hook is Python's again


@pytest.mark.parametrize("damage", ["empty", "no metadata", "no data"])
def test_damaged_folders_are_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "orbax"
    if damage == "empty":
        folder.mkdir()
    else:
        write_arrays(folder, {"a": np.ones(3, np.float32)})
        pattern = "_METADATA" if damage == "no metadata" else "d/*"
        for path in [*folder.glob(pattern), *folder.glob(f"ocdbt.process_0/{pattern}")]:
            path.unlink()
    with pytest.raises(InputError) as error:
        read_arrays(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
