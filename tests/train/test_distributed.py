"""Several processes in one run, on this machine; and the options that start them."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from tests.examples.checkpoints import hf_values
from tests.examples.tiny_run import (
    free_port,
    metric_lines,
    start_command,
    tiny_recipe,
    write_recipe,
)
from train.evaluation.held_out import Evaluation
from train.evaluation.questions import asked_questions, drawn_questions
from train.program import objective_of
from train.recipe.config import EvaluationSection
from train.start import held_out_rows
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.host.processes import LAUNCHERS
from wedlm_jax.sharding import make_mesh

LIMIT_S = 300


def evaluation_of(run, config):
    """What evaluation finds of a finished run's model, in this process alone."""
    mesh = make_mesh({}, jax.devices()[:1])
    model = load_checkpoint(run / "hf", mesh=mesh)
    tokenizer = Tokenizer.from_file(str(run / "hf" / "tokenizer.json"))
    held = held_out_rows(config, tokenizer, model.config.pad_token_id or 0)
    graph, parameters = nnx.split(model)
    drawn = drawn_questions(config.evaluation)
    asked = asked_questions(config, drawn, run / "hf", model.config.max_position_embeddings)
    with jax.set_mesh(mesh):
        objective = objective_of(config, model.config)
        return Evaluation(config, mesh, graph, model.config, objective, held, asked).run(parameters)


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
    recipe, address = write_recipe(config, tmp_path), f"localhost:{free_port()}"
    common = ["--config", str(recipe), "--coordinator", address, "--num-processes", "2"]
    children = [
        start_command([*common, "--process-id", str(i)], tmp_path / f"{i}.txt") for i in range(2)
    ]
    for child in children:
        child.join(LIMIT_S)
    said = [(tmp_path / f"{i}.txt").read_text() for i in range(2)]
    assert [child.exitcode for child in children] == [0, 0], said
    together, alone = metric_lines(tmp_path / "run"), metric_lines(finished)
    assert [line["step"] for line in together] == [line["step"] for line in alone]
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)
    # Held-out losses are taken together; each process decodes its share of prompts and questions.
    first, evaluated = [
        json.loads(line)
        for line in (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()
    ]
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
    common = ["--config", str(recipe), "--coordinator", f"localhost:{free_port()}"]
    children = [
        start_command(
            [
                *common,
                "--num-processes",
                "2",
                "--process-id",
                str(i),
                f"output={tmp_path / str(i)}",
            ],
            tmp_path / f"{i}.txt",
            constants={"train.run_files.SEEN_WITHIN_S": 0.5},
        )
        for i in range(2)
    ]
    for child in children:
        child.join(LIMIT_S)
    said = [(tmp_path / f"{i}.txt").read_text() for i in range(2)]
    assert [child.exitcode for child in children] == [2, 2], said
    assert "output must be a folder that all hosts share" in said[0]
    assert "is not seen within 0 s by host 1;" in said[1]
    assert list((tmp_path / "0").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinator", "localhost:1"], "--num-processes auto: none of JAX_NUM_PROCESSES, "),
        (["--coordinator", "localhost:1", "--distributed"], "leave --coordinator out"),
        (["--num-processes", "2"], "go with --coordinator"),
        (
            ["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id: expected 0 to 1, not 2",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options, message, tokenizer_folder, tmp_path, monkeypatch, capsys
):
    for names in LAUNCHERS.values():
        for variable in filter(None, names):
            monkeypatch.delenv(variable, raising=False)
    recipe = write_recipe(tiny_recipe(tmp_path / "run", tokenizer_folder), tmp_path)
    assert main(["train", "--config", str(recipe), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
