"""The training loop: set up, resume, step, log, save, export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tokenizers import Tokenizer

from train.checkpoint import Checkpoints
from train.config import TrainConfig, save_config
from train.corpus import generate
from train.data import PackedDataset, batches, build_dataset, load_dataset, save_dataset
from train.metrics import MetricsLog
from train.step import Objective, TrainState, TrainStep, make_optimizer, make_train_step
from train.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.config import ModelConfig, config_from_hf
from wedlm_jax.corruption import PackedRows
from wedlm_jax.errors import InputError
from wedlm_jax.hf import load_checkpoint, save_checkpoint
from wedlm_jax.loss import LossConfig
from wedlm_jax.model import Transformer

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
    optimizer = _optimizer(config)
    objective = _objective(config, model.config)
    state = TrainState(jnp.zeros((), jnp.int32), parameters, optimizer.init(parameters))
    checkpoints = Checkpoints(output / "checkpoints", config.keep_checkpoints)
    if (resumed := checkpoints.latest_step()) is not None:
        state = checkpoints.restore(state)
        print(f"resumed from step {resumed}", flush=True)
    try:
        state = _run(config, state, make_train_step(graph, optimizer, objective), dataset,
                     checkpoints, output)  # fmt: skip
    finally:
        checkpoints.close()
    trained = nnx.merge(graph, state.parameters)
    exported = dataclasses.replace(model.config, model_type="wedlm")
    folder = output / "hf"
    save_checkpoint(trained, exported, folder, dtype="float32", tokenizer_from=tokenizer_folder)
    return folder


def _run(
    config: TrainConfig,
    state: TrainState,
    step_fn: TrainStep,
    dataset: PackedDataset,
    checkpoints: Checkpoints,
    output: Path,
) -> TrainState:
    source = batches(dataset, config)
    key = jax.random.key(config.seed)
    done = int(state.step)
    log = MetricsLog(output, config.steps, done, config.objective)
    tokens = config.accumulation * config.rows * config.row_length
    try:
        for step in range(done, config.steps):
            rows = PackedRows(**{name: jnp.asarray(x) for name, x in source[step].items()})
            state, metrics = step_fn(state, rows, key)
            last = step + 1 == config.steps
            if (step + 1) % config.log_every == 0 or last:
                values = {name: float(value) for name, value in metrics.items()}
                if not jnp.isfinite(values["loss"]):
                    raise InputError(f"step {step + 1}: the loss is {values['loss']}; stopped")
                log.write(step + 1, values, tokens)
            if (step + 1) % config.checkpoint_every == 0 or last:
                checkpoints.save(state)
    finally:
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
) -> PackedDataset:
    """The packed rows, made once; made anew when what they depend on has changed."""
    path, recipe_path = output / "rows.npz", output / "rows.json"
    recipe = json.dumps(
        [dataclasses.asdict(config.data), config.row_length, config.block_size, tokenizer.to_str()]
    )
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


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    o = config.optimizer
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, o.warmup_steps, config.steps, o.final_learning_rate
    )
    return make_optimizer(
        schedule, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm
    )


def _objective(config: TrainConfig, model: ModelConfig) -> Objective:
    mask = model.require_mask_token_id() if config.objective == "wedlm" else None
    loss = LossConfig(**dataclasses.asdict(config.loss))
    return Objective(config.objective, config.block_size, mask, loss)
