"""The engine: requests in, events out, on the devices of one process.

It knows token ids only; text is `wedlm_jax.llm`'s.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from wedlm_jax.attention.ragged_pages import check_ragged_backend
from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.loop import REFILLS
from wedlm_jax.decode.options import Traits, check_options
from wedlm_jax.decode.state import num_slots
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.counters import Counters
from wedlm_jax.engine.device import Device
from wedlm_jax.engine.events import Event, Failed, Finished
from wedlm_jax.engine.results import SequenceResult, WindowView
from wedlm_jax.engine.memory import MemoryPlan, parameter_bytes, plan_pages
from wedlm_jax.engine.scheduler import Scheduler, SchedulerSizes
from wedlm_jax.engine.settings import EngineSettings
from wedlm_jax.engine.windows import FixedWindows, WindowChoice
from wedlm_jax.errors import InputError
from wedlm_jax.layer_layout import with_layers_apart
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams

DEFAULT_WINDOW = 16
AUTO_WINDOW = 32
"""The widest window that "auto" chooses."""
PAGE_SIZES = {"cpu": 16, "gpu": 32, "tpu": 128}
CHUNK_TOKENS = {"cpu": 256, "gpu": 512, "tpu": 1024}
"""Prompt tokens that a forward computes beside the windows: as many as cost it little."""
TOKENS_AT_ONCE = {"cpu": 512, "gpu": 1024, "tpu": 1024}
"""Tokens that pass the layers at once: more of them would not cost less each."""
EMITTED = 256
"""Tokens that a sequence may commit before the host looks."""


class Engine:
    """Decodes requests together.

    Args:
      model: parameters in the compute dtype, on one device or on a mesh.
      window_size: W of requests that name none; 0 decodes autoregressively; "auto" chooses for
        each sequence while it decodes.
      max_batch_size: sequences that decode together, at most, on each replica of the mesh.
      refill: "streaming", or "blockwise" for the paper's baseline.
      max_model_len: prompt and completion tokens together, at most.
      attention: of spans, a name in `wedlm_jax.attention.RAGGED_BACKENDS`; by default the one
        for this platform.
      kv_cache_dtype: None for the parameters' dtype, or "int8".
      deterministic: compute every forward in one shape, so that a sequence's tokens depend on
        nothing but itself, whatever the dtype.
      page_size, num_pages: of the cache; by default for this platform, and as many as fit.
      mesh: where the model lies; ``data`` and ``tensor`` count.

    Raises:
      InputError: naming the option.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        window_size: int | str = DEFAULT_WINDOW,
        max_batch_size: int = 16,
        refill: str = "streaming",
        max_model_len: int | None = None,
        attention: str | None = None,
        kv_cache_dtype: str | None = None,
        deterministic: bool = False,
        page_size: int | None = None,
        num_pages: int | None = None,
        mesh: Mesh | None = None,
    ):
        platform = jax.default_backend()
        self.config: ModelConfig = model.config
        self.mesh = mesh
        self.window_size = window_size
        self.windows = _window_choice(window_size)
        widest = AUTO_WINDOW if window_size == "auto" else int(window_size)
        if widest:
            model.config.require_mask_token_id()
        if refill not in REFILLS:
            raise InputError(f"refill: expected one of {', '.join(REFILLS)}, not {refill!r}")
        if kv_cache_dtype not in (None, "int8"):
            raise InputError(f"kv_cache_dtype: expected None or 'int8', not {kv_cache_dtype!r}")
        attention = check_ragged_backend(
            attention, platform, model.config, int8=kv_cache_dtype is not None
        )
        self.max_model_len = _checked_length(max_model_len, model.config)
        self.kv_cache_dtype = kv_cache_dtype
        if platform == "cpu":
            model = with_layers_apart(model)
        size = page_size or PAGE_SIZES.get(platform, PAGE_SIZES["gpu"])
        longest = self.max_model_len + num_slots(widest) + 1
        max_pages = math.ceil(longest / size)
        dtype = kv_cache_dtype or model.embed_tokens[...].dtype
        with self._on_mesh():
            self.memory = _plan(model, dtype, size, max_pages, max_batch_size, num_pages)
            self.settings = EngineSettings(
                replicas=1 if mesh is None else mesh.shape["data"],
                sequences_each=max_batch_size,
                window=widest,
                max_text=self.max_model_len,
                emitted=max(EMITTED, 2 * num_slots(widest)),
                page_size=size,
                num_pages=self.memory.num_pages,
                max_pages=max_pages,
                cache_dtype=dtype,
                chunk_tokens=CHUNK_TOKENS.get(platform, CHUNK_TOKENS["gpu"]),
                tokens_at_once=TOKENS_AT_ONCE.get(platform, TOKENS_AT_ONCE["gpu"]),
                attention=attention,
                refill=refill,
                deterministic=deterministic,
                eos_token_ids=tuple(model.config.eos_token_ids),
            )
            self.device = Device(model, self.settings)
        self.scheduler = self._new_scheduler()
        self._floor = Traits()
        self._requests: dict[int, Traits] = {}

    # --- requests -----------------------------------------------------------------------

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuses a prompt that cannot be decoded.

        Raises:
          InputError: it is empty, has ids outside the vocabulary, does not fit with its
            ``max_tokens`` into ``max_model_len``, or its options do not fit the model.
        """
        if not len(prompt):
            raise InputError("the prompt has no tokens; at least one is needed")
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
            raise InputError("prompt_token_ids: expected a flat list of integers")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            worst = int(ids.min() if ids.min() < 0 else ids.max())
            raise InputError(
                f"prompt token id {worst} lies outside the vocabulary of {self.config.vocab_size}"
            )
        self.scheduler.check(Request(-1, prompt, params))
        check_options(params, self.settings.stop_ids(params), self.config.vocab_size)

    def step(
        self,
        submitted: Sequence[Request] = (),
        aborted: Sequence[int] = (),
        *,
        max_forwards: int | None = None,
    ) -> list[Event]:
        """Takes requests in, decodes a burst of forwards, and tells what happened.

        Args:
          submitted: checked requests, in the order in which they came.
          aborted: numbers of requests that nobody wants any more.
          max_forwards: of the burst, for those who cannot wait; by default as many as serve all.
            With 0 requests are let in and nothing is run.

        Returns:
          new tokens, finished and failed requests, by their numbers.
        """
        for request in submitted:
            self._requests[request.number] = self.traits_of(request)
        for number in aborted:
            self._requests.pop(number, None)
        with self._on_mesh():
            if self._requests:
                self.device.prepare(self._traits())
            events = self.scheduler.step(submitted, aborted, max_forwards=max_forwards)
        for event in events:
            if isinstance(event, Finished | Failed):
                self._requests.pop(event.number, None)
        return events

    def decode(self, requests: Sequence[Request]) -> list[SequenceResult]:
        """Decodes requests that all come at once, and waits for the last.

        Raises:
          InputError: one cannot be decoded.
        """
        results: dict[int, SequenceResult] = {}
        events = self.step(requests)
        while True:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    results[event.number] = event.result
            if not self.has_work:
                return [results[request.number] for request in requests]
            events = self.step()

    def window(self, number: int) -> WindowView | None:
        """Returns the window of a request as its next forward will see it; None while it waits."""
        index = self.scheduler.index_of(number)
        return None if index is None else self.device.window(index)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    @property
    def counters(self) -> Counters:
        """Where the scheduler stands."""
        return self.scheduler.counters

    def traits_of(self, request: Request) -> Traits:
        """What a program needs to decode a request."""
        stops = self.settings.stop_ids(request.params)
        window = self.windows.widest(request)
        traits = Traits.of(request.params, window, len(stops))
        if self.window_size == "auto" and window:
            traits = traits.union(Traits(autoregressive=True))
        return traits

    # --- programs and weights -----------------------------------------------------------

    def expect(self, params: Sequence[SamplingParams]) -> None:
        """Prepares for requests with these options, so that none compiles when it comes."""
        for one in params:
            self._floor = self._floor.union(self.traits_of(Request(-1, (), one)))

    def compile(self, on_step: Callable[[int, int], None] | None = None) -> None:
        """Compiles what requests with the expected options need, and runs nothing.

        Args:
          on_step: told after each program how many are compiled, of how many.
        """
        with self._on_mesh():
            self.device.prepare(self._traits())
            for done, total in self.device.compile():
                if on_step is not None:
                    on_step(done, total)

    def update(self, model: Transformer) -> None:
        """Decodes with other weights of the same shapes from now on; nothing is compiled anew.

        Raises:
          RuntimeError: sequences are under way.
        """
        self.scheduler.forget_prefixes()
        on_cpu = jax.default_backend() == "cpu"
        self.device.update(with_layers_apart(model) if on_cpu else model)

    def release(self) -> None:
        """Lets weights and pages go; the programs are kept for those that `update` gives next."""
        self.device.release()
        self.scheduler = self._new_scheduler()

    def run_model(self, function: Any, *arguments: Any, **static: Any) -> Any:
        """Calls a jitted function of the model's graph, its parameters and these arguments."""
        with self._on_mesh():
            return self.device.run_model(function, *arguments, **static)

    @property
    def num_parameters(self) -> int:
        return sum(int(x.size) for x in jax.tree.leaves(self.device.parameters))

    @property
    def compile_seconds(self) -> float:
        """Spent on compiling so far."""
        return self.device.compile_seconds

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return self.device.num_programs

    def _traits(self) -> Traits:
        traits = self._floor
        for one in set(self._requests.values()):
            traits = traits.union(one)
        # Sequences that run keep the program they have, if it holds the others; a narrower one for
        # what is left would be one more to compile.
        return traits.union(self.device.traits) if self.scheduler.has_work else traits

    def _new_scheduler(self) -> Scheduler:
        settings = self.settings
        sizes = SchedulerSizes(
            num_replicas=settings.replicas,
            num_sequences=settings.sequences_each,
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            max_pages=settings.max_pages,
            chunk_tokens=settings.chunk_tokens,
            max_model_len=self.max_model_len,
        )
        return Scheduler(self.device, sizes, self.windows)

    @contextlib.contextmanager
    def _on_mesh(self) -> Iterator[None]:
        if self.mesh is None:
            yield
        else:
            with jax.set_mesh(self.mesh):
                yield


