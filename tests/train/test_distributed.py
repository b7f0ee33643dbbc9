"""Several processes in one run; hosts that differ, or of which one fails alone."""

import dataclasses
import importlib.metadata
import json
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from tests.examples.checkpoints import hf_values
from tests.examples.data import EMBEDDED, ROW, documents, tokenised, write_jsonl
from tests.examples.tiny_run import (
    metric_lines,
    run_hosts,
    run_until_killed,
    sentences,
    tiny_recipe,
    write_recipe,
)
from tests.train.test_checkpoint import read, write
from tests.train.test_evaluation import evaluations
from train import agreement
from train import checkpoint as training_states
from train.agreement import agree, differences
from train.data.batches import TrainBatches
from train.evaluation import Evaluation, asked_questions, drawn_questions
from train.program import make_program
from train.recipe.config import DataSection, EvaluationSection
from train.start import held_out_rows
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.orbax import DamagedCheckpoint, is_whole
from wedlm_jax.errors import STORAGE_FAILED, InputError, StorageFailure
from wedlm_jax.sharding import make_mesh


def evaluation_of(run, config):
    """What evaluation finds of a finished run's model, in this process alone."""
    mesh = make_mesh({}, jax.devices()[:1])
    model = load_checkpoint(run / "hf", mesh=mesh)
    tokenizer = Tokenizer.from_file(str(run / "hf" / "tokenizer.json"))
    held = held_out_rows(config, tokenizer, model.config.pad_token_id or 0)
    drawn = drawn_questions(config.evaluation)
    asked = asked_questions(config, drawn, run / "hf", model.config.max_position_embeddings)
    program = make_program(config, model.config, mesh)
    with jax.set_mesh(mesh):
        return Evaluation(program, held, asked).run(nnx.state(model))


@pytest.mark.full
def test_two_processes_train_together_what_one_trains_alone(finished, tokenizer_folder, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(f'{{"prompt": "{n} + 1", "match": null}}\n' for n in ("one", "two", "three"))
    )
    section = EvaluationSection(
        every=4, rows=4, prompts=3, max_tokens=6, questions=str(questions), answer_tokens=6
    )
    config = tiny_recipe(tmp_path / "run", tokenizer_folder, checkpoint_every=2, evaluation=section)
    statuses, said = run_hosts(["--config", str(write_recipe(config, tmp_path))], tmp_path)
    assert statuses == [0, 0], said
    together, alone = metric_lines(tmp_path / "run"), metric_lines(finished)
    assert [line["step"] for line in together] == [line["step"] for line in alone]
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
    # Held-out losses are taken together; each process decodes its share of prompts and questions.
    first, evaluated = evaluations(tmp_path / "run")
    assert (first.pop("step"), evaluated.pop("step")) == (0, 4)
    assert first.keys() == evaluated.keys()
    expected_figures = evaluation_of(tmp_path / "run", config)
    assert expected_figures["tokens_per_forward"] > 0
    assert expected_figures["questions"] == 3
    assert evaluated == pytest.approx(expected_figures, rel=1e-4)
    # One process speaks for all.
    assert "4 of 4 steps" in said[0]
    assert "step" not in said[1]
    values, expected = hf_values(tmp_path / "run" / "hf"), hf_values(finished / "hf")
    assert values.keys() == expected.keys()
    for name, value in values.items():
        # Adam divides small differences of the sums by small numbers.
        np.testing.assert_allclose(value, expected[name], atol=2e-3, err_msg=name)
    config_file = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert config_file["model_type"] == "wedlm"


def test_folders_that_hosts_do_not_share_are_refused_at_once(tokenizer_folder, tmp_path):
    """Such a run stood still at its first checkpoint once."""
    recipe = write_recipe(tiny_recipe(tmp_path / "run", tokenizer_folder), tmp_path)
    constants = {"train.run_files.SEEN_WITHIN_S": 0.5}
    statuses, said = run_hosts(
        ["--config", str(recipe)],
        tmp_path,
        arguments_of=[[f"output={tmp_path / str(i)}"] for i in range(2)],
        constants=[constants] * 2,
    )
    assert statuses == [2, 2], said
    assert "output must be a folder that all hosts share" in said[0]
    assert "is not seen within 0 s by host 1;" in said[1]
    assert list((tmp_path / "0").iterdir()) == []


