"""A drafter from recipe to tokens: a run, its files, and decoding with and without it."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.examples.checkpoints import assert_same_bits, edit_json, hf_values, set_tensors
from tests.examples.tiny_run import metric_lines, tiny_recipe
from tests.examples.training import TINY
from tests.train.test_evaluation import evaluations
from train.loop import train as run_training
from train.recipe.config import DrafterSection, EvaluationSection, LoraSection, ModelSection
from train.step_cost import model_flops, program_flops
from wedlm_jax import LLM, SamplingParams
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.errors import InputError

WINDOW = 4
PROMPTS = [[5, 17, 3], [60, 2, 9, 31, 4, 8], [41], [7, 7, 7, 7, 12]]


def recipe(output, init_from):
    return tiny_recipe(
        output,
        None,
        model=ModelSection(init_from=str(init_from)),
        objective="drafter",
        drafter=DrafterSection(window_size=WINDOW),
        lora=LoraSection(rank=4, alpha=8.0),
        evaluation=EvaluationSection(every=30, rows=4),
        steps=60,
        checkpoint_every=30,
        log_every=30,
    )


@pytest.fixture(scope="module")
def stock(finished, tmp_path_factory):
    """A checkpoint as people have them: no mask token, of an AR family."""
    folder = shutil.copytree(finished / "hf", tmp_path_factory.mktemp("stock") / "model")
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    edit_json(folder / "config.json", **kind, mask_token_id=None)
    return folder


@pytest.fixture(scope="module")
def run(stock, tmp_path_factory):
    output = tmp_path_factory.mktemp("drafter") / "run"
    assert run_training(recipe(output, stock)) == output / "drafter"
    return output


def agreements(run):
    return [line["agreement_1"] for line in evaluations(run)]


def test_a_run_learns_to_agree_with_its_model_and_writes_pefts_files(run, stock):
    lines = evaluations(run)
    assert [line["step"] for line in lines] == [0, 30, 60]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[-1]["agreement_1"] > lines[0]["agreement_1"] + 0.05
    assert {"agreement_1", "agreement_3", "tokens_per_forward"} <= lines[0].keys()
    assert metric_lines(run)[-1]["tokens_per_forward"] >= 1
    assert_same_bits(hf_values(run / "base"), hf_values(stock))
    content = json.loads((run / "drafter" / "adapter_config.json").read_text())
    assert (content["peft_type"], content["r"], content["lora_alpha"]) == ("LORA", 4, 8.0)
    assert content["wedlm"]["rows"] == "masked"
    values = hf_values(run / "drafter")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    assert values[name + "A.weight"].shape == (4, 16)
    assert np.abs(values[name + "B.weight"]).max() > 0
    assert values["base_model.model.mask_embedding"].shape == (16,)


def tokens(llm, params):
    return [list(one.token_ids) for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({}, {}),
        *(
            pytest.param(options, engine, marks=pytest.mark.full)
            for options, engine in (
                ({}, {"mesh": {"data": 2}, "max_batch_size": 4}),
                ({"temperature": 0.9, "seed": 3}, {}),
                ({}, {"quantization": "int8"}),
                ({}, {"kv_cache_dtype": "int8"}),
            )
        ),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_model_alone(run, stock, options, engine):
    params = SamplingParams(max_tokens=24, ignore_eos=True, **options)
    alone = tokens(LLM(stock, lookup=0, **engine), params)
    drafted = LLM(stock, drafter=str(run / "drafter"), window_size=WINDOW, lookup=0, **engine)
    assert tokens(drafted, params) == alone
    results = drafted.generate(PROMPTS, params)
    assert sum(one.num_forwards for one in results) <= sum(map(len, alone))


def test_a_drafter_is_trained_on_with_wider_windows(run, stock, tmp_path):
    config = recipe(tmp_path / "on", stock)
    config.drafter = DrafterSection(window_size=2 * WINDOW, init_from=str(run / "drafter"))
    config.steps, config.evaluation.every, config.optimizer.warmup_steps = 1, 1, 0
    assert run_training(config) == tmp_path / "on" / "drafter"
    untrained, *_, last = agreements(run)
    first, _ = agreements(tmp_path / "on")
    # A mask does not see those after it, so near offsets begin where they were left.
    assert abs(first - last) < 0.1
    assert first > untrained + 0.05
    content = json.loads((tmp_path / "on" / "drafter" / "adapter_config.json").read_text())
    assert content["wedlm"]["window_size"] == 2 * WINDOW


def test_adapters_of_another_shape_are_not_trained_on(run, stock, tmp_path):
    config = recipe(tmp_path / "on", stock)
    config.drafter.init_from = str(run / "drafter")
    for change, sentence in (
        ({"rank": 2}, "has adapters of rank 4, .* recipe adapters of rank 2"),
        ({"rank": 4, "targets": ["q_proj"]}, "recipe .* on q_proj and a previous"),
    ):
        config.lora = LoraSection(alpha=8.0, **change)
        with pytest.raises(InputError, match=sentence):
            run_training(config)


def not_finite(value):
    """A drafter's weights with this value in the embedding of its mask."""

    def spoilt(content):
        values = load(content)
        values["base_model.model.mask_embedding"][3] = value
        return save(values, {"format": "pt"})

    return spoilt


