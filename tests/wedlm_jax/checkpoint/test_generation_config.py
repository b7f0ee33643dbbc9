"""`generation_config.json`: what ends a text, and the sampling that the makers advise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.evaluate import decoders_at
from infer.flags import sampling_params
from infer.generate import load, parser
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from wedlm_jax.checkpoint.generation_config import FILE, read_generation_config
from wedlm_jax.checkpoint.opened import open_checkpoint
from wedlm_jax.config import read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
SMALL: dict[str, Any] = {"window_size": 4, "max_batch_size": 1, "deterministic": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


def write(folder: Path, **values: Any) -> None:
    (folder / FILE).write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("given", [7, [7], [7, 5, 7]])
def test_its_stop_tokens_join_those_of_config_json(folder: Path, given: int | list[int]) -> None:
    own = read_config_json(folder)["eos_token_id"]
    write(folder, eos_token_id=given)
    more = [7, 5] if given == [7, 5, 7] else [7]
    assert open_checkpoint(folder).config.eos_token_ids == (own, *more)


def test_a_completion_ends_with_its_stop_token(folder: Path) -> None:
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
def test_a_malformed_file_is_named_in_one_sentence(folder: Path, content: str, said: str) -> None:
    (folder / FILE).write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as error:
        open_checkpoint(folder)
    assert str(error.value).startswith(f"{folder / FILE}: ")
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
def test_what_it_advises_is_what_transformers_does_with_it(
    tmp_path: Path, values: dict, expected: SamplingParams
) -> None:
    write(tmp_path, **values)
    assert read_generation_config(tmp_path).params() == expected


def test_advice_that_is_none_is_told_where_it_is_asked_for(folder: Path) -> None:
    write(folder, do_sample=True, temperature="hot")
    options = vars(parser().parse_args(["--model", str(folder), "--generation-config", "auto"]))
    with pytest.raises(InputError, match=r"generation_config\.json: temperature: expected"):
        sampling_params(options)
    with pytest.raises(InputError, match=r"generation_config\.json: temperature: expected"):
        LLM(folder, generation_config="auto")
    assert sampling_params({"model": str(folder)}) == SamplingParams()


def test_options_go_before_advice_and_advice_before_defaults(folder: Path) -> None:
    write(folder, **QWEN3)
    given = ["--model", str(folder), "--generation-config", "auto", "--top-k", "7"]
    params = sampling_params(vars(parser().parse_args(given)))
    assert params == SamplingParams(temperature=0.6, top_k=7, top_p=0.95)
    (decoder,) = decoders_at(
        str(folder), [], kinds=["verified"], window_size=4, generation_config="auto"
    )
    assert (decoder.params.mode, decoder.params.temperature) == ("verified", 0.6)


def test_prompts_without_parameters_are_decoded_as_advised(folder: Path) -> None:
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
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict,
    options: dict[str, Any],
    told: bool,
) -> None:
    write(folder, **values)
    load({"model": str(folder), "window_size": 4, "batch_size": 1, **options})
    said = [one for one in capsys.readouterr().err.splitlines() if "advises to sample" in one]
    assert len(said) == told
    if told:
        assert "(temperature 0.6, top_p 0.95, top_k 20)" in said[0]
        assert "--generation-config auto" in said[0]
