"""Scores texts by the model's autoregressive log-probabilities: one forward, no decoding.

Tested by tests/wedlm_jax/test_llm.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from wedlm_jax.decode.logits import token_logits
from wedlm_jax.decode.logprobs import Logprobs, TokenLogprob, as_list, token_logprobs
from wedlm_jax.decode.options import Vocabulary
from wedlm_jax.engine.engine import Engine
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import Transformer

SHORTEST = 32
"""Texts are padded to a power of two, at least this many tokens."""
TOKENS_AT_ONCE = 4096
LOGITS_AT_ONCE = 128
"""Maximum positions per text whose logits are in memory at once."""


@partial(jax.jit, static_argnames=("graph", "top", "int8_kv", "vocabulary"))
def score_texts(
    graph: nnx.GraphDef[Transformer],
    parameters: nnx.State,
    tokens: Array,
    *,
    top: int,
    int8_kv: bool,
    vocabulary: Vocabulary,
) -> Logprobs:
    """Returns the log-probability of each of ``tokens [N, T]`` given those before it, ``[N, T]``,
    with ``top`` alternatives each. The first token's value is meaningless; a token outside the
    vocabulary has −inf."""
    model = nnx.merge(graph, parameters)
    count, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    hidden = model(tokens, positions, CausalMask(), int8_kv=int8_kv)
    hidden = jnp.roll(hidden, 1, axis=1)

    def chunks(x: Array) -> Array:
        many = max(length // LOGITS_AT_ONCE, 1)
        return x.reshape(count, many, length // many, *x.shape[2:]).swapaxes(0, 1)

    def score(chunk: tuple[Array, Array]) -> Logprobs:
        predicts, chosen = chunk
        logits = token_logits(model, predicts.reshape(-1, predicts.shape[-1]), vocabulary)
        found = token_logprobs(logits, chosen.reshape(-1), top)
        return jax.tree.map(lambda x: x.reshape(*chosen.shape, *x.shape[1:]), found)

    scored = jax.lax.map(score, (chunks(hidden), chunks(tokens)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(count, length, *x.shape[3:]), scored)


def score(
    engine: Engine,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    top: int,
    turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[list[TokenLogprob]]:
    """Returns the log-probability of each token of the completions, given the tokens before it.

    Args:
      texts: token ids of prompts and completions.
      top: the number of alternatives reported for each token.
      turn: a context manager entered around each use of the engine, for callers that share it.
    """
    by_length: dict[int, list[int]] = {}
    for number, (prompt, completion) in enumerate(texts):
        length = _padded(len(prompt) + len(completion))
        by_length.setdefault(length, []).append(number)
    results: list[list[TokenLogprob]] = [[] for _ in texts]
    for length, numbers in sorted(by_length.items()):
        rows = max(TOKENS_AT_ONCE // length, 1)
        for start in range(0, len(numbers), rows):
            batch = numbers[start : start + rows]
            tokens = np.zeros((rows, length), np.int32)
            for row, number in enumerate(batch):
                whole = [*texts[number][0], *texts[number][1]]
                tokens[row, : len(whole)] = whole
            static: dict[str, Any] = {
                "int8_kv": engine.kv_cache_dtype == "int8",
                "vocabulary": engine.settings.vocabulary,
            }
            with turn():
                found = jax.device_get(engine.run_model(score_texts, tokens, top=top, **static))
            for row, number in enumerate(batch):
                prompt, completion = texts[number]
                every = as_list(found, row, len(prompt) + len(completion), top)
                results[number] = every[len(prompt) :]
    return results


def _padded(length: int) -> int:
    return max(SHORTEST, 1 << (length - 1).bit_length())
