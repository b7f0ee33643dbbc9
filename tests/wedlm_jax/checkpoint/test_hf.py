"""A folder in Hugging Face format: what is read of it, and how a bad one is refused."""

import json

import numpy as np
import pytest

from infer.evaluate import decoders_at
from infer.flags import sampling_params
from infer.generate import load, parser
from tests.examples.checkpoints import edit_config, hf_values, refused, set_tensors, write_tiny
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from wedlm_jax.checkpoint.hf import (
    GENERATION_CONFIG,
    INDEX,
    HFCheckpoint,
    read_generation_config,
)
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.config import read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
FULL = "full_attention"


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        (K_PROJ, None, f"{K_PROJ!r} is missing"),
        ("lm_head.weight", None, "'lm_head.weight' is missing"),
        ("model.layers.3.mlp.up_proj.weight", np.zeros(2), "is not part of this model"),
        (K_PROJ, np.zeros((16, 12)), "shape [16, 12], expected [12, 16]"),
    ],
)
def test_tensors_that_are_not_the_models(hf, tensor, value, said):
    set_tensors(hf, **{tensor: None if value is None else np.float32(value)})
    with refused(hf, repr(tensor), said):
        load_checkpoint(hf)


@pytest.mark.parametrize("content", ["{", "", "[1]", "\x00\xff", "null", None])
def test_invalid_config(hf, content):
    path = hf / "config.json"
    path.unlink() if content is None else path.write_bytes(content.encode("latin-1"))
    said = "no such file" if content is None else "JSON"
    with refused(path, said):
        load_checkpoint(hf)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not supported"),
        ({"model_type": None}, "model_type None"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "from layer 1 on"),
        ({"layer_types": [FULL, FULL, "sliding_attention"]}, "layer 2"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"vocab_size": "24"}, ""),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"mask_token_id": 24}, "mask_token_id 24 lies outside"),
        ({"rms_norm_eps": "small"}, ""),
        ({"rope_scaling": "yarn"}, ""),
        ({"remove": "num_hidden_layers"}, "'num_hidden_layers' is missing"),
    ],
)
def test_config_that_cannot_be_served(hf, changes, said):
    edit_config(hf, **changes)
    with refused(hf / "config.json", said):
        load_checkpoint(hf)


def test_wedlm_config_that_is_silent_is_told_by_the_tensors(hf):
    for part in ("attention_bias", "qk_norm", "mlp_bias"):
        edit_config(hf, remove=part)
    config = load_checkpoint(hf).config
    assert (config.attention_bias, config.qk_norm, config.mlp_bias) == (True, True, False)


# --- several files -----------------------------------------------------------------------


def test_single_file_goes_before_an_index(hf):
    (hf / INDEX).write_text("stale")
    assert len(HFCheckpoint(hf).files) == 1


@pytest.fixture
def sharded(tmp_path):
    return write_tiny(tmp_path / "sharded", shard_bytes=4000)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((text, INDEX) for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}')),
        ('{"weight_map": {"a": "../other.safetensors"}}', "'a' is in no file of this folder"),
    ],
)
def test_index_that_is_none(sharded, content, said):
    (sharded / INDEX).write_text(content)
    with refused(sharded, said):
        load_checkpoint(sharded)


def test_index_that_disagrees_with_its_files(sharded):
    index = json.loads((sharded / INDEX).read_text())
    files = index["weight_map"]
    files[K_PROJ] = next(f for f in sorted(set(files.values())) if f != files[K_PROJ])
    (sharded / INDEX).write_text(json.dumps(index))
    with refused(files[K_PROJ], f"{K_PROJ!r} is missing"):
        load_checkpoint(sharded)
    (shard,) = sharded.glob("model-00002-of-*.safetensors")
    shard.unlink()
    with refused(shard, "no such file"):
        load_checkpoint(sharded)


def test_tied_head_written_out_is_accepted(tmp_path):
    folder = write_tiny(tmp_path / "a", tie_word_embeddings=True)
    set_tensors(folder, **{"lm_head.weight": hf_values(folder)["model.embed_tokens.weight"]})
    assert load_checkpoint(folder).config.tie_word_embeddings


# --- generation_config.json --------------------------------------------------------------

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
SMALL = {"window_size": 4, "max_batch_size": 1, "deterministic": True}


@pytest.fixture
def folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny")


def write(folder, **values):
    (folder / GENERATION_CONFIG).write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("given", [7, [7], [7, 5, 7]])
