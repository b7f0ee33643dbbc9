"""Token-level decoding for tests: cases in, committed tokens, counts and traces out."""

from __future__ import annotations

import dataclasses
import functools

from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    prompt: list[int]
    window: int
    max_tokens: int
    entropy_threshold: float | None = 0.4
    position_penalty: float = 0.02
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)

    def sampling(self):
        return SamplingParams(
            mode="paper",
            max_tokens=self.max_tokens,
            entropy_threshold=self.entropy_threshold,
            position_penalty=self.position_penalty,
            stop_token_ids=tuple(self.stop_token_ids),
        )

    def request(self, number):
        return Request(number, self.prompt, self.sampling(), self.window)


@functools.lru_cache(maxsize=32)
def _engine(model, window, sequences, refill, chunk_tokens=32):
    """Kept, because an engine keeps its compiled programs: cases of equal shapes share them."""
    return Engine(
        model,
        EngineConfig(
            window_size=window,
            lookup=0,
            max_batch_size=sequences,
            refill=refill,
            chunk_tokens=chunk_tokens,
        ),
    )


def decode_cases(model, cases, refill="streaming"):
    """All cases as one batch, each sequence with its own window."""
    engine = _engine(model, max(case.window for case in cases), len(cases), refill)
    results = engine.decode([case.request(i) for i, case in enumerate(cases)])
    return [dataclasses.asdict(result) for result in results]


def decode_trace(model, case):
    """Forward by forward: the window in physical order and the run that the forward commits."""
    # The prompt in one chunk: each forward then runs the window.
    engine = _engine(model, case.window, 1, "streaming", chunk_tokens=128)
    mask = model.config.require_mask_token_id()
    trace = []
    engine.step([case.request(0)], max_forwards=0)
    while engine.has_work:
        view = engine.window(0)
        assert view is not None
        run = view.tokens.index(None) if None in view.tokens else len(view.tokens)
        trace.append(
            {
                "physical_tokens": [
                    mask if view.tokens[s] is None else view.tokens[s] for s in view.order
                ],
                "logical_positions": [view.start + s for s in view.order],
                "committed": view.tokens[:run],
            }
        )
        engine.step(max_forwards=1)
    return trace
