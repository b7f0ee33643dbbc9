"""Runs and commands that are refused in one sentence, before anything is made."""

import sys

import pytest

from tests.examples.data import EMBEDDED
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.examples.tiny_run import changed, on_devices, tiny_recipe, write_recipe
from train.loop import train
from wedlm_jax.__main__ import main
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import LAUNCHERS

REFUSED = r"""
optimizer.warmup_steps=4 | warmup_steps: expected fewer than steps .4., not 4
optimizer.schedule=wsd; optimizer.decay_steps=4 | decay_steps must be at most 3.* not 4
+model.architecture.head_dim=7 | head_dim must be even
model.architecture={} | model\.init_from: expected the folder of the
model.init_from=tiny | tiny: neither a Hugging Face checkpoint
lora.rank=2 | lora\.rank needs model\.init_from
loss.attention=splash | 'splash' is for TPUs, not for
phases=[{from_step: 4}] | phases\[0\].from_step must be 1 to 3
phases=[{from_step: 2}, {from_step: 2}] | phases\[1\].from_step must be 3 to 3, .*not 2
phases=[{row_length: 256}] | phases\[0\].row_length needs sources
phases=[{row_length: 6, sources: {rows: 1}}] | 6 is not a multiple of block_size 32
phases=[{from_step: 2, rows: 1000}] | a step takes 2,000 packed rows
data.sources={} | data\.sources: expected the folders to train on
data.tokenizer=null | data\.tokenizer: expected the folder
data.tokenizer=there | there: no tokenizer.json
data.tokenizer=nowhere | nowhere: no such folder
evaluation.every=2 | evaluation\.source: expected a folder of held-out
evaluation={every: 2, source: x, questions: bad.jsonl} | line 2: unknown field 'anwser'; did you
evaluation={every: 2, source: x, questions: no.jsonl} | evaluation\.questions: no\.jsonl: no such
evaluation={every: 2, source: x, questions: gs://b/q} | q: evaluation\.questions cannot be in
metrics.tensorboard=true | metrics\.tensorboard needs tensorboardX: pip
metrics.wandb=mine | metrics\.wandb needs wandb: pip
quantized_training=int8 | quantized_training .*qwix.*"wedlm-jax\[int8\]"
rows=3 | rows = 3 is not divisible by data 1 x fsdp 2
mesh.data=1; phases=[{from_step: 2, rows: 3}] | rows = 3 is not divisible by data 1 x fsdp 2
mesh.tensor=2 | num_key_value_heads = 1 is not divisible by tensor 2 x sequence 1
"""
"""Overrides of a recipe, each with a pattern of the sentence that refuses it."""


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """What the recipes name: a folder of nothing, questions, a checkpoint without its weights."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "there").mkdir()
    asked = ['{"prompt": "x", "answer": "y"}', '{"prompt": "x", "anwser": 1}']
    (folder / "bad.jsonl").write_text("\n".join(asked))
    for weights in write_tiny_checkpoint(folder / "tiny").glob("*.safetensors"):
        weights.unlink()
    return folder


@pytest.mark.parametrize("line", REFUSED.strip("\n").split("\n"))
def test_what_cannot_be_trained_is_refused_and_leaves_no_folder(
    named, tokenizer_folder, tmp_path, monkeypatch, line
):
    overrides, _, sentence = line.rpartition(" | ")
    monkeypatch.chdir(named)
    for module in ("tensorboardX", "wandb", "qwix"):
        monkeypatch.setitem(sys.modules, module, None)
    if line.startswith(("rows", "mesh")):
        on_devices(monkeypatch, 2)
    config = tiny_recipe(
        tmp_path / "run", EMBEDDED if line.startswith("model") else tokenizer_folder
    )
    config = changed(config, *overrides.split("; "))
    with pytest.raises(InputError, match=sentence):
        train(config)
    assert not (tmp_path / "run").exists()
    if config.model.init_from:
        # A folder that was there is not the run's to remove.
        (tmp_path / "run").mkdir()
        with pytest.raises(InputError, match=sentence):
            train(config)
        assert (tmp_path / "run").exists()


COORDINATOR = ("--coordinator", "localhost:1")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (COORDINATOR, "--num-processes auto: none of JAX_NUM_PROCESSES, "),
        ((*COORDINATOR, "--distributed"), "leave --coordinator out"),
        (("--num-processes", "2"), "go with --coordinator"),
        (("--config", "none.yaml"), "none.yaml: no such configuration file\n"),
        (("rows=none",), "override 'rows=none': rows: expected an integer, not 'none'\n"),
        (("--steps=5",), "unrecognized arguments: --steps=5; fields are given as steps=VALUE\n"),
        (("--row-length",), "arguments: --row-length; fields are given as row_length="),
    ],
)
def test_the_command_says_what_is_wrong_and_ends_with_status_2(
    options, sentence, tokenizer_folder, tmp_path, monkeypatch, capsys
):
    for names in LAUNCHERS.values():
        for variable in filter(None, names):
            monkeypatch.delenv(variable, raising=False)
    recipe = write_recipe(tiny_recipe(tmp_path / "run", tokenizer_folder), tmp_path)
    try:
        status = main(["train", "--config", str(recipe), *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_needs_a_recipe(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    assert "--config" in capsys.readouterr().err
