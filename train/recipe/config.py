"""A training run as typed fields: a YAML file plus ``key=value`` overrides.

Unknown keys and wrong types are refused, with the nearest known name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from train.recipe.fields import apply_override, check_fields, field, field_origin
from train.recipe.skipped_batches import SkippedBatches
from wedlm_jax.attention import IMPLEMENTATIONS
from wedlm_jax.attention.tiles import LANES
from wedlm_jax.checkpoint.safetensors import DTYPES
from wedlm_jax.errors import InputError, did_you_mean, errors_at, nearest
from wedlm_jax.host.atomic import written_beside
from wedlm_jax.loss import WEIGHTINGS
from wedlm_jax.model.distillation import DISTANCES
from wedlm_jax.model.layers import POLICIES
from wedlm_jax.model.lora import PREVIOUS_RANK, TARGETS
from wedlm_jax.params import MODES

AUTO = "auto"


@dataclasses.dataclass
class ModelSection:
    init_from: str | None = field(
        None,
        "checkpoint to start from (Hugging Face or orbax, may be gs://); null: start from scratch",
    )
    architecture: dict[str, Any] = field(
        {},
        "fields of an HF config.json, for a model from scratch or to override init_from's",
    )
    mask_token: str | None = field(
        None,
        "text or id of the mask token; null: the checkpoint's, or else one that no text contains",
    )


@dataclasses.dataclass
class LoraSection:
    rank: int = field(
        0,
        "rank of the adapters trained alongside frozen parameters; 0 trains all parameters",
        low=0,
    )
    alpha: float = field(32.0, "the adapters' output is scaled by alpha / rank", low=0, above=True)
    targets: list[str] = field(
        [*TARGETS], "matrices of each layer that get adapters", choices=TARGETS
    )


@dataclasses.dataclass
class DrafterSection:
    window_size: int = field(16, "masks per window; decoding drafts with at most this many", low=2)
    windows: int = field(0, "windows per row; 0: half as many masks as tokens", low=0)
    init_from: str | None = field(
        None, "folder of a drafter to train further; its window_size may differ"
    )
    previous_rank: int = field(
        PREVIOUS_RANK,
        "hidden units of the head that corrects a mask's prediction, given the token before it; "
        "0: no such head",
        low=0,
    )
    distance: str = field(
        "kl",
        "distance from the model's predictions: kl, tv (total variation), or ce (cross entropy "
        "with the text's tokens)",
        choices=DISTANCES,
    )


@dataclasses.dataclass
class DataSection:
    tokenizer: str | None = field(None, "folder of the tokenizer; null: model.init_from's")
    sources: dict[str, float] = field(
        {}, "folders made by `wedlm tokenize`, and their shares of a batch", low=0, above=True
    )
    skip: list[list[int]] = field(
        [],
        "batches to skip: [[FROM, TO], ...], both inclusive, counted from 1; batch N is the one "
        "that step N reads if nothing is skipped",
    )
    workers: int = field(
        0, "worker processes that read rows ahead; 0: threads of the training process", low=0
    )
    prefetch: int = field(
        2, "batches kept ready at each stage: read, and placed on the devices", low=1
    )


@dataclasses.dataclass
class OptimizerSection:
    name: str = field(
        "adamw", "adamw, or muon (layers' matrices; AdamW for the rest)", choices=("adamw", "muon")
    )
    learning_rate: float = field(3e-4, "peak learning rate", low=0)
    final_learning_rate: float = field(3e-5, "learning rate at the last step", low=0)
    warmup_steps: int = field(100, "steps of linear warm-up from 0", low=0)
    schedule: str = field(
        "cosine",
        "schedule after the warm-up: cosine, or wsd (constant at the peak, then a linear decay)",
        choices=("cosine", "wsd"),
    )
    decay_steps: int = field(0, "steps of wsd's decay, at the end of the run", low=0)
    b1: float = field(0.9, "decay of AdamW's first moment", low=0, high=1, below=True)
    b2: float = field(0.95, "decay of AdamW's second moment", low=0, high=1, below=True)
    first_moment_dtype: str = field(
        "float32",
        "dtype of first moments: float32, or bfloat16 to save 2 bytes per parameter",
        choices=("float32", "bfloat16"),
    )
    average: float = field(
        0.0,
        "decay of a moving average of the parameters, to evaluate and export; 0: no averaging",
        low=0,
        high=1,
        below=True,
    )
    eps: float = field(1e-8, "epsilon of AdamW and of Muon", low=0, above=True)
    weight_decay: float = field(0.1, "weight decay, applied to matrices only", low=0)
    clip_norm: float = field(1.0, "gradients are clipped to this global norm", low=0, above=True)
    spike_factor: float = field(
        10.0,
        "skip a step whose gradient norm is this many times the running mean; 0: never",
        low=0,
    )
    max_skipped: int = field(20, "stop the run when this many steps in a row are skipped", low=1)


@dataclasses.dataclass
class LossSection:
    weighting: str = field(
        "inverse_ratio",
        "how masked tokens are weighted: inverse_ratio or uniform",
        choices=WEIGHTINGS,
    )
    ar_weight: float = field(1.0, "weight of the AR loss: a in (MLM + a AR) / (1 + a)", low=0)
    chunk: int = field(2048, "maximum number of tokens whose logits a device holds at once", low=1)
    dtype: str = field(
        "bfloat16",
        "compute dtype, bfloat16 or float32; parameters stay float32",
        choices=("bfloat16", "float32"),
    )
    remat: str = field(
        AUTO,
        "what the backward pass recomputes, from none to full (and offload: full, with layer "
        "inputs kept in host memory); auto: the least that leaves 10% of a device's memory free, "
        "with micro-batches as small as that requires",
        choices=(AUTO, *POLICIES),
    )
    attention: str = field(
        "streams",
        "attention implementation: dense, streams, blockwise or splash (TPUs)",
        choices=tuple(IMPLEMENTATIONS),
    )
    tile: int = field(
        0, "side of splash's tiles, a multiple of 128; 0: chosen to suit the chip", low=0
    )
    unroll: int = field(
        1, "layers per iteration of the scan over layers; more take longer to compile", low=1
    )


@dataclasses.dataclass
class MeshSection:
    data: int = field(
        1, "replicas of the parameters; one of the four mesh sizes may be -1: all devices left"
    )
    fsdp: int = field(-1, "devices that share the batch, the parameters and their moments")
    tensor: int = field(1, "devices that share heads, the MLP and the vocabulary")
    sequence: int = field(
        1, "devices that share the tokens of a row; must divide the number of KV heads"
    )


@dataclasses.dataclass
class MetricsSection:
    tensorboard: bool = field(False, "write events for TensorBoard to <output>/tensorboard")
    wandb: str | None = field(None, "Weights & Biases project to log to; null: none")
    profile_from: int = field(
        0, "steps before those that are profiled, for xprof, in <output>/profile", low=0
    )
    profile_steps: int = field(0, "number of steps to profile; 0: no profile", low=0)
    norms: bool = field(True, "measure norms of parameters and updates, by group")
    stall_factor: float = field(
        10.0,
        "print the stacks of all threads when a step takes this many times the median; 0: never",
        low=0,
    )


@dataclasses.dataclass
class EvaluationSection:
    every: int = field(
        0, "steps between evaluations, logged to <output>/evaluation.jsonl; 0: none", low=0
    )
    source: str | None = field(
        None, "folder of held-out rows to evaluate on, made by `wedlm tokenize`"
    )
    rows: int = field(64, "held-out packed rows on which to compute losses", low=1)
    seed: int = field(0, "seed for drawing held-out rows, prefixes and questions")
    prompts: int = field(8, "prefixes of held-out samples to decode", low=0)
    max_tokens: int = field(64, "maximum number of completion tokens per prefix", low=1)
    questions: str | None = field(
        None, "file of questions to ask, as for `wedlm evaluate --questions`; null: none"
    )
    most_questions: int = field(
        200, "maximum number of questions to ask, drawn by evaluation.seed", low=1
    )
    answer_tokens: int = field(256, "maximum number of tokens per answer", low=1)
    mode: str = field(
        "verified",
        "decoding mode for answers: verified, paper or ar; always ar with objective ar",
        choices=MODES,
    )


@dataclasses.dataclass
class PhaseSection:
    from_step: int = field(1, "number of completed steps at which the phase begins", low=1)
    sources: dict[str, float] = field(
        {}, "sources that replace data.sources; empty: as before", low=0, above=True
    )
    learning_rate: float | None = field(
        None, "peak to which the schedule is scaled; null: as before", low=0, above=True
    )
    row_length: int | None = field(None, "row length of the new sources; null: as before", low=1)
    prediction_blocks: int | None = field(None, "prediction blocks per row; null: as before", low=0)
    rows: int | None = field(None, "rows per micro-batch; null: as before", low=1)
    accumulation: int | None = field(None, "micro-batches per step; null: as before", low=1)


@dataclasses.dataclass
class TrainConfig:
    objective: str = field(
        "wedlm",
        "what to train: wedlm (MLM + AR over dual streams), ar (next token), or drafter (adapters "
        "on masks, which learn a frozen model's choices)",
        choices=("wedlm", "ar", "drafter"),
    )
    steps: int = field(1000, "optimizer steps", low=1)
    rows: int = field(8, "packed rows per micro-batch; loss.remat=auto may reduce it", low=1)
    accumulation: int = field(1, "micro-batches per step", low=1)
    row_length: int = field(512, "tokens per packed row, a multiple of block_size", low=1)
    block_size: int = field(32, "B: consecutive positions that share a mask ratio", low=1)
    prediction_blocks: int = field(
        0,
        "blocks per row in the prediction stream, which leaves out blocks without a token to train "
        "on; 0: as many as the data's rows need",
        low=0,
    )
    suffix_share: float = field(
        0.0,
        "share of blocks in which the last tokens are masked, as in verified decoding's windows",
        low=0,
        high=1,
    )
    quantized_training: str = field(
        "none",
        "none, or int8: layer matrices are multiplied in 8-bit integers, forward and backward; "
        "needs qwix",
        choices=("none", "int8"),
    )
    seed: int = field(0, "seed for initialisation, data order and masks")
    output: str = field(
        "runs/train",
        "folder for checkpoints, logs and the exported model, shared by all hosts; may be gs://",
    )
    branch_from: str | None = field(
        None,
        "state of another run to start from, RUN@STEP: its parameters, optimizer, step and place "
        "in the data; null: start from model.init_from, or from scratch",
    )
    checkpoint_every: int = field(200, "steps between checkpoints", low=1)
    checkpoint_timeout: int = field(
        1200, "seconds after which an unfinished checkpoint counts as failed", low=1
    )
    keep_checkpoints: int = field(2, "number of newest checkpoints to keep", low=1)
    keep_every: int = field(
        0, "also keep every checkpoint whose step is a multiple of this; 0: none", low=0
    )
    export_dtype: str = field(
        "float32",
        "dtype of the exported model in <output>/hf; training keeps float32 parameters",
        choices=DTYPES,
    )
    log_every: int = field(10, "steps between metric lines", low=1)
    phases: list[PhaseSection] = field(
        [],
        "changes at given steps: [{from_step: N, ...}] with "
        + ", ".join(field.name for field in dataclasses.fields(PhaseSection)[1:]),
    )
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    lora: LoraSection = dataclasses.field(default_factory=LoraSection)
    drafter: DrafterSection = dataclasses.field(default_factory=DrafterSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    loss: LossSection = dataclasses.field(default_factory=LossSection)
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)
    metrics: MetricsSection = dataclasses.field(default_factory=MetricsSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)

    @property
    def prediction_length(self) -> int:
        """Returns the number of tokens in a row's prediction stream; 0 if there is none."""
        if self.objective == "ar":
            return 0
        if self.objective == "drafter":
            return self.windows * self.drafter.window_size
        return self.prediction_blocks * self.block_size or self.row_length

    @property
    def windows(self) -> int:
        """Returns the number of windows of masks per row with objective "drafter"."""
        half = max(self.row_length // (2 * self.drafter.window_size), 1)
        return self.drafter.windows or half

    @property
    def leaves_blocks_out(self) -> bool:
        """Returns whether a row's prediction stream holds only some of its blocks."""
        return self.objective == "wedlm" and self.prediction_length < self.row_length

    @property
    def row_tokens(self) -> int:
        """Returns the number of tokens per row that go through the layers, in both streams."""
        return self.row_length + self.prediction_length


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Reads a YAML file and applies ``section.key=value`` overrides.

    An override replaces the recipe's value; a mapping is replaced as a whole:
    ``data.sources={a: 1}``. ``+data.sources.b=2`` adds an entry.

    Raises:
      InputError: no such file, not YAML, an unknown key or a value of the wrong type.
    """
    for item in overrides or []:
        if "=" not in item:
            quoted = "; an argument with spaces needs quotes" * item.endswith("}")
            raise InputError(f"override {item!r}: expected key=value{quoted}")
    merged = OmegaConf.structured(TrainConfig)
    with _told_as(str(path)):
        merged = OmegaConf.merge(merged, OmegaConf.load(path))
    for item in overrides or []:
        with _told_as(f"override {item!r}"):
            apply_override(merged, item)
    given_in = partial(field_origin, path, overrides or [])
    with _told_as(given_in):
        config = OmegaConf.to_object(merged)
    assert isinstance(config, TrainConfig)
    _check(config, given_in)
    return config


@contextlib.contextmanager
def _told_as(given: str | Callable[[str], str]) -> Iterator[None]:
    """Turns OmegaConf's errors into `InputError` messages that begin with where the value came
    from: a text, or a function of the field's name."""
    origin = given if isinstance(given, str) else given("")
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{origin}: no such configuration file") from None
    except IsADirectoryError:
        raise InputError(f"{origin}: is a folder; expected a recipe, a YAML file") from None
    except UnicodeDecodeError:
        raise InputError(f"{origin}: is not a text file") from None
    except (ConfigKeyError, ConfigAttributeError) as error:
        # OmegaConf names the key of a phase without the list that it is in.
        of_phase = error.object_type is PhaseSection
        raise InputError(f"{origin}: {_unknown_key(str(error.full_key), of_phase)}") from None
    except InputError:
        raise
    except (OmegaConfBaseException, ValueError, OSError) as error:
        key = getattr(error, "full_key", None)
        origin = given if isinstance(given, str) else given(str(key or ""))
        reason = str(error).splitlines()[0]
        if isinstance(key, int):  # OmegaConf names no field if an element of data.skip is no list
            reason = f"data.skip: {_expected('data.skip')}"
        elif key and not isinstance(error, InterpolationResolutionError):
            value = re.search(r"^Value ('.*?') ", reason)
            reason = f"{key}: {_expected(key)}" + (f", not {value[1]}" if value else "")
        raise InputError(f"{origin}: {reason}") from None
    except Exception as error:
        # A YAML parser has many error types; all mean that the file is not YAML.
        raise InputError(f"{origin}: not valid YAML ({str(error).splitlines()[0]})") from None


def save_config(config: TrainConfig, path: Path) -> None:
    """Writes the resolved configuration as YAML, whole or not at all."""
    with written_beside(path) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.structured(config)).encode("utf-8"))


