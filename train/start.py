"""Loads what a run starts from: tokenizer, architecture, state, and held-out rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from train.checkpoint import Checkpoints, read_state
from train.data.shards import mask_token_in
from train.data.sources import manifest_of, open_folder
from train.data.tokenizer import load_tokenizer
from train.mask_token import choose_mask_token, describe_mask_token, named_mask_token
from train.program import TrainProgram, lora_of
from train.recipe.config import TrainConfig
from train.recipe.phases import phases_of
from train.resume import Origin
from train.step import TrainState
from wedlm_jax.checkpoint import RUN_BASE, RUN_MODEL
from wedlm_jax.checkpoint.adapters import read_drafter, read_drafter_config
from wedlm_jax.checkpoint.hf import Checkpoint
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.names import check_tensors
from wedlm_jax.checkpoint.open import open_checkpoint, read_architecture
from wedlm_jax.checkpoint.orbax import described_lora
from wedlm_jax.config import CONFIG_FIELDS, PARTS, SIZES, ModelConfig, config_from_hf, config_to_hf
from wedlm_jax.errors import InputError, did_you_mean
from wedlm_jax.host.processes import say
from wedlm_jax.host.storage import as_path, folder_of_this_machine, why_absent
from wedlm_jax.model.lora import LoraConfig

PARAMETERS = (*SIZES, *PARTS, "tie_word_embeddings")
"""Fields of a ``config.json`` that determine the parameters and their shapes."""


def tokenizer_folder(config: TrainConfig, *, before: Path | None = None) -> Path:
    """Returns the folder of the recipe's tokenizer, or of the starting checkpoint's.

    Args:
      before: the folder of the run from whose states this one continues, its own or another.
        ``model/`` there has precedence over the starting checkpoint, which may be gone.

    Raises:
      InputError: there is none.
    """
    folder = None if before is None else before / RUN_MODEL
    if folder is not None and not _has_tokenizer(config.data.tokenizer) and _has_tokenizer(folder):
        return folder
    given = config.data.tokenizer or config.model.init_from
    if given is None:
        raise InputError("data.tokenizer: expected the folder of the tokenizer of data.sources")
    if not _has_tokenizer(given):
        raise InputError(why_absent(as_path(given), "tokenizer.json"))
    return as_path(given)


def _has_tokenizer(folder: str | Path | None) -> bool:
    return folder is not None and (as_path(folder) / "tokenizer.json").exists()


def recipe_model(
    config: TrainConfig, tokenizer_from: Path | None = None, run: Path | None = None
) -> ModelConfig:
    """Returns the architecture that a recipe trains, without reading weights.

    Args:
      config: the recipe. If there is a checkpoint, fields of ``model.architecture`` that concern
        parameters must agree with it; other fields replace the checkpoint's, with a message.
      tokenizer_from: the tokenizer's folder. It determines the vocabulary of a model from scratch,
        and which token can be the mask; without it, for compiling, any token can.
      run: the folder of a run that is resumed or branched from, whose model is then used.

    Raises:
      InputError: a field does not belong to an architecture, or contradicts the checkpoint; or no
        token can be the mask.
    """
    tokenizer = None if tokenizer_from is None else load_tokenizer(tokenizer_from)
    model = _architecture(config, tokenizer, run)
    if tokenizer is None or tokenizer_from is None:
        if config.objective == "drafter":
            return model
        any_token = model.vocab_size - 1
        return dataclasses.replace(model, mask_token_id=model.mask_token_id or any_token)
    model = with_turn_ends(config, model)
    named = named_mask_token(tokenizer_from)
    return dataclasses.replace(model, mask_token_id=mask_token(config, tokenizer, model, named))


def _architecture(
    config: TrainConfig, tokenizer: Tokenizer | None, run: Path | None
) -> ModelConfig:
    """Returns a recipe's architecture, with the checkpoint's mask token, if it has one."""
    stated = config.model.architecture
    for name in stated:
        if name not in CONFIG_FIELDS:
            raise InputError(
                f"model.architecture.{name}: not a field of a model's config.json that is read "
                f"here; {did_you_mean(name, CONFIG_FIELDS)}"
            )
    if run is not None and (run / RUN_MODEL / "config.json").exists():
        return _with_architecture(run / RUN_MODEL, stated)
    if config.model.init_from is not None:
        return _with_architecture(as_path(config.model.init_from), stated)
    fields: dict[str, Any] = {"model_type": "wedlm"}
    if tokenizer is not None:
        fields |= {
            "vocab_size": tokenizer.get_vocab_size(),
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        }
    made = config_from_hf({**fields, **stated})
    # If the recipe names none, it is chosen as for an AR checkpoint.
    return dataclasses.replace(made, mask_token_id=stated.get("mask_token_id"))


def with_turn_ends(config: TrainConfig, model: ModelConfig) -> ModelConfig:
    """Returns the architecture, with the tokens that end turns added to those that end texts if the
    recipe trains on conversations: a base checkpoint knows only the end of a document, so its
    answers would not stop."""
    names = [name for phase in phases_of(config) for name in phase.config.data.sources]
    ends: list[int] = []
    for name in dict.fromkeys(names):
        end = manifest_of(name).turn_end
        if end is not None and end not in (*model.eos_token_ids, *ends):
            ends.append(end)
    if not ends:
        return model
    listed = ", ".join(map(str, ends))
    say(f"turns end with token {listed}, so the model's texts will also end with it")
    return dataclasses.replace(model, eos_token_ids=(*ends, *model.eos_token_ids))


def mask_token(
    config: TrainConfig, tokenizer: Tokenizer, model: ModelConfig, own: str | None = None
) -> int | None:
    """Returns the id of the run's mask token, and prints which it is and whether the data has it.

    Args:
      config: the recipe, which may name another mask token than the model's.
      model: the architecture; in a resumed run it has the run's mask token.
      own: the mask token that the tokenizer's folder names.

    Returns:
      the id; None may be returned for the objective "ar", which needs no mask, and for "drafter",
      whose masks have a separate embedding.

    Raises:
      InputError: the recipe's mask token cannot be used, or there is none (`choose_mask_token`).
    """
    if config.objective == "drafter":
        return model.mask_token_id
    stated = config.model.architecture.get("mask_token_id")
    requested = config.model.mask_token or (None if stated is None else str(stated))
    try:
        chosen = choose_mask_token(tokenizer, model, requested, own=own)
    except InputError:
        if config.objective == "ar" and requested is None:
            return None
        raise
    say(f"mask token {describe_mask_token(tokenizer, chosen)}")
    for name in config.data.sources:
        manifest = manifest_of(name)
        if line := mask_token_in(manifest, name, chosen):
            say(line)
    return chosen


def _with_architecture(folder: Path, stated: dict[str, Any]) -> ModelConfig:
    """Returns a checkpoint's architecture with the fields that a recipe states replaced."""
    found = read_architecture(folder)
    for name in PARAMETERS:
        value = getattr(found, name)
        if stated.get(name, value) not in (value, None):
            raise InputError(
                f"model.architecture.{name} is {stated[name]!r} in the recipe, and {value!r} "
                f"in {folder}, where the model starts from"
            )
    elsewhere = ("model_type", "mask_token_id", *PARAMETERS)
    laid = {name: value for name, value in stated.items() if name not in elsewhere}
    model = config_from_hf({**config_to_hf(found), **laid})
    for field in dataclasses.fields(model):
        ours, theirs = getattr(model, field.name), getattr(found, field.name)
        if ours != theirs:
            say(f"model.architecture: {field.name} is {ours} in the recipe, {theirs} in {folder}")
    return model


