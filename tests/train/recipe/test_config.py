"""Recipes: typed, overridable, and refused with one clear sentence."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from train.recipe.config import TrainConfig, describe, load_config, save_config
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def recipe(folder, text="steps: 5\n"):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_with_the_values_it_states(path):
    config = dataclasses.asdict(load_config(path))
    stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key, value in stated.items():
        if isinstance(value, dict):
            assert {name: config[key][name] for name in value} == value, key
        else:
            assert config[key] == value, key


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_recipe_names_a_mask_token(path):
    """Which rows of a vocabulary are unused, the tokenizer knows."""
    config = load_config(path)
    assert "mask_token_id" not in config.model.architecture
    assert config.model.mask_token is None


def test_there_are_recipes():
    assert {"embedded_ar", "embedded_wedlm"} <= {path.stem for path in CONFIGS}


def test_what_a_recipe_leaves_out_has_its_default(tmp_path):
    config = load_config(recipe(tmp_path))
    assert config == dataclasses.replace(TrainConfig(), steps=5)
    empty = load_config(recipe(tmp_path, "# nothing\n"))
    assert empty == TrainConfig()


def test_overrides_win_over_the_file(tmp_path):
    path = recipe(tmp_path, "steps: 5\noptimizer: {learning_rate: 0.5}\n")
    given = ["steps=7", "optimizer.b1=0.8", "data.sources={prose: 1}", "model.init_from=some/dir"]
    config = load_config(path, given)
    assert (config.steps, config.optimizer.b1, config.optimizer.learning_rate) == (7, 0.8, 0.5)
    assert config.data.sources == {"prose": 1.0}
    assert config.model.init_from == "some/dir"
    assert load_config(path, ["model.init_from=null"]).model.init_from is None


def test_a_saved_recipe_loads_as_the_same(tmp_path):
    path = recipe(tmp_path, "steps: 5\nmodel: {architecture: {hidden_size: 8, qk_norm: true}}\n")
    config = load_config(path, ["loss.dtype=float32", "loss.ar_weight=0.25"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("text", "unknown", "near"),
    [
        ("stpes: 5", "stpes", "steps"),
        ("row_lenght: 64", "row_lenght", "row_length"),
        ("optimizer: {learning_rat: 1}", "optimizer.learning_rat", "optimizer.learning_rate"),
        ("loss: {wieghting: uniform}", "loss.wieghting", "loss.weighting"),
        ("lora: {target: [q_proj]}", "lora.target", "lora.targets"),
        ("optimizer: {lr: 1}", "optimizer.lr", "optimizer.learning_rate"),
        ("optimizer: {beta2: 1}", "optimizer.beta2", "optimizer.b2"),
        ("optim: {lr: 1}", "optim", "optimizer.name"),
        ("optimiser: {lr: 1}", "optimiser", "optimizer"),
        ("learning_rate: 1", "learning_rate", "optimizer.learning_rate"),
        ("lr: 1", "lr", "optimizer.learning_rate"),
        ("batch_size: 1", "batch_size", "rows"),
        ("per_device_train_batch_size: 1", "per_device_train_batch_size", "rows"),
        ("evaluation: {batch_size: 1}", "evaluation.batch_size", "evaluation.rows"),
        ("num_train_epochs: 1", "num_train_epochs", "steps"),
        ("max_steps: 1", "max_steps", "steps"),
        ("output_dir: a", "output_dir", "output"),
        ("save_steps: 1", "save_steps", "checkpoint_every"),
        ("save_total_limit: 1", "save_total_limit", "keep_checkpoints"),
        ("logging_steps: 1", "logging_steps", "log_every"),
        ("eval_steps: 1", "eval_steps", "evaluation.every"),
        ("warmup_ratio: 1", "warmup_ratio", "optimizer.warmup_steps"),
        ("optimizer: {warmup: 1}", "optimizer.warmup", "optimizer.warmup_steps"),
        ("weight_decay: 1", "weight_decay", "optimizer.weight_decay"),
        ("max_grad_norm: 1", "max_grad_norm", "optimizer.clip_norm"),
        ("max_seq_length: 1", "max_seq_length", "row_length"),
        ("gradient_accumulation_steps: 1", "gradient_accumulation_steps", "accumulation"),
        ("gradient_checkpointing: true", "gradient_checkpointing", "loss.remat"),
        ("model: {path: a}", "model.path", "model.init_from"),
        ("model: {name_or_path: a}", "model.name_or_path", "model.init_from"),
        ("model_name_or_path: a", "model_name_or_path", "model.init_from"),
        ("data: {path: a}", "data.path", "data.sources"),
        ("data: {source: a}", "data.source", "data.sources"),
        ("dataset: a", "dataset", "data.sources"),
        ("lora: {r: 1}", "lora.r", "lora.rank"),
        ("lora: {target_modules: [a]}", "lora.target_modules", "lora.targets"),
        ("bf16: true", "bf16", "loss.dtype"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(tmp_path, text, unknown, near):
    path = recipe(tmp_path, text)
    with pytest.raises(InputError) as refused:
        load_config(path)
    assert str(refused.value) == f"{path}: unknown key {unknown!r}; did you mean {near!r}?"


def test_an_unknown_key_like_no_other_is_named_alone(tmp_path):
    with pytest.raises(InputError, match=r"unknown key 'qqqq'$"):
        load_config(recipe(tmp_path, "qqqq: 5"))


def test_an_unknown_override_is_named_with_the_nearest_one(tmp_path):
    with pytest.raises(InputError, match="unknown key 'stepz'; did you mean 'steps'"):
        load_config(recipe(tmp_path), ["stepz=5"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("steps: many", "many"),
        ("steps: 2.5", "2.5"),
        ("optimizer: {learning_rate: fast}", "fast"),
        ("metrics: {norms: perhaps}", "perhaps"),
    ],
)
def test_a_wrong_type_is_refused_with_its_value(tmp_path, text, value):
    path = recipe(tmp_path, text)
    with pytest.raises(InputError) as refused:
        load_config(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert value in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["steps:", "optimizer: 3", "- a\n- b", "just words"])
def test_what_is_no_mapping_of_fields_is_refused(tmp_path, text):
    path = recipe(tmp_path, text)
    with pytest.raises(InputError, match=r"recipe\.yaml: ") as refused:
        load_config(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["steps: [1, 2", "a: b: c", "\tsteps: 5", "steps: *unknown"])
def test_what_is_not_yaml_is_refused(tmp_path, text):
    with pytest.raises(InputError, match=r"recipe\.yaml: not valid YAML") as refused:
        load_config(recipe(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml: no such configuration file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("content", [b"\x00\x01\x02", bytes(range(256)), b"\xff\xfe\xfa" * 50])
def test_a_binary_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors: ") as refused:
        load_config(path)
    assert "\n" not in str(refused.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=str(tmp_path)):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["steps", "rows", "accumulation", "block_size", "log_every"])
def test_a_count_below_one_is_refused_by_name(tmp_path, name):
    with pytest.raises(InputError, match=f"{name} must be at least 1, not 0"):
        load_config(recipe(tmp_path), [f"{name}=0"])


def test_a_row_of_broken_blocks_is_refused(tmp_path):
    with pytest.raises(InputError, match="row_length 100 is not a multiple of block_size 32"):
        load_config(recipe(tmp_path), ["row_length=100"])


def test_an_unknown_attention_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(InputError, match=r"loss\.attention must be one of dense.*not 'flash'"):
        load_config(recipe(tmp_path), ["loss.attention=flash"])


def test_an_unknown_objective_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="objective must be one of wedlm, ar, drafter, not 'mlm'"):
        load_config(recipe(tmp_path), ["objective=mlm"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "loss.remat=ful",
            "loss.remat must be one of auto, none, products, gate, projections, attention, full, "
            "offload, not 'ful'",
        ),
        ("loss.tile=100", "loss.tile must be a multiple of 128, not 100"),
        ("loss.weighting=foo", "loss.weighting must be inverse_ratio or uniform, not 'foo'"),
        ("loss.dtype=int8", "loss.dtype must be bfloat16 or float32, not 'int8'"),
        ("checkpoint_every=0", "checkpoint_every must be at least 1, not 0"),
        ("optimizer.b2=1.5", "optimizer.b2 must be at least 0 and below 1, not 1.5"),
        ("optimizer.clip_norm=0", "optimizer.clip_norm must be above 0, not 0.0"),
        ("optimizer.name=sgd", "optimizer.name must be adamw or muon, not 'sgd'"),
        ("data.sources={prose: 0}", "data.sources: the share of prose must be above 0, not 0.0"),
        ("lora.rank=-1", "lora.rank must be at least 0, not -1"),
        ("lora.alpha=0", "lora.alpha must be above 0, not 0.0"),
        (
            "lora.targets=[q_proj, lm_head]",
            "lora.targets must be one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
            "down_proj, not 'lm_head'",
        ),
        ("quantized_training=int4", "quantized_training must be none or int8, not 'int4'"),
    ],
)
def test_a_value_out_of_bounds_is_refused(tmp_path, override, message):
    path = recipe(tmp_path)
    with pytest.raises(InputError) as refused:
        load_config(path, [override])
    assert str(refused.value) == f"override {override!r}: {message}"


@pytest.mark.parametrize(
    ("text", "overrides", "origin"),
    [
        ("rows: 0", [], None),
        ("rows: 0", ["steps=5"], None),
        ("rows: 4", ["rows=2", "rows=0", "steps=5"], "rows=0"),
        ("block_size: 32", ["row_length=100"], "row_length=100"),
        ("row_length: 64", ["block_size=48"], "block_size=48"),
        ("{row_length: 100, block_size: 32}", ["steps=5"], None),
        ("data: {sources: {a: 1, b: 1}}", ["+data.sources.c=0", "seed=1"], "+data.sources.c=0"),
        ("data: {sources: {a: 0, b: 1}}", ["+data.sources.c=1"], None),
        ("steps: 5", ["lora={rank: -1}"], "lora={rank: -1}"),
        ("steps: 5", ["phases=[{from_step: 2, rows: 0}]"], "phases=[{from_step: 2, rows: 0}]"),
        ("steps: 5", ["data.skip=[[9, 2]]"], "data.skip=[[9, 2]]"),
        ("steps: 5", ["output=${nowhere}", "seed=1"], "output=${nowhere}"),
    ],
)
def test_a_refusal_names_where_the_value_comes_from(tmp_path, text, overrides, origin):
    path = recipe(tmp_path, text)
    with pytest.raises(InputError) as refused:
        load_config(path, overrides)
    expected = f"{path}: " if origin is None else f"override {origin!r}: "
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.targets=[]", "lora.targets must name at least one of q_proj, k_proj, v_proj"),
        ("optimizer.name=muon", "optimizer.name must be adamw with lora.rank"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(tmp_path, override, message):
    path = recipe(tmp_path)
    load_config(path, [override])
    with pytest.raises(InputError, match=message):
        load_config(path, ["lora.rank=4", override])


def test_sources_to_train_on_need_one_to_evaluate_on(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("data: {tokenizer: t, sources: {a: 1}}\nevaluation: {every: 5}\n")
    with pytest.raises(InputError, match=r"evaluation\.source must name a folder"):
        load_config(path)
    load_config(path, ["evaluation.source=b"])
    load_config(path, ["evaluation.every=0"])


def test_a_mapping_takes_the_place_of_the_recipes_and_a_plus_adds(tmp_path):
    path = recipe(tmp_path, "data: {tokenizer: t, sources: {prose: 1, reasoning: 2}}\n")

    def sources(*overrides):
        return load_config(path, [*overrides]).data.sources

    assert sources("data.sources={low_entropy: 3}") == {"low_entropy": 3.0}
    assert sources("data.sources={low_entropy:3,prose:1}") == {"low_entropy": 3.0, "prose": 1.0}
    assert sources("+data.sources.low_entropy=3") == {
        "prose": 1.0,
        "reasoning": 2.0,
        "low_entropy": 3.0,
    }
    assert sources("data.sources={}") == {}
    assert sources("+data.sources={low_entropy: 3}") == sources("+data.sources.low_entropy=3")
    assert sources("data.sources.prose=5") == {"prose": 5.0, "reasoning": 2.0}
    for wrong, message in (
        ("data.sources.prsoe=5", "there is no such entry; "),
        ("+seed=5", "adds to a mapping"),
        ("data.sources={a: 1", "not valid YAML"),
    ):
        with pytest.raises(InputError, match=message):
            sources(wrong)
    assert load_config(path, ["seed=7", "output=runs/${seed}"]).output == "runs/7"
    config = load_config(path, ["data={prefetch: 7}"])
    assert (config.data.prefetch, config.data.sources) == (7, {"prose": 1.0, "reasoning": 2.0})


def test_an_override_without_a_value_is_refused(tmp_path):
    with pytest.raises(InputError, match="override 'steps': expected key=value"):
        load_config(recipe(tmp_path), ["steps"])


def test_every_field_is_described_once():
    lines = describe()
    names = [name for name, _, _ in lines]
    assert len(set(names)) == len(names)
    assert ("steps", "1000", "optimizer steps") in lines
    assert ("optimizer.b2", "0.95", "AdamW's second moment decay") in lines
    assert "model.init_from" in names
    assert all(meaning for _, _, meaning in lines)


def test_every_setting_of_the_loss_can_be_set_in_a_recipe():
    section = {f.name: f.type for f in dataclasses.fields(type(TrainConfig().loss))}
    assert section == {f.name: f.type for f in dataclasses.fields(LossConfig)}