def describe() -> list[tuple[str, str, str]]:
    """Lists every field as (dotted name, default, meaning), for ``--help``."""

    def walk(cls: type, prefix: str) -> list[tuple[str, str, str]]:
        lines = []
        for one in dataclasses.fields(cls):
            factory = one.default_factory
            if dataclasses.is_dataclass(factory):
                lines += walk(factory, f"{prefix}{one.name}.")
            else:
                default = factory() if callable(factory) else one.default
                lines.append((prefix + one.name, str(default), one.metadata["option"].help))
        return lines

    return walk(TrainConfig, "")


def field_values(recipe: Any) -> dict[str, Any]:
    """Returns the values of a recipe's fields by dotted name.

    Args:
      recipe: nested dictionaries; fields that are not in them are left out.
    """
    found = {}
    for name, _, _ in describe():
        value = recipe
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            found[name] = value
    return found


NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
"""Names of the fields' types for messages."""


def _expected(key: str) -> str:
    """Describes what a field of the wrong type should be."""
    kind: Any = TrainConfig
    for name in re.sub(r"(\[\d+\])+$", "", key).split("."):
        kind = get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    if dataclasses.is_dataclass(kind):
        return f"expected fields of its own, such as {key}.{dataclasses.fields(kind)[0].name}"
    if get_origin(kind) is dict:
        return f"expected a mapping, such as {key}={{name: 1}}"
    if kind == list[list[int]]:
        return "expected a list of ranges, such as [[5001, 5050]]"
    known = [NAMES[one] for one in (kind, *get_args(kind)) if one in NAMES]
    return f"expected {known[0]}" if known else "expected another type"