def test_its_stop_tokens_join_those_of_config_json(folder, given):
    own = read_config_json(folder)["eos_token_id"]
    write(folder, eos_token_id=given)
    more = [7, 5] if given == [7, 5, 7] else [7]
    assert open_checkpoint(folder).config.eos_token_ids == (own, *more)


def test_a_completion_ends_with_its_stop_token(folder):
    params = SamplingParams(max_tokens=8, ignore_eos=False)
    (before,) = LLM(folder, **SMALL).generate("the cat", params)
    end = before.token_ids[2]
    write(folder, eos_token_id=end)
    (after,) = LLM(folder, **SMALL).generate("the cat", params)
    assert before.finish_reason == "length"
    assert after.finish_reason == "stop"
    assert after.token_ids == before.token_ids[: before.token_ids.index(end) + 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"eos_token_id": "x"}', 'token id, or a list, as eos_token_id, not "x"'),
        ('{"eos_token_id": [1, null]}', "as eos_token_id"),
        ('{"eos_token_id": true}', "as eos_token_id"),
        ('{"eos_token_id": -1}', "as eos_token_id"),
        ('{"eos_token_id": 999999}', "of the vocabulary of"),
        ('{"do_sample": "yes"}', "true or false as do_sample"),
        ("[]", "expected a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_a_malformed_file_is_named_in_one_sentence(folder, content, said):
    (folder / GENERATION_CONFIG).write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as error:
        open_checkpoint(folder)
    assert str(error.value).startswith(f"{folder / GENERATION_CONFIG}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (QWEN3, SamplingParams(temperature=0.6, top_k=20, top_p=0.95)),
        ({"do_sample": True, "top_p": 0.9}, SamplingParams(temperature=1.0, top_p=0.9)),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingParams()),
        (QWEN3 | {"do_sample": False}, SamplingParams()),
        ({"repetition_penalty": 1.05, "top_k": None}, SamplingParams(repetition_penalty=1.05)),
    ],
)
def test_what_it_advises_is_what_transformers_does_with_it(tmp_path, values, expected):
    write(tmp_path, **values)
    assert read_generation_config(tmp_path).params() == expected


def test_advice_that_is_none_is_told_where_it_is_asked_for(folder):
    write(folder, do_sample=True, temperature="hot")
    options = vars(parser().parse_args(["--model", str(folder), "--generation-config", "auto"]))
    with pytest.raises(InputError, match=r"generation_config\.json: temperature: expected"):
        sampling_params(options)
    with pytest.raises(InputError, match=r"generation_config\.json: temperature: expected"):
        LLM(folder, generation_config="auto")
    assert sampling_params({"model": str(folder)}) == SamplingParams()


def test_options_go_before_advice_and_advice_before_defaults(folder):
    write(folder, **QWEN3)
    given = ["--model", str(folder), "--generation-config", "auto", "--top-k", "7"]
    params = sampling_params(vars(parser().parse_args(given)))
    assert params == SamplingParams(temperature=0.6, top_k=7, top_p=0.95)
    (decoder,) = decoders_at(
        str(folder), [], kinds=["verified"], window_size=4, generation_config="auto"
    )
    assert (decoder.params.mode, decoder.params.temperature) == ("verified", 0.6)


def test_prompts_without_parameters_are_decoded_as_advised(folder):
    write(folder, **QWEN3)
    llm = LLM(folder, **SMALL, generation_config="auto")
    assert llm.default_params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert llm.prepare("the cat", None)[0][1] == llm.default_params
    assert LLM(folder, **SMALL).prepare("the cat", None)[0][1] == SamplingParams()
    with pytest.raises(
        InputError, match="generation_config: expected one of none, auto, not 'all'"
    ):
        LLM(folder, generation_config="all")


@pytest.mark.parametrize(
    ("values", "options", "told"),
    [
        (QWEN3, {}, True),
        (QWEN3, {"temperature": 0.0}, False),
        (QWEN3, {"generation_config": "none"}, False),
        (QWEN3, {"generation_config": "auto"}, False),
        ({"eos_token_id": 7}, {}, False),
    ],
)
def test_a_command_says_once_that_it_does_not_sample_as_advised(
    folder, capsys, values, options, told
):
    write(folder, **values)
    load({"model": str(folder), "window_size": 4, "batch_size": 1, **options})
    said = [one for one in capsys.readouterr().err.splitlines() if "advises to sample" in one]
    assert len(said) == told
    if told:
        assert "(temperature 0.6, top_p 0.95, top_k 20)" in said[0]
        assert "--generation-config auto" in said[0]
