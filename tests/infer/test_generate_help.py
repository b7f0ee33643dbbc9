"""The help of `wedlm generate`: true defaults and choices, examples that work, and no wait."""

import inspect
import re
import shlex
import subprocess
import sys

import pytest

from infer import generate
from infer.job.job import SHARD_SIZE
from infer.job.shard_decoder import GRACE_SECONDS
from wedlm_jax.__main__ import main
from wedlm_jax.attention.ragged import RAGGED_BACKENDS
from wedlm_jax.engine.config import DEFAULT_WINDOW
from wedlm_jax.llm import LLM
from wedlm_jax.params import MODES, SamplingParams


def test_help_names_the_defaults_that_hold(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["generate", "--help"])
    assert exit_status.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    shown = dict(
        re.findall(r"--([a-z-]+) (?:N|N\|auto|N\|none|X|X\|none) [^\[]*\[([^\]]+)\]", text)
    )
    library = inspect.signature(LLM).parameters
    params = SamplingParams()
    numbers = (
        "temperature top_p top_k max_tokens entropy_threshold position_penalty seed n min_tokens"
    )
    penalties = "repetition_penalty presence_penalty frequency_penalty"
    expected = {
        name.replace("_", "-"): str(getattr(params, name))
        for name in f"{numbers} {penalties}".split()
    }
    no_masks = "0 for a checkpoint that was not trained on masks"
    expected["window-size"] = f"auto, but {DEFAULT_WINDOW} in mode paper; {no_masks}"
    expected["batch-size"] = (
        f"{library['max_batch_size'].default}; 1 with --prompt, unless --n is above 1"
    )
    expected["shard-size"], expected["grace"] = str(SHARD_SIZE), str(GRACE_SECONDS)
    expected["num-hosts"] = "1"
    assert {name: shown.get(name) for name in expected} == expected
    assert re.search(r"--mode [^\[]*\[([a-z]+)\]", text).group(1) == params.mode  # type: ignore[union-attr]


def test_choices_of_the_help_are_those_of_the_library():
    choices = {action.dest: action.choices for action in generate.parser()._actions}
    assert choices["mode"] is not None
    assert set(choices["mode"]) == set(MODES)
    assert choices["attention"] == tuple(RAGGED_BACKENDS)


def test_examples_of_the_help_are_accepted():
    examples = re.findall(r"wedlm generate (--.*?)(?: {3,}\(.*| && .*)?\n", generate.FILES)
    assert len(examples) == generate.FILES.split("examples:")[1].count("wedlm generate") == 9
    for example in examples:
        options = vars(generate.parser().parse_args(shlex.split(example)))
        generate._check_combination(options)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from wedlm_jax.__main__ import main\n"
        "try:\n    main(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'jax', 'numpy', 'flax', 'transformers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
