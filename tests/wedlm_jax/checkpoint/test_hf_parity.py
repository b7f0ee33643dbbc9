"""Agreement with transformers on tiny random models, both ways through the files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")

from wedlm_jax.checkpoint.convert import convert  # noqa: E402
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint  # noqa: E402
from wedlm_jax.config import config_from_hf  # noqa: E402
from wedlm_jax.masks import CausalMask  # noqa: E402
from wedlm_jax.model import Transformer  # noqa: E402
from wedlm_jax.model.rope import inverse_frequencies  # noqa: E402

torch.set_num_threads(1)  # these models are too small for threads, which only wait

TOLERANCE = 1e-4
VOCABULARY = 96
LENGTH = 40

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn without an original length": {"rope_type": "yarn", "factor": 4.0},
    "yarn with betas and factor": YARN
    | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "yarn with mscale": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.5},
    "yarn not truncated": {**YARN, "truncate": False},
}


BIASES = {
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with an MLP's": {"mlp_bias": True},
}


def make_reference(kind, *, tied=False, rope="default"):
    """A transformers model none of whose parameters is at its plain initial value."""
    import transformers

    settings = {**SHAPE, "tie_word_embeddings": tied, "attn_implementation": "eager"}
    settings["rope_parameters"] = {"rope_theta": 10000.0, **ROPES[rope]}
    if kind in ("qwen3", "mistral"):
        settings["head_dim"] = 16  # not hidden_size / heads, which is 12
    if kind == "mistral":
        settings["sliding_window"] = None
    settings |= BIASES.get(kind, {})
    name = kind.split()[0].capitalize()
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter += 0.2 * noise
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def inputs():
    """Token ids and logical positions, ``[2, LENGTH]``: rows far apart, so that scaling tells."""
    token_ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, LENGTH))
    return token_ids, np.arange(LENGTH) + np.array([[0], [300]])


def reference_logits(model):
    token_ids, positions = map(torch.from_numpy, inputs())
    with torch.no_grad():
        return model(input_ids=token_ids, position_ids=positions).logits.numpy()


@jax.jit
def forward(model, token_ids, positions):
    """Compiled once for all models of one configuration."""
    hidden = model(token_ids, positions, CausalMask())
    return model.logits(hidden)


def our_logits(folder):
    model = load_checkpoint(folder, dtype=jnp.float32)
    return np.asarray(forward(model, *map(jnp.asarray, inputs())))


def assert_close(ours, theirs):
    assert theirs.std() > 0.3, "logits too small for the tolerance to mean anything"
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def load_reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize(
    ("kind", "tied", "rope"),
    [
        ("qwen2", True, "linear"),
        ("qwen3", False, "yarn with betas and factor"),
        ("llama", True, "llama3"),
        ("mistral", False, "default"),
        ("llama with biases", False, "default"),
        ("llama with an MLP's", True, "default"),
    ],
)
def test_logits_agree_and_transformers_loads_what_is_written(tmp_path, kind, tied, rope):
    """Of tensors and ``config.json``, in one file or in several."""
    source, written = tmp_path / "source", tmp_path / "written"
    reference = make_reference(kind, tied=tied, rope=rope)
    reference.save_pretrained(source, max_shard_size="60KB" if tied else "5GB")
    expected = reference_logits(reference)
    assert_close(our_logits(source), expected)
    model = load_checkpoint(source)
    save_checkpoint(model, model.config, written, shard_bytes=60_000 if tied else 5_000_000)
    for folder in (source, written):
        assert (len(list(folder.glob("*.safetensors"))) > 1) == tied
    theirs = load_reference(written)
    assert type(theirs) is type(reference)
    np.testing.assert_array_equal(reference_logits(theirs), expected)


@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies_are_those_of_transformers(rope):
    config = make_reference("qwen3", rope=rope).config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    theirs = Qwen3RotaryEmbedding(config)
    frequencies, factor = inverse_frequencies(config_from_hf(config.to_dict()))
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=2e-6)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen3", {"qk_norm": True}),
        ("llama", {"attention_bias": True, "attention_out_bias": True}),
        ("mistral", {}),
    ],
)
def test_a_wedlm_under_the_name_of_a_stock_model_loads_in_transformers(kind, parts, tmp_path):
    raw = {**SHAPE, "model_type": "wedlm", **parts, "head_dim": 12}
    config = config_from_hf({**raw, "mask_token_id": 5, "initializer_range": 0.15})
    model = Transformer(config, rngs=nnx.Rngs(0))
    save_checkpoint(model, config, tmp_path / "wedlm")
    done = convert(tmp_path / "wedlm", tmp_path / kind, to="hf", model_type=kind)
    assert done.format == "hf"
    reference = load_reference(tmp_path / kind)
    assert type(reference).__name__ == f"{kind.capitalize()}ForCausalLM"
    assert reference.config.eos_token_id is None  # as in the WeDLM, not the family's own
    assert_close(our_logits(tmp_path / "wedlm"), reference_logits(reference))
    assert load_checkpoint(tmp_path / kind).config.model_type == kind
