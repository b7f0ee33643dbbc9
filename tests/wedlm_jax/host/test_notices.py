"""What a command says besides: whole lines of nothing but the sentence, above a progress bar."""

import contextlib
import logging
import re

from tests.examples.child import run_python
from tests.infer.chat.terminal import Terminal
from wedlm_jax.host import notices

AFTER_A_LIBRARY = """
import sys
import absl.logging
absl.logging.warning("of absl")  # with which it gives the root logger a handler, as in orbax
from wedlm_jax.host.notices import notice
notice("of %s", "ours")
"""


def test_a_notice_is_its_sentence_alone_whatever_libraries_do_to_logging():
    done = run_python("-c", AFTER_A_LIBRARY)
    assert done.stderr.splitlines() == ["WARNING:absl:of absl", "of ours"]


def test_an_application_may_take_notices_itself(monkeypatch, caplog):
    logger = logging.getLogger("wedlm")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "propagate", True)
    notices.notice("%d of them", 2)
    assert caplog.messages == ["2 of them"]


WITH_A_BAR = """
import logging, sys, warnings
logging.basicConfig()
from wedlm_jax.host.notices import notice
from wedlm_jax.host.progress import ProgressBar
with ProgressBar("records", total=3) as bar:
    bar.update(1)
    notice("a notice that is longer than the terminal is wide: " + "words " * 20 + "END")
    logging.getLogger("library").warning("of a library")
    print("printed")
    warnings.showwarning = lambda *a, **k: print("warned", file=sys.stderr)
    warnings.warn("")
    bar.update(2)
notice("afterwards")
logging.getLogger("library").warning("afterwards, too")
print("over")
"""


def test_what_is_said_stands_above_a_bar_in_lines_of_its_own(tmp_path):
    with contextlib.closing(Terminal(["-c", WITH_A_BAR], tmp_path)) as terminal:
        seen = terminal.wait_for("over\r\n")
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", seen)]
    (notice,) = [line for line in lines if line.startswith("a notice")]
    assert notice.endswith("words END")
    for line in ("WARNING:library:of a library", "printed", "warned", "afterwards"):
        assert lines.count(line) == 1, (line, lines)
    assert "WARNING:library:afterwards, too" in lines
    assert any("2 of 3 records" in line for line in lines)


def test_what_goes_into_a_file_stays_out_of_a_bars_terminal(tmp_path):
    out = tmp_path / "out"
    into_file = f"import sys; sys.stdout = open({str(out)!r}, 'w')\n{WITH_A_BAR}"
    with contextlib.closing(Terminal(["-c", into_file], tmp_path)) as terminal:
        terminal.wait_for("afterwards, too")
        assert terminal.end() == 0
    assert out.read_text() == "printed\nover\n"
