"""A decoder that decodes nothing: what it answers depends on the prompt alone, in no time."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from wedlm_jax.completion import Completion
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.errors import InputError
from wedlm_jax.generation import Prepared, Windowed
from wedlm_jax.host.progress import Progress
from wedlm_jax.llm import LLM
from wedlm_jax.params import sample_seed


def quick_completion(record: Prepared | Windowed) -> Completion:
    token_ids, params, *window = record
    if params.n > 1:
        seeds = [sample_seed(params.seed, sample) for sample in range(params.n)]
        each = [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]
        first, *further = [quick_completion((token_ids, one, *window)) for one in each]
        return dataclasses.replace(first, further=tuple(further))
    digest = hashlib.sha256(repr((list(token_ids), params, *window)).encode()).digest()
    ids = list(digest)[: min(params.max_tokens, 1 + digest[0] % 32)]
    logprobs = None
    if params.logprobs is not None:
        # The last alternative is an impossible one.
        values = [-i / 3 for i in range(params.logprobs - 1)] + [-math.inf]
        top = list(enumerate(values[: params.logprobs]))
        logprobs = [TokenLogprob(-token / 7, top) for token in ids]
    text = f"naïve {ids[0]}\u2028\n"
    return Completion(text, ids, "length", 1 + len(ids) // 2, 3 * len(ids), logprobs)


def quick_run(
    self: LLM,
    records: Iterable[Prepared | Windowed],
    on_progress: Callable[[Progress], None] | None = None,
    *,
    stopping: Callable[[], bool] | None = None,
    on_failure: Callable[[int, InputError], None] | None = None,
) -> Iterator[list[tuple[int, Completion]]]:
    """As `LLM.run`: prompts are read a few at a time, and come back in another order."""
    numbered, running, finished, tokens = enumerate(records), [], 0, 0
    while True:
        running += itertools.islice(numbered, self.options.max_batch_size - len(running))
        if not running:
            return
        done = [(i, quick_completion(record)) for i, record in running[1::2] or running]
        running = running[0::2] if len(running) > 1 else []
        finished, tokens = finished + len(done), tokens + sum(len(c.token_ids) for _, c in done)
        if on_progress is not None:
            on_progress(Progress(finished, None, tokens, tokens, tokens))
        yield done[::-1]
