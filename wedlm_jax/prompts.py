"""Prompts as callers give them: one or many, texts or token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

Prompt = str | Sequence[int]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, given one or several; NumPy arrays of integers count as lists."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(
            "prompts: expected a text, a list of token ids, or a list of those, "
            f"not {type(prompts).__name__}"
        )
    if len(prompts) and all(is_integer(item) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def for_each(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """The sampling parameters of each prompt, given one for all or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, list | tuple) or not all(
        isinstance(one, SamplingParams) for one in params
    ):
        raise InputError("params: expected SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise InputError(f"{len(prompts)} prompts came with {len(params)} sampling parameters")
    return params


def as_token_ids(prompt: Sequence[int]) -> Sequence[int]:
    """``prompt``, if it is a flat list of integers; of which range, the engine knows."""
    ids: Any = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    if (
        not isinstance(ids, Sequence)
        or isinstance(ids, str | bytes)
        or not all(is_integer(token) for token in ids)
    ):
        raise InputError("expected a text or a flat list of token ids")
    return ids


def is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@contextlib.contextmanager
def numbered(what: str, number: int, count: int) -> Iterator[None]:
    """Puts the number of the prompt, where there are several, before what is wrong with it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what} {number}: {error}" if count > 1 else str(error)) from None
