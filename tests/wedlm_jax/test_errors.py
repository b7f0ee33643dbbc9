"""What messages are made of: hints, short texts, and the command that installs an extra."""

import inspect
import sys

import pytest

from infer.chat.lines import ORDERS
from infer.generate import parser
from train.recipe.config import describe
from wedlm_jax.__main__ import SUBCOMMANDS
from wedlm_jax.errors import (
    SYNONYMS,
    InputError,
    did_you_mean,
    nearest,
    require_extra,
    shortened,
    written,
)
from wedlm_jax.llm import LLM
from wedlm_jax.params import OPTIONS


def test_the_nearest_name_is_meant_or_all_are_named():
    assert did_you_mean("temprature", ["temperature", "top_p"]) == "did you mean 'temperature'?"
    assert did_you_mean("x", ["temperature", "top_p"]) == "expected one of temperature, top_p"
    assert did_you_mean("num_beams", ["temperature", "top_p"]) == "there is no beam search"


@pytest.mark.parametrize(
    ("meant", "names"),
    [
        ("max_tokens", "max_new_tokens max_length maxtokens"),
        ("min_tokens", "min_new_tokens"),
        ("temperature", "temp do_sample"),
        ("top_k", "topk"),
        ("n", "num_return_sequences best_of"),
        ("stop", "stop_strings stop_words"),
        ("stop_token_ids", "eos_token_id"),
        ("bad_words", "bad_words_ids"),
        ("json_schema", "guided_json structured_outputs response_format"),
        ("regex", "guided_regex"),
        ("repetition_penalty", "repeat_penalty"),
        ("seed", "random_seed"),
        ("logprobs", "prompt_logprobs"),
        ("entropy_threshold", "wedlm_entropy_threshold tau"),
        ("position_penalty", "wedlm_pos_penalty_factor"),
        ("--max-tokens", "--max-new-tokens --max_tokens"),
        ("--mesh", "--tensor-parallel-size"),
        ("--batch-size", "--max-num-seqs --batch --max-batch-size"),
        ("--max-model-len", "--max-model-length --context-length"),
        ("--model", "--model-name-or-path --model-path --pretrained"),
        ("--dtype", "--torch-dtype"),
        ("--output", "--output-dir --out"),
        ("--input", "--input-file"),
        ("--prompt", "--prompts"),
        ("--json-schema", "--guided-json"),
        ("--quantization", "--quantisation"),
        ("--warmup", "--warm-up"),
        (None, "--verbose"),
    ],
)
def test_what_other_programs_call_a_sampling_field_or_a_flag(meant, names):
    known = parser()._option_string_actions if names.startswith("--") else OPTIONS
    assert {nearest(name, known) for name in names.split()} == {meant}


def test_every_synonym_is_a_name_that_is_known_somewhere():
    fields = [name for name, _, _ in describe()]
    known = {*OPTIONS, *ORDERS, *SUBCOMMANDS, *inspect.signature(LLM).parameters}
    known |= set(inspect.signature(LLM.stream).parameters)
    known |= set(inspect.signature(LLM.generate).parameters)
    known |= set(inspect.signature(LLM.chat).parameters)
    known |= {name.lstrip("-/").replace("-", "_") for name in parser()._option_string_actions}
    known |= {name.lstrip("/") for name in ORDERS} | {"sampling"}  # a prompt file's key
    known |= {*fields, *(name.rpartition(".")[2] for name in fields)}
    for name, meant in SYNONYMS.items():
        assert set(meant.split()) <= known, name


def test_numbers_are_written_without_an_exponent():
    shown = [written(number) for number in (0, 0.5, 1e6, 2**32 - 1, 1e-8, float("inf"))]
    assert shown == ["0", "0.5", "1,000,000", "4,294,967,295", "1e-08", "inf"]


def test_a_text_is_put_on_one_line_and_cut():
    assert shortened(" a\n b ") == "a b"
    assert shortened("x" * 30, 10) == "x" * 7 + "..."


def test_a_missing_extra_is_told_with_its_command(monkeypatch):
    require_extra("this", "test", "json", "pytest")
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(InputError) as caught:
        require_extra("this", "int8", "json", "qwix")
    assert str(caught.value) == (
        'this needs qwix, which is not installed: pip install "wedlm-jax[int8]"'
    )
    with pytest.raises(InputError, match="needs qwix and no_such_package, which are not installed"):
        require_extra("this", "int8", "qwix", "no_such_package")
