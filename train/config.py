"""A training run as typed fields: a YAML file plus ``key=value`` overrides.

Unknown keys and wrong types are refused, with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from wedlm_jax.attention import IMPLEMENTATIONS
from wedlm_jax.errors import InputError


def _field(default: Any, meaning: str) -> Any:
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata={"help": meaning})
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass
class ModelSection:
    init_from: str | None = _field(None, "HF checkpoint folder to start from; null: from scratch")
    architecture: dict[str, Any] = _field({}, "from scratch: the fields of an HF config.json")


@dataclasses.dataclass
class DataSection:
    corpus_seed: int = _field(0, "seed of the synthetic corpus")
    samples: int = _field(1000, "how many samples to generate")
    weights: dict[str, float] = _field({}, "share of each regime in the samples")
    tokenizer: str | None = _field(None, "folder of the tokenizer; null: train one")
    vocab_size: int = _field(2048, "size of the tokenizer, where one is trained")
    train_on_prompt: bool = _field(False, "whether prompt tokens are targets, too")
    end_tokens: int = _field(0, "trainable end tokens behind each answer, beside its own")
    sources: dict[str, float] = _field(
        {}, "folders of `wedlm tokenize` and their shares of a batch; empty: the synthetic corpus"
    )
    workers: int = _field(0, "processes that read rows ahead; 0: threads of this one")
    prefetch: int = _field(2, "batches that wait ready, read and placed each")


@dataclasses.dataclass
class OptimizerSection:
    name: str = _field("adamw", "adamw, or muon (layers' matrices; AdamW for the rest)")
    learning_rate: float = _field(3e-4, "peak")
    final_learning_rate: float = _field(3e-5, "end of the cosine")
    warmup_steps: int = _field(100, "linear warm-up from 0")
    b1: float = _field(0.9, "AdamW's first moment decay")
    b2: float = _field(0.95, "AdamW's second moment decay")
    eps: float = _field(1e-8, "AdamW's epsilon")
    weight_decay: float = _field(0.1, "on matrices only")
    clip_norm: float = _field(1.0, "global gradient norm is clipped to this")
    spike_factor: float = _field(
        10.0, "skip a step whose gradient norm is so many times the running mean; 0: never"
    )
    max_skipped: int = _field(20, "steps skipped in a row at which the run stops")


@dataclasses.dataclass
class LossSection:
    weighting: str = _field("inverse_ratio", "of masked tokens: inverse_ratio or uniform")
    ar_weight: float = _field(1.0, "a in (MLM + a AR) / (1 + a)")
    chunk: int = _field(256, "rows of logits that exist at once, per packed row")
    dtype: str = _field("bfloat16", "compute dtype; parameters stay float32")
    remat: str = _field("full", "none, dots or full: what the backward pass recomputes")
    attention: str = _field("streams", "attention: dense, streams, blockwise or splash (TPUs)")
    unroll: int = _field(1, "layers in one turn of the scan over layers; more compile longer")


@dataclasses.dataclass
class MeshSection:
    data: int = _field(1, "replicas of the parameters; one of the four may be -1: what is left")
    fsdp: int = _field(-1, "devices that share the batch, the parameters and their moments")
    tensor: int = _field(1, "devices that share heads, the MLP and the vocabulary")
    sequence: int = _field(1, "devices that share the tokens of a row; divides the KV heads")


@dataclasses.dataclass
class MetricsSection:
    tensorboard: bool = _field(False, "write events for TensorBoard to <output>/tensorboard")
    wandb: str | None = _field(None, "project at Weights & Biases to log to; null: none")
    profile_from: int = _field(0, "first step of a profile for xprof, in <output>/profile")
    profile_steps: int = _field(0, "steps profiled; 0: no profile")


@dataclasses.dataclass
class EvaluationSection:
    every: int = _field(0, "steps between evaluations, in <output>/evaluation.jsonl; 0: none")
    source: str | None = _field(
        None,
        "folder of `wedlm tokenize` to evaluate on; null: held-out part of the corpus",
    )
    rows: int = _field(64, "held-out packed rows to take losses over")
    prompts: int = _field(8, "of these rows, how many beginnings to decode")
    max_tokens: int = _field(64, "completion tokens of each")


@dataclasses.dataclass
class TrainConfig:
    objective: str = _field("wedlm", "wedlm (MLM + AR over dual streams) or ar (next token)")
    steps: int = _field(1000, "optimizer steps")
    rows: int = _field(8, "packed rows in a micro-batch")
    accumulation: int = _field(1, "micro-batches in a step")
    row_length: int = _field(512, "tokens in a packed row, a multiple of block_size")
    block_size: int = _field(32, "B: consecutive positions that share a mask ratio")
    suffix_share: float = _field(
        0.0, "share of blocks whose masks are its last tokens, as in verified decoding's windows"
    )
    seed: int = _field(0, "of initial parameters, data order and masks")
    output: str = _field("runs/train", "folder for checkpoints, logs and the exported model")
    checkpoint_every: int = _field(200, "steps between checkpoints")
    keep_checkpoints: int = _field(2, "newest checkpoints kept")
    keep_every: int = _field(0, "checkpoints at multiples of this are kept for good; 0: none")
    log_every: int = _field(10, "steps between metric lines")
    allow_other_data: bool = _field(
        False, "resume although seed, sizes or sources of the data are not as before"
    )
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    loss: LossSection = dataclasses.field(default_factory=LossSection)
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)
    metrics: MetricsSection = dataclasses.field(default_factory=MetricsSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Reads a YAML file and applies ``section.key=value`` overrides.

    Raises:
      InputError: no such file, not YAML, an unknown key or a value of the wrong type.
    """
    for item in overrides or []:
        if "=" not in item:
            raise InputError(f"override {item!r}: expected key=value")
    try:
        given = OmegaConf.load(path)
        merged = OmegaConf.merge(
            OmegaConf.structured(TrainConfig), given, OmegaConf.from_dotlist(overrides or [])
        )
        config = OmegaConf.to_object(merged)
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except ConfigKeyError as error:
        raise InputError(f"{path}: {_unknown_key(str(error.full_key))}") from None
    except (OmegaConfBaseException, ValueError, OSError) as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}") from None
    except Exception as error:
        # A YAML parser has many error types of its own; all mean the file is not YAML.
        raise InputError(f"{path}: not valid YAML ({str(error).splitlines()[0]})") from None
    assert isinstance(config, TrainConfig)
    _check(config, path)
    return config


