"""A scheduler over a made-up device, and requests for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.wedlm_jax.engine.scheduling.fake_device import (
    FakeDevice,
    small_sizes,
)
from wedlm_jax.engine.interface import Finished, Request
from wedlm_jax.engine.scheduling.scheduler import Scheduler
from wedlm_jax.engine.windows.choice import FixedWindows
from wedlm_jax.params import SamplingParams

WINDOW = 3


def new(window: int = WINDOW, **changes: int) -> tuple[Scheduler, FakeDevice]:
    sizes = small_sizes(**changes)
    device = FakeDevice(sizes)
    return Scheduler(device, sizes, FixedWindows(window)), device


def request(
    number: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 10,
    mode: str = "ar",
    window: int | None = None,
    **options: Any,
) -> Request:
    options = {"ignore_eos": True, **options}
    params = SamplingParams(max_tokens=max_tokens, mode=mode, **options)
    return Request(number, prompt, params, window)


def results(events: Sequence[Any]) -> dict[int, Any]:
    return {event.number: event.result for event in events if isinstance(event, Finished)}
