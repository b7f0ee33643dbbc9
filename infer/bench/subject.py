"""What is measured: a model of a checkpoint, or of random weights in a known shape."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.config import ModelConfig, RopeConfig
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.engine.engine import Engine
    from wedlm_jax.model import Transformer
    from wedlm_jax.text import TextCodec

_QWEN3 = ModelConfig(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    qk_norm=True,
    tie_word_embeddings=True,
    rope=RopeConfig(1e6),
    max_position_embeddings=40_960,
    mask_token_id=151_665,
    model_type="qwen3",
)
_EMBEDDED = ModelConfig(
    vocab_size=1536,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    qk_norm=True,
    tie_word_embeddings=True,
    max_position_embeddings=32_768,
    mask_token_id=3,
    model_type="qwen3",
)

SHAPES = {
    "embedded": _EMBEDDED,
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": dataclasses.replace(_QWEN3, hidden_size=2048, intermediate_size=6144),
    "qwen2.5-0.5b": dataclasses.replace(
        _QWEN3,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
        qk_norm=False,
        max_position_embeddings=32_768,
        model_type="qwen2",
    ),
}
"""Shapes of published models, and that of the embedded one with a long context."""

SHORT_CONTEXT = 1024
"""Tokens that a sequence of random weights may have, but where long prompts are the point."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its layers as engines run them: all engines share these weights.

    Attributes:
      folder: its checkpoint; None for random weights.
      codec: its tokenizer; None for random weights.
      dtype: of weights and cache.
      engine_options: of every engine, such as ``kv_cache_dtype``.
    """

    model: Transformer
    folder: Path | None
    codec: TextCodec | None
    dtype: str
    engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def engine(self, window: int | str, sequences: int, **options: Any) -> Engine:
        """Makes an engine for so many sequences; ``options`` are fields of `EngineConfig`.
        No drafts are copied from texts unless these say so."""
        from wedlm_jax.engine.config import EngineConfig
        from wedlm_jax.engine.engine import Engine

        options = {"lookup": 0, **self.engine_options, **options}
        if self.folder is None:
            options.setdefault("max_model_len", SHORT_CONTEXT)
        config = EngineConfig(window_size=window, max_batch_size=sequences, **options)
        known = None if self.codec is None else self.codec.token_ids
        return Engine(self.model, config, known_tokens=known)

    def chat_prompt(self, *said: str) -> list[int]:
        """Returns the token ids of a conversation, the user's turn first.

        Raises:
          InputError: there is no tokenizer.
        """
        if self.codec is None:
            raise InputError(f"{self.folder or 'random weights'}: no tokenizer for the questions")
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        return self.codec.encode_chat(messages)


def load_subject(
    model: str | None,
    dtype: str | None,
    *,
    quantization: str | None = None,
    **engine_options: Any,
) -> Subject:
    """Loads a checkpoint as `wedlm_jax.llm.LLM` loads it.

    Args:
      quantization: as `LLM` takes it.
      engine_options: of every engine.
    """
    import jax.numpy as jnp

    from wedlm_jax.checkpoint.load import load_checkpoint
    from wedlm_jax.checkpoint.open import find_model
    from wedlm_jax.text import TextCodec

    folder, name = find_model(model), _dtype(dtype)
    weights = load_checkpoint(
        folder, dtype=jnp.dtype(name), stacked=not _on_cpu(), quantization=quantization
    )
    return Subject(weights, folder, TextCodec.load(folder), name, engine_options)


def random_subject(
    config: ModelConfig,
    dtype: str | None,
    *,
    quantization: str | None = None,
    **engine_options: Any,
) -> Subject:
    """Makes random weights: what a forward costs does not depend on what it says."""
    import jax.numpy as jnp
    from flax import nnx

    from wedlm_jax.model import Transformer
    from wedlm_jax.model.quantization import quantize_weights

    name = _dtype(dtype)
    model = Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(name), stacked=not _on_cpu())
    if quantization is not None:
        model = quantize_weights(model)
    return Subject(model, None, None, name, engine_options)


def random_prompts(config: ModelConfig, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts of random tokens, no two of which begin alike."""
    import numpy as np

    ids = np.random.default_rng(seed).integers(4, config.vocab_size, (count, length))
    ids[:, 0] = 4 + np.arange(count) % (config.vocab_size - 4)
    prompts: Sequence[list[int]] = ids.tolist()
    return list(prompts)


def forget_programs() -> None:
    """Frees compiled programs: on a CPU each takes about a hundred memory maps, of which Linux
    allows a process 65,530."""
    import jax

    gc.collect()
    jax.clear_caches()


def _dtype(name: str | None) -> str:
    if name is not None:
        return name
    return "float32" if _on_cpu() else "bfloat16"


def _on_cpu() -> bool:
    import jax

    return bool(jax.default_backend() == "cpu")
