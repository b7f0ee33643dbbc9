"""Compares the speed of drafts from each origin with AR's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

from infer.bench.rival import RIVAL, RIVAL_LOOKUP, Rival
from infer.bench.subject import Subject, forget_programs
from infer.bench.windows import decode, decode_elsewhere, speed_of
from infer.bench.work import Regimes, questions_of
from infer.speed import Speed
from wedlm_jax.benchmark import Bar, by_turns
from wedlm_jax.engine.config import MOST_LOOKUP

NAMES = {"none": "AR", "masks": "masks", "lookup": "lookup, always", "auto": "auto"}
"""What the values of ``SamplingParams.draft`` are called in tables."""


def compare_drafts(
    subject: Subject,
    regimes: Regimes,
    *,
    batch_sizes: Sequence[int],
    drafts: Sequence[str],
    prompts: int | None,
    passes: int,
    rival: Rival | None,
    bar: Bar,
) -> Iterator[list[Speed]]:
    """Measures AR and every origin of drafts; yields the speeds of one regime at one number of
    sequences at a time. A model that was not trained on masks has none that draft.

    Args:
      drafts: values of ``SamplingParams.draft``.
      prompts: of a regime, at most; by default twice as many as sequences, at least 24.
      rival: what to compare with, if anything; its lookup takes one sequence at a time.
    """
    masks = subject.config.knows_masks
    drafts = [one for one in dict.fromkeys(["none", *drafts]) if masks or one != "masks"]
    for sequences in batch_sizes:
        plain = subject.engine(0, sequences)
        drafting = subject.engine("auto" if masks else 0, sequences, lookup=MOST_LOOKUP)
        for regime, questions in regimes.items():
            count = prompts or max(2 * sequences, 24)
            asked = questions_of(subject, questions, count, "verified")
            runs = {
                NAMES[draft]: partial(
                    decode,
                    subject,
                    plain if draft == "none" else drafting,
                    [(ids, dataclasses.replace(params, draft=draft)) for ids, params in asked],
                )
                for draft in drafts
            }
            if rival is not None:
                texts = [ids for ids, _ in asked]
                runs[RIVAL] = partial(decode_elsewhere, rival, texts, sequences)
                if sequences == 1:
                    runs[RIVAL_LOOKUP] = partial(decode_elsewhere, rival, texts, 1, lookup=True)
            made = by_turns(runs, passes, bar, f"{sequences} sequences, {regime}")
            yield [speed_of(name, regime, sequences, len(asked), made[name]) for name in runs]
        del plain, drafting
        forget_programs()