def check_paths(config: TrainConfig) -> None:
    """Refuses a recipe's paths if they cannot be read or written where they are.

    Raises:
      InputError: a scheme that is not supported, rows in a bucket, no rows, or no model.
    """
    begun = (as_path(config.output) / RUN_MODEL / "config.json").exists()
    branches = config.branch_from is not None
    if not (config.model.init_from or config.model.architecture or begun or branches):
        raise InputError(
            "model.init_from: expected the folder of the checkpoint to start from; a model from "
            "scratch needs its sizes in model.architecture"
        )
    places = config.output, config.model.init_from, config.data.tokenizer, config.drafter.init_from
    for name in places:
        if name is not None:
            as_path(name)
    if not config.data.sources:
        raise InputError(
            "data.sources: expected the folders to train on, made by `wedlm tokenize`, and their "
            "shares, as in data.sources={data/chats: 1}"
        )
    for name in config.data.sources:
        folder_of_this_machine(name, "data.sources")
    if config.evaluation.source is not None:
        folder_of_this_machine(config.evaluation.source, "evaluation.source")
    elif config.evaluation.every:
        raise InputError("evaluation.source: expected a folder of held-out rows")


def check_start(config: TrainConfig, *, before: Path | None = None) -> None:
    """Refuses to start, before anything is compiled, from a checkpoint whose tensors do not fit its
    model (going by headers), with adapters but no model, or from states of other adapters.

    Args:
      config: the recipe.
      before: the folder of the run from whose states this one continues, its own or another.
    """
    if before is not None:
        was, now = described_lora(before), lora_of(config)
        if was != now:
            is_own = before == as_path(config.output)
            run = "this run" if is_own else before
            raise InputError(
                f"lora: {run} began with {_described(was)}, the recipe has {_described(now)}; "
                + (f"use another output than {before}" if is_own else "leave branch_from out")
            )
        if now is not None:
            check_tensors(open_checkpoint(before / RUN_BASE))
    elif config.model.init_from is not None:
        base = open_checkpoint(config.model.init_from)
        check_tensors(base)
        _check_drafter(config, base)
    elif config.lora.rank:
        raise InputError("lora.rank needs model.init_from: the model that the adapters belong to")


