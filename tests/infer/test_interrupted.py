"""Ctrl-C while a program is compiled ends a command at once, with nothing half-written."""

import signal

import pytest

from tests.examples.interrupted import command, interrupted
from tests.infer.chat.terminal import Terminal

PROMPT = "generate --chat --prompt Hello."
JOB = "generate --input HERE/in.jsonl --output HERE/out"
KEPT = ": 0 of 2 records are kept in HERE/out; the same command continues from there"


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "number", "status", "sentence"),
    [
        (PROMPT, signal.SIGINT, 130, "wedlm generate: interrupted"),
        (JOB, signal.SIGINT, 130, f"interrupted{KEPT}"),
        (JOB, signal.SIGTERM, 143, f"stopped by SIGTERM{KEPT}"),
    ],
)
def test_a_prompt_or_a_job_ends_and_says_what_is_kept(
    tmp_path, arguments, number, status, sentence
):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = arguments.replace("HERE", str(tmp_path)).split()
    ended, printed = interrupted(tmp_path, "run", *words, number=number)
    assert ended == status
    assert printed.splitlines()[-1] == sentence.replace("HERE", str(tmp_path))
    assert not (tmp_path / "out").exists(), "any job may begin there"


@pytest.mark.full
def test_a_conversation_ends(tmp_path):
    terminal = Terminal(command(tmp_path, "run", "chat"), tmp_path)
    try:
        terminal.wait_for("compiling")
        while not (tmp_path / "compiling").exists():
            pass
        terminal.press_ctrl_c()
        printed = terminal.wait_for("interrupted while compiling")
        assert "\x1b[?25h" in printed, "the cursor is there again"
        assert terminal.end() == 130
        assert not (tmp_path / "compiled").exists()
    finally:
        terminal.close()
