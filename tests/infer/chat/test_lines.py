"""Messages from a pipe and from somebody at a terminal."""

import contextlib
import io
import re

import pytest

from infer.chat.lines import EDITED_KEYS, PLAIN, PLAIN_KEYS, line_reader
from tests.infer.chat.terminal import Terminal
from wedlm_jax.errors import InputError

READS = """
import sys
from infer.chat.lines import keys, line_reader
read = line_reader(sys.stdin)
print(keys())
while True:
    try:
        print("GOT", repr(read()))
    except KeyboardInterrupt:
        print("GIVEN UP")
    except EOFError:
        print("THE END")
        break
"""


def test_each_line_of_a_pipe_is_a_message():
    read = line_reader(io.StringIO("one\r\n\ntwo\\\nthree\nlast"))
    assert [read() for _ in range(4)] == ["one", "", "two\nthree", "last"]
    with pytest.raises(EOFError):
        read()
    assert line_reader(io.StringIO("one\\\n"))() == "one\n", "a pipe may end within a message"


def test_bytes_that_are_no_text_are_told():
    read = line_reader(io.TextIOWrapper(io.BytesIO(b"a\n\xff\n"), encoding="utf-8"))
    with pytest.raises(InputError, match="expected UTF-8 text on standard input"):
        read()


def press_ctrl_c_until(terminal, answer):
    """Presses again after a while without an answer, as a person would: Python's own line reader
    waits for the next key if the signal comes between its last look for one and that wait."""
    for _ in range(5):
        terminal.press_ctrl_c()
        with contextlib.suppress(TimeoutError):
            terminal.wait_for(answer, seconds=5)
            return
    raise TimeoutError(f"no {answer!r}")


WITHOUT_PROMPT_TOOLKIT = "import sys; sys.modules['prompt_toolkit'] = None" + READS


def test_without_prompt_toolkit_lines_are_read_all_the_same(tmp_path):
    with contextlib.closing(Terminal(["-c", WITHOUT_PROMPT_TOOLKIT], tmp_path)) as terminal:
        terminal.wait_for(re.escape(PLAIN))
        terminal.wait_for(re.escape(PLAIN_KEYS))
        terminal.say("one\\\rtwo\r", r"GOT 'one\\ntwo'")
        terminal.say("a line", "a line")
        press_ctrl_c_until(terminal, "GIVEN UP")
        terminal.say("\x04", "THE END")
        assert terminal.end() == 0


def test_what_is_pasted_is_one_message_and_lines_are_kept(tmp_path):
    with contextlib.closing(Terminal(["-c", READS], tmp_path)) as terminal:
        terminal.wait_for(re.escape(EDITED_KEYS))
        terminal.say("\x1b[200~the cat\nsat\x1b[201~\r", r"GOT 'the cat\\nsat'")
        terminal.say("one\x1b\rtwo\r", r"GOT 'one\\ntwo'")  # Alt-Enter
        terminal.say("\x1b[A\r", r"GOT 'one\\ntwo'")  # the line before, by the arrow key
        terminal.say("a line\x03", "GIVEN UP")  # Ctrl-C
        terminal.say("another\r", "GOT 'another'")
        terminal.say("\x04", "THE END")
        assert terminal.end() == 0
    history = tmp_path / "wedlm-jax" / "chat-history"
    assert "+the cat\n+sat\n" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_history_that_cannot_be_kept_is_done_without(tmp_path):
    (tmp_path / "wedlm-jax").write_text("a file where the folder would be")
    with contextlib.closing(Terminal(["-c", READS], tmp_path)) as terminal:
        terminal.say("one\r", "GOT 'one'")
