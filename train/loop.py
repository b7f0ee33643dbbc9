"""The training loop: set up, resume, step, log, save, export."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from tokenizers import Tokenizer

from train.checkpoint import Checkpoints
from train.config import TrainConfig, save_config
from train.corpus import generate
from train.data.batches import TrainBatches, TrainingRows
from train.data.sources import open_sources
from train.data.synthetic import build_dataset, load_dataset, rows_recipe, save_dataset
from train.metrics import MetricsLog
from train.setup import objective_of, optimizer_of, placed_state
from train.step import TrainState, TrainStep, make_train_step
from train.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.config import config_from_hf
from wedlm_jax.errors import InputError
from wedlm_jax.hf import load_checkpoint, save_checkpoint
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import batch_sharding, check_fits, make_mesh

TOKENIZER_SAMPLES = 20_000


def train(config: TrainConfig) -> Path:
    """Runs (or resumes) the training that ``config`` describes.

    Returns:
      the folder of the exported Hugging Face checkpoint, ``<output>/hf``.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    save_config(config, output / "config.yaml")
    tokenizer_folder = _tokenizer_folder(config, output)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    model = _initial_model(config, tokenizer)
    dataset = _dataset(config, output, tokenizer, model.config.pad_token_id or 0)

    graph, parameters = nnx.split(model)
    optimizer = optimizer_of(config)
    objective = objective_of(config, model.config)
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    check_fits(mesh, model.config, rows=config.rows, row_length=config.row_length)
    state = placed_state(mesh, parameters, optimizer)
    checkpoints = Checkpoints(output / "checkpoints", config.keep_checkpoints)
    if (resumed := checkpoints.latest_step()) is not None:
        state = checkpoints.restore(state)
        print(f"resumed from step {resumed}", flush=True)
    try:
        step = make_train_step(graph, optimizer, objective)
        with jax.set_mesh(mesh):
            state = _run(config, mesh, state, step, dataset, checkpoints, output)
    finally:
        checkpoints.close()
    trained = nnx.merge(graph, state.parameters)
    exported = dataclasses.replace(model.config, model_type="wedlm")
    folder = output / "hf"
    save_checkpoint(trained, exported, folder, dtype="float32", tokenizer_from=tokenizer_folder)
    return folder


def _run(
    config: TrainConfig,
    mesh: Mesh,
    state: TrainState,
    step_fn: TrainStep,
    dataset: TrainingRows,
    checkpoints: Checkpoints,
    output: Path,
) -> TrainState:
    key = jax.random.key(config.seed)
    done = int(state.step)
    batches = TrainBatches(dataset, config, batch_sharding(mesh), start=done)
    log = MetricsLog(output, config.steps, done, config.objective)
    tokens = config.accumulation * config.rows * config.row_length
    try:
        for step in range(done, config.steps):
            state, metrics = step_fn(state, next(batches), key)
            last = step + 1 == config.steps
            if (step + 1) % config.log_every == 0 or last:
                values = {name: float(value) for name, value in metrics.items()}
                if not jnp.isfinite(values["loss"]):
                    raise InputError(f"step {step + 1}: the loss is {values['loss']}; stopped")
                log.write(step + 1, values, tokens)
            if (step + 1) % config.checkpoint_every == 0 or last:
                checkpoints.save(state)
    finally:
        batches.close()
        log.close()
    return state


def _initial_model(config: TrainConfig, tokenizer: Tokenizer) -> Transformer:
    if config.model.init_from is not None:
        return load_checkpoint(Path(config.model.init_from), dtype=jnp.float32)
    special = {
        "mask_token_id": tokenizer.token_to_id("<|mask|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    architecture = {"model_type": "wedlm", "vocab_size": tokenizer.get_vocab_size(), **special}
    model_config = config_from_hf({**architecture, **config.model.architecture})
    return Transformer(model_config, rngs=nnx.Rngs(params=jax.random.key(config.seed)))


def _tokenizer_folder(config: TrainConfig, output: Path) -> Path:
    """The tokenizer given, that of the starting checkpoint, or one trained on the corpus."""
    for given in (config.data.tokenizer, config.model.init_from):
        if given is not None:
            if not (Path(given) / "tokenizer.json").exists():
                raise InputError(f"{given}: no tokenizer.json in this folder")
            return Path(given)
    folder = output / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        print(f"training a tokenizer of {config.data.vocab_size} tokens", flush=True)
        weights = config.data.weights or None
        samples = generate(
            config.data.corpus_seed, TOKENIZER_SAMPLES, split="train", weights=weights
        )
        texts = (f"{sample.prompt}\n{sample.answer}\n" for sample in samples)
        save_tokenizer(train_tokenizer(texts, config.data.vocab_size), folder)
    return folder


def _dataset(
    config: TrainConfig, output: Path, tokenizer: Tokenizer, pad_token_id: int
) -> TrainingRows:
    """The packed rows: of the sources, or of the corpus, made once and made anew when what
    they depend on has changed."""
    if config.data.sources:
        return open_sources(config, tokenizer, pad_token_id)
    path, recipe_path = output / "rows.npz", output / "rows.json"
    recipe = rows_recipe(config, tokenizer)
    if path.exists() and recipe_path.exists() and recipe_path.read_text() == recipe:
        return load_dataset(path)
    print(f"tokenising and packing {config.data.samples:,} samples", flush=True)
    dataset = build_dataset(config, tokenizer, pad_token_id, report=lambda _: None)
    print(
        f"{len(dataset.arrays['tokens']):,} rows of {config.row_length}, "
        f"{dataset.fill:.1%} filled, {dataset.skipped} samples too long and left out",
        flush=True,
    )
    save_dataset(dataset, path)
    recipe_path.write_text(recipe, encoding="utf-8")
    return dataset
