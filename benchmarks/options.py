"""What benchmarks share: command-line options, models with random weights, and prompts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, islice
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from infer.bench.command import OPTIONS, add_subject_options
from infer.bench.subject import Regimes, Subject, Work, held_as
from infer.flags import flag
from wedlm_jax.config import ModelConfig, RopeConfig
from wedlm_jax.engine.engine import runs_apart
from wedlm_jax.host.command_line import CommandParser, at_least_1
from wedlm_jax.model import Transformer
from wedlm_jax.model.quantization import quantize_weights
from wedlm_jax.params import SamplingParams

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
_QWEN3 = dataclasses.replace(
    _EMBEDDED,
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    rope=RopeConfig(1e6),
    max_position_embeddings=40_960,
    mask_token_id=151_665,
)
SHAPES = {"embedded": _EMBEDDED, "qwen3-0.6b": _QWEN3}
"""Shapes of the embedded model, with a long context, and of a published one."""

MAX_TOKENS = 160
"""Longer than any answer of the corpus."""


def new_parser(name: str, description: str | None, *, passes: int | None = 3) -> CommandParser:
    """Returns the parser of a benchmark, without ``--passes`` if its default ``passes`` is None.
    Options without a default are absent unless given."""
    parser = CommandParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--output", default=None, metavar="FILE", help="also write all figures as JSON"
    )
    if passes is not None:
        add_numbers(parser, "--passes", passes, "timed passes, after one that compiles")
    return parser


def add_numbers(
    parser: argparse.ArgumentParser, flag: str, default: int | Sequence[int], meaning: str
) -> None:
    """Adds an option for a count, or for several if the default is a sequence."""
    several = {} if isinstance(default, int) else {"nargs": "+"}
    values = [default] if isinstance(default, int) else default
    parser.add_argument(
        flag,
        type=at_least_1,
        default=default,
        metavar="N",
        help=f"{meaning} [{' '.join(map(str, values))}]",
        **several,  # type: ignore[arg-type]
    )


def add_decoding(
    parser: argparse.ArgumentParser, *, batch_size: Sequence[int], mode: Sequence[str]
) -> None:
    """Adds options for the checkpoint, questions, batch sizes, windows and modes."""
    add_subject_options(parser)
    for name, default in (("batch_size", batch_size), ("window_size", [0, 16]), ("mode", mode)):
        meaning, settings = OPTIONS[name]
        shown = f"{meaning} [{' '.join(map(str, default))}]"
        parser.add_argument(flag(name), default=default, help=shown, **settings)


def random_subject(shape: str, options: Mapping[str, Any]) -> Subject:
    """Makes random weights, stored as the parsed options say: a forward's cost does not depend on
    its output."""
    dtype, engine_options = held_as(options)
    model = Transformer(
        SHAPES[shape], rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype), stacked=not runs_apart()
    )
    if engine_options.get("quantization") is not None:
        model = quantize_weights(model)
    return Subject(model, None, None, dtype, engine_options)


def random_prompts(config: ModelConfig, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts of random tokens, each starting with a different one."""
    ids = np.random.default_rng(seed).integers(4, config.vocab_size, (count, length))
    ids[:, 0] = 4 + np.arange(count) % (config.vocab_size - 4)
    prompts: list[list[int]] = ids.tolist()
    return prompts


def long_answers(subject: Subject, regimes: Regimes, count: int, mode: str) -> Work:
    """Returns the questions with the longest answers, regimes in turns, answered to their ends:
    what a model generates after the end is not text, and would not cost what text costs."""
    longest = [sorted(some, key=lambda one: -len(one.answer)) for some in regimes.values()]
    turns = chain.from_iterable(zip(*map(cycle, longest), strict=True))
    params = SamplingParams(mode=mode, max_tokens=MAX_TOKENS)
    return [(subject.ask(one), params) for one in islice(turns, count)]
