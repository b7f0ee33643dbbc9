"""What is measured: a model, engines that share its weights, and questions."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from infer.evaluate import EMBEDDED_QUESTIONS
from infer.flags import SHARED, errors_at_flags
from infer.harness.human_eval import HUMAN_EVAL, code_questions
from wedlm_jax.checkpoint.adapters import with_drafter
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.open import (
    find_model,
    open_checkpoint,
    read_architecture,
    tokenizer_folder,
)
from wedlm_jax.config import ModelConfig
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine, runs_apart
from wedlm_jax.engine.settings import longest_text
from wedlm_jax.errors import InputError
from wedlm_jax.grammar.guidance import TokenizerGrammars
from wedlm_jax.model import Transformer
from wedlm_jax.model.quantization import check_quantization
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import Question, read_questions
from wedlm_jax.text import TextCodec

Work: TypeAlias = list[tuple[list[int], SamplingParams]]
"""Prompts, each with its sampling parameters."""

Regimes: TypeAlias = Mapping[str, Sequence[Question]]
"""Questions by regime."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model whose weights all engines share.

    Attributes:
      folder: its checkpoint; None for random weights.
      codec: its tokenizer, if it has one.
      dtype: dtype of weights and cache.
      options: options of every engine: the given ones among `SHARED`.
    """

    model: Transformer
    folder: Path | None
    codec: TextCodec | None
    dtype: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def engine(self, window: int | str, sequences: int, **options: Any) -> Engine:
        """Makes an engine that decodes up to ``sequences`` at once; ``options`` are more fields of
        `EngineConfig`. Unless they set ``lookup``, no drafts are copied from the text."""
        options = {"lookup": 0, **self.options, **options}
        config = EngineConfig(window_size=window, max_batch_size=sequences, **options)
        if self.codec is None:
            return Engine(self.model, config)
        vocabulary = self.config.vocab_size, self.config.eos_token_ids
        grammars = TokenizerGrammars(self.codec.tokenizer, *vocabulary)
        return Engine(self.model, config, known_tokens=self.codec.token_ids, grammars=grammars)

    def ask(self, question: Question) -> list[int]:
        """Returns the token ids of a question."""
        if self.codec is None:
            raise InputError(f"{self.folder or 'random weights'}: no tokenizer for the questions")
        with question.named():
            turns = question.messages or [{"role": "user", "content": question.prompt}]
            return self.codec.encode_chat(turns)


def held_as(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the dtype of the weights, and the engine options among parsed options."""
    shared = {name: options[name] for name in SHARED if name in options}
    check_quantization(shared.get("quantization"))
    return shared.get("dtype") or ("float32" if runs_apart() else "bfloat16"), shared


def load_subject(options: Mapping[str, Any]) -> Subject:
    """Loads the checkpoint that parsed options name, as `wedlm_jax.llm.LLM` loads it."""
    dtype, shared = held_as(options)
    folder = find_model(options.get("model"))
    config = read_architecture(folder)
    with errors_at_flags():
        for window in options.get("window_size", ()):
            longest_text(EngineConfig(window_size=window), config)  # before anything is loaded
    weights = load_checkpoint(
        folder,
        dtype=jnp.dtype(dtype),
        stacked=not runs_apart(),
        quantization=shared.get("quantization"),
    )
    if shared.get("drafter") is not None:
        weights = with_drafter(weights, open_checkpoint(folder), shared["drafter"])
    return Subject(weights, folder, TextCodec.load(tokenizer_folder(folder)), dtype, shared)


def regimes_of(options: Mapping[str, Any]) -> Regimes:
    """Reads the questions that parsed options name."""
    found: dict[str, Sequence[Question]] = {}
    for source in options.get("questions", [EMBEDDED_QUESTIONS]):
        if source == HUMAN_EVAL:
            found["code"] = code_questions()
        else:
            found |= read_questions(Path(source), match=None)
    chosen = options.get("regime", list(found))
    if wrong := [name for name in chosen if name not in found]:
        raise InputError(f"--regime: expected one of {', '.join(found)}, not {wrong[0]!r}")
    return {name: found[name] for name in chosen}


def forget_programs() -> None:
    """Frees compiled programs: on a CPU each takes about a hundred memory maps, of which Linux
    allows a process 65,530."""
    gc.collect()
    jax.clear_caches()
