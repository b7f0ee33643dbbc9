"""What a run starts from: its tokenizer, its model on the mesh, its packed rows.

The first process makes what has to be made; the others wait for it and read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tokenizers import Tokenizer

from train.config import TrainConfig
from train.data.batches import TrainingRows
from train.data.sources import open_sources
from train.data.synthetic import (
    PackedDataset,
    build_dataset,
    load_dataset,
    rows_recipe,
    save_dataset,
)
from train.embedded.corpus import generate
from train.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.checkpoint.hf import load_checkpoint
from wedlm_jax.config import SIZES, ModelConfig, config_from_hf, read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.processes import is_first, say, wait_for_all
from wedlm_jax.sharding import tree_shardings

TOKENIZER_SAMPLES = 20_000
PARAMETERS = (*SIZES, "attention_bias", "qk_norm", "tie_word_embeddings")
"""Fields of a ``config.json`` that say which parameters there are, in which shapes."""


def tokenizer_folder(config: TrainConfig, output: Path) -> Path:
    """The tokenizer given, that of the starting checkpoint, or one trained on the corpus."""
    for given in (config.data.tokenizer, config.model.init_from):
        if given is not None:
            if not (Path(given) / "tokenizer.json").exists():
                raise InputError(f"{given}: no tokenizer.json in this folder")
            return Path(given)
    folder = output / "tokenizer"
    if is_first() and not (folder / "tokenizer.json").exists():
        say(f"training a tokenizer of {config.data.vocab_size} tokens")
        weights = config.data.weights or None
        samples = generate(
            config.data.corpus_seed, TOKENIZER_SAMPLES, split="train", weights=weights
        )
        texts = (f"{sample.prompt}\n{sample.answer}\n" for sample in samples)
        save_tokenizer(train_tokenizer(texts, config.data.vocab_size), folder)
    wait_for_all("tokenizer")
    return folder


def initial_model(config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh) -> Transformer:
    """The model to start from, float32, each parameter on the devices that the rules give it."""
    if config.model.init_from is not None:
        _check_architecture(config.model.architecture, Path(config.model.init_from))
        return load_checkpoint(Path(config.model.init_from), dtype=jnp.float32, mesh=mesh)
    model_config = _new_model_config(config, tokenizer)

    def make() -> nnx.State:
        key = jax.random.key(config.seed)
        return nnx.state(Transformer(model_config, rngs=nnx.Rngs(params=key)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(model_config, rngs=nnx.Rngs(0))))
    layout = tree_shardings(mesh, jax.eval_shape(make))
    return nnx.merge(graph, jax.jit(make, out_shardings=layout)())


def _check_architecture(stated: dict[str, Any], folder: Path) -> None:
    """Compares what a recipe says of its model, for compiling without weights, with a checkpoint.

    Raises:
      InputError: naming the first field that differs.
    """
    config = config_from_hf(read_config_json(folder))
    for name in PARAMETERS:
        found = getattr(config, name)
        if stated.get(name, found) not in (found, None):
            raise InputError(
                f"model.architecture.{name} is {stated[name]!r} in the recipe, and {found!r} "
                f"in {folder}, where the model starts from"
            )


def _new_model_config(config: TrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    special = {
        "mask_token_id": tokenizer.token_to_id("<|mask|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    architecture = {"model_type": "wedlm", "vocab_size": tokenizer.get_vocab_size(), **special}
    return config_from_hf({**architecture, **config.model.architecture})


def training_rows(
    config: TrainConfig, output: Path, tokenizer: Tokenizer, pad_token_id: int
) -> TrainingRows:
    """The rows to train on: of the recipe's sources, or of the synthetic corpus."""
    if config.data.sources:
        return open_sources(config, tokenizer, pad_token_id)
    return packed_dataset(config, output, tokenizer, pad_token_id)


def held_out_rows(
    config: TrainConfig, tokenizer: Tokenizer, pad_token_id: int
) -> dict[str, np.ndarray]:
    """The rows to evaluate on, arrays ``[N, L]``, drawn by the evaluation's seed: from its source,
    or from the corpus's held-out part. The first would be no sample: packing begins with the
    longest texts."""
    count, data = config.evaluation.rows, config.data

    def order(rows: int) -> np.ndarray:
        return np.random.default_rng(config.evaluation.seed).permutation(rows)[:count]

    if config.evaluation.source is not None:
        source = dataclasses.replace(data, sources={config.evaluation.source: 1.0})
        opened = open_sources(dataclasses.replace(config, data=source), tokenizer, pad_token_id)
        drawn = [opened.rows[0][i] for i in order(len(opened.rows[0]))]
        return {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}
    # As many samples as fill the rows amply.
    amply = dataclasses.replace(data, samples=count * config.row_length // 16)
    recipe = dataclasses.replace(config, data=amply)
    rows = build_dataset(recipe, tokenizer, pad_token_id, lambda _: None, "heldout")
    picked = order(len(rows.arrays["tokens"]))
    return {name: x[picked] for name, x in rows.arrays.items()}


def packed_dataset(
    config: TrainConfig, output: Path, tokenizer: Tokenizer, pad_token_id: int
) -> PackedDataset:
    """The corpus as packed rows, made once; made anew when what they depend on has changed."""
    path, recipe_path = output / "rows.npz", output / "rows.json"
    recipe = rows_recipe(config, tokenizer)

    def is_made() -> bool:
        return path.exists() and recipe_path.exists() and recipe_path.read_text() == recipe

    if is_first() and not is_made():
        say(f"tokenising and packing {config.data.samples:,} samples")
        dataset = build_dataset(config, tokenizer, pad_token_id, report=lambda _: None)
        say(
            f"{len(dataset.arrays['tokens']):,} rows of {config.row_length}, "
            f"{dataset.fill:.1%} filled, {dataset.skipped} samples too long and left out"
        )
        save_dataset(dataset, path)
        recipe_path.write_text(recipe, encoding="utf-8")
    wait_for_all("rows")
    return load_dataset(path)
