"""Token-level decoding for tests: cases in, committed tokens, counts and traces out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from wedlm_jax.engine import Engine
from wedlm_jax.model import Transformer
from wedlm_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    prompt: list[int]
    window: int
    max_tokens: int
    entropy_threshold: float | None = 0.4
    position_penalty: float = 0.02
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            entropy_threshold=self.entropy_threshold,
            position_penalty=self.position_penalty,
            stop_token_ids=tuple(self.stop_token_ids),
        )


@functools.lru_cache(maxsize=32)
def _engine(model: Transformer, window: int, refill: str) -> Engine:
    """Kept, because an engine keeps its compiled programs: cases of equal shapes share them."""
    return Engine(model, window_size=window, refill=refill)


def decode_cases(
    model: Transformer, cases: list[DecodeCase], refill: str = "streaming"
) -> list[dict[str, Any]]:
    """All cases as one batch, each row with its own window."""
    engine = _engine(model, max(case.window for case in cases), refill)
    batch = engine.start(
        [case.prompt for case in cases],
        [case.sampling() for case in cases],
        windows=[case.window for case in cases],
    )
    batch.advance()
    return [dataclasses.asdict(result) for result in batch.results()]


def decode_trace(model: Transformer, case: DecodeCase) -> list[dict[str, Any]]:
    """Forward by forward: the window in physical order and the run that the forward commits."""
    engine = _engine(model, case.window, "streaming")
    batch = engine.start([case.prompt], [case.sampling()])
    mask = model.config.require_mask_token_id()
    trace, done = [], False
    while not done:
        view = batch.window(0)
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
        done = batch.advance(1)
    return trace
