"""Describes a model's architecture by the fields of a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wedlm_jax.errors import InputError, file_error, shortened
from wedlm_jax.option_values import is_number

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""The fields that determine the shapes of parameters."""

PARTS = ("qk_norm", "attention_bias", "attention_out_bias", "mlp_bias")
"""Optional parameters of a model: norms of queries and keys in each head; biases of the projections
to queries, keys and values, of attention's output, and of the MLP."""


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one ``model_type``.

    Attributes:
      architecture: the class in transformers.
      parts: which of `PARTS` its models have; None if the file and the tensors determine it.
      defaults: values of omitted fields, where they differ from those of other families.
    """

    architecture: str
    parts: tuple[str, ...] | None = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_ENDS = {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "wedlm": Family("WeDLMForCausalLM", None),
        "qwen2": Family("Qwen2ForCausalLM", ("attention_bias",)),
        "qwen3": Family("Qwen3ForCausalLM", ("qk_norm",), {"head_dim": 128}),
        # Its attention_bias covers all four projections.
        "llama": Family("LlamaForCausalLM", None, {**_ENDS, "max_position_embeddings": 2048}),
        "mistral": Family(
            "MistralForCausalLM",
            defaults={
                **_ENDS,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
            },
        ),
    }
)
MODEL_TYPES = tuple(FAMILIES)
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The supported RoPE types, and the numbers that each requires."""

SILU = ("silu", "swish")
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    # The MLP.
    "hidden_act": SILU,
    "hidden_activation": SILU,
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "moe_num_experts": (0, 1),
    # Attention.
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (0,),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    # Positions.
    "alibi": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "rope_local_base_freq": (),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rotary_dim": (),
    "rotary_pct": (1,),
    # Scaling factors.
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "final_logit_softcapping": (0,),
    # How tensors are stored.
    "quantization_config": (),
    "compression_config": (),
}
"""Unsupported keys of a ``config.json``, in these or related families, with the values under which
they have no effect. Null has no effect, either."""

QWEN_WINDOW, QWEN_MAX_WINDOW_LAYERS = 4096, 28
"""The defaults in a Qwen config.json."""

