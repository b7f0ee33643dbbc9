"""A folder in Hugging Face format: what is read of it, and how a bad one is refused."""

import json
import os
import stat

import numpy as np
import pytest
from safetensors.numpy import save

from infer.evaluate import decoders_at
from infer.flags import sampling_params
from infer.generate import load, parser
from tests.examples.checkpoints import edit_json, refused, set_tensors, write_tiny
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from wedlm_jax.checkpoint.hf import GENERATION_CONFIG, INDEX, HFCheckpoint, read_generation_config
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.checkpoint.safetensors import DeferredArray, SafetensorsFile, write_safetensors
from wedlm_jax.config import read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def with_tensor(name, value):
    return lambda folder: set_tensors(folder, **{name: value})


def with_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


@pytest.mark.parametrize(
    ("spoil", "file", "message"),
    [
        (with_tensor(K_PROJ, None), "", f"{K_PROJ!r} is missing"),
        (with_tensor("lm_head.weight", None), "", "'lm_head.weight' is missing"),
        (with_tensor("q.weight", np.float32([0])), "", "'q.weight' is not part of this model"),
        (with_tensor(K_PROJ, np.float32([0])), "", f"{K_PROJ!r} has shape [1], expected [12, 16]"),
        # What else is refused of a config.json: `tests/wedlm_jax/test_config.py`.
        (with_config(model_type="gemma3"), "config.json", "'gemma3' is not supported"),
        (with_config(rope_scaling="yarn"), "config.json", ""),
        (with_config(remove="num_hidden_layers"), "config.json", "'num_hidden_layers' is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json", "no such file"),
    ],
)
def test_a_spoilt_folder_is_refused(hf, spoil, file, message):
    spoil(hf)
    with refused(hf / file, message):
        load_checkpoint(hf)


# --- several files -----------------------------------------------------------------------


def test_single_file_goes_before_an_index(hf):
    (hf / INDEX).write_text("stale")
    assert len(HFCheckpoint(hf).files) == 1


@pytest.fixture
def sharded(tmp_path):
    return write_tiny(tmp_path / "sharded", shard_bytes=4000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((text, INDEX) for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}')),
        ('{"weight_map": {"a": "../other.safetensors"}}', "'a' is in no file of this folder"),
    ],
)
def test_index_that_is_none(sharded, content, message):
    (sharded / INDEX).write_text(content)
    with refused(sharded, message):
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": "x"}', 'token id, or a list, as eos_token_id, not "x"'),
        ('{"eos_token_id": [1, null]}', "as eos_token_id"),
        ('{"eos_token_id": true}', "as eos_token_id"),
        ('{"eos_token_id": -1}', "as eos_token_id"),
        ('{"eos_token_id": 999999}', "must be a token id below vocab_size"),
        ('{"do_sample": "yes"}', "true or false as do_sample"),
        ("[]", "expected a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_a_malformed_file_is_named_in_one_sentence(folder, content, message):
    (folder / GENERATION_CONFIG).write_text(content, encoding="utf-8")
    with refused(f"{folder / GENERATION_CONFIG}: ", message):
        open_checkpoint(folder)


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
    for ask in (sampling_params, lambda given: LLM(given["model"], generation_config="auto")):
        with pytest.raises(InputError, match=r"generation_config\.json: temperature: expected"):
            ask({"model": str(folder), "generation_config": "auto"})
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
    llm = LLM(folder, **SMALL, generation_config="auto")
    assert llm.default_params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert llm.prepare("the cat", None)[0][1] == llm.default_params
    assert LLM(folder, **SMALL).prepare("the cat", None)[0][1] == SamplingParams()
    with refused("generation_config: expected one of none, auto, not 'all'"):
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
    message = [one for one in capsys.readouterr().err.splitlines() if "advises sampling" in one]
    assert len(message) == told
    if told:
        assert "(temperature 0.6, top_p 0.95, top_k 20)" in message[0]
        assert "--generation-config auto" in message[0]


# --- one safetensors file ----------------------------------------------------------------


def write_file(path, tensors):
    headers = [DeferredArray(name, x.shape, x.dtype, x.copy) for name, x in tensors.items()]
    write_safetensors(path, headers, tensors.values())


def test_file_may_be_read_by_whoever_may_read_the_folder(tmp_path):
    for mode in (0o755, 0o700):
        tmp_path.chmod(mode)
        path = tmp_path / f"{mode}.safetensors"
        write_file(path, {"a": np.zeros(1, np.float32)})
        assert stat.S_IMODE(os.stat(path).st_mode) == mode & 0o666


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (lambda whole, end=end: whole[:end], "truncated or not a")
            for end in (0, 7, 40, 1000, -1)
        ),
        (lambda _: np.random.default_rng(0).bytes(4096), "truncated or not a safetensors file"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid", "`git lfs pull` fetches it"),
        (lambda _: save({"q.weight": np.zeros(3, np.int8)}), "'q.weight' has dtype I8"),
        (None, "no such file"),
        ("folder", "not a safetensors file"),
    ],
)
def test_what_is_no_such_file(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        write_file(path, {"a": np.zeros((64, 8), np.float32)})
        path.write_bytes(content(path.read_bytes()))
    with refused(path, message):
        SafetensorsFile(path)
