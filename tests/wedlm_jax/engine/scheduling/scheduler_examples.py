"""A scheduler over a made-up device, and requests for it."""

from tests.wedlm_jax.engine.scheduling.fake_device import (
    FakeDevice,
    small_sizes,
)
from wedlm_jax.engine.interface import Finished, Request
from wedlm_jax.engine.scheduling.scheduler import Scheduler
from wedlm_jax.engine.windows.choice import FixedWindows
from wedlm_jax.params import SamplingParams

WINDOW = 3


def new(window=WINDOW, **changes):
    sizes = small_sizes(**changes)
    device = FakeDevice(sizes)
    return Scheduler(device, sizes, FixedWindows(window)), device


def request(number, prompt, *, max_tokens=10, mode="ar", window=None, **options):
    options = {"ignore_eos": True, **options}
    params = SamplingParams(max_tokens=max_tokens, mode=mode, **options)
    return Request(number, prompt, params, window)


def results(events):
    return {event.number: event.result for event in events if isinstance(event, Finished)}
