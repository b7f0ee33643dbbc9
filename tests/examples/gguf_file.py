"""Small GGUF files, as llama.cpp's own converter writes them, for tests."""

import ml_dtypes
import numpy as np

from tests.examples.checkpoints import hf_values, tiny_config, tiny_model
from wedlm_jax.checkpoint.model import save_checkpoint

ARCHITECTURES = {
    "llama": {"model_type": "llama", "qk_norm": False},
    "llama with biases": {
        "model_type": "llama",
        "qk_norm": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {"model_type": "qwen2", "qk_norm": False, "attention_bias": True},
    "qwen3": {"model_type": "qwen3"},
}

PIECES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def example(folder, kind="llama", **changes):
    """Writes a tiny Hugging Face checkpoint of an architecture, and returns its tensors."""
    config = tiny_config(**{**ARCHITECTURES[kind], "mask_token_id": None, **changes})
    save_checkpoint(tiny_model(config), config, folder)
    return hf_values(folder)


def metadata_of(kind="llama", **changes):
    """Returns what a file says of the shape that `example` has, without a tokenizer."""
    config = tiny_config(**{**ARCHITECTURES[kind], "mask_token_id": None, **changes})
    said = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    return {f"{config.model_type}.{name}": value for name, value in said.items()}


SOME_TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*(chr(65 + i) for i in range(22)), "<end>", "[PAD23]"],
    "tokenizer.ggml.token_type": [*[1] * 22, 3, 5],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.eos_token_id": 22,
}
"""For the vocabulary of `example`."""


def gguf_tensors(tensors, kind="llama", heads=4, kv_heads=2):
    """Returns a model's tensors under their names there, a Llama's queries and keys interleaved."""
    renamed = {}
    for name, value in tensors.items():
        if kind.startswith("llama") and (".q_proj" in name or ".k_proj" in name):
            count = heads if ".q_proj" in name else kv_heads
            value = value.reshape(count, 2, -1, *value.shape[1:]).swapaxes(1, 2)
            value = value.reshape(tensors[name].shape)
        for ours, theirs in PIECES.items():
            name = name.replace(ours, theirs)
        renamed[name] = value
    return renamed


def write_gguf(path, metadata, tensors, *, types=None, architecture="llama"):
    """Writes a file; ``types`` names those of tensors that are given as bytes."""
    import gguf

    kinds = {
        np.dtype("float32"): gguf.GGMLQuantizationType.F32,
        np.dtype("float16"): gguf.GGMLQuantizationType.F16,
        np.dtype(ml_dtypes.bfloat16): gguf.GGMLQuantizationType.BF16,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value:
            writer.add_array(name, value)
    for name, value in tensors.items():
        if name in (types or {}):
            kind = gguf.GGMLQuantizationType[(types or {})[name]]
        else:
            kind = kinds[value.dtype]
            value = value.view(np.uint8) if value.dtype == ml_dtypes.bfloat16 else value
        writer.add_tensor(name, np.ascontiguousarray(value), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def made(path, kind="llama", dtype=np.float32, **changes):
    """Writes the file of `example`, all its matrices in ``dtype``."""
    tensors = {
        name: value.astype(dtype) if value.ndim == 2 else value
        for name, value in example(path.parent / "original", kind, **changes).items()
    }
    metadata = {**metadata_of(kind, **changes), **SOME_TOKENIZER}
    architecture = kind.split()[0]
    return write_gguf(path, metadata, gguf_tensors(tensors, kind), architecture=architecture)
