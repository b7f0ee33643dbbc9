"""`wedlm generate`: completes one prompt, or millions from files."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from infer.flags import (
    add_decoding_options,
    add_engine_options,
    adders,
    engine_options,
    errors_at_flags,
    flag,
    sampling_params,
)
from wedlm_jax.errors import InputError, counted
from wedlm_jax.host.atomic import check_writable
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.notices import notice
from wedlm_jax.params import OPTIONS

if TYPE_CHECKING:
    from infer.trace import SequenceTrace
    from wedlm_jax.completion import Completion
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.text import Prompt

DESCRIPTION = """\
Completes one prompt and prints the completion as it is committed, or runs a batch job over files
of prompts, which writes one record per prompt. A job that was killed continues when the same
command is run again.
"""

FILES = """\
--input takes JSONL (.jsonl, .jsonl.gz, .jsonl.zst) or Parquet files and folders of them, or - for
JSONL from a pipe. A record is an object with exactly one of
  "prompt"            a text
  "prompt_token_ids"  a list of token ids; needs no tokenizer
  "messages"          [{"role": ..., "content": ...}, ...], through the chat template
and optionally
  "id"                a unique text or integer; default: the record's number, from 1
  "tools"             [{...}, ...] and
  "chat_template_kwargs"  {"enable_thinking": false, ...}, for the chat template
  "sampling"          {"temperature": 0.7, "stop": ["\\n"], ...}, which overrides the command
                      line for this record. Fields:
{fields}
  "window_size"       W of this record, at most --window-size; 0 decodes autoregressively
  any other key       is copied to the output record
A record may also have the form of OpenAI's batch files, {"custom_id": ..., "url": ...,
"body": {...}}; its result then has that form, too.
In Parquet these keys are columns, and null means absent; "sampling" may be JSON text.

An output record has
  id, text, token_ids, finish_reason, num_forwards, num_token_instances, drafts, and your own
  keys
  logprobs  if requested: {"logprob": X, "top": [[token_id, X], ...]} for each token
  samples   with n above 1: a list of all n samples, each with these fields except id; the
            fields of the record itself are those of the first sample
or, if its prompt cannot be decoded,
  id (if it has one), error, line, and file (if there are several)

--output is a .jsonl or .parquet file, or a folder of shards (rows-00000-of-00010.jsonl), each
with a manifest, in the order of the input. Finished records are kept (for a file, in
OUTPUT.shards): a job that was stopped, even by SIGKILL, continues when the same command is run
again, with any --batch-size and --num-hosts, and writes the same records as without the stop.
SIGTERM finishes the records in progress first. A record samples with a seed derived from --seed
and its id, unless it sets its own. See docs/batch.md.

examples:
  wedlm generate --chat --prompt "Count from 12 to 40 in steps of 2."
  echo "Once upon a time" | wedlm generate --prompt - --max-tokens 64
  wedlm generate --model DIR --input prompts.jsonl --output completions.jsonl --batch-size 64
  zstdcat *.zst | wedlm generate --model DIR --input - --output completions
  wedlm generate --model DIR --input prompts/ --output completions --num-hosts 8 --host-id 3
  wedlm generate --model DIR --input prompts/ --output completions --ray --ray-actors 8
  wedlm generate --model DIR --input prompts/ --output completions --mesh tensor=4 data=2
  wedlm generate --model DIR --mode ar --prompt "..."     (autoregressive decoding)
  wedlm generate --prompt "..." --trace out.json && wedlm plot out.json