QUICK = {"train.distributed.GRACE_S": 1.0}

version = importlib.metadata.version


def version_elsewhere(package):
    return "0.0.1" if package == "jaxlib" else version(package)


def listing(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_hosts_with_other_recipes_versions_or_data_are_all_told(tmp_path):
    """Each host reads its own file; both files have the same name."""
    folders, content = [tmp_path / "host0", tmp_path / "host1"], []
    for host, folder in enumerate(folders):
        folder.mkdir()
        records = write_jsonl(folder / "texts.jsonl", documents(20, seed=host))
        tokenised([records], folder / "rows")
        manifest = json.loads((folder / "rows" / "dataset.json").read_text())
        content.append(f"{manifest['rows']} rows ({manifest['content'][:16]})")
    data = DataSection(sources={"rows": 1.0}, tokenizer=str(EMBEDDED))
    config = tiny_recipe(tmp_path / "run", None, data=data, row_length=ROW)
    statuses, told = run_hosts(
        ["--config", str(write_recipe(config, tmp_path))],
        tmp_path,
        arguments_of=[["optimizer.learning_rate=0.01"], ["optimizer.learning_rate=0.02"]],
        constants=[QUICK, {**QUICK, "importlib.metadata.version": version_elsewhere}],
        folder=folders,
    )
    assert statuses == [2, 2], told
    sentence = (
        "wedlm train: the 2 hosts of this run differ: "
        "optimizer.learning_rate is 0.01 on host 0 and 0.02 on host 1; "
        f"jaxlib is {version('jaxlib')} on host 0 and 0.0.1 on host 1; "
        f"what rows holds is {content[0]} on host 0 and {content[1]} on host 1"
    )
    assert [sentences(text) for text in told] == [[sentence], [sentence]]
    assert not (tmp_path / "run").exists()


class FailingBatches(TrainBatches):
    """Comes to a row that this host alone reads, and cannot."""

    def __next__(self):
        self.given = getattr(self, "given", 0) + 1
        if self.given == 3:
            raise InputError("rows-00000.arrayrecord: row 7 is damaged")
        return super().__next__()


@pytest.mark.full
@pytest.mark.parametrize("host", [0, 1])
def test_what_one_host_cannot_use_ends_all(host, tokenizer_folder, tmp_path):
    """In the midst of training the other waits for it on its devices."""
    recipe = write_recipe(tiny_recipe(tmp_path / "run", tokenizer_folder), tmp_path)
    constants = [QUICK, QUICK]
    constants[host] = {**QUICK, "train.loop.TrainBatches": FailingBatches}
    statuses, said = run_hosts(["--config", str(recipe)], tmp_path, constants=constants)
    assert statuses == [2, 2], said
    sentence = "rows-00000.arrayrecord: row 7 is damaged"
    assert sentences(said[host]) == [f"wedlm train: {sentence}"]
    assert sentences(said[1 - host]) == [f"wedlm train: host {host} of 2: {sentence}"]
    assert "Traceback" not in said[1 - host]


# --- states --------------------------------------------------------------------------------


class Late:
    """Sees step 4 of a run's states late, as some file systems tell of another host's files."""

    def __init__(self, seconds):
        self._seconds, self._asked = seconds, 0.0

    def __call__(self, step_folder):
        self._asked = self._asked or time.monotonic()
        late = time.monotonic() < self._asked + self._seconds
        return is_whole(step_folder) and not (step_folder.name == "4" and late)


class TooEarly:
    """Reads a state before its files are there, so often; then it does not."""

    def __init__(self, times):
        self._times = times

    def __call__(self, folder, like):
        self._times -= 1
        if self._times >= 0:
            raise DamagedCheckpoint(f"{folder}: damaged or not an orbax checkpoint")


def few_files(folder):
    return {"_METADATA": 7}


@pytest.fixture(scope="module")
def stopped(tokenizer_folder, tmp_path_factory):
    """A run with states of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    config = tiny_recipe(folder, tokenizer_folder, steps=5, checkpoint_every=2)
    run_until_killed(config, 4)
    return config


def copy_of(config, folder):
    shutil.copytree(config.output, folder / "run")
    return dataclasses.replace(config, output=str(folder / "run"))


def resumed(config, tmp_path, constants, within):
    """Goes on with a run on two hosts, of which the second sees something else."""
    own = [
        {**QUICK, "train.agreement.SEEN_WITHIN_S": within, "train.checkpoint.SEEN_WITHIN_S": within}
        for _ in range(2)
    ]
    own[1] |= constants
    recipe = write_recipe(config, tmp_path)
    return run_hosts(["--config", str(recipe)], tmp_path, constants=own)


@pytest.mark.full
@pytest.mark.parametrize(("seconds", "within"), [(2.0, 60.0), (1000.0, 1.0)])
def test_a_host_that_sees_a_state_late_goes_on_and_of_one_that_never_does_all_are_told(
    stopped, tmp_path, seconds, within
):
    config = copy_of(stopped, tmp_path)
    before, late = listing(tmp_path / "run"), Late(seconds)
    constants = {"wedlm_jax.checkpoint.orbax.is_whole": late, "train.agreement.is_whole": late}
    statuses, told = resumed(config, tmp_path, constants, within)
    if seconds < within:
        assert statuses == [0, 0], told
        assert "resumed from step 4" in told[0]
        assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1, 2, 3, 4, 5]
        assert not list((tmp_path / "run" / "checkpoints").glob("*.damaged*"))
        return
    assert statuses == [2, 2], told
    for text in told:
        [sentence] = sentences(text)
        assert sentence.endswith("the newest whole state is 4 on host 0 and 2 on host 1")
    assert listing(tmp_path / "run") == before


@pytest.mark.full
def test_a_good_state_that_one_host_reads_too_early_is_not_renamed(stopped, tmp_path):
    """It was once, and the run went on from the state before."""
    config = copy_of(stopped, tmp_path)
    constants = {
        "train.checkpoint._check_arrays": TooEarly(100),
        "train.checkpoint.file_sizes": few_files,
    }
    statuses, said = resumed(config, tmp_path, constants, within=1.0)
    assert statuses == [STORAGE_FAILED] * 2, said
    for text in said:
        [sentence] = sentences(text)
        assert "checkpoints/4: is left as it is, because after 1 s host 1 of 2 " in sentence
        assert "still sees 1 files of 7 bytes" in sentence
    constants = {"train.checkpoint._check_arrays": TooEarly(1)}
    statuses, said = resumed(config, tmp_path, constants, within=1.0)
    assert statuses == [0, 0], said
    assert said[0].count("reading it once more") == 1
    assert "resumed from step 4" in said[0]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.damaged*"))


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch):
    write(tmp_path, 2, 4)

    full = Mock(side_effect=MemoryError)
    monkeypatch.setattr(training_states.ocp.StandardCheckpointHandler, "restore", full)
    with pytest.raises(MemoryError):
        read(tmp_path)
    assert (tmp_path / "4").is_dir()


def test_a_folder_of_states_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch):
    write(tmp_path / "checkpoints", 2, 4)
    config = tiny_recipe(tmp_path, None)
    assert agree(config) == [4, 2]

    monkeypatch.setattr("wedlm_jax.host.storage.PAUSES_S", (0.0,))
    refused = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(StorageFailure, match=r"checkpoints: cannot be read, and is left as it is"):
        agree(config)


def test_a_difference_names_the_hosts_and_their_values():
    first = {"seed": "1", "jax": "0.10.2", "steps": "4"}
    others = [{}, {"seed": "2"}, {}, {"seed": "2", "jax": "0.10.1"}, {}]
    others += [{"jax": "0.10.1"} for _ in range(5)]
    assert differences(first, others) == (
        "the 10 hosts of this run differ: seed is 1 on hosts 0, 2, 4, 5 and 4 more "
        "and 2 on hosts 1, 3; jax is 0.10.2 on hosts 0, 1, 2, 4 and 0.10.1 on hosts 3, 5, 6, 7 "
        "and 2 more"
    )


def test_what_a_run_starts_from_is_told_by_its_content(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(300_000))
    config = tiny_recipe(tmp_path / "run", None)
    config.model.init_from = str(tmp_path)
    found = agreement._start(config, [])
    assert agreement._start(config, [2]) == "not checked"
    for place in (0, 150_000, 299_999):
        content = bytearray(300_000)
        content[place] = 1
        (tmp_path / "model.safetensors").write_bytes(content)
        assert agreement._start(config, []) != found
