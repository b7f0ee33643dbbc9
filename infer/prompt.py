"""One prompt on the command line: its text as it is committed, then what it took."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from wedlm_jax.errors import InputError, counted
from wedlm_jax.host.atomic import check_writable

if TYPE_CHECKING:
    from infer.trace import SequenceTrace
    from wedlm_jax.completion import Completion
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.text import Prompt


def read_prompt(argument: str, stdin: TextIO) -> str:
    """Returns the prompt given as ``--prompt``: itself, or for "-" what ``stdin`` holds.

    A shell ends what it pipes with a line end that nobody meant, so one is dropped.
    """
    if argument != "-":
        return argument
    try:
        text = stdin.read()
    except UnicodeDecodeError:
        raise InputError("--prompt -: expected UTF-8 text on standard input") from None
    return text.removesuffix("\n").removesuffix("\r")


def check_trace(path: str | None, samples: int) -> None:
    """Refuses, with an `InputError`, a trace that cannot be written, before anything is loaded."""
    if path is None:
        return
    if samples > 1:
        raise InputError("--trace: expected --n 1, as a trace is of one sequence")
    check_writable(Path(path), "--trace")


def complete_prompt(
    llm: LLM, text: str, params: SamplingParams, *, chat: bool, trace: str | None = None
) -> int:
    """Prints the completion on standard output as it is committed, or all samples of it when they
    are done; then log-probabilities where they are asked for, and what it took, on standard error.

    Args:
      trace: a file to write the trace to.
    """
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
    compiled, started = llm.engine.compile_seconds, time.monotonic()
    if params.n > 1:
        (completion,) = llm.generate([prompt], params)
        for number, sample in enumerate(completion.samples, 1):
            print(f"--- sample {number} of {params.n} ---\n{sample.text}", flush=True)
    else:
        completion = _stream(llm, prompt, params, None if trace is None else (Path(trace), text))
    compiling = llm.engine.compile_seconds - compiled
    seconds = time.monotonic() - started - compiling
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
    llm: LLM, prompt: Prompt, params: SamplingParams, traced: tuple[Path, str] | None
) -> Completion:
    completion, trace = None, None
    if traced is not None:
        trace = _trace(llm, prompt, params, traced[1])
    on_forward = None if trace is None else trace.take
    chunks = llm.stream(prompt, params, on_forward=on_forward)
    for chunk in chunks:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        completion = chunk.completion
    print(flush=True)
    assert completion is not None, "a completion has at least one token"
    if trace is not None and traced is not None:
        from infer.trace import write_trace

        write_trace(traced[0], [trace.whole(completion.finish_reason)])
    return completion


def _trace(llm: LLM, prompt: Prompt, params: SamplingParams, text: str) -> SequenceTrace:
    from infer.trace import SequenceTrace

    window = llm.engine.window_size
    return SequenceTrace(
        llm.codec,
        params,
        len(llm.as_ids(prompt)),
        window if isinstance(window, int) else None,
        model=Path(llm.name).name,
        prompt=text,
    )


def _print_logprobs(llm: LLM, completion: Completion) -> None:
    """Prints a line for each token: its log-probability in nats, itself, and the most probable in
    its place."""

    def shown(token_id: int) -> str:
        if llm.codec is None:
            return str(token_id)
        # A special token, such as that which ends a text, is no part of the text.
        text = llm.codec.decode([token_id]) or llm.tokenizer.convert_ids_to_tokens(token_id)
        return repr(text)

    for token_id, said in zip(completion.token_ids, completion.logprobs or [], strict=True):
        top = "  ".join(f"{shown(other)} {value:.2f}" for other, value in said.top)
        print(f"{said.logprob:8.3f}  {shown(token_id):<16} {top}".rstrip(), file=sys.stderr)
