"""Several samples of one prompt: each a row of its own, gathered when the last is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from wedlm_jax.sampling import SamplingParams

Prompt = TypeVar("Prompt")
Result = TypeVar("Result")


def sample_seed(seed: int, sample: int) -> int:
    """The seed of a prompt's sample, counted from 0: the first has the prompt's own."""
    if sample == 0:
        return seed
    # Neighbouring seeds are other prompts': a sample's must not be one of them.
    return int(np.random.SeedSequence([seed, sample]).generate_state(1)[0])


class Samples(Generic[Prompt, Result]):
    """Prompts as rows of one sample each, numbered from 0, and their results as prompts'.

    Args:
      prompts: with their parameters.
    """

    def __init__(self, prompts: Iterable[tuple[Prompt, SamplingParams]]):
        self._prompts = prompts
        self._owners: dict[int, tuple[int, int]] = {}
        self._params: dict[int, SamplingParams] = {}
        self._gathered: dict[int, dict[int, Result]] = {}

    def rows(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        """Read as far as they are needed."""
        row = 0
        for number, (prompt, params) in enumerate(self._prompts):
            self._params[number] = params
            self._gathered[number] = {}
            for sample in range(params.n):
                self._owners[row] = number, sample
                row += 1
                # Prompts with one sample keep their parameters, and whoever knows them.
                yield (
                    prompt,
                    params
                    if params.n == 1
                    else dataclasses.replace(params, n=1, seed=sample_seed(params.seed, sample)),
                )

    def params_of(self, row: int) -> SamplingParams:
        """Of the prompt whose sample the row is; for as long as it is not finished."""
        return self._params[self._owners[row][0]]

    def finish(self, row: int, result: Result) -> tuple[int, Sequence[Result]] | None:
        """Takes a row's result; the prompt's number and all its samples, if this was the last."""
        number, sample = self._owners.pop(row)
        gathered = self._gathered[number]
        gathered[sample] = result
        if len(gathered) < self._params[number].n:
            return None
        del self._gathered[number], self._params[number]
        return number, [gathered[sample] for sample in sorted(gathered)]