def save_config(config: TrainConfig, path: Path) -> None:
    """Writes the resolved configuration as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def describe() -> list[tuple[str, str, str]]:
    """Every field as (dotted name, default, meaning), for ``--help``."""

    def walk(cls: type, prefix: str) -> list[tuple[str, str, str]]:
        lines = []
        for field in dataclasses.fields(cls):
            factory = field.default_factory
            if dataclasses.is_dataclass(factory):
                lines += walk(factory, f"{prefix}{field.name}.")
            else:
                default = factory() if callable(factory) else field.default
                lines.append((prefix + field.name, str(default), field.metadata["help"]))
        return lines

    return walk(TrainConfig, "")


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, [name for name, _, _ in describe()], n=1, cutoff=0.4)
    return f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _check(config: TrainConfig, path: str | Path) -> None:
    if config.objective not in ("wedlm", "ar"):
        raise InputError(f"{path}: objective must be wedlm or ar, not {config.objective!r}")
    if config.optimizer.name not in ("adamw", "muon"):
        raise InputError(
            f"{path}: optimizer.name must be adamw or muon, not {config.optimizer.name!r}"
        )
    for name in ("steps", "rows", "accumulation", "row_length", "block_size", "log_every"):
        if getattr(config, name) < 1:
            raise InputError(f"{path}: {name} must be at least 1, not {getattr(config, name)}")
    if not 0 <= config.suffix_share <= 1:
        raise InputError(f"{path}: suffix_share must be 0 to 1, not {config.suffix_share}")
    for name, least in (("workers", 0), ("prefetch", 1)):
        if (value := getattr(config.data, name)) < least:
            raise InputError(f"{path}: data.{name} must be at least {least}, not {value}")
    for folder, weight in config.data.sources.items():
        if not 0 < weight < math.inf:
            raise InputError(
                f"{path}: data.sources: the share of {folder} must be above 0, not {weight}"
            )
    if config.data.sources and not (config.data.tokenizer or config.model.init_from):
        raise InputError(
            f"{path}: data.sources needs the tokenizer that made them, "
            "as data.tokenizer or in model.init_from"
        )
    if config.loss.attention not in IMPLEMENTATIONS:
        raise InputError(
            f"{path}: loss.attention must be one of {', '.join(IMPLEMENTATIONS)}, "
            f"not {config.loss.attention!r}"
        )
    if config.row_length % config.block_size:
        raise InputError(
            f"{path}: row_length {config.row_length} is not a multiple of "
            f"block_size {config.block_size}"
        )