def _window_choice(window_size: int | str) -> WindowChoice:
    if window_size == "auto":
        from wedlm_jax.engine.auto_windows import AutoWindows

        return AutoWindows(AUTO_WINDOW)
    if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 0:
        raise InputError(
            f"window_size: expected an integer of at least 0 or 'auto', not {window_size!r}"
        )
    return FixedWindows(window_size)


def _checked_length(length: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    length = limit if length is None else length
    if not 1 <= length <= limit:
        raise InputError(
            f"max_model_len: expected 1 to {limit}, the model's context, not {length!r}"
        )
    return length


def _plan(
    model: Transformer,
    dtype: Any,
    page_size: int,
    max_pages: int,
    sequences: int,
    num_pages: int | None,
) -> MemoryPlan:
    weights = parameter_bytes(jax.tree.leaves(model))
    plan = plan_pages(
        model.config,
        weights=weights,
        working=0,
        page_size=page_size,
        pages_per_sequence=max_pages,
        sequences=sequences,
        dtype=dtype,
    )
    if num_pages is None:
        return plan
    if num_pages < 2:
        raise InputError(f"num_pages: expected at least 2, not {num_pages!r}")
    return plan_pages_given(plan, num_pages)


def plan_pages_given(plan: MemoryPlan, num_pages: int) -> MemoryPlan:
    """A plan with so many pages instead."""
    each = plan.pages // plan.num_pages
    return MemoryPlan(
        plan.weights, each * num_pages, plan.working, plan.limit, num_pages, plan.page_size
    )
