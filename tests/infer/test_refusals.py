"""What each command refuses: status 2, nothing on standard output, and a sentence that names the
option, before anything is written."""

import shlex
import sys

import pytest

from tests.examples.child import ROOT
from tests.no_libtpu import NO_LIBTPU, hide_libtpu
from wedlm_jax.__main__ import main

RECIPE = "configs/wedlm_8b.yaml"
EITHER = "expected either --prompt or --input, see --help"
FILES = "--input README.md --output HERE/b"
REFUSED = {
    "generate --model TINY --window-size 4 --max-tokens 24": {
        "": EITHER,
        "--prompt a --input b": EITHER,
        "--input b": "--input and --output go together; --output is missing",
        "--prompt a --output b": "go together; --input is missing",
        "--input b --output c --seed none": "--seed: expected a number with --inp",
        "--prompt a --fail-fast": "--fail-fast goes with --input",
        "--prompt a --shard-size 5": "--shard-size goes with --input",
        "--prompt a --warmup": "--warmup goes with --input",
        "--prompt a --n 2": "--n: expected 1 at temperature 0",
        f"{FILES} --n 2": "--n: expected 1 at temperature 0",
        f"{FILES} --shard-size 0": "--shard-size: expected 1 or",
        f"{FILES} --max-errors -1": "--max-errors: expected 0 or more, not -1",
        f"{FILES} --trace t.json": "--trace goes with --prompt",
        "--prompt a --n 2 --temperature 1 --trace t.json": "--trace: expected --n 1, as a ",
        "--prompt a --trace HERE": "HERE: is a folder",
        "--prompt a --trace HERE/no/t.json": "HERE/no/t.json: no such folder",
        "--prompt ''": "the prompt has no tokens; at least one is needed",
        "--prompt a --temperature -1": "--temperature: expected a number",
        "--prompt a --entropy-threshold abc": "argument --entropy-threshold: invalid number",
        "--prompt a --dtype int8": "argument --dtype: invalid choice: 'int8'",
        "--prompt a --max-cache-tokens 9": "arguments: --max-cache-tokens 9",
        "--prompt a --batch-size 0": "--batch-size: expected an integer from 1 to 65,536",
        "--prompt a --mesh tensor": "argument --mesh",
        "--prompt a --mesh tensor=a": "argument --mesh",
        "--prompt a --mesh tensor=4 data=4": "needs 16 devices, but there are 8",
        "--prompt a --max-tokens 320": "exceed max_model_len 320",
        "--prompt a --model /no/such": "/no/such: no such folder",
        "--prompt a --model BARE": "bare has no tokenizer",
        "--chat --prompt a --model BARE": "bare has no tokenizer",
    },
    "generate --compile-only": {
        "": "--compile-only needs --model",
        f"--model {RECIPE} --window-size auto": "one --window-size",
        f"--model {RECIPE} --batch-size 0": "--batch-size",
        f"--model {RECIPE}": NO_LIBTPU,
    },
    "plot": {
        "HERE/no.json": "no.json: No such file or directory",
        "HERE/no.json --output x.bmp": "a plot's name ends with one of",
    },
    "chat": {
        "--n 2 --temperature 1": "--n: a conversation has one answer",
        "--logprobs 1": "--logprobs: wedlm generate shows them",
        "--top-p 0": "--top-p: expected",
    },
    "demo": {
        "--samples 1": "--samples: expected at least 4, not 1",
        "--seconds -1": "--seconds: expected 0 to 60, not -1",
        "--seconds nan": "--seconds",
        "--record demo.png": "--record demo.png: expected an .svg file",
        "--record no/such/demo.svg": "--record no/such/demo.svg: expected",
    },
    "evaluate": {
        "--samples 0": "--samples",
        "--passes 0": "--passes",
        "--questions nowhere.jsonl": "nowhere.jsonl",
        "--plot scores.bmp": "ends with one of",
        "--plot /no/such/scores.svg": "no such folder",
        "--output /no/such/scores.json": "--output /no/such/scores.json: no such folder",
        "--answers /no/such/answers.jsonl": "--answers",
        "--max-tokens 0": "--max-tokens",
        "--limit 3": "--limit goes with --tasks",
        "--run-code": "--run-code goes with --tasks",
        "--tasks x --questions q.jsonl": "--questions cannot be combined with --tasks",
        "--tasks x --limit 0": "--limit: expected 1 to 1,000,000",
    },
    "bench": {
        "--questions nowhere.jsonl": "nowhere.jsonl",
        "--regime verse": "'verse'",
        "--plot speeds.bmp": "ends with one of",
        "--output /no/such/speeds.json": "no such folder",
        "--temperature 1": "--temperature is an option of identity, not of windows",
        "--compare drafts --mode paper": "--mode is an option of windows, not of drafts",
        "--compare drafts identity --window-size 0": "name another window",
        "--compare gaps": "invalid choice: 'gaps'",
        "--compare identity --temperature -0.5": "expected at least 0, not -0.5",
        "--window-size 0 100000": "--window-size: expected at most 1024, the longest text",
        "--batch-size 8 99999999": "--batch-size: expected an integer from 1 to 65,536, not 9999",
        "--batch-size 0": "argument --batch-size: expected a number of at least 1, not '0'",
        "--prompts -3": "argument --prompts: expected a number of at least 1, not '-3'",
        "--window-size four": "'four'",
        "--window-size -1": "'-1'",
        "--rival transformers --quantization int8": "not rounded",
        "--compare drafts --assistant 8": "--assistant drafts for --rival, which is not given",
        "--rival transformers": "wedlm-jax[rival]",
    },
    "bench --predict v5e:2x4": {
        "": "--predict needs --model: a folder, or a recipe with its sizes",
        f"--model {RECIPE} --window-size auto": "expected numbers for --window-size, not auto",
        f"--model {RECIPE} --compare drafts": "--compare does not go with --predict",
        f"--model {RECIPE} --passes 2": "--passes does not go with --predict",
        "--model configs/drafter.yaml": "expected a recipe with model.architecture",
        "--model nowhere": "nowhere: no such folder",
        "--model STOCK": "was not trained on masks; give a --drafter, or --window-size 0",
    },
    "serve": {
        "--port 70000": "--port: expected 0 to 65535",
        "--grace 0": "--grace: expected a number above 0",
        "--max-waiting -1": "--max-waiting: expected 0 or more, not -1",
        "--api-key=": "--api-key: expected a key",
        "--temperature -1": "--temperature: expected a number",
        "--n 2 --temperature 1": "--n: each request sets its own",
        "--host nowhere.invalid": "--host nowhere.invalid --port 8000: ",
        "--port 0 --model missing": "missing",
    },
}


@pytest.mark.parametrize("command", REFUSED)
def test_options_that_cannot_be_are_refused(
    command, checkpoint, without_tokenizer, stock, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    hide_libtpu(monkeypatch)
    if command == "bench":
        monkeypatch.setitem(sys.modules, "torch", None)
    folders = {"TINY": checkpoint, "BARE": without_tokenizer, "STOCK": stock, "HERE": tmp_path}

    def filled(text):
        for name, folder in folders.items():
            text = text.replace(name, str(folder))
        return text

    for options, message in REFUSED[command].items():
        try:
            status = main(shlex.split(filled(f"{command} {options}")))
        except SystemExit as ended:  # of the parser
            status = ended.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), options
        sentence = next((line for line in err.splitlines() if filled(message) in line), "")
        assert sentence.startswith(f"wedlm {command.split()[0]}: "), (options, err)
    assert list(tmp_path.iterdir()) == []
