"""Model configurations: Hugging Face fields in and out, and what is refused."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.checkpoints import published_config
from wedlm_jax.config import (
    FAMILIES,
    MODEL_TYPES,
    PARTS,
    PUBLISHED_MASK_TOKEN_ID,
    WITHOUT_EFFECT,
    ModelConfig,
    RopeConfig,
    config_from_hf,
    config_to_hf,
)
from wedlm_jax.errors import InputError

SMALL = {
    "model_type": "wedlm",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def transformers_config(raw):
    """Returns what transformers makes of the content of a ``config.json``."""
    import transformers

    kind = getattr(transformers, f"{raw['model_type'].capitalize()}Config")
    return kind(**without(raw, "model_type"))


def without(raw, name):
    return {key: value for key, value in raw.items() if key != name}


@pytest.mark.parametrize(("name", "billions"), [("wedlm_8b", 8.19), ("wedlm_7b", 7.62)])
def test_published_models_have_their_published_sizes(name, billions):
    silent = {"mask_token_id": None, "rope_scaling": None, "eos_token_id": 151643}
    config = config_from_hf(published_config(name, model_type="wedlm", **silent))
    assert round(config.num_parameters() / 1e9, 2) == billions
    assert config.mask_token_id == PUBLISHED_MASK_TOKEN_ID
    assert config.eos_token_ids == (151643,)
    assert config.rope == RopeConfig(1000000.0)


def test_each_model_type_has_its_own_defaults():
    """What a config.json leaves out is what transformers assumes of the family."""
    qwen2 = config_from_hf({**SMALL, "model_type": "qwen2"})
    qwen3 = config_from_hf({**SMALL, "model_type": "qwen3", "head_dim": 6})
    wedlm = config_from_hf(SMALL)
    assert (qwen2.attention_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 4)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 6)
    assert (wedlm.attention_bias, wedlm.qk_norm) == (False, False)
    small = without(SMALL, "num_key_value_heads")
    mistral = {**small, "model_type": "mistral", "num_attention_heads": 8, "sliding_window": None}
    for raw in ({**small, "model_type": "llama"}, mistral, {**mistral, "bos_token_id": None}):
        theirs = transformers_config(raw)
        ours = config_from_hf(raw)
        for name in ("num_key_value_heads", "max_position_embeddings", "bos_token_id"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.eos_token_ids == (theirs.eos_token_id,) == (2,)
    assert config_from_hf({**SMALL, "model_type": "qwen3"}).head_dim == 128
    assert config_from_hf(without(SMALL, "num_key_value_heads")).num_key_value_heads == 4


def test_a_mask_token_is_assumed_only_where_the_vocabulary_has_its_row():
    edge = PUBLISHED_MASK_TOKEN_ID
    large = {**SMALL, "vocab_size": edge + 1}
    assert config_from_hf(large).mask_token_id == edge
    assert config_from_hf({**large, "vocab_size": edge}).mask_token_id is None
    assert config_from_hf({**large, "mask_token_id": 5}).mask_token_id == 5
    assert config_from_hf({**large, "model_type": "qwen3"}).mask_token_id is None
    with pytest.raises(InputError, match="mask_token_id 7 is also an eos_token_id"):
        config_from_hf({**large, "mask_token_id": 7, "eos_token_id": 7})
    with pytest.raises(InputError, match="mask_token_id"):
        config_from_hf(SMALL).require_mask_token_id()


ROPE_SPELLINGS = [
    ({}, RopeConfig(10000.0)),
    ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
    (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        RopeConfig(5e5, "linear", (("factor", 2.0),)),
    ),
    (
        {"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}},
        RopeConfig(7.0, "linear", (("factor", 2.0),)),
    ),
    (
        {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        RopeConfig(10000.0, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 64))),
    ),
    (  # the length before the extension, beside the scaling
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        RopeConfig(10000.0, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 32))),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), ROPE_SPELLINGS)
def test_rope_is_read_in_old_and_new_spelling(fields, expected):
    assert config_from_hf({**SMALL, **fields}).rope == expected


@st.composite
def configs(draw):
    model_type = draw(st.sampled_from(MODEL_TYPES))
    parts = dict.fromkeys(FAMILIES[model_type].parts or (), True)
    if model_type == "wedlm":
        parts = {name: draw(st.booleans()) for name in PARTS}
    elif model_type == "llama":
        parts = dict.fromkeys(("attention_bias", "attention_out_bias"), draw(st.booleans()))
        parts["mlp_bias"] = draw(st.booleans())
    scaling = draw(st.sampled_from([rope for _, rope in ROPE_SPELLINGS]))
    groups, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    optional_id = st.none() | st.integers(0, 9)
    return ModelConfig(
        vocab_size=draw(st.integers(10, 99)),
        hidden_size=draw(st.integers(1, 64)),
        intermediate_size=draw(st.integers(1, 64)),
        num_hidden_layers=draw(st.integers(1, 9)),
        num_attention_heads=groups * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 16)),
        **parts,
        tie_word_embeddings=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope=scaling,
        mask_token_id=draw(st.none() | st.integers(0, 4)),
        pad_token_id=draw(optional_id),
        bos_token_id=draw(optional_id),
        eos_token_ids=tuple(draw(st.lists(st.integers(5, 9), max_size=3))),
        model_type=model_type,
    )


@given(config=configs())
def test_a_config_survives_the_json_file(config):
    raw = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(raw) == config
    # In a folder that says so, nothing hangs on the defaults of the type.
    assert raw["model_type"] == config.model_type


REFUSED = [
    *(
        ({"model_type": model_type}, f"model_type '{model_type}' is not supported .only wedlm, ")
        for model_type in ("llama4", "gemma3_text", "mixtral", "qwen3_moe")
    ),
    ({"model_type": "mistral"}, "sliding_window by default limits .* .only null.$"),
    ({"model_type": "mistral", "sliding_window": None, "mlp_bias": True}, "true in a mistral"),
    ({"model_type": "llama", "qk_norm": True}, "qk_norm true in a llama model"),
    ({"model_type": "llama", "attention_out_bias": True}, "attention_out_bias true in a llama"),
    ({"model_type": "qwen2", "attention_bias": False}, "attention_bias false in a qwen2 model"),
    ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias true in a qwen3 model"),
    ({"model_type": None}, "model_type"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer 1"),
    ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' for layer 0"),
    ({"quantization_config": {"bits": 8}}, r'quantization_config \{"bits": 8\} is not supported'),
    ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "differs between layers"),
    ({"rope_parameters": {"factor": 4}, "rope_scaling": {"factor": 2}}, "rope_scaling differ"),
    (
        {
            "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8},
            "original_max_position_embeddings": 16,
        },
        "original_max_position_embeddings is 16, but 8 in",
    ),
    ({"partial_rotary_factor": 1, "rope_scaling": {"partial_rotary_factor": 0.5}}, "factor 0.5"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "yarn"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a positive number as 'factor'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": "4"}}, "'factor', not '4'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
    ({"num_attention_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 5}, "head_dim"),
    ({"hidden_size": 0, "head_dim": 4}, "hidden_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"vocab_size": "24"}, "vocab_size"),
    ({"num_attention_heads": "4"}, "num_attention_heads"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"mask_token_id": "5"}, "mask_token_id"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rope_theta": "large"}, "rope_theta"),
    ({"mask_token_id": 24}, "mask_token_id must be a token id below vocab_size .24., not 24"),
    ({"pad_token_id": -1}, "pad_token_id must be .*, not -1"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    with pytest.raises(InputError, match=named):
        config_from_hf({**SMALL, **changes})


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_key_that_changes_the_arithmetic_is_refused_with_its_value(name):
    """Silence, null and the neutral values are one model; anything else is refused."""
    for neutral in (None, *WITHOUT_EFFECT[name]):
        assert config_from_hf({**SMALL, name: neutral}) == config_from_hf(SMALL)
    with pytest.raises(InputError, match=f"{name} 0.125 is not supported"):
        config_from_hf({**SMALL, name: 0.125})


WINDOWS = [
    *(
        (model_type, fields)
        for model_type in ("qwen2", "qwen3")
        for fields in (
            {},
            {"sliding_window": 8},
            {"sliding_window": 8, "use_sliding_window": False},
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            {"sliding_window": 8, "use_sliding_window": True},
            {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
            {"use_sliding_window": True, "max_window_layers": 1},
        )
    ),
    ("mistral", {}),
    ("mistral", {"use_sliding_window": True, "max_window_layers": 9}),
    ("mistral", {"sliding_window": 8, "use_sliding_window": False}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 8}),
]


@pytest.mark.parametrize(("model_type", "fields"), WINDOWS)
def test_a_sliding_window_is_refused_where_transformers_uses_one(model_type, fields):
    raw = {**SMALL, "model_type": model_type, **fields}
    theirs = transformers_config(raw)
    if model_type == "mistral":
        used = theirs.sliding_window is not None
    else:
        used = "sliding_attention" in theirs.layer_types
    if used:
        with pytest.raises(InputError, match=r"sliding_window .* limits what tokens attend to"):
            config_from_hf(raw)
    else:
        config_from_hf(raw)


def test_a_config_is_hashable_whatever_the_scaling_holds_and_cannot_be_changed():
    scaling = {"rope_type": "yarn", "factor": 4.0, "extra": [1, 2]}
    config = config_from_hf({**SMALL, "max_position_embeddings": 64, "rope_scaling": scaling})
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3
