"""The commands of the documents are ones that the program takes."""

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from docs.reference import MODULES, module_parser, subcommand_parser
from infer.flags import sampling_params
from tests.docs.pages import PAGES, ROOT, blocks, prose
from train.recipe.config import load_config
from wedlm_jax.__main__ import SUBCOMMANDS
from wedlm_jax.errors import InputError

OTHERS = (
    "bash|cat|cd|curl|diff|docker|done|echo|for|gcloud|git|grep|head|hf|kill|kubectl|lm_eval|mkdir|"
    "sbatch|sh|source|srun|tail|uv|wait|wc|zcat"
)
"""Commands that are not ours, and that documents may use."""
NO_OPTIONS = ("build", "infer.harness", "pip", "pytest", "venv")
"""What `python -m` runs with options that are not ours."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


class Refused(Exception):
    """Says what is wrong with a command."""


def check_all(script):
    """Checks every command of a script; returns how many there are."""
    found = list(commands(script))
    for words in found:
        check(words)
    return len(found)


def check(words):
    """Refuses a command that does not exist, or that does not take these arguments."""
    name = Path(words[0]).name
    if name == "wedlm":
        check_wedlm(words[1:])
    elif re.fullmatch(r"python[\d.]*", name):
        assert words[1] == "-m", words
        if words[2] not in NO_OPTIONS:
            parser(f"python -m {words[2]}").parse_args(words[3:])
    elif name == "make":
        unknown = {word for word in words[1:] if "=" not in word} - set(TARGETS)
        assert not unknown, unknown
    elif name == "pip":
        asked = re.findall(r"\[(.*?)\]", " ".join(words))
        extras = {extra for some in asked for extra in some.split(",")}
        assert extras <= PROJECT["optional-dependencies"].keys(), extras
    elif words[0].startswith("launch/"):  # runs what stands behind it, perhaps a variable
        assert (ROOT / words[0]).is_file(), words[0]
        if words[1:] != ["1"]:
            check(words[1:])
    else:
        assert re.fullmatch(OTHERS, name), name


def check_wedlm(words):
    if words in (["--version"], ["--help"], [*words[:1], "--help"]):
        assert words[0] in (*SUBCOMMANDS, "--version", "--help")
        return
    assert words[0] in SUBCOMMANDS, words[0]
    options = parser(f"wedlm {words[0]}").parse_args(words[1:])
    if words[0] == "generate":
        sampling_params(vars(options))
    if words[0] == "train":
        load_config(ROOT / options.config, options.overrides)


@cache
def parser(command):
    name = command.split()[-1]
    made = subcommand_parser(name) if command.startswith("wedlm") else module_parser(name)

    def refuse(message):
        raise Refused(f"{command}: {message}")

    made.error = refuse
    return made


def container_commands(manifest):
    """The commands of all containers anywhere in a Kubernetes manifest."""
    if isinstance(manifest, list):
        return [found for item in manifest for found in container_commands(item)]
    if not isinstance(manifest, dict):
        return []
    if "command" in manifest:
        return [[*manifest["command"], *manifest.get("args", [])]]
    return [found for item in manifest.values() for found in container_commands(item)]


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.name)
def test_commands_are_taken(block):
    assert check_all(block.text)


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_yaml_is_a_recipe_a_manifest_or_a_task(block, tmp_path):
    if block.text.startswith("task: "):
        harness = pytest.importorskip("lm_eval.tasks")
        (tmp_path / "task.yaml").write_text(block.text, encoding="utf-8")
        tasks = harness.TaskManager(include_path=str(tmp_path), include_defaults=False)
        assert tasks.all_tasks == [yaml.safe_load(block.text)["task"]]
        return
    if "apiVersion" not in block.text:
        (tmp_path / "recipe.yaml").write_text(block.text, encoding="utf-8")
        load_config(tmp_path / "recipe.yaml", ["data.tokenizer=DIR"])
        return
    found = container_commands(yaml.safe_load(block.text))
    assert found
    for words in found:
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_the_text_names_exist(page):
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    assert page.name != "batch.md" or len(spans) > 20
    flags = {name: set(parser(f"wedlm {name}")._option_string_actions) for name in SUBCOMMANDS}
    of_modules = [set(module_parser(name)._option_string_actions) for name in MODULES]
    every = set().union(*flags.values(), *of_modules)
    for span in spans:
        words = span.split()
        if words[0] == "wedlm" and len(words) > 1 and words[1].islower():
            assert words[1] in SUBCOMMANDS, span
        if words[0] == "make" and len(words) > 1:
            assert words[1] in TARGETS, span
        known = flags[words[1]] if words[0] == "wedlm" and len(words) > 1 else every
        if words[0] == "wedlm" or words[0].startswith("--"):
            named = {word.partition("=")[0] for word in words if word.startswith("--")}
            # Options with an underscore are those of lm_eval.
            assert {name for name in named if "_" not in name} <= known, span


@pytest.mark.parametrize(
    "line",
    [
        "wedlm generate --promt x",
        "wedlm genrate",
        "wedlm generate --model DIR --prompt x --max-tokens many",
        "wedlm generate --model DIR --prompt x --top-p 3",
        "wedlm train --config configs/wedlm_8b.yaml optimizer.learning_rat=1",
        "wedlm train --config configs/none.yaml",
        "X=1 make no-such-target",
        'pip install "path/to/wedlm-jax[no-such-extra]"',
        "gcloud ssh --command 'cd x && .venv/bin/wedlm tokenize'",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((Refused, AssertionError, InputError)):
        check_all(line)


KEYWORDS = ("do", "then", "else", "!", "{", "(", "time")
ENDS = re.compile(r"[();<>|&\n]+")


def commands(script):
    """Yields the words of every simple command; variables and arithmetic count as the number 1."""
    script = re.sub(r"(^|\s)#[^\n]*", r"\1", script)
    script = re.sub(r"\\\n\s*", " ", script)
    script = re.sub(r"\d>&\d", "", script)
    script = re.sub(r"\$\(\(.*?\)\)|\$\{?\w+\}?", "1", script)
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words = []
    skip = False
    for word in [*lexer, "\n"]:
        if ENDS.fullmatch(word):
            skip = ">" in word or "<" in word
            if not skip:
                yield from _command(words)
                words = []
        elif skip:
            skip = False
        else:
            words.append(word)


def _command(words):
    while words and (words[0] in KEYWORDS or re.match(r"\w+=", words[0])):
        if "=" in words[0] and " " in words[0]:  # a command kept in a variable
            yield from commands(words[0].partition("=")[2])
        words = words[1:]
    if not words:
        return
    yield words
    for word in words[1:]:
        if re.search(r"\s", word) and re.search(r"\b(wedlm|python3?|pip|make) ", word):
            yield from commands(word)
