"""`wedlm chat` through a pipe and at a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.chat.command import NO_TEMPLATE, WELCOME, figures
from infer.chat.lines import line_reader
from wedlm_jax.__main__ import main
from wedlm_jax.completion import Completion
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

SHAPE = ["--window-size", "4", "--max-tokens", "24", "--deterministic"]


def chat(checkpoint: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", "--model", str(checkpoint), *SHAPE, *arguments])


def test_a_pipe_is_answered_line_by_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "the cat\n\n/mode fast\n/reset\none\\\ntwo\n/quit\nnever\n"
    assert chat(checkpoint, lines, monkeypatch) == 0
    out, err = capsys.readouterr()
    llm = LLM(checkpoint, window_size=4, max_batch_size=1, deterministic=True)
    params = SamplingParams(max_tokens=24)
    conversations = [[{"role": "user", "content": text}] for text in ("the cat", "one\ntwo")]
    first, second = llm.chat(conversations, params)
    assert out == f"{first.text}\n{second.text}\n"
    said = [line for line in err.splitlines() if not line.startswith("compiled")]
    assert said[0] == WELCOME
    assert said[2] == "mode: expected one of paper, verified, ar, not 'fast'"
    assert said[3] == "forgotten"
    pattern = r"\[\d+ tokens, \d\.\d\d tokens per forward, \d+ tokens/s, \d+ cached.*\]"
    assert re.fullmatch(pattern, said[1])
    assert re.fullmatch(pattern, said[4])


class Impatient(io.StringIO):
    """Standard output with somebody in front of it who presses Ctrl-C at the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.pressed = False

    def write(self, text: str) -> int:
        if text.strip() and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_an_answer_and_no_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Impatient())
        assert chat(checkpoint, "the cat\nand?\n", monkeypatch, "--ignore-eos") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    first, second = said
    assert first.endswith(", stopped]")
    assert not first.startswith("[24 tokens")
    assert second.startswith("[24 tokens")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # as it was before


def test_a_model_without_a_template_says_so(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    )
    assert chat(tmp_path, "the cat", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert NO_TEMPLATE in err
    assert out.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "2", "--temperature", "1"], "--n: a conversation has one answer"),
        (["--logprobs", "1"], "--logprobs: wedlm generate shows them"),
        (["--top-p", "0"], "--top-p: expected"),
    ],
)
def test_options_that_cannot_be_are_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bytes_that_are_no_text_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    read = line_reader(io.TextIOWrapper(io.BytesIO(b"a\n\xff\n"), encoding="utf-8"))
    with pytest.raises(ValueError, match="expected UTF-8 text on standard input"):
        read()


def test_what_an_answer_took() -> None:
    whole = Completion("a b", [5, 6, 2], "stop", 2, 9, num_cached_tokens=16)
    assert figures(whole, 0.5, stopped=False) == (
        "[3 tokens, 1.50 tokens per forward, 6 tokens/s, 16 cached]"
    )
    cut = Completion("a b", [5, 6], "length", 2, 9)
    assert figures(cut, 0.5, stopped=False).endswith("0 cached, cut at its longest]")
    part = Completion("a b", [5, 6], None, 2, 9)
    assert figures(part, 0.5, stopped=True).endswith("0 cached, stopped]")


# --- at a terminal ------------------------------------------------------------------------


AT_ITS_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from wedlm_jax.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""`wedlm` with the terminal as its own, so that Ctrl-C reaches it as it does a person's."""


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, arguments: list[str], state: Path):
        self._own, other = pty.openpty()
        environment = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", AT_ITS_TERMINAL, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
        )
        os.close(other)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, pattern: str, seconds: float = 300) -> str:
        """Reads until the pattern has come; returns what came up to its end."""
        until = time.monotonic() + seconds
        while True:
            if found := re.search(pattern, self._seen):
                before, self._seen = self._seen[: found.end()], self._seen[found.end() :]
                return before
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._own], [], [], left)[0]:
                raise AssertionError(f"no {pattern!r} in {self._seen!r}")
            try:
                self._seen += os.read(self._own, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {pattern!r}: {self._seen!r}") from None

    def end(self) -> int:
        return self._process.wait(60)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self._own)


@pytest.fixture
def terminal(checkpoint: Path, tmp_path: Path) -> Iterator[Terminal]:
    # No limit: with `ignore_eos` an answer fills the context, and can be stopped on its way.
    shape = ["--window-size", "4", "--deterministic", "--ignore-eos"]
    with contextlib.closing(
        Terminal(["chat", "--model", str(checkpoint), *shape], tmp_path)
    ) as terminal:
        yield terminal


FIGURES = r"\[\d+ tokens, [^\]]*\]"


@pytest.mark.slow
def test_a_person_at_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(re.escape(WELCOME))
    terminal.wait_for("> ")
    # What is pasted is one message, whatever lines it has.
    terminal.type("\x1b[200~the cat\nsat\x1b[201~\r")
    assert "cut at its longest" in terminal.wait_for(FIGURES)
    terminal.wait_for("> ")
    terminal.type("and?\r")
    terminal.wait_for("/reset begins anew")
    terminal.wait_for("> ")
    terminal.type("a line given up\x03")
    terminal.wait_for("> ")
    terminal.type("/reset\r")
    terminal.wait_for("forgotten")
    terminal.wait_for("> ")
    terminal.type("/help\r")
    terminal.wait_for("/quit")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    history = (tmp_path / "wedlm-jax" / "chat-history").read_text()
    assert "+the cat\n+sat\n" in history
    assert (tmp_path / "wedlm-jax" / "chat-history").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("/window 0\r")
    terminal.wait_for("window 0")
    terminal.wait_for("> ")
    terminal.type("the cat\r")
    terminal.wait_for("the cat\r?\n")
    terminal.type("\x03")
    terminal.wait_for("> ")
    terminal.type("/quit\r")
    assert terminal.end() == 0