@pytest.mark.parametrize(
    ("file", "harm", "sentence"),
    [
        ("config.json", {"r": 2}, r"has shape \[4, 24\], expected \[2, 24\]"),
        ("config.json", {"target_modules": ["q_proj"]}, "is not part of a drafter"),
        ("config.json", {"target_modules": ["lm_head"]}, "not a drafter's configuration: "),
        ("config.json", {"r": 4.5}, "expected an integer of at least 0 as r, not 4.5"),
        (
            "config.json",
            {"wedlm": {"rows": "masked", "window_size": "four"}},
            "expected an integer of at least 0 as window_size, not 'four'",
        ),
        ("config.json", {"wedlm": None}, "adapters of an ordinary finetune, not a drafter"),
        ("config.json", lambda _: b"\xff\x00", "not valid JSON"),
        ("config.json", None, r"no adapter_config\.json here, so this is not"),
        ("model.safetensors", lambda x: x[:-100], "truncated or not a safetensors file"),
        ("model.safetensors", not_finite(np.nan), "mask_embedding' has values that are not finite"),
        ("model.safetensors", not_finite(np.inf), "mask_embedding' has values that are not finite"),
    ],
)
def test_what_is_no_drafter_is_refused(file, harm, sentence, run, stock, tmp_path):
    path = shutil.copytree(run / "drafter", tmp_path / "drafter") / f"adapter_{file}"
    if harm is None:
        path.unlink()
    elif isinstance(harm, dict):
        edit_json(path, **harm)
    else:
        path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(InputError, match=sentence):
        LLM(stock, drafter=str(path.parent))


def test_a_drafter_of_another_model_is_refused(run, stock, tmp_path):
    other, name = shutil.copytree(stock, tmp_path / "other"), "model.layers.1.mlp.up_proj.weight"
    set_tensors(other, **{name: hf_values(stock)[name] + 1})
    with pytest.raises(InputError, match="a drafter of another model"):
        LLM(other, drafter=str(run / "drafter"))


def test_masks_of_a_drafter_are_not_to_decide(run, stock):
    llm = LLM(stock, drafter=str(run / "drafter"))
    with pytest.raises(InputError, match="mode: expected verified or ar, not paper"):
        llm.generate(PROMPTS, SamplingParams(mode="paper", max_tokens=4))


def test_the_newest_state_converts_to_the_drafter_and_to_no_model(run, tmp_path):
    """Merged adapters would act on text, too."""
    written = convert(run, tmp_path / "out", dtype="float32")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (run / "drafter" / name).read_bytes()
    assert (written.format, written.dtypes) == ("peft", ("float32",))
    with pytest.raises(InputError, match="one format and no model type"):
        convert(run, tmp_path / "other", model_type="llama")
    with pytest.raises(InputError, match="this run trains a drafter: `wedlm convert`"):
        load_checkpoint(run)


def test_products_are_those_counted_by_hand():
    """Rows of 128 with 16 windows of 4: the memory has no backward pass, a teacher has logits."""
    config = dataclasses.replace(recipe(Path("unused"), Path("unused")), rows=1, accumulation=1)
    hidden, inner, layers = TINY.hidden_size, TINY.intermediate_size, TINY.num_hidden_layers
    parameters = TINY.num_parameters(embeddings=False)
    adapters = layers * 4 * (2 * (hidden + 24) + 2 * (hidden + 12) + 3 * (hidden + inner))
    products = 128 * parameters + 64 * (2 * parameters + 3 * adapters)
    products += 3 * 64 * hidden * TINY.vocab_size + 64 * 8 * 256 * hidden
    attention = (128 + 3 * 64) * 2 * (4 * 6 * layers) * 128 / 2
    assert model_flops(config, TINY) == 2 * products + 2 * attention
    assert program_flops(config, TINY, 1).products == 2 * products
