"""Texts under schemas and expressions, from a model that knows nothing."""

import dataclasses

import numpy as np
import pytest

from tests.examples.checkpoints import edit_json
from tests.examples.schemas import fits, random_schema
from tests.examples.tiny_checkpoint import TEXTS, write_tiny_checkpoint
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

LONGEST = 900


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Of random weights, with room for long answers."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    edit_json(folder / "config.json", max_position_embeddings=1000)
    llm = LLM(folder, window_size=4, max_batch_size=8, deterministic=True)
    llm.warm_up(
        [
            SamplingParams(mode="verified", temperature=1.0, regex="a"),
            SamplingParams(mode="ar", temperature=1.0),
        ]
    )
    return llm


def in_both_modes(llm, params):
    """Decodes in mode "verified", and holds the tokens against those of "ar"."""
    prompts = [f"{TEXTS[i % len(TEXTS)]} {i}" for i in range(len(params))]
    ours = llm.generate(prompts, params)
    as_ar = [dataclasses.replace(one, mode="ar") for one in params]
    theirs = llm.generate(prompts, as_ar)
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
    return ours


@pytest.mark.full
def test_five_hundred_random_schemas_are_followed(llm):
    schemas = [random_schema(np.random.default_rng(seed)) for seed in range(500)]
    params = [
        SamplingParams(
            mode="verified",
            json_schema=schema,
            temperature=[0.0, 0.7, 1.5][seed % 3],
            draft_budget=[2.0, 100.0][seed % 2],
            seed=seed,
            max_tokens=LONGEST,
        )
        for seed, schema in enumerate(schemas)
    ]
    for schema, result in zip(schemas, in_both_modes(llm, params), strict=True):
        assert result.finish_reason == "stop", (schema, result.text)
        assert fits(result.text or "", schema), (schema, result.text)