def _check_drafter(config: TrainConfig, base: Checkpoint) -> None:
    """Refuses ``drafter.init_from`` if its adapters are not those of the recipe."""
    if config.drafter.init_from is None:
        return
    was = read_drafter_config(as_path(config.drafter.init_from), base)
    now = lora_of(config)
    if now is None or dataclasses.replace(was, window_size=now.window_size) != now:
        raise InputError(
            f"drafter.init_from: {config.drafter.init_from} has {_described(was)}, the recipe "
            f"{_described(now)}"
        )


def _described(lora: LoraConfig | None) -> str:
    if lora is None:
        return "no adapters"
    head = f" and a previous-token head of rank {lora.previous_rank}" if lora.previous_rank else ""
    targets = ", ".join(lora.targets)
    return f"adapters of rank {lora.rank}, alpha {lora.alpha:g} on {targets}{head}"


def starting_state(
    program: TrainProgram, checkpoints: Checkpoints, origin: Origin | None = None
) -> TrainState:
    """Restores, imports or draws the state to train from, with the program's shardings.

    A run with states reads only the newest whole one, and the frozen parameters, which it wrote to
    its folder at its start. A state of another run is also written to the run's folder before it is
    used. All processes call this.

    Args:
      origin: another run's state to begin with, if the run has no states.

    Raises:
      InputError: all states are damaged, or they belong to another model.
    """
    frozen, mesh = program.lora is not None, program.mesh
    kept = as_path(program.config.output) / RUN_BASE
    dtype = jnp.dtype(program.config.loss.dtype if frozen else "float32")
    state = checkpoints.restore(program.state, say)
    if state is not None:
        say(f"resumed from step {int(state.step)}")
        if not frozen:
            return state
        base = load_checkpoint(kept, dtype=dtype, mesh=mesh)
        return dataclasses.replace(state, frozen=nnx.state(base))
    if origin is not None:
        state = read_state(origin.state, program.state)
        if frozen:
            base = load_checkpoint(origin.run / RUN_BASE, dtype=dtype, mesh=mesh)
            save_checkpoint(base, program.model, kept)
            state = dataclasses.replace(state, frozen=nnx.state(base))
        checkpoints.save(state, whole=True)
        say(f"branched from {origin}")
        return state
    folder = program.config.model.init_from
    if folder is None:
        return program.first_state()
    loaded = load_checkpoint(folder, dtype=dtype, mesh=mesh)
    if frozen:
        save_checkpoint(loaded, program.model, kept)
    first = program.first_state(nnx.state(loaded))
    drafter = program.config.drafter.init_from
    if drafter is None:
        return first
    adapters = read_drafter(as_path(drafter), first.parameters)
    layout = jax.tree.map(lambda leaf: leaf.sharding, first.parameters)
    say(f"training continues with the adapters of {drafter}")
    return dataclasses.replace(first, parameters=jax.device_put(adapters, layout))


def held_out_rows(
    config: TrainConfig, tokenizer: Tokenizer, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Returns the rows of ``evaluation.source`` to evaluate on, arrays ``[N, L]``, drawn with the
    evaluation's seed. The first rows would not be representative, since packing begins with the
    longest texts."""
    section = config.evaluation
    assert section.source is not None, "checked by `check_paths`"
    rows = open_folder(section.source, config, tokenizer, pad_token_id)
    drawn = np.random.default_rng(section.seed).permutation(len(rows))[: section.rows]
    picked = [rows[i] for i in drawn]
    return {name: np.stack([row[name] for row in picked]) for name in picked[0]}
