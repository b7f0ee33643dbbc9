"""Python in the documents runs; what claims to be of a file is in it; JSON is JSON."""

import ast
import json
import re

import pytest

from tests.docs.pages import PAGES, ROOT, blocks
from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

WRITTEN = [page for page in PAGES if page.name != "reference.md"]
"""The signatures of the reference are no programs."""
PYTHON = blocks("python", pages=WRITTEN)
EXCERPTS = [block for block in PYTHON if block.comment.startswith("from ")]
PROGRAMS = [block for block in PYTHON if not block.comment]


def test_every_block_is_an_excerpt_or_runs_or_says_why_not():
    rest = [block for block in PYTHON if block not in EXCERPTS + PROGRAMS]
    assert [block.name for block in rest if not block.comment.startswith("not run: ")] == []
    assert EXCERPTS
    assert PROGRAMS


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_compiles(block):
    ast.parse(block.text)


def code_lines(text):
    lines = (re.sub(r"(^|\s+)# .*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: block.name)
def test_excerpts_are_in_their_file(block):
    """Lines of ``...`` stand for what is left out; indentation and comments may differ."""
    source = (ROOT / block.comment.removeprefix("from ")).read_text(encoding="utf-8")
    lines = code_lines(source)
    start = 0
    for part in re.split(r"^ *\.\.\.\n", block.text, flags=re.MULTILINE):
        wanted = code_lines(part.strip())
        places = range(start, len(lines) - len(wanted) + 1)
        found = [i for i in places if lines[i : i + len(wanted)] == wanted]
        assert found, f"not in {block.comment}: {part}"
        start = found[0] + len(wanted)


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
def test_programs_run(block, tmp_path, monkeypatch):
    """With the embedded model in the place of any other, compiled once for all of them."""
    made = LLM.__init__

    def expecting(llm, *arguments, **options):
        made(llm, *arguments, **options)
        llm.engine.expect(
            [SamplingParams(mode=mode, temperature=0.7) for mode in ("verified", "ar")]
        )

    monkeypatch.setattr(LLM, "__init__", expecting)
    monkeypatch.chdir(tmp_path)
    program = re.sub(r'"path/to/[^"]*"', repr(str(EMBEDDED_MODEL)), block.text)
    exec(compile(program, block.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.name)
def test_json_is_json(block):
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)
