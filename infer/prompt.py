"""One prompt on the command line: its text as it is committed, then what it took."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams


def read_prompt(argument: str, stdin: TextIO) -> str:
    """The prompt given as ``--prompt``: itself, or for "-" what ``stdin`` holds.

    A shell ends what it pipes with a line end that nobody meant, so one is dropped.
    """
    if argument != "-":
        return argument
    try:
        text = stdin.read()
    except UnicodeDecodeError:
        raise InputError("--prompt -: expected UTF-8 text on standard input") from None
    return text.removesuffix("\n").removesuffix("\r")


def complete_prompt(llm: LLM, text: str, params: SamplingParams, *, chat: bool) -> int:
    """Prints the completion on standard output, and one line about it on standard error."""
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
    compiled, started = llm.engine.compile_seconds, time.monotonic()
    completion = None
    for chunk in llm.stream(prompt, params):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        completion = chunk.completion
    print(flush=True)
    compiling = llm.engine.compile_seconds - compiled
    seconds = time.monotonic() - started - compiling
    assert completion is not None, "a completion has at least one token"
    tokens, forwards = len(completion.token_ids), completion.num_forwards
    print(
        f"{tokens} tokens in {forwards} forwards ({completion.tokens_per_forward:.2f} tokens per "
        f"forward), {seconds:.2f} s after {compiling:.1f} s of compiling; "
        f"finished by {completion.finish_reason}",
        file=sys.stderr,
    )
    return 0
