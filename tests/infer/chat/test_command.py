"""`wedlm chat` through a pipe and at a terminal."""

import contextlib
import io
import re
import signal
import sys

import pytest

from infer.chat.command import NO_TEMPLATE, WELCOME, empty, figures
from tests.examples.tiny_checkpoint import CONTEXT
from tests.infer.chat.terminal import Terminal
from wedlm_jax.__main__ import main
from wedlm_jax.completion import Completion
from wedlm_jax.params import SamplingParams
from wedlm_jax.text import TextCodec

SHAPE = ["--window-size", "4", "--max-tokens", "24", "--deterministic"]


def chat(checkpoint, lines, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", "--model", str(checkpoint), *SHAPE, *arguments])


def test_a_pipe_is_answered_line_by_line(checkpoint, llm, monkeypatch, capsys):
    lines = " /cat\n\n/mode fast\n/reset\none\\\ntwo\n/retry\n/quit\nnever\n"
    assert chat(checkpoint, lines, monkeypatch) == 0
    out, err = capsys.readouterr()
    # A space before a slash makes it a message.
    conversations = [[{"role": "user", "content": text}] for text in (" /cat", "one\ntwo")]
    first, second = llm.chat(conversations, SamplingParams(max_tokens=24))
    assert out == f"{first.text}\n{second.text}\n{second.text}\n"
    opening, took, refused, reset, *others = err.splitlines()
    assert opening == f"{checkpoint.name}, a context of {CONTEXT} tokens. {WELCOME}"
    assert refused == "mode: expected one of paper, verified, ar, not 'fast'"
    assert reset == "forgotten"
    pattern = r"\[\d+ tokens, \d\.\d\d tokens per forward, \d+ tokens/s, \d+ cached.*\]"
    assert all(re.fullmatch(pattern, line) for line in (took, *others))
    assert len(others) == 2


class Impatient(io.StringIO):
    """Standard output with somebody in front of it who presses Ctrl-C at the first word."""

    def __init__(self):
        super().__init__()
        self.pressed = False

    def write(self, text):
        if text.strip() and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_an_answer_and_no_other(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("wedlm_jax.llm.STREAM_SECONDS", 1e-9)  # a forward per burst
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Impatient())
        assert chat(checkpoint, "the cat\nand?\n", monkeypatch, "--ignore-eos") == 0
    printed = capsys.readouterr().err.splitlines()
    first, second = (line for line in printed if line.startswith("["))
    assert first.endswith(", stopped]")
    assert not first.startswith("[24 tokens")
    assert second.startswith("[24 tokens")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # as it was before


def test_a_model_without_a_template_says_so(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(TextCodec, "has_chat_template", False)
    assert chat(checkpoint, "the cat", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert NO_TEMPLATE in err
    assert out.strip()


@pytest.mark.parametrize(
    ("reason", "stopped", "end"),
    [("stop", False, ""), ("length", True, ", cut at the token limit"), (None, True, ", stopped")],
)
def test_what_an_answer_took(reason, stopped, end):
    answer = Completion("a b", [5, 6, 2], reason, 2, 9, num_cached_tokens=16)
    line = f"[3 tokens, 1.50 tokens per forward, 6 tokens/s, 16 cached{end}]"
    assert figures(answer, 0.5, stopped=stopped) == line


def test_an_empty_answer_says_why(llm):
    end = llm.engine.config.eos_token_ids[0]
    name = repr(llm.tokenizer.convert_ids_to_tokens(end))
    for text, ids, reason, why in (
        ("", [end], "stop", f"it ended at once, with {name}"),
        (" \n", [7, end], "stop", f"it ended with {name} after 1 token without any visible text"),
        ("", [7, 7], "length", "2 tokens without any visible text"),
        ("a", [7], "stop", None),
        ("", [7], None, None),  # somebody stopped it
    ):
        said = empty(Completion(text, ids, reason, 1, 1), llm)
        assert said == (why and f"an empty answer: {why}")


# --- at a terminal ------------------------------------------------------------------------


@pytest.mark.full
def test_a_person_at_a_terminal_stops_an_answer_and_goes_on(checkpoint, tmp_path):
    # With no limit an answer fills the context, unless it is stopped.
    shape = ["--window-size", "4", "--deterministic", "--ignore-eos", "--mode", "ar"]
    arguments = ["-m", "wedlm_jax", "chat", "--model", str(checkpoint), *shape]
    with contextlib.closing(Terminal(arguments, tmp_path)) as terminal:
        terminal.wait_for(re.escape(WELCOME))
        terminal.say("the cat\r", r"the cat[^\n]*\n")
        terminal.press_ctrl_c()
        terminal.say("/reset\r", "forgotten")
        terminal.wait_for(">")
        terminal.type("\x04")
        assert terminal.end() == 0
