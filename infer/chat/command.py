"""`wedlm chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infer.flags import add_decoding_options, add_engine_options, sampling_params
from infer.generate import load
from wedlm_jax.errors import CompilingInterrupted, InputError, counted
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.progress import BusyNotice
from wedlm_jax.host.signals import StopRequest

if TYPE_CHECKING:
    from infer.chat.conversation import Conversation
    from wedlm_jax.completion import Chunk, Completion
    from wedlm_jax.llm import LLM

DESCRIPTION = """\
Chats with a model. Answers appear as they are committed; earlier turns stay in the cache, so that
each turn computes only its new tokens.
"""

NOTES = """\
A line that begins with a slash is a command; /help lists them. Ctrl-C stops an answer, Ctrl-D ends
the chat. Input may come from a pipe: each line is a message, and a line that ends in a backslash
continues on the next. Answers go to standard output, everything else to standard error.

An answer may fill the context; --max-tokens limits it when nobody is there to stop it. A model
without a chat template completes each message on its own.

examples:
  wedlm chat
  wedlm chat --model DIR --system "Answer in one sentence." --temperature 0.7
  echo "Count from 12 to 40 in steps of 2." | wedlm chat
"""

WELCOME = "/help lists the commands; Ctrl-D ends."
EMPTY = "an empty answer"
NO_TEMPLATE = "this checkpoint has no chat template: each message is completed on its own"


def parser() -> argparse.ArgumentParser:
    """Returns the parser. An option that is not given is absent from the result."""
    result = CommandParser(
        prog="wedlm chat",
        usage="wedlm chat [--model DIR] [--system TEXT] [options]",
        description=DESCRIPTION,
        epilog=NOTES,
        argument_default=argparse.SUPPRESS,
    )
    result.add_argument("--system", metavar="TEXT", help="the system message [none]")
    add_engine_options(result.add_argument_group("model"), batch_size="1")
    instead = {"max_tokens": "maximum tokens of an answer [as many as fit into the context]"}
    add_decoding_options(result.add_argument_group("decoding"), instead)
    return result


def main(arguments: list[str]) -> int:
    options = vars(parser().parse_args(arguments))
    if options.get("n", 1) > 1:
        raise InputError("--n: a conversation has one answer per message")
    if options.get("logprobs") is not None:
        raise InputError("--logprobs: wedlm generate shows them, a conversation does not")
    from infer.chat.conversation import Conversation
    from infer.chat.lines import line_reader

    read = line_reader(sys.stdin)
    llm = load({"batch_size": 1, "warmup": True, **options})
    conversation = Conversation(
        llm,
        sampling_params(options),
        limited="max_tokens" in options,
        system=options.get("system", ""),
        tell=_tell,
    )
    context = counted(llm.engine.max_model_len, "token")
    _tell(f"{Path(llm.name).name}, a context of {context}. {WELCOME}")
    if not conversation.has_template:
        _tell(NO_TEMPLATE)
    converse(read, conversation, llm)
    return 0


def converse(read: Callable[[], str], conversation: Conversation, llm: LLM) -> None:
    """Answers messages until there are no more."""
    from infer.chat.lines import follow

    while True:
        try:
            message = read()
            if message.rstrip() == "/retry":
                _answer(conversation.retry, conversation, llm)
            elif message.startswith("/"):
                _tell(follow(message, conversation, llm))
            elif message.strip():
                _answer(partial(conversation.answer, message), conversation, llm)
        except EOFError:
            return
        except CompilingInterrupted:
            raise  # in the middle of an answer: the engine cannot be used any more
        except KeyboardInterrupt:
            _tell("Ctrl-D ends the chat.")  # a line was cancelled
        except InputError as error:
            _tell(str(error))


def _answer(answer: Callable[..., Iterator[Chunk]], conversation: Conversation, llm: LLM) -> None:
    """Prints an answer as it comes, then its figures."""
    clock, completion = llm.engine.clock(), None
    written = ""

    def end_line() -> None:
        """Ends the answer's line in a terminal, so that a notice begins on a new one."""
        if written and not written.endswith("\n") and sys.stdout.isatty():
            print(flush=True)

    if isinstance(notice := llm.engine.device.programs.while_busy, BusyNotice):
        notice.before = end_line
    # An exception in the middle of a forward would leave the engine unusable.
    with StopRequest(signal.SIGINT) as interrupt:
        for chunk in answer(lambda: interrupt.requested):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            written, completion = chunk.text or written, chunk.completion
    seconds = clock.seconds
    print(flush=True)
    written = ""
    if completion is not None:
        if reason := empty(completion, llm):
            _tell(reason)
        _tell(figures(completion, seconds, stopped=interrupt.requested))
        if advice := conversation.advice(completion):
            _tell(advice)


def empty(completion: Completion, llm: LLM) -> str | None:
    """Returns why an answer shows no text; None if it shows some."""
    if completion.finish_reason is None or (completion.text or "").strip():
        return None
    *before, last = completion.token_ids
    if completion.finish_reason == "length":
        return f"{EMPTY}: {counted(len(before) + 1, 'token')} without any visible text"
    name = repr(llm.tokenizer.convert_ids_to_tokens(last))
    if before:
        tokens = counted(len(before), "token")
        return f"{EMPTY}: it ended with {name} after {tokens} without any visible text"
    return f"{EMPTY}: it ended at once, with {name}"


def figures(completion: Completion, seconds: float, *, stopped: bool) -> str:
    """Formats an answer's figures as a line."""
    tokens, reason = len(completion.token_ids), ""
    if completion.finish_reason == "length":
        reason = ", cut at the token limit"
    elif stopped and completion.finish_reason is None:
        reason = ", stopped"
    return (
        f"[{counted(tokens, 'token')}, {completion.tokens_per_forward:.2f} tokens per forward, "
        f"{tokens / max(seconds, 1e-9):.0f} tokens/s, "
        f"{completion.num_cached_tokens} cached{reason}]"
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
