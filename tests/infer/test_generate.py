"""`wedlm generate` on one prompt: what goes to which stream, and what is refused; its help has true
defaults and choices, examples that work, and no wait."""

import dataclasses
import io
import re
import shlex
import sys

import pytest

from infer import generate
from infer.flags import flag
from infer.generate import _print_logprobs
from infer.job.job import SHARD_SIZE
from infer.job.shard_decoder import GRACE_SECONDS
from tests.examples.child import heavy_imports
from wedlm_jax.__main__ import main
from wedlm_jax.attention.ragged import RAGGED_BACKENDS
from wedlm_jax.completion import Completion
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.engine.config import DEFAULT_WINDOW, EngineConfig
from wedlm_jax.errors import InputError
from wedlm_jax.params import MODES, OPTIONS, SamplingParams

LOAD = generate.load
SHAPE = ["--window-size", "4", "--max-tokens", "24", "--deterministic"]


def run(checkpoint, *arguments):
    return main(["generate", "--model", str(checkpoint), *SHAPE, *arguments])


@pytest.fixture
def expected(llm, capsys):
    """The completion of "the cat"; what was said of it is gone."""
    (completion,) = llm.generate("the cat", SamplingParams(max_tokens=24))
    capsys.readouterr()
    return completion


# --- the text and the summary ------------------------------------------------------------


def test_prompt_prints_its_text_and_nothing_else(checkpoint, expected, capsys):
    assert run(checkpoint, "--prompt", "the cat") == 0
    out, err = capsys.readouterr()
    assert out == f"{expected.text}\n"
    tokens, forwards = len(expected.token_ids), expected.num_forwards
    *notices, line = err.splitlines()  # a model gives its notice once
    assert all(one.startswith("plain-text prompts are completed without") for one in notices)
    assert line.startswith(
        f"{tokens} tokens in {forwards} forwards ({tokens / forwards:.2f} tokens per forward), "
    )
    assert line.endswith(f"of compiling; finished by {expected.finish_reason}")


@pytest.mark.full
def test_a_jobs_warm_up_compiles_what_its_other_options_need(checkpoint, tmp_path, monkeypatch):
    source, output, counts = tmp_path / "in.jsonl", tmp_path / "out.jsonl", []
    source.write_text('{"prompt": "the cat"}\n', encoding="utf-8")

    def counting(options):
        llm = LOAD(options)
        counts.append((llm, llm.engine.num_programs))
        return llm

    monkeypatch.setattr(generate, "load", counting)
    arguments = f"--input {source} --output {output} --max-model-len 64 --batch-size 2"
    options = "--mode paper --logprobs 1 --warmup"
    assert run(checkpoint, *arguments.split(), *options.split()) == 0
    [(llm, programs)] = counts
    assert '"logprobs"' in output.read_text(encoding="utf-8")
    assert llm.engine.num_programs == programs


def test_prompt_from_standard_input(checkpoint, expected, monkeypatch, capsys):
    for piped in ("the cat", "the cat\n", "the cat\r\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert run(checkpoint, "--prompt", "-") == 0
        assert capsys.readouterr().out == f"{expected.text}\n"
    stdin = io.TextIOWrapper(io.BytesIO("naïve".encode("utf-16")), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(checkpoint, "--prompt", "-") == 2
    assert "--prompt -: expected UTF-8 text" in capsys.readouterr().err


def test_chat_applies_the_template(checkpoint, llm, expected, capsys):
    (answer,) = llm.chat([{"role": "user", "content": "the cat"}], SamplingParams(max_tokens=24))
    assert run(checkpoint, "--chat", "--prompt", "the cat") == 0
    assert capsys.readouterr().out == f"{answer.text}\n" != f"{expected.text}\n"


def test_samples_of_a_prompt_one_below_the_other(checkpoint, llm, capsys):
    params = SamplingParams(max_tokens=24, temperature=0.8, n=2)
    (expected,) = llm.generate("the cat", params)
    assert run(checkpoint, "--prompt", "the cat", "--n", "2", "--temperature", "0.8") == 0
    first, second = (sample.text for sample in expected.samples)
    shown = f"--- sample 1 of 2 ---\n{first}\n--- sample 2 of 2 ---\n{second}\n"
    assert capsys.readouterr().out == shown


def test_log_probabilities_of_a_prompt_a_line_a_token(checkpoint, llm, capsys):
    (expected,) = llm.generate("the cat", SamplingParams(max_tokens=24, logprobs=2))
    capsys.readouterr()
    assert run(checkpoint, "--prompt", "the cat", "--logprobs", "2") == 0
    out, err = capsys.readouterr()
    assert out == f"{expected.text}\n"
    lines = err.splitlines()[-1 - len(expected.token_ids) : -1]
    assert [line.split()[0] for line in lines] == [f"{x.logprob:.3f}" for x in expected.logprobs]


def test_the_token_that_ends_a_text_is_shown(llm, capsys):
    (end,) = llm.engine.config.eos_token_ids
    logprobs = [TokenLogprob(-0.5, [(end, -0.5)])]
    _print_logprobs(llm, Completion("", [end], "stop", 1, 1, logprobs))
    name = repr(llm.tokenizer.convert_ids_to_tokens(end))
    assert capsys.readouterr().err.split() == ["-0.500", name, name, "-0.50"]


def test_drafts_that_a_model_cannot_give_are_refused(stock):
    with pytest.raises(InputError, match=rf"^--draft: {stock} was not trained on masks"):
        LOAD({"model": str(stock), "draft": "masks"})


def test_without_model_the_embedded_one(monkeypatch, capsys, checkpoint, expected):
    monkeypatch.setattr("wedlm_jax.checkpoint.open.EMBEDDED_MODEL", checkpoint)
    assert main(["generate", *SHAPE, "--prompt", "the cat"]) == 0
    assert capsys.readouterr().out == f"{expected.text}\n"


# --- the help ----------------------------------------------------------------------------


def test_help_says_what_the_fields_say_and_which_defaults_hold(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["generate", "--help"])
    assert exit_status.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options, records = text.split("--input takes JSONL")
    assert all(name in records for name in OPTIONS)
    assert all(one.help in options for name, one in OPTIONS.items() if name != "logit_bias")
    defaults = dataclasses.asdict(SamplingParams())
    batch_size = f"{EngineConfig.max_batch_size}; 1 with --prompt, unless --n is above 1"
    no_masks = "0 for a checkpoint that was not trained on masks and has no drafter"
    for name, default in {
        **{name: one for name, one in defaults.items() if type(one) in (int, float, str)},
        "window_size": f"auto, but {DEFAULT_WINDOW} in mode paper; {no_masks}",
        "batch_size": batch_size,
        "shard_size": SHARD_SIZE,
        "grace": GRACE_SECONDS,
    }.items():
        assert re.search(rf"{flag(name)} [^\[]*\[{re.escape(str(default))}\]", options), name


def test_choices_of_the_help_are_those_of_the_library():
    choices = {action.dest: action.choices for action in generate.parser()._actions}
    assert (choices["mode"], choices["attention"]) == (MODES, tuple(RAGGED_BACKENDS))


def test_examples_of_the_help_are_accepted():
    examples = re.findall(r"wedlm generate (--.*?)(?: {3,}\(.*| && .*)?\n", generate.FILES)
    assert len(examples) == generate.FILES.split("examples:")[1].count("wedlm generate") == 9
    for example in examples:
        options = vars(generate.parser().parse_args(shlex.split(example)))
        generate._check_combination(options)


def test_help_imports_nothing_heavy():
    assert heavy_imports("generate", "--help")[1] == []
