"""Recipes and `wedlm train`: typed, overridable, and refused with one clear sentence."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import train.command
import train.loop
from train.recipe.config import TrainConfig, describe, load_config, save_config
from train.recipe.phases import largest_phase
from wedlm_jax.__main__ import main
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig

COUNTS = ("steps", "rows", "accumulation", "block_size", "log_every", "checkpoint_every")
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
    # Which rows of a vocabulary are unused, the tokenizer knows.
    assert "mask_token_id" not in loaded.model.architecture
    assert loaded.model.mask_token is None


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


FILE, REMAT = None, "auto, none, products, gate, projections, attention, full, offload"
LORA = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


@pytest.mark.parametrize(
    ("text", "overrides", "origin", "message"),
    [
        ("qqqq: 5", [], FILE, "unknown key 'qqqq'"),
        ("steps: many", [], FILE, "steps: expected an integer, not 'many'"),
        ("steps: 2.5", [], FILE, "steps: expected an integer, not .*2.5.*"),
        ("optimizer: {learning_rate: fast}", [], FILE, "optimizer.learning_rate: .* 'fast'"),
        ("metrics: {norms: perhaps}", [], FILE, "metrics.norms: .* 'perhaps'"),
        *((text, [], FILE, ".*") for text in ("steps:", "optimizer: 3", "- a\n- b", "just words")),
        *(
            (text, [], FILE, "not valid YAML.*")
            for text in ("steps: [1, 2", "a: b: c", "\tsteps: 5", "steps: *unknown")
        ),
        ("rows: 0", [], FILE, "rows must be at least 1, not 0"),
        ("rows: 0", ["steps=5"], FILE, "rows must be at least 1, not 0"),
        ("rows: 4", ["rows=2", "rows=0", "steps=5"], "rows=0", "rows must be .*"),
        ("{row_length: 100, block_size: 32}", ["steps=5"], FILE, ".*"),
        ("block_size: 32", ["row_length=100"], "row_length=100", "row_length 100 is not .* 32"),
        ("row_length: 64", ["block_size=48"], "block_size=48", ".*"),
        ("data: {sources: {a: 0, b: 1}}", ["+data.sources.c=1"], FILE, ".*"),
        (
            "data: {sources: {a: 1, b: 1}}",
            ["+data.sources.c=0", "seed=1"],
            "+data.sources.c=0",
            "data.sources: the share of c must be above 0, not 0.0",
        ),
        ("data: {sources: {a: -1.5}, tokenizer: t}", [], FILE, ".* share of a .* not -1.5"),
        ("data: {sources: {a: 1}}", [], FILE, "data.sources needs the tokenizer .*"),
        ("data: {workers: -1}", [], FILE, "data.workers must be at least 0, not -1"),
        ("data: {prefetch: 0}", [], FILE, "data.prefetch must be at least 1, not 0"),
        (
            "data: {tokenizer: t, sources: {a: 1}}\nevaluation: {every: 5}",
            [],
            FILE,
            "evaluation.source must name a folder.*",
        ),
        *(
            ("", [override], override, message)
            for override, message in (
                *((f"{name}=0", f"{name} must be at least 1, not 0") for name in COUNTS),
                ("stepz=5", "unknown key 'stepz'; did you mean 'steps'\\?"),
                ("steps", "expected key=value.*"),
                ("loss.attention=flash", "loss.attention must be one of dense.*not 'flash'"),
                ("objective=mlm", "objective must be one of wedlm, ar, drafter, not 'mlm'"),
                ("loss.remat=ful", f"loss.remat must be one of {REMAT}, not 'ful'"),
                ("loss.tile=100", "loss.tile must be a multiple of 128, not 100"),
                ("loss.weighting=foo", "loss.weighting must be inverse_ratio or uniform, .*'foo'"),
                ("loss.dtype=int8", "loss.dtype must be bfloat16 or float32, not 'int8'"),
                ("optimizer.b2=1.5", "optimizer.b2 must be at least 0 and below 1, not 1.5"),
                ("optimizer.clip_norm=0", "optimizer.clip_norm must be above 0, not 0.0"),
                ("optimizer.name=sgd", "optimizer.name must be adamw or muon, not 'sgd'"),
                ("lora.rank=-1", "lora.rank must be at least 0, not -1"),
                ("lora.alpha=0", "lora.alpha must be above 0, not 0.0"),
                ("lora.targets=[lm_head]", f"lora.targets must be one of {LORA}, not 'lm_head'"),
                ("lora={rank: -1}", "lora.rank must be .*"),
                ("quantized_training=int4", "quantized_training must be none or int8, not 'int4'"),
                ("phases=[{from_step: 2, rows: 0}]", r"phases\[0\].rows must be at least 1, not 0"),
                ("phases=[{from_stop: 10}]", ".*unknown key .*"),
                ("data.skip=[[9, 2]]", r"data.skip\[0\] must be \[from, to\], .* not \[9, 2\]"),
                ("data.skip=[[0, 3]]", r"data.skip\[0\] must be .*"),
                ("data.skip=[[9, 9], [1, 2, 3]]", r"data.skip\[1\] must .*not \[1, 2, 3\]"),
                ("data.skip=[[8, 12], [2, 8]]", ".*two ranges have batch 8"),
                ("data.skip=[5, 9]", "data.skip: expected a list of ranges, such as .*"),
                ("data.skip=5", "data.skip: expected a list of ranges.*"),
                ("data.skip=[[a, 9]]", r"data.skip\[0\]\[0\]: expected a list of .*not 'a'"),
                ("output=${nowhere}", ".*"),
            )
        ),
        *(
            ("lora: {rank: 4}", [override], override, message)
            for override, message in (
                ("lora.targets=[]", "lora.targets must name at least one of q_proj, k_proj, .*"),
                ("optimizer.name=muon", "optimizer.name must be adamw with lora.rank.*"),
            )
        ),
        *(
            ("objective: drafter\nlora: {rank: 4}\nmodel: {init_from: x}", [override], origin, text)
            for override, origin, text in (
                (
                    "lora.rank=0",
                    "lora.rank=0",
                    "objective drafter trains adapters; give lora.rank.*",
                ),
                (
                    "drafter.window_size=1",
                    "drafter.window_size=1",
                    "drafter.window_size must be at least 2.*",
                ),
                (
                    "evaluation.questions=x.jsonl",
                    "evaluation.questions=x.jsonl",
                    ".*a drafter never changes an answer.*",
                ),
            )
        ),
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


BYTES = [b"\x00\x01\x02", bytes(range(256)), b"\xff\xfe\xfa" * 50]


@pytest.mark.parametrize("content", [*BYTES, "a folder", None])
def test_what_is_no_file_of_text_is_refused_by_name(tmp_path, content):
    path = tmp_path / "model.safetensors"
    if content == "a folder":
        path.mkdir()
    elif content:
        path.write_bytes(content)
    what = ".+" if content else "no such configuration file"
    with pytest.raises(InputError, match=rf"model\.safetensors: {what}") as refused:
        load_config(path)
    assert "\n" not in str(refused.value)


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


@pytest.fixture
def asked_for(monkeypatch):
    """The configurations of the runs that the command starts, none of which trains."""
    configs = []

    def record(config, *, allow_changed=False):
        configs.append(config)
        return Path(config.output) / "hf"

    monkeypatch.setattr(train.loop, "train", record)
    return configs


def test_recipe_and_overrides_reach_the_loop(asked_for, tmp_path, capsys):
    status = main(["train", "--config", str(recipe(tmp_path)), "rows=3", "output=some/run"])
    assert status == 0
    assert [(c.steps, c.rows) for c in asked_for] == [(5, 3)]
    assert capsys.readouterr().out.split() == ["exported", str(Path("some/run/hf"))]


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        train.command.main(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line for line in lines if line.startswith("  ") and line.split()}
    for name, default, meaning in describe():
        assert meaning in named[name]
        assert named[name].endswith(f"[{default}]")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("stpes: 5", [], "unknown key 'stpes'; did you mean 'steps'?"),
        ("steps: 5", ["rows=none"], "override 'rows=none': rows: expected an integer, not 'none'"),
        ("steps: 5", ["optimizer=adam"], "optimizer: expected fields of its own, such as"),
        ("steps: 5", ["data.sources=x"], "data.sources: expected a mapping, such as"),
    ],
)
def test_bad_input_is_one_line_and_status_2(asked_for, tmp_path, capsys, text, overrides, message):
    assert main(["train", "--config", str(recipe(tmp_path, text)), *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wedlm train: ")
    assert message in error
    assert error.count("\n") == 1
    assert not asked_for


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (None, "--config"),
        ("--steps=5", "unrecognized arguments: --steps=5; fields are given as steps=VALUE\n"),
        ("--row-length", "unrecognized arguments: --row-length; fields are given as row_length="),
        ("--confg", "unrecognized arguments: --confg; did you mean --config?\n"),
    ],
)
def test_options_that_there_are_not_are_told_as_fields(tmp_path, capsys, option, said):
    with pytest.raises(SystemExit) as ended:
        main(["train", *(["--config", str(recipe(tmp_path)), option] if option else [])])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


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
    arguments = [
        "train",
        "--compile-only",
        "--config",
        str(recipe(tmp_path, "steps: 50\nrows: 2\n")),
    ]
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
