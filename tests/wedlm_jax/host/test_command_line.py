"""A refused command: its usage and one sentence on standard error, and status 2."""

import pytest

from wedlm_jax.host.command_line import CommandParser


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--temprature", "1"],
            "unrecognized arguments: --temprature 1; did you mean --temperature?",
        ),
        (["--temprature=1"], "--temprature=1; did you mean --temperature?"),
        (
            ["--temprature", "1", "--max_tokens", "2"],
            "did you mean --temperature and --max-tokens?",
        ),
        (["--mode", "papr"], "invalid choice: 'papr'"),
        (["--mode", "papr"], "; did you mean 'paper'?\n"),
        (["--zzz"], "unrecognized arguments: --zzz\n"),
        (["prompt"], "unrecognized arguments: prompt\n"),
        (["--temperature", "hot"], "argument --temperature: invalid float value: 'hot'\n"),
    ],
)
def test_a_refusal_names_the_nearest_options(given, said, capsys):
    parser = CommandParser(prog="wedlm generate")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--mode", choices=("paper", "ar"))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(given)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: wedlm generate ")
    assert said in err
