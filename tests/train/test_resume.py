"""A run given again with another recipe: what changed is told, other data is refused."""

import json
import re
from pathlib import Path

import pytest

from tests.examples.data import EMBEDDED, documents, tokenised, write_jsonl
from tests.examples.tiny_run import changed, metric_lines, run_until_killed, tiny_recipe
from train import resume
from train.loop import train as run_training
from train.recipe.config import DataSection, describe, load_config
from train.resume import begin_or_resume
from wedlm_jax.errors import InputError


def begun(config, step=2):
    """As if the run of a recipe had written a state."""
    begin(config)
    (Path(config.output) / "checkpoints" / str(step)).mkdir(parents=True)


def begin(config, *, allow_changed=False):
    run = Path(config.output)
    run.mkdir(exist_ok=True)
    states = [int(path.name) for path in (run / "checkpoints").glob("*")]
    begin_or_resume(config, run, run, states, None, allow_changed=allow_changed)


def with_sources(output, sources, **changes):
    data = DataSection(
        sources={str(folder): weight for folder, weight in sources.items()}, tokenizer=str(EMBEDDED)
    )
    return tiny_recipe(output, None, data=data, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name, seed in (("a", 0), ("b", 1)):
        records = write_jsonl(root / f"{name}.jsonl", documents(20, seed=seed))
        tokenised([records], root / name)
    return root / "a", root / "b"


@pytest.mark.full
def test_a_run_goes_on_with_a_changed_recipe_when_that_is_allowed(
    finished, tokenizer_folder, tmp_path
):
    config = tiny_recipe(tmp_path, tokenizer_folder, checkpoint_every=2)
    run_until_killed(config, 2)
    other = changed(config, "optimizer.learning_rate=0.02", "keep_checkpoints=3")
    sentence = r"0\.01, is 0\.02; --allow-changed continues with this one from step 2, and another"
    with pytest.raises(InputError, match=f"recipe: optimizer.learning_rate was {sentence}"):
        run_training(other)
    assert load_config(tmp_path / "config.yaml").optimizer.learning_rate == 0.01
    run_training(other, allow_changed=True)
    lines, before = metric_lines(tmp_path), metric_lines(finished)
    assert lines[:2] == before[:2]
    # The third step's parameters are those of the second state; its batch is as it was.
    assert lines[2]["loss"] == before[2]["loss"]
    assert lines[3]["loss"] != before[3]["loss"]


DECISIVE = """
seed=3 | seed was 1, is 3
rows=4 | rows x accumulation was 4, is 8
row_length=160 | row_length was 128, is 160
block_size=64 | block_size was 32, is 64
model.init_from=elsewhere | model.init_from was None, is elsewhere
objective=ar | objective was wedlm, is ar
suffix_share=0.5 | suffix_share was 0.0, is 0.5
quantized_training=int8 | quantized_training was none, is int8
loss.weighting=uniform | loss.weighting was inverse_ratio, is uniform
optimizer.weight_decay=0 | optimizer.weight_decay was 0.1, is 0.0
steps=9 | steps was 4, is 9
"""
"""Changes that make it another run, and the message of each: the first four change the order of
rows, and more steps change the learning rate of a cosine from the first step on."""


@pytest.mark.parametrize("line", DECISIVE.strip().split("\n"))
def test_what_makes_it_another_run_is_refused_by_name(tokenizer_folder, tmp_path, line, capsys):
    override, sentence = line.split(" | ")
    config = tiny_recipe(tmp_path, tokenizer_folder)
    begun(config, step=3)
    other = changed(config, override)
    for _ in range(2):
        with pytest.raises(InputError, match=f"began with another recipe: .*{sentence}"):
            begin(other)
    assert f"not as before: {sentence}" in capsys.readouterr().out
    begin(config)  # what was refused has left nothing behind
    assert capsys.readouterr().out == ""
    begin(other, allow_changed=True)
    assert f"not as before: {sentence}" in capsys.readouterr().out
    [changes] = (tmp_path / "changes.jsonl").read_text().splitlines()
    assert json.loads(changes)["changed"][0].startswith(override.partition("=")[0])
    begin(other)  # what was allowed once is how the run is
    assert capsys.readouterr().out == ""


HARMLESS = """
rows=4; accumulation=1
log_every=7
checkpoint_every=9
keep_every=5
mesh.data=2
loss.remat=full; loss.attention=dense; loss.chunk=32
metrics.norms=false
evaluation.every=3
phases=[{from_step: 3, rows: 4}]
"""


@pytest.mark.parametrize("line", HARMLESS.strip().split("\n"))
def test_what_is_of_no_consequence_to_its_steps_is_told(tokenizer_folder, tmp_path, line, capsys):
    config, overrides = tiny_recipe(tmp_path, tokenizer_folder), line.split("; ")
    begun(config)
    begin(changed(config, *overrides))
    told = capsys.readouterr().out.splitlines()
    fields = [override.partition("=")[0] for override in overrides]
    assert sorted(said.split()[3] for said in told) == sorted(fields)
    assert all(said.startswith("not as before: ") for said in told)


def test_a_plateau_may_become_longer_until_its_decay_has_begun(tokenizer_folder, tmp_path):
    wsd = ("optimizer.schedule=wsd", "optimizer.decay_steps=4", "steps=10")
    config = changed(tiny_recipe(tmp_path, tokenizer_folder), *wsd)
    begun(config, step=6)
    begin(changed(config, "steps=20"))
    with pytest.raises(InputError, match="another recipe: steps was 20, is 8; --allow-changed"):
        begin(changed(config, "steps=8"))
    (tmp_path / "checkpoints" / "18").mkdir()
    with pytest.raises(InputError, match="another recipe: steps was 20, is 40"):
        begin(changed(config, "steps=40"))


def test_every_field_that_is_named_as_harmless_is_one():
    """A pattern that matches nothing would be a field that was renamed."""
    names = [name for name, _, _ in describe()]
    for pattern in (resume.HARMLESS, resume.BY_CONTENT, resume.BY_RATE):
        for part in re.split(r"\|(?![^()]*\))", pattern.pattern):
            assert any(re.fullmatch(part, name) for name in names), part


def test_before_the_first_state_everything_may_change_and_after_the_last_step_it_is_told(
    tokenizer_folder, tmp_path, capsys
):
    begin(tiny_recipe(tmp_path, tokenizer_folder))
    assert capsys.readouterr().out == ""
    second = tiny_recipe(tmp_path, tokenizer_folder, seed=2, rows=4, steps=2)
    begin(second)
    begun(second)
    begin(second)
    assert capsys.readouterr().out.splitlines() == [
        *[f"{tmp_path}: no state was saved yet; training begins at step 1"] * 2,
        f"{tmp_path}: trained for 2 steps already, and the recipe has 2: nothing is left to train",
    ]


def test_sources_are_told_by_content_weight_and_order(folders, tmp_path, capsys):
    a, b = folders
    begun(with_sources(tmp_path / "run", {a: 0.75, b: 0.25}))
    others = [{a: 0.5, b: 0.25}, {b: 0.25, a: 0.75}, {a: 0.75}]
    for sources in others:
        with pytest.raises(InputError, match=r"the rows were of .*a \(weight 0\.75, \w{16}\), "):
            begin(with_sources(tmp_path / "run", sources))
    a_moved = tmp_path / "elsewhere"
    a_moved.symlink_to(a)
    begin(with_sources(tmp_path / "run", {a_moved: 0.75, b: 0.25}))
    assert "not as before: data.sources was" in capsys.readouterr().out
    # The same name, other rows: what names alone would not show.
    a_moved.unlink()
    a_moved.symlink_to(b)
    with pytest.raises(InputError, match="this run began with another recipe: the rows were of"):
        begin(with_sources(tmp_path / "run", {a_moved: 0.75, b: 0.25}))


def test_files_of_a_run_that_cannot_be_read_are_told(tokenizer_folder, tmp_path, capsys):
    config = tiny_recipe(tmp_path, tokenizer_folder)
    begun(config)
    (tmp_path / "config.yaml").write_text("steps: 3\nnot_a_field: 1\n")
    begin(config)
    assert "not as before: steps was 3, is 4" in capsys.readouterr().out
    (tmp_path / "config.yaml").write_text("steps: [")
    begin(config)
    told = capsys.readouterr().out
    assert f"{tmp_path / 'config.yaml'} cannot be read (" in told
    assert "), so changes of the recipe are not known\n" in told
    assert "not as before" not in told
    (tmp_path / "order.json").write_text("{")
    with pytest.raises(InputError, match=r"order\.json: cannot be read"):
        begin(config)