# The published WeDLM checkpoints leave `mask_token_id` null and use this row of
# the padded Qwen vocabulary.
PUBLISHED_MASK_TOKEN_ID = 151665


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding: its base, and how the context was extended, if it was.

    Attributes:
      theta: base of the geometric progression of wavelengths.
      rope_type: a key of `ROPE_FIELDS`.
      parameters: the parameters of the scaling, under their Hugging Face names.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in tuple(ROPE_FIELDS):
            raise InputError(
                f"model config: RoPE type {self.rope_type!r} is not supported "
                f"(only {', '.join(ROPE_FIELDS)})"
            )
        for name in ROPE_FIELDS[self.rope_type]:
            value = self.get(name)
            if not is_number(value) or value <= 0:
                raise InputError(
                    f"model config: RoPE scaling {self.rope_type!r} needs a positive number as "
                    f"{name!r}, not {value!r}"
                )

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.parameters).get(name, default)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a Qwen2.5-, Qwen3-, Llama-, Mistral- or WeDLM-shaped decoder.

    ``mask_token_id`` is None if none has been chosen yet, as in stock checkpoints. Masks of
    such a model do not draft, unless it has adapters that act on masks (``has_drafter``).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "wedlm"
    has_drafter: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            _require_size(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"model config: num_attention_heads ({self.num_attention_heads}) must be a "
                f"multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise InputError(f"model config: head_dim must be even, not {self.head_dim}")
        names = ("mask_token_id", "pad_token_id", "bos_token_id")
        ids = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
        for name, value in [*ids, *(("eos_token_id", one) for one in self.eos_token_ids)]:
            if type(value) is not int or not 0 <= value < self.vocab_size:
                raise InputError(
                    f"model config: {name} must be a token id below vocab_size "
                    f"({self.vocab_size}), not {value!r}"
                )
        if self.mask_token_id is not None and self.mask_token_id in self.eos_token_ids:
            raise InputError(
                f"model config: mask_token_id {self.mask_token_id} is also an eos_token_id; the "
                "mask must be a token that never occurs in texts"
            )

    @property
    def knows_masks(self) -> bool:
        """Whether masks can draft: the model was trained to fill them, or has a drafter."""
        trained = self.model_type == "wedlm" and self.mask_token_id is not None
        return trained or self.has_drafter

    def require_mask_token_id(self) -> int:
        if self.mask_token_id is None:
            raise InputError(
                "this model has no mask_token_id, which masked decoding and WeDLM training need: "
                "`wedlm train` chooses one; until then, decode autoregressively, with a window of 0"
            )
        return self.mask_token_id

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Counts the parameters; without ``embeddings``, those of the layers and norms only."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * h, self.num_key_value_heads * h
        layer = d * q * 2 + 2 * d * kv + 3 * d * f + 2 * d
        layer += (q + 2 * kv) * self.attention_bias + 2 * h * self.qk_norm
        layer += d * self.attention_out_bias + (2 * f + d) * self.mlp_bias
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * d * embeddings
        return self.num_hidden_layers * layer + d + tables

    @property
    def attention_per_place(self) -> int:
        """The multiplications for a token's attention to one place, over all layers: for the score
        and for the weighted value. (A token's linear layers take one per parameter.)"""
        return 2 * self.num_hidden_layers * self.num_attention_heads * self.head_dim


def _require_size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"model config: {name} must be a positive integer, not {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise InputError(f"model config: {name} must be a number, not {value!r}")
    return float(value)


def _rope_from_hf(raw: dict[str, Any]) -> RopeConfig:
    # Transformers 5 writes one `rope_parameters`; before, `rope_theta` and `rope_scaling`.
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    if len(names) > 1 and raw[names[0]] != raw[names[1]]:
        raise InputError("model config: rope_parameters and rope_scaling differ; give one of them")
    scaling = dict(raw[names[0]]) if names else {}
    if nested := [key for key, value in scaling.items() if isinstance(value, dict)]:
        raise InputError(
            f"model config: {names[0]} has separate values for {nested[0]!r}; RoPE that differs "
            "between layers is not supported"
        )
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta", 10000.0)
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    for part in (raw.get("partial_rotary_factor"), scaling.pop("partial_rotary_factor", None)):
        if part not in (None, 1):
            raise InputError(
                f"model config: partial_rotary_factor {part!r} is not supported (only 1)"
            )
    if rope_type in ("yarn", "llama3"):
        # The length at which the model was trained before its context was extended.
        name = "original_max_position_embeddings"
        inside, outside = scaling.get(name), raw.get(name)
        if inside and outside and inside != outside:
            raise InputError(
                f"model config: {name} is {outside!r}, but {inside!r} in the RoPE scaling; "
                "expected one value"
            )
        if not inside and (length := outside or raw.get("max_position_embeddings")):
            scaling[name] = length
    # A configuration is a key of compiled programs, so all of it must be hashable.
    parameters = {k: tuple(v) if isinstance(v, list) else v for k, v in scaling.items()}
    return RopeConfig(_number("rope_theta", theta), rope_type, tuple(sorted(parameters.items())))


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    for key, neutral in WITHOUT_EFFECT.items():
        if (value := raw.get(key)) is not None and value not in neutral:
            only = f" (only {', '.join(json.dumps(one) for one in neutral)})" if neutral else ""
            shown = shortened(json.dumps(value), 80)
            raise InputError(f"model config: {key} {shown} is not supported{only}")
    kinds = raw.get("layer_types") or []
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            raise InputError(
                f"model config: layer_types has {kind!r} for layer {layer}, which is not supported "
                "(only 'full_attention')"
            )
    windowed = None if kinds else _first_windowed_layer(raw)
    if windowed is not None:
        unused = "" if raw["model_type"] == "mistral" else ', or "use_sliding_window": false'
        raise InputError(
            f"model config: sliding_window {raw.get('sliding_window', 'by default')} limits what "
            f"tokens attend to from layer {windowed} on, which is not supported (only null{unused})"
        )


def _first_windowed_layer(raw: dict[str, Any]) -> int | None:
    """Returns the first layer whose attention has a sliding window, by the rules of transformers
    for a file without ``layer_types``; None if there is none."""
    model_type = raw["model_type"]
    # A Qwen's window has a size even if it is not used. In other families, and for renamed Qwens,
    # a size alone enables it; Mistral has no other field, and a size by default.
    by_flag = model_type in ("qwen2", "qwen3")
    default = QWEN_WINDOW if raw.get("use_sliding_window") else None
    default = FAMILIES[model_type].defaults.get("sliding_window", default)
    size = raw.get("sliding_window", default)
    if model_type == "mistral":
        return None if size is None else 0
    if size is None or not raw.get("use_sliding_window", not by_flag):
        return None
    first = raw.get("max_window_layers", QWEN_MAX_WINDOW_LAYERS if by_flag else 0) or 0
    return first if first < raw.get("num_hidden_layers", 0) else None


def _parts(raw: dict[str, Any]) -> dict[str, bool]:
    """Returns which of `PARTS` a model has; refuses a file that contradicts what models of its type
    have."""
    model_type, of_family = raw["model_type"], FAMILIES[raw["model_type"]].parts
    given = {name: bool(raw[name]) for name in PARTS if raw.get(name) is not None}
    parts = {name: given.get(name, False) for name in PARTS}
    if of_family is not None:
        parts = {name: name in of_family for name in PARTS}
    elif model_type == "llama":
        parts |= {"qk_norm": False, "attention_out_bias": parts["attention_bias"]}
    for name, value in given.items():
        if value != parts[name]:
            raise InputError(
                f"model config: {name} {json.dumps(raw[name])} in a {model_type} model is not "
                "supported"
            )
    return parts


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Reads the content of a Hugging Face ``config.json``.

    Raises:
      InputError: a field is missing, malformed or not supported.
    """
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise InputError(
            f"model config: model_type {model_type!r} is not supported "
            f"(only {', '.join(MODEL_TYPES)})"
        )
    _refuse_unsupported(raw)
    raw = {**FAMILIES[model_type].defaults, **raw}
    try:
        vocab_size = raw["vocab_size"]
        heads = _require_size("num_attention_heads", raw["num_attention_heads"])
        width = _require_size("hidden_size", raw["hidden_size"])
        mask, ends = raw.get("mask_token_id"), raw.get("eos_token_id")
        ends = [] if ends is None else ends
        # A vocab_size that is not a number is refused below, by ModelConfig.
        padded = isinstance(vocab_size, int) and vocab_size > PUBLISHED_MASK_TOKEN_ID
        if mask is None and model_type == "wedlm" and padded:
            mask = PUBLISHED_MASK_TOKEN_ID
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or width // heads,
            **_parts(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rms_norm_eps=_number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
            rope=_rope_from_hf(raw),
            max_position_embeddings=raw.get("max_position_embeddings", 32768),
            initializer_range=_number("initializer_range", raw.get("initializer_range", 0.02)),
            mask_token_id=mask,
            pad_token_id=raw.get("pad_token_id"),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=tuple(ends if isinstance(ends, list | tuple) else [ends]),
            model_type=model_type,
        )
    except KeyError as error:
        raise InputError(f"model config: the field {error.args[0]!r} is missing") from None


def config_to_hf(config: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """Returns ``config`` as the content of a Hugging Face ``config.json``."""
    eos = config.eos_token_ids
    scaling = {"rope_type": config.rope.rope_type, **dict(config.rope.parameters)}
    raw: dict[str, Any] = {
        "architectures": [FAMILIES[config.model_type].architecture],
        "model_type": config.model_type,
        "dtype": dtype,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.rope_type == "default" else scaling,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
    }
    if config.model_type == "mistral":
        raw["sliding_window"] = None
    for field in dataclasses.fields(config):
        if field.name not in ("rope", "eos_token_ids", "model_type"):
            raw[field.name] = getattr(config, field.name)
    return raw


CONFIG_FIELDS = [
    *("hidden_act", "use_sliding_window", "sliding_window", "layer_types", "max_window_layers"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("eos_token_id", "attention_dropout"),
    *(
        field.name
        for field in dataclasses.fields(ModelConfig)
        if field.name not in ("rope", "eos_token_ids")
    ),
]
"""The fields of a ``config.json`` that `config_from_hf` reads or takes for granted."""

STOCK = "stock"
"""A model type that stands for the stock family whose models have the same parameters."""


def with_model_type(raw: dict[str, Any], model_type: str, config: ModelConfig) -> dict[str, Any]:
    """Returns the content of a ``config.json`` under another ``model_type``, one of `MODEL_TYPES`,
    or `STOCK` for the stock family that fits. A WeDLM has the same parameters as a stock model,
    which other programs support.

    Args:
      config: the architecture; ``raw`` may leave parts of it to the tensors.

    Raises:
      InputError: models of that type have other parameters.
    """
    parts = {name: getattr(config, name) for name in PARTS}
    fitting = [name for name in ("qwen3", "qwen2", "llama", "mistral") if _fits(name, parts)]
    chosen = next(iter(fitting), model_type) if model_type == STOCK else model_type
    if chosen != "wedlm" and chosen not in fitting:
        has = ", ".join(name for name, value in parts.items() if value)
        has = has or "neither biases nor qk_norm"
        fit = f"; expected {' or '.join(['wedlm', *fitting])}" if fitting else ""
        raise InputError(
            f"--model-type {model_type}: does not match this model, which has {has}{fit}"
        )
    kept = {name: value for name, value in raw.items() if name != "auto_map"}
    # Written out, since the meaning of an omitted field depends on the type.
    full = config_to_hf(dataclasses.replace(config, model_type=chosen))
    stated = {name: value for name, value in full.items() if name in _STATED}
    if chosen == "mistral":
        kept.pop("sliding_window", None)  # in a Mistral a size alone enables the window
    name = {"model_type": chosen, "architectures": [FAMILIES[chosen].architecture]}
    return {**stated, **kept, **parts, **name}


_STATED = (
    *("head_dim", "num_key_value_heads", "max_position_embeddings", "sliding_window"),
    *("bos_token_id", "eos_token_id"),
)
"""Fields whose defaults differ between families."""


def _fits(model_type: str, parts: Mapping[str, bool]) -> bool:
    try:
        return _parts({"model_type": model_type, **parts}) == parts
    except InputError:
        return False


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads a file that holds a JSON object; returns None if there is no such file.

    Raises:
      InputError, StorageFailure: it holds something else, or cannot be read.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error(path, "cannot be read", error) from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object")
    return raw


def read_config_json(folder: Path) -> dict[str, Any]:
    """Returns the content of ``folder/config.json``."""
    raw = read_object(path := folder / "config.json")
    if raw is None:
        raise InputError(f"{path}: no such file; a model's folder holds a config.json")
    return raw