"""

JOB_OPTIONS = (
    "shard_size",
    "fail_fast",
    "max_errors",
    "overwrite",
    "grace",
    "num_hosts",
    "host_id",
    "ray",
    "ray_actors",
    "prompt_token_ids",
)
"""Options that only a job with --input takes."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser. Options that are not given are absent from the result; their defaults,
    in brackets in the help, are those of `LLM` or `SamplingParams`."""
    fields = textwrap.fill(", ".join(OPTIONS), 68)
    result = CommandParser(
        prog="wedlm generate",
        usage="wedlm generate [--model DIR] (--prompt TEXT | --input PATH ... --output PATH) "
        "[options]",
        description=DESCRIPTION,
        epilog=FILES.replace("{fields}", textwrap.indent(fields, " " * 22)),
        argument_default=argparse.SUPPRESS,
    )
    add, switch = adders(result.add_argument_group("what to complete"))
    add("--prompt", "TEXT", "the prompt; - reads it from standard input, without the final newline")
    add(
        "--input",
        "PATH",
        "files or folders of prompts, or - for standard input; see below",
        nargs="+",
        action="extend",
    )
    add(
        "--output",
        "PATH",
        "with --input: the folder, or .jsonl or .parquet file, to write; if it holds results "
        "of another job, --overwrite is needed",
    )
    add(
        "--trace",
        "FILE",
        "with --prompt: also write what every forward saw, filled, rejected and committed, as "
        "JSON; wedlm plot draws it",
    )
    switch("--chat", "treat a prompt as a user message and apply the chat template", default=False)
    add_engine_options(
        result.add_argument_group("model"), batch_size="16; 1 with --prompt, unless --n is above 1"
    )
    add_decoding_options(result.add_argument_group("decoding"))
    _add_job(result.add_argument_group("with --input"))
    add, switch = adders(result.add_argument_group("without a TPU"))
    switch(
        "--compile-only",
        "compile the decoder of --model and --drafter (folders, or recipes that state the "
        "sizes) for --topology, report what it needs, and stop",
        default=False,
    )
    add("--topology", "NAME", "chip and shape to compile for [%(default)s]", default="v5e:2x4")
    return result


def _add_job(group: Any) -> None:
    add, switch = adders(group)
    switch("--warmup", "compile before the first prompt is decoded")
    switch(
        "--prompt-token-ids",
        "also write the prompt's tokens, for `wedlm tokenize --format completions`",
    )
    add("--shard-size", "N", "records per shard [1000]")
    switch(
        "--fail-fast",
        "check all records first, and stop at a bad one instead of recording its error",
    )
    add(
        "--max-errors",
        "N",
        "stop with status 65 when more than N records of this run are bad; decoded records "
        "are kept [no limit, unless the first 1,000 are all bad]",
    )
    switch("--overwrite", "replace results of another job in the output")
    add("--grace", "X", "seconds after SIGTERM in which records in progress may finish [20.0]")
    add(
        "--num-hosts",
        "N|auto",
        "number of processes that share the job; auto: as many as were launched together [1]",
    )
    add("--host-id", "N", "index of this process among them, from 0 [from the launcher]")
    add(
        "--ray",
        "ADDRESS",
        "decode with Ray Data on the cluster at ADDRESS; without it, on one that is found or "
        "started",
        nargs="?",
        const="",
    )
    add("--ray-actors", "N", "number of models that decode with Ray [one per accelerator]")


def main(arguments: list[str]) -> int:
    options = vars(parser().parse_args(arguments))
    if options["compile_only"]:
        from infer.compile_only import main as compile_only

        return compile_only(options)
    _check_combination(options)
    if "prompt" in options:
        trace = options.get("trace")
        check_trace(trace, options.get("n", 1))
        text = read_prompt(options["prompt"], sys.stdin)
        params = sampling_params(options)
        # Only two batch sizes, so that every n above 1 shares the program for 16.
        llm = load({"batch_size": 1 if params.n == 1 else 16, **options})
        return complete_prompt(llm, text, params, chat=options["chat"], trace=trace)
    return _run_job(options)


def _run_job(options: dict[str, Any]) -> int:
    from infer.job.job import Job, JobOptions
    from wedlm_jax.host.processes import find_host

    names = [field.name for field in dataclasses.fields(JobOptions)]
    given = {name: options[name] for name in names if name in options} | {
        "inputs": tuple(options["input"]),
        "params": sampling_params(options),
        "host": find_host(options.get("num_hosts"), options.get("host_id")),
    }
    job = Job(JobOptions(**given))
    if "ray" not in options:
        return job.run(partial(load, options))
    from infer.job.ray_job import RayCluster, run_with_ray

    if "model" in options and os.path.exists(options["model"]):
        # Actors have their own working directories.
        options = options | {"model": os.path.abspath(options["model"])}
    cluster = RayCluster(options["ray"], options.get("ray_actors"))
    return run_with_ray(job, partial(load, options), cluster)


def _check_combination(options: dict[str, Any]) -> None:
    if ("prompt" in options) == ("input" in options):
        raise InputError("expected either --prompt or --input, see --help")
    if ("input" in options) != ("output" in options):
        missing = "--output" if "input" in options else "--input"
        raise InputError(f"--input and --output go together; {missing} is missing")
    for name in JOB_OPTIONS:
        if name in options and "input" not in options:
            raise InputError(f"{flag(name)} goes with --input")
    if "input" in options and options.get("seed", 0) in (None, -1):
        raise InputError(
            "--seed: expected a number with --input, so that a restart gives the same records"
        )
    if "trace" in options and "prompt" not in options:
        raise InputError("--trace goes with --prompt")
    if "prompt" in options and "warmup" in options:
        raise InputError("--warmup goes with --input; a --prompt is decoded at once")
    if "ray_actors" in options and "ray" not in options:
        raise InputError("--ray-actors goes with --ray")
    if "ray" in options and "num_hosts" in options:
        raise InputError("--num-hosts does not go with --ray, which manages the hosts itself")


def load(options: dict[str, Any]) -> LLM:
    """Loads the model that the options name; with ``warmup``, compiles all that records with these
    sampling parameters need. Error messages name the option, not the argument."""
    from wedlm_jax.llm import LLM

    given = engine_options(options)
    with errors_at_flags():
        llm = LLM(given.pop("model", None), **given)
        _tell_advice(llm, options)
        if "draft" in options:
            llm.check_draft(sampling_params(options))
        if options.get("warmup"):
            llm.warm_up(sampling_params(options))
        return llm


def _tell_advice(llm: LLM, options: dict[str, Any]) -> None:
    """Logs that decoding is greedy if the model advises sampling and the user chose neither."""
    found = llm.generation_config
    if found.samples and "generation_config" not in options and "temperature" not in options:
        advised = ", ".join(f"{name} {value}" for name, value in found.advised.items())
        notice(
            "%s advises sampling (%s); decoding is greedy unless --generation-config auto is given",
            *(found.path, advised),
        )


# --- one prompt -----------------------------------------------------------------------------


def read_prompt(argument: str, stdin: TextIO) -> str:
    """Returns the prompt given as ``--prompt``, or for "-" the contents of ``stdin``.

    A final newline is dropped: programs such as `echo` add one that nobody meant.
    """
    if argument != "-":
        return argument
    try:
        text = stdin.read()
    except UnicodeDecodeError:
        raise InputError("--prompt -: expected UTF-8 text on standard input") from None
    return text.removesuffix("\n").removesuffix("\r")


def check_trace(path: str | None, samples: int) -> None:
    """Raises `InputError`, before anything is loaded, if the trace cannot be written."""
    if path is None:
        return
    if samples > 1:
        raise InputError("--trace: expected --n 1, as a trace shows one sequence")
    check_writable(Path(path), "--trace")


def complete_prompt(
    llm: LLM, text: str, params: SamplingParams, *, chat: bool, trace: str | None = None
) -> int:
    """Prints the completion on standard output as it is committed, or all its samples when they are
    done; then, on standard error, log-probabilities if requested, and the figures. Writes a trace
    to the file ``trace``, if given."""
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
    clock = llm.engine.clock()
    if params.n > 1:
        (completion,) = llm.generate([prompt], params)
        for number, sample in enumerate(completion.samples, 1):
            print(f"--- sample {number} of {params.n} ---\n{sample.text}", flush=True)
    elif trace is None:
        completion = _stream(llm, prompt, params, None)
    else:
        from infer.trace import SequenceTrace, write_trace

        length, known = len(llm.as_ids(prompt)), {"model": Path(llm.name).name, "prompt": text}
        traced = SequenceTrace(llm.codec, params, length, llm.engine.window_size, **known)
        completion = _stream(llm, prompt, params, traced)
        write_trace(Path(trace), [traced.whole(completion.finish_reason)])
    seconds, compiling = clock.seconds, clock.compiling
    samples = completion.samples
    for number, sample in enumerate(samples, 1):
        if sample.logprobs is not None:
            if len(samples) > 1:
                print(f"--- sample {number} of {len(samples)} ---", file=sys.stderr)
            _print_logprobs(llm, sample)
    tokens = sum(len(sample.token_ids) for sample in samples)
    forwards = sum(sample.num_forwards for sample in samples)
    reasons = " and ".join(sorted({str(sample.finish_reason) for sample in samples}))
    print(
        f"{counted(tokens, 'token')} in {counted(forwards, 'forward')} "
        f"({tokens / max(forwards, 1):.2f} tokens per forward), {seconds:.2f} s after "
        f"{compiling:.1f} s of compiling; finished by {reasons}",
        file=sys.stderr,
    )
    return 0


def _stream(
    llm: LLM, prompt: Prompt, params: SamplingParams, trace: SequenceTrace | None
) -> Completion:
    completion = None
    for chunk in llm.stream(prompt, params, on_forward=None if trace is None else trace.take):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        completion = chunk.completion
    print(flush=True)
    assert completion is not None, "a completion has at least one token"
    return completion


def _print_logprobs(llm: LLM, completion: Completion) -> None:
    """Prints a line for each token: its log-probability in nats, the token, and the most likely
    tokens in its place."""

    def shown(token_id: int) -> str:
        if llm.codec is None:
            return str(token_id)
        # A special token, such as the end of text, decodes to no text.
        text = llm.codec.decode([token_id]) or llm.tokenizer.convert_ids_to_tokens(token_id)
        return repr(text)

    for token_id, found in zip(completion.token_ids, completion.logprobs or [], strict=True):
        top = "  ".join(f"{shown(other)} {value:.2f}" for other, value in found.top)
        print(f"{found.logprob:8.3f}  {shown(token_id):<16} {top}".rstrip(), file=sys.stderr)
