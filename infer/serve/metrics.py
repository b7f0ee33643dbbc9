"""Metrics for Prometheus: counts and times of calls, and the state of the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infer.serve.served_engine import ServedEngine
from wedlm_jax.completion import Completion
from wedlm_jax.engine.interface import TokenDelta

FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
BETWEEN_TOKENS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Upper bounds of histograms, in seconds."""


class Metrics(Collector):
    """Counts what calls do, and reads the engine's state when Prometheus asks."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"wedlm_{name}", what, labels, registry=self._registry)

        def histogram(name: str, what: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"wedlm_{name}", what, buckets=bounds, registry=self._registry)

        self.calls = counter("calls", "Answered calls of the API", "path", "status")
        self.finished = counter("sequences_finished", "Finished completions", "reason")
        self.aborted = counter("sequences_aborted", "Completions that nobody waited for")
        self.errors = counter("errors", "Calls that ended with an exception")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.completion_tokens = counter("completion_tokens", "Tokens of completions")
        self.sequence_forwards = counter(
            "sequence_forwards", "Decode forwards, counted for each sequence in them"
        )
        self.token_instances = counter("token_instances", "Window slots that these forwards ran")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From the call to a sequence's first token", FIRST_TOKEN
        )
        self.between_tokens = histogram(
            "inter_token_seconds",
            "From a sequence's tokens to its next ones, divided by how many came",
            BETWEEN_TOKENS,
        )
        self.whole = histogram("sequence_seconds", "From the call to the last token", WHOLE)

    def text(self) -> bytes:
        """Returns all metrics, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the engine."""
        served, counters = self._engine, self._engine.counters
        device = served.engine.device
        waiting = counters.waiting + served.num_held
        yield _gauge("sequences_running", "Sequences that decode", counters.running)
        yield _gauge("sequences_waiting", "Sequences that wait in the queue", waiting)
        pages = GaugeMetricFamily(
            "wedlm_pages", "Pages of the cache: of running sequences, prefixes, free", labels=["of"]
        )
        pages.add_metric(["running"], counters.pages_used)
        pages.add_metric(["prefixes"], counters.pages_cached)
        pages.add_metric(["free"], counters.pages_free)
        yield pages
        yield _gauge("engine_up", "1 while the engine can decode", not served.is_broken)
        yield _counter("forwards", "Forwards of the device", int(device.counters[0]))
        masks, masks_accepted, lookup, lookup_accepted = device.drafts
        for name, what, *values in (
            ("drafts", "Drafts that were checked, by source", masks, lookup),
            ("drafts_accepted", "Drafts that were committed", masks_accepted, lookup_accepted),
        ):
            family = CounterMetricFamily(f"wedlm_{name}", what, labels=["of"])
            for source, count in zip(("masks", "lookup"), values, strict=True):
                family.add_metric([source], count)
            yield family
        yield _counter("prefix_hit_tokens", "Tokens found in the cache", counters.prefix_tokens)
        yield _counter("prefix_miss_tokens", "Tokens of prompts to compute", counters.prompt_tokens)
        yield _counter("preemptions", "Sequences put back for lack of pages", counters.preemptions)
        yield _counter("compile_seconds", "Time spent compiling", served.engine.compile_seconds)
        yield _counter("engine_restarts", "Restarts after an exception in a step", served.restarts)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"wedlm_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"wedlm_{name}", what, value=value)


class SequenceTimes:
    """Measures when the tokens of a sequence come, counted from its call."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._begun = self._last = time.perf_counter()
        self._forwards = self._instances = 0

    def note(self, delta: TokenDelta) -> None:
        """Records new tokens."""
        metrics, now = self._metrics, time.perf_counter()
        count = len(delta.token_ids)
        if delta.num_output == count:
            metrics.first_token.observe(now - self._begun)
        else:
            metrics.between_tokens.observe((now - self._last) / count)
        self._last = now
        metrics.completion_tokens.inc(count)
        metrics.sequence_forwards.inc(delta.num_forwards - self._forwards)
        metrics.token_instances.inc(delta.num_token_instances - self._instances)
        self._forwards, self._instances = delta.num_forwards, delta.num_token_instances

    def end(self, completion: Completion) -> None:
        """Records the end of the sequence."""
        self._metrics.whole.observe(time.perf_counter() - self._begun)
        self._metrics.finished.labels(str(completion.finish_reason)).inc()
