"""Models in orbax's files: folders of arrays, and states of a run."""

import dataclasses
import shutil
import sys
import threading
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tests.examples.checkpoints import (
    assert_same_bits,
    model_arrays,
    refused,
    tiny_config,
    tiny_model,
    write_tiny,
)
from train.checkpoint import Checkpoints
from train.step import TrainState
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.open import kind_of, open_checkpoint
from wedlm_jax.checkpoint.orbax import (
    array_headers,
    describe_run,
    newest_state,
    read_arrays,
    write_arrays,
)
from wedlm_jax.checkpoint.safetensors import DeferredArray
from wedlm_jax.errors import InputError


def test_deferred_arrays_are_read_when_their_turn_has_come(tmp_path):
    """However many there are: a few in memory."""
    seen = []
    most = 0

    def read():
        nonlocal most
        values = np.full((8, 4), len(seen), np.float32)
        seen.append(weakref.ref(values))
        most = max(most, sum(ref() is not None for ref in seen))
        return values

    arrays = [DeferredArray(f"a{i}", (8, 4), np.dtype(np.float32), read) for i in range(9)]
    write_arrays(tmp_path / "orbax", arrays)
    assert most <= 3
    back = read_arrays(tmp_path / "orbax")
    assert [float(back[f"a{i}"][0, 0]) for i in range(9)] == [*range(9)]
    assert read_arrays(tmp_path / "orbax", ["a3"]).keys() == {"a3"}  # the others stay on disk


def test_reads_that_fail_late_are_not_heard(tmp_path, monkeypatch):
    """Of a damaged folder one sentence tells; what is no late read still reaches Python."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: heard.append(str(report.exc_value)))
    late = []

    def report(text):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))

    class Failing(ocp.PyTreeCheckpointHandler):
        def metadata(self, directory):
            for text in ("Event loop is closed", "something else"):
                late.append(threading.Timer(0.1, report, [text]))
                late[-1].start()
            raise ValueError("cut off")

    monkeypatch.setattr(ocp, "PyTreeCheckpointHandler", Failing)
    with pytest.raises(InputError, match="cut off"):
        array_headers(tmp_path)
    for timer in late:
        timer.join()
    assert heard == ["something else"]
    report("Event loop is closed")
    assert heard[1:] == ["Event loop is closed"]  # afterwards the hook is Python's again


@pytest.mark.parametrize("damage", ["empty", "no metadata", "no manifest", "no data", "cut"])
def test_damaged_folders_are_named(orbax, damage):
    folder = orbax / "orbax"
    if damage == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    pattern = {"no metadata": "_METADATA", "no manifest": "manifest.ocdbt"}.get(damage, "d/*")
    for path in folder.rglob(pattern):
        path.write_bytes(path.read_bytes()[:20]) if damage == "cut" else path.unlink()
    message = "damaged or not an orbax checkpoint"
    with refused(folder, message):
        convert(orbax, orbax.with_name("out"))


# --- the model of a training run -------------------------------------------------------------

BIASED = {"attention_bias": True}


def trained(factor, changes):
    """A model other than that of the starting checkpoint."""
    graph, parameters = nnx.split(tiny_model(tiny_config(**changes)))
    return nnx.merge(graph, jax.tree.map(lambda x: x * factor, parameters))


def write_run(folder, *steps, **changes):
    """A run's folder with a state of each step, whose parameters are step times those it began
    with; and the folder that it began with."""
    states = Checkpoints(folder / "run" / "checkpoints", keep=5)
    for step in steps:
        parameters = nnx.state(trained(step, changes))
        optimizer = optax.adamw(1e-3).init(parameters)
        states.save(TrainState(jnp.int32(step), parameters, optimizer))
    states.close()
    return folder / "run", write_tiny(folder / "start", **changes)


def assert_same_files(found, expected):
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def test_newest_state_is_what_the_run_would_export(tmp_path):
    run, start = write_run(tmp_path, 9, 10, **BIASED)
    model = trained(10, BIASED)
    config = dataclasses.replace(model.config, model_type="wedlm")
    save_checkpoint(model, config, tmp_path / "expected", tokenizer_from=start)
    describe_run(run, tiny_config(**BIASED), start)
    describe_run(run, tiny_config(**BIASED), start)  # as when it is resumed
    for number, source in enumerate((run, run / "checkpoints", run / "checkpoints" / "10")):
        assert kind_of(source) == "run"
        convert(source, tmp_path / str(number))
        assert (tmp_path / str(number) / "tokenizer.json").exists()
        assert_same_files(tmp_path / str(number), tmp_path / "expected")
    ninth = load_checkpoint(run / "checkpoints" / "9")
    assert_same_bits(model_arrays(ninth), model_arrays(trained(9, BIASED)))


def test_what_a_run_has_exported_is_no_run(tmp_path):
    run, start = write_run(tmp_path, 1)
    describe_run(run, tiny_config(), start)
    assert (kind_of(run), kind_of(write_tiny(run / "hf"))) == ("run", "hf")


def test_unfinished_state_is_passed_over(tmp_path):
    """Orbax writes under another name; a state's folder without its arrays is none either."""
    run, _ = write_run(tmp_path, 4)
    (run / "checkpoints" / "5.orbax-checkpoint-tmp-17" / "default").mkdir(parents=True)
    (run / "checkpoints" / "6").mkdir()
    assert newest_state(run).name == "4"


def test_bad_input_is_one_sentence(tmp_path):
    run, start = write_run(tmp_path, 1)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    describe_run(tmp_path / "empty", tiny_config(), start)
    with refused("empty: no complete state"):
        open_checkpoint(tmp_path / "empty")
    others = {
        "mlp.gate_proj.weight' has shape [12, 16], expected [20, 16]": {"intermediate_size": 20},
        "is not part of this model": {"num_hidden_layers": 2},
        "is missing": {"num_hidden_layers": 4},
    }
    for message, changes in others.items():
        describe_run(run, tiny_config(**changes), start)
        with refused(run, message):
            convert(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
