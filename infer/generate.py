"""`wedlm generate`: complete one prompt, or a JSONL file of prompts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM
    from wedlm_jax.sampling import SamplingParams

DESCRIPTION = """\
Completes a prompt, printing its text as it is committed, or a JSONL file of prompts,
writing one row of results for each row, in the same order.
"""

FILES = """\
a row of the input has exactly one of
  "prompt"            a text
  "prompt_token_ids"  a list of token ids; needs no tokenizer
  "messages"          [{"role": ..., "content": ...}, ...], through the chat template
and may have
  "id"                a text or an integer, unique; the row's number, from 0, without it
  "sampling"          {"temperature": 0.7, "stop": ["\\n"], ...}, instead of the command
                      line's values for this row. Fields: temperature, top_p, top_k,
                      max_tokens, min_tokens, stop, stop_token_ids, ignore_eos,
                      entropy_threshold, position_penalty, seed, repetition_penalty,
                      presence_penalty, frequency_penalty, logit_bias, bad_words

a row of the output has
  id, text, token_ids, finish_reason, num_forwards, num_token_instances

All rows are checked before the first is decoded. Finished rows are kept in OUTPUT.part
until all are there: a job that was stopped goes on from them when it is started again with
the same input and settings (the batch size may change), and begins anew otherwise.
Sampled rows draw from seed + row number, unless they name a seed of their own.

examples:
  wedlm generate --chat --prompt "Count from 12 to 40 in steps of 2."
  echo "Once upon a time" | wedlm generate --prompt - --max-tokens 64
  wedlm generate --model DIR --input prompts.jsonl --output completions.jsonl --batch-size 64
  wedlm generate --model DIR --window-size 0 --prompt "..."     (autoregressive decoding)
