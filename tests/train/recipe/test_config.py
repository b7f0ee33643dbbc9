"""Recipes and `wedlm train`: typed, overridable, and refused with one clear sentence."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import train.command
import train.loop
from train.recipe.config import TrainConfig, describe, load_config
from train.recipe.phases import largest_phase
from wedlm_jax.__main__ import main
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def recipe(folder, text="steps: 5\n"):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


assert {"embedded_ar", "embedded_wedlm"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_with_the_values_it_states(path):
    loaded = load_config(path)
    config = dataclasses.asdict(loaded)
    stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key, value in stated.items():
        if isinstance(value, dict):
            assert {name: config[key][name] for name in value} == value, key
        else:
            assert config[key] == value, key
    # The tokenizer knows which rows of a vocabulary are unused.
    assert "mask_token_id" not in loaded.model.architecture
    assert loaded.model.mask_token is None


def test_overrides_win_over_the_file_and_what_both_leave_out_has_its_default(tmp_path):
    assert load_config(recipe(tmp_path)) == dataclasses.replace(TrainConfig(), steps=5)
    assert load_config(recipe(tmp_path, "# nothing\n")) == TrainConfig()
    path = recipe(tmp_path, "steps: 5\noptimizer: {learning_rate: 0.5}\n")
    given = ["steps=7", "optimizer.b1=0.8", "data.sources={prose: 1}", "model.init_from=some/dir"]
    config = load_config(path, given)
    assert (config.steps, config.optimizer.b1, config.optimizer.learning_rate) == (7, 0.8, 0.5)
    assert config.data.sources == {"prose": 1.0}
    assert config.model.init_from == "some/dir"
    assert load_config(path, ["model.init_from=null"]).model.init_from is None


NEAREST = """
steps: stpes num_train_epochs max_steps
rows: batch_size per_device_train_batch_size
row_length: row_lenght max_seq_length
accumulation: gradient_accumulation_steps
output: output_dir
checkpoint_every: save_steps
keep_checkpoints: save_total_limit
log_every: logging_steps
model.init_from: model.path model.name_or_path model_name_or_path
data.sources: data.path data.source dataset
evaluation.every: eval_steps
evaluation.rows: evaluation.batch_size
optimizer: optimiser
optimizer.name: optim
optimizer.learning_rate: optimizer.learning_rat optimizer.lr learning_rate lr
optimizer.warmup_steps: optimizer.warmup warmup_ratio
optimizer.weight_decay: weight_decay
optimizer.clip_norm: max_grad_norm
optimizer.b2: optimizer.beta2
loss.weighting: loss.wieghting
loss.remat: gradient_checkpointing
loss.dtype: bf16
lora.rank: lora.r
lora.targets: lora.target lora.target_modules
"""
"""Fields, and other names for them: misspelt, or of other programs."""


@pytest.mark.parametrize("line", NEAREST.split("\n")[1:-1])
def test_an_unknown_key_is_named_with_the_nearest_one(tmp_path, line):
    near, _, others = line.partition(": ")
    for unknown in others.split():
        section, _, name = unknown.rpartition(".")
        path = recipe(tmp_path, f"{section}: {{{name}: 1}}" if section else f"{name}: 1")
        with pytest.raises(InputError) as refused:
            load_config(path)
        assert str(refused.value) == f"{path}: unknown key {unknown!r}; did you mean {near!r}?"


RECIPES = r"""
qqqq: 5 | unknown key 'qqqq'
steps: many | steps: expected an integer, not 'many'
steps: 2.5 | steps: expected an integer, not .*2.5.*
optimizer: {learning_rate: fast} | optimizer.learning_rate: .* 'fast'
metrics: {norms: perhaps} | metrics.norms: .* 'perhaps'
steps: | .*
optimizer: 3 | .*
- a\n- b | .*
just words | .*
steps: [1, 2 | not valid YAML.*
a: b: c | not valid YAML.*
\tsteps: 5 | not valid YAML.*
steps: *unknown | not valid YAML.*
{row_length: 100, block_size: 32} | row_length 100 is not a multiple of block_size 32.*
data: {sources: {a: -1.5}, tokenizer: t} | data.sources.a: expected a number above 0, not -1.5
data: {sources: {a: 1}} | data.sources needs the tokenizer .*
data: {tokenizer: t, sources: {a: 1}}\nevaluation: {every: 5} | evaluation.source must name a .*
"""
# Bounds and choices of every field are in docs/reference.md, which is compared with the code.
OVERRIDES = r"""
steps=0 | steps: expected a number of at least 1, not 0
stepz=5 | unknown key 'stepz'; did you mean 'steps'\?
steps | expected key=value.*
objective=mlm | objective: expected one of wedlm, ar, drafter, not 'mlm'
loss.tile=100 | loss.tile must be a multiple of 128, not 100
optimizer.b2=1.5 | optimizer.b2: expected a number of at least 0 and below 1, not 1.5
optimizer.learning_rate=.inf | .*: expected a finite number of at least 0, not inf
suffix_share=1.5 | suffix_share: expected a number from 0 to 1, not 1.5
lora={rank: -1} | lora.rank: expected a number of at least 0, not -1
lora.targets=[q_proj, lm_head] | lora.targets\[1\]: expected one of q_proj, .*, not 'lm_head'
phases=[{from_step: 2, rows: 0}] | phases\[0\].rows: expected a number of at least 1, not 0
phases=[{from_stop: 10}] | unknown key 'from_stop' of a phase; did you mean 'from_step'\?
phases=[{from_step: 2, learning_rat: 1}] | .* of a phase; did you mean 'learning_rate'\?
data.skip=[[9, 2]] | data.skip\[0\] must be \[from, to\], .*counted from 1, not \[9, 2\]
data.skip=[[0, 3]] | data.skip\[0\] must be .*
data.skip=[[9, 9], [1, 2, 3]] | data.skip\[1\] must be .*not \[1, 2, 3\]
data.skip=[[8, 12], [2, 8]] | .*two ranges contain batch 8
data.skip=[5, 9] | data.skip: expected a list of ranges, such as \[\[5001, 5050\]\].*
data.skip=5 | data.skip: expected a list of ranges.*
data.skip=[[a, 9]] | data.skip\[0\]\[0\]: expected a list of ranges.*not 'a'
output=${nowhere} | .*
optimizer=adam | optimizer: expected fields of its own, such as .*
data.sources=x | data.sources: expected a mapping, such as .*
"""
OF_A_DRAFTER = r"""
lora.rank=0 | objective drafter trains adapters; give lora.rank.*
evaluation.questions=x.jsonl | .*a drafter never changes an answer.*
"""
OF_ADAPTERS = r"""
lora.targets=[] | lora.targets must name at least one of q_proj, k_proj, v_proj.*
optimizer.name=muon | optimizer.name must be adamw with lora.rank.*
"""
DRAFTER = "objective: drafter\nlora: {rank: 4}\nmodel: {init_from: x}"


def rows(table):
    return [tuple(line.rsplit(" | ", 1)) for line in table.strip("\n").split("\n")]


@pytest.mark.parametrize(
    ("text", "overrides", "origin", "message"),
    [
        *((text.encode().decode("unicode_escape"), [], None, told) for text, told in rows(RECIPES)),
        *(("steps: 5", [override], override, told) for override, told in rows(OVERRIDES)),
        *((DRAFTER, [override], override, told) for override, told in rows(OF_A_DRAFTER)),
        *(("lora: {rank: 4}", [override], override, told) for override, told in rows(OF_ADAPTERS)),
        ("rows: 0", ["steps=5"], None, "rows: expected a number of at least 1, not 0"),
        ("rows: 4", ["rows=2", "rows=0", "steps=5"], "rows=0", "rows: .*"),
        ("{row_length: 100, block_size: 32}", ["steps=5"], None, ".*"),
        ("block_size: 32", ["row_length=100"], "row_length=100", "row_length 100 is not .* 32"),
        ("row_length: 64", ["block_size=48"], "block_size=48", ".*"),
        ("data: {sources: {a: 0, b: 1}}", ["+data.sources.c=1"], None, ".*"),
        ("data: {sources: {a: 1}}", ["+data.sources.c=0", "seed=1"], "+data.sources.c=0", ".* 0.0"),
    ],
)
def test_a_refusal_is_a_sentence_and_names_where_the_value_comes_from(
    tmp_path, text, overrides, origin, message
):
    path = recipe(tmp_path, text)
    with pytest.raises(InputError) as refused:
        load_config(path, overrides)
    begins = f"{path}: " if origin is None else f"override {origin!r}: "
    assert re.fullmatch(re.escape(begins) + message, str(refused.value))


def test_what_is_refused_beside_something_else_is_taken_alone(tmp_path):
    path = recipe(tmp_path, "data: {tokenizer: t, sources: {a: 1, b: 0.5}}\nevaluation: {every: 5}")
    assert load_config(path, ["evaluation.source=b"]).data.sources == {"a": 1.0, "b": 0.5}
    load_config(path, ["evaluation.every=0", "lora.targets=[]", "optimizer.name=muon"])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\x00\x01\x02", "not valid YAML"),
        (bytes(range(256)), "is not a text file"),
        (b"\xff\xfe\xfa" * 50, "is not a text file"),
        ("a folder", "is a folder"),
        (None, "no such configuration file"),
    ],
)
def test_what_is_no_file_of_text_is_refused_by_name(tmp_path, content, what):
    path = tmp_path / "model.safetensors"
    if content == "a folder":
        path.mkdir()
    elif content:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"model\.safetensors: {what}") as refused:
        load_config(path)
    assert "\n" not in str(refused.value)


def test_a_mapping_takes_the_place_of_the_recipes_and_a_plus_adds(tmp_path):
    path = recipe(tmp_path, "data: {tokenizer: t, sources: {prose: 1, reasoning: 2}}\n")

    def sources(*overrides):
        return load_config(path, [*overrides]).data.sources

    both, third = {"prose": 1.0, "reasoning": 2.0}, {"low_entropy": 3.0}
    assert sources("data.sources={low_entropy: 3}") == third
    assert sources("data.sources={low_entropy:3,prose:1}") == {**third, "prose": 1.0}
    assert sources("+data.sources.low_entropy=3") == both | third
    assert sources("+data.sources={low_entropy: 3}") == both | third
    assert sources("data.sources={}") == {}
    assert sources("data.sources.prose=5") == {**both, "prose": 5.0}
    for wrong, message in (
        ("data.sources.prsoe=5", "there is no such entry; "),
        ("+seed=5", "adds to a mapping"),
        ("data.sources={a: 1", "not valid YAML"),
    ):
        with pytest.raises(InputError, match=message):
            sources(wrong)
    assert load_config(path, ["seed=7", "output=runs/${seed}"]).output == "runs/7"
    config = load_config(path, ["data={prefetch: 7}"])
    assert (config.data.prefetch, config.data.sources) == (7, both)


def test_every_setting_of_the_loss_can_be_set_in_a_recipe():
    section = {f.name: f.type for f in dataclasses.fields(type(TrainConfig().loss))}
    assert section == {f.name: f.type for f in dataclasses.fields(LossConfig)}


def test_recipe_and_overrides_reach_the_loop(tmp_path, monkeypatch, capsys):
    asked_for = []

    def train_nothing(config, *, allow_changed=False):
        asked_for.append((config.steps, config.rows))
        return Path(config.output) / "hf"

    monkeypatch.setattr(train.loop, "train", train_nothing)
    assert main(["train", "--config", str(recipe(tmp_path)), "rows=3", "output=some/run"]) == 0
    assert asked_for == [(5, 3)]
    assert capsys.readouterr().out.split() == ["exported", str(Path("some/run/hf"))]


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        train.command.main(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line for line in lines if line.startswith("  ") and line.split()}
    for name, default, meaning in describe():
        assert meaning
        assert meaning in named[name]
        assert named[name].endswith(f"[{default}]")


def test_every_size_of_batch_is_compiled_once_as_the_largest_is(tmp_path, monkeypatch, capsys):
    def compiled(config, topology, sources):
        assert sources == 1
        own = largest_phase(config).config
        assert config.loss.remat == ("auto" if own.rows == largest else "gate")
        # The largest is found to fit in two micro-batches, so the others are cut as it is.
        assert own.accumulation == (1 if own.rows == largest else 2)
        return SimpleNamespace(text=f"{own.rows} on {topology}", remat="gate", accumulation=2)

    monkeypatch.setattr("train.compile_only.compile_step", compiled)
    monkeypatch.setattr("train.compile_only.describe", lambda step: step.text)
    path = recipe(tmp_path, "steps: 50\nrows: 2\n")
    arguments = ["train", "--compile-only", "--config", str(path)]
    largest = 2
    assert main(arguments) == 0
    assert capsys.readouterr().out == "2 on v5p:4x4x4\n"
    phases = "[{from_step: 5, learning_rate: 1}, {from_step: 9, rows: 4}, {from_step: 20, rows: 2}]"
    largest = 4
    assert main([*arguments, f"phases={phases}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "from step 0:",
        "1 on v5p:4x4x4",
        "from step 9:",
        "4 on v5p:4x4x4",
    ]
