"""Ctrl-C while a program is compiled ends a command at once, with nothing half-written."""

import signal

import pytest

from tests.examples.interrupted import command, interrupted
from tests.infer.chat.terminal import Terminal


@pytest.mark.full
def test_a_prompt_ends(tmp_path):
    status, printed = interrupted(tmp_path, "run", "generate", "--chat", "--prompt", "Hello.")
    assert status == 130
    assert printed.splitlines()[-1] == "wedlm generate: interrupted"


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "status", "how"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_job_says_what_is_kept(tmp_path, number, status, how):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    ended, printed = interrupted(tmp_path, "run", "generate", *files, number=number)
    assert ended == status
    assert printed.splitlines()[-1] == (
        f"{how}: 0 of 2 records are kept in {tmp_path / 'out'}; the same "
        "command continues from there"
    )
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