def _unknown_key(key: str, of_phase: bool) -> str:
    if of_phase:
        known = [field.name for field in dataclasses.fields(PhaseSection)]
        return f"unknown key {key!r} of a phase; {did_you_mean(key, known)}"
    names = [name for name, _, _ in describe()]
    sections = {name.partition(".")[0]: None for name in names if "." in name}
    near = nearest(key, [*names, *sections])
    return f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else "")


def _check(config: TrainConfig, given_in: Callable[..., str]) -> None:
    """Refuses invalid values, and fields that contradict each other; the message begins with where
    the first of the fields was set."""
    check_fields(config, given_in)
    with errors_at(given_in("data.skip")):
        SkippedBatches.of(config.data.skip)
    sources, section, lora = config.data.sources, config.evaluation, config.lora
    drafter = config.objective == "drafter"
    rules = (
        (
            sources and not (config.data.tokenizer or config.model.init_from),
            ("data.sources", "data.tokenizer", "model.init_from"),
            "data.sources needs the tokenizer that made them, as data.tokenizer or in "
            "model.init_from",
        ),
        (
            sources and section.every and section.source is None,
            ("evaluation.source", "evaluation.every"),
            "evaluation.source must name a folder of held-out rows; evaluation.every=0 trains "
            "without evaluating",
        ),
        (
            config.row_length % config.block_size,
            ("row_length", "block_size"),
            f"row_length {config.row_length} is not a multiple of block_size {config.block_size}",
        ),
        (
            drafter and not lora.rank,
            ("lora.rank", "objective"),
            "objective drafter trains adapters; give lora.rank, such as 32",
        ),
        (
            config.drafter.init_from is not None and not drafter,
            ("drafter.init_from", "objective"),
            "drafter.init_from needs the objective drafter",
        ),
        (
            drafter and section.questions is not None,
            ("evaluation.questions", "objective"),
            "a drafter never changes an answer; evaluation.source measures how often it agrees "
            "with its model",
        ),
        (
            lora.rank and not lora.targets,
            ("lora.targets", "lora.rank"),
            f"lora.targets must name at least one of {', '.join(TARGETS)}",
        ),
        (
            lora.rank and config.optimizer.name == "muon",
            ("optimizer.name", "lora.rank"),
            "optimizer.name must be adamw with lora.rank: muon is for whole matrices",
        ),
        (
            config.loss.tile % LANES,
            ("loss.tile",),
            f"loss.tile must be a multiple of {LANES}, not {config.loss.tile}",
        ),
    )
    for is_wrong, fields, sentence in rules:
        if is_wrong:
            raise InputError(f"{given_in(*fields)}: {sentence}")