"""


def parser() -> argparse.ArgumentParser:
    """Options without a value on the command line are absent from what it parses: their
    defaults are those of `LLM` and `SamplingParams`, in brackets here."""
    result = argparse.ArgumentParser(
        prog="wedlm generate",
        usage="wedlm generate [--model DIR] (--prompt TEXT | --input FILE --output FILE) [options]",
        description=DESCRIPTION,
        epilog=FILES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = result.add_argument_group("what to complete").add_argument
    add("--prompt", metavar="TEXT",
        help="one prompt; - reads standard input, without its last line end")  # fmt: skip
    add("--input", metavar="FILE", help="a JSONL file of prompts, see below")
    add("--output", metavar="FILE", help="where the results of --input go; replaced if it exists")
    add("--chat", action="store_true", default=False,
        help="a prompt is a user's message, put through the chat template")  # fmt: skip
    _add_model(result.add_argument_group("model"))
    _add_decoding(result.add_argument_group("decoding"))
    add = result.add_argument_group("without a TPU").add_argument
    add("--compile-only", action="store_true", default=False,
        help="compile the decoder of --model (a folder, or a recipe that states its sizes) for "
        "--topology, say what it takes, and stop")  # fmt: skip
    add("--topology", metavar="NAME", default="v5e:2x4",
        help="chip and shape to compile for [%(default)s]")  # fmt: skip
    return result


def _add_model(group: Any) -> None:
    add = group.add_argument
    add("--model", metavar="DIR",
        help="folder in Hugging Face format, or a hub id [the embedded model]")  # fmt: skip
    add("--dtype", choices=("float32", "bfloat16"),
        help="of weights and arithmetic [float32 on a CPU, else bfloat16]")  # fmt: skip
    add("--max-model-len", type=int, metavar="N",
        help="prompt and completion tokens at most [the model's context]")  # fmt: skip
    add("--batch-size", type=int, metavar="N", help="prompts that decode together [16]")


def _add_decoding(group: Any) -> None:
    add = group.add_argument
    add("--window-size", type=_window, metavar="N|auto",
        help="W, masked slots decoded in parallel; 0 decodes autoregressively; auto chooses "
        "while decoding, for speed: results may then differ from run to run [16]")  # fmt: skip
    add("--entropy-threshold", type=_threshold, metavar="X|none",
        help="τ in nats: masks below it are filled; none fills one a forward [0.4]")  # fmt: skip
    add("--position-penalty", type=float, metavar="X",
        help="λ, added to the entropy per slot from the first mask [0.02]")  # fmt: skip
    add("--max-tokens", type=int, metavar="N", help="completion tokens at most [256]")
    add("--min-tokens", type=int, metavar="N",
        help="completion tokens before which nothing stops [0]")  # fmt: skip
    add("--temperature", type=float, metavar="X", help="0 takes the most likely token [0.0]")
    add("--top-p", type=float, metavar="X", help="sample from this much probability [1.0]")
    add("--top-k", type=int, metavar="N", help="sample from so many tokens; 0 is all [0]")
    add("--stop", nargs="+", action="extend", metavar="S",
        help="texts that end a completion and are left out of it")  # fmt: skip
    add("--bad-words", nargs="+", action="extend", metavar="S",
        help="texts whose tokens a completion never has in a row")  # fmt: skip
    add("--repetition-penalty", type=float, metavar="X",
        help="above 1 against tokens of prompt and completion [1.0]")  # fmt: skip
    add("--presence-penalty", type=float, metavar="X",
        help="taken from logits of tokens that the completion has [0.0]")  # fmt: skip
    add("--frequency-penalty", type=float, metavar="X",
        help="the same, as often as it has them [0.0]")  # fmt: skip
    add("--seed", type=int, metavar="N", help="of sampling [0]")


def _window(text: str) -> int | str:
    return text if text == "auto" else int(text)


_window.__name__ = "integer or 'auto'"


def _threshold(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


_threshold.__name__ = "number or 'none'"  # what argparse calls it in its message


def main(arguments: list[str]) -> int:
    options = vars(parser().parse_args(arguments))
    if options["compile_only"]:
        from infer.compile_only import main as compile_only

        return compile_only(options)
    _check_combination(options)
    if "prompt" in options:
        from infer.prompt import complete_prompt, read_prompt

        text = read_prompt(options["prompt"], sys.stdin)
        params = sampling_params(options)
        return complete_prompt(load(options), text, params, chat=options["chat"])
    from infer.file_job import FileJob

    params = sampling_params(options)
    job = FileJob(options["input"], options["output"], params, chat=options["chat"])
    return job.run(lambda: load(options))


def _check_combination(options: dict[str, Any]) -> None:
    if ("prompt" in options) == ("input" in options):
        raise InputError("expected either --prompt or --input, see --help")
    if ("input" in options) != ("output" in options):
        missing = "--output" if "input" in options else "--input"
        raise InputError(f"--input and --output go together; {missing} is missing")


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """The command line's sampling parameters; a message names the option, not the field."""
    import dataclasses

    from wedlm_jax.sampling import SamplingParams

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    try:
        return SamplingParams(**{k: v for k, v in options.items() if k in names})
    except InputError as error:
        raise InputError(_as_option(str(error))) from None


def load(options: dict[str, Any]) -> LLM:
    """The model; a message names the option, not the argument."""
    from wedlm_jax.llm import LLM

    names = {"window_size": "window_size", "dtype": "dtype", "max_model_len": "max_model_len",
             "batch_size": "max_batch_size"}  # fmt: skip
    given = {names[k]: v for k, v in options.items() if k in names}
    try:
        return LLM(options.get("model"), **given)
    except InputError as error:
        message = str(error).replace("max_batch_size:", "batch_size:", 1)
        raise InputError(_as_option(message)) from None


def _as_option(message: str) -> str:
    name, colon, rest = message.partition(":")
    known = ("window_size", "batch_size", "max_model_len", "temperature", "top_p", "top_k",
             "max_tokens", "min_tokens", "stop", "bad_words", "entropy_threshold",
             "position_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "seed")  # fmt: skip
    return f"--{name.replace('_', '-')}{colon}{rest}" if name in known else message
