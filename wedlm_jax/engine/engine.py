"""The engine: takes requests and returns events, on the devices of one process.

It knows token ids only; `wedlm_jax.llm` adds text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from wedlm_jax.completion import Completion
from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.options import Traits, check_options
from wedlm_jax.engine.config import DEFAULT_WINDOW, EngineConfig
from wedlm_jax.engine.costs import CostTable
from wedlm_jax.engine.device import Device
from wedlm_jax.engine.interface import Counters, Event, Failed, Finished, Request
from wedlm_jax.engine.probe import forward_costs
from wedlm_jax.engine.scheduler import Scheduler
from wedlm_jax.engine.settings import plan_engine
from wedlm_jax.engine.windows import AutoWindows, WindowChoice
from wedlm_jax.errors import InputError
from wedlm_jax.grammar.masks import Grammars
from wedlm_jax.host.compiled_cache import ProgramStore
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import with_layers_apart
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import check_fits, local_bytes

AUTO_WINDOW = {"cpu": 16, "gpu": 32, "tpu": 32}
"""The widest window that "auto" chooses, by platform. Room for a wider one slows every forward a
little, and does not pay where forwards are limited by computation rather than by reading weights.
"""


class DecodeClock:
    """Measures time from its creation on; compiling is counted apart."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._compiled, self._started = engine.compile_seconds, time.perf_counter()

    @property
    def compiling(self) -> float:
        """Seconds spent compiling."""
        return self._engine.compile_seconds - self._compiled

    @property
    def seconds(self) -> float:
        """Seconds spent on everything else."""
        return time.perf_counter() - self._started - self.compiling


class Engine:
    """Decodes requests in batches.

    Args:
      model: the model, with parameters in the compute dtype, on one device or on a mesh.
      config: sizes and decoding options.
      mesh: the model's mesh; its axes ``data`` and ``tensor`` are used. None for a single device.
      grammars: compiles the grammars of requests; with None, requests with a grammar are refused.
      known_tokens: the ids that the model's tokenizer knows; others are never chosen. None (no
        tokenizer) allows all but the mask token.
      store: where compiled programs are stored for the next process; None stores nothing.

    Attributes:
      window_size: W of requests that do not set it; 0 decodes autoregressively; "auto" chooses for
        each sequence while it decodes.

    Raises:
      InputError: an option does not fit the model or the device; the message names it.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        mesh: Mesh | None = None,
        grammars: Grammars | None = None,
        known_tokens: Collection[int] | None = None,
        store: ProgramStore | None = None,
    ):
        self.config: ModelConfig = model.config
        if mesh is not None:
            check_fits(mesh, model.config)
        self.mesh, self._grammars, self._store = mesh, grammars, store
        self.window_size, lookup = config.drafting(knows_masks=model.config.knows_masks)
        replicas = 1 if mesh is None else mesh.shape["data"]
        self.windows: WindowChoice
        drafter, widest = model.config.has_drafter, _widest(self.window_size, model)
        if self.window_size == "auto":
            paper = DEFAULT_WINDOW if config.window_size is None else None
            self.windows = AutoWindows(
                widest,
                config.max_batch_size,
                replicas=replicas,
                lookup=lookup,
                drafter=drafter,
                paper=paper,
            )
        else:
            self.windows = WindowChoice(int(self.window_size), lookup, drafter=drafter)
        if runs_apart():
            model = with_layers_apart(model)
        with self._on_mesh():
            self.settings, self.memory = plan_engine(
                model.config,
                config,
                window=widest,
                lookup=lookup,
                known_tokens=known_tokens,
                dtype=model.embed_tokens[...].dtype,
                platform=jax.default_backend(),
                replicas=replicas,
                weights=local_bytes(nnx.state(model)),
            )
            vary = self.window_size == "auto"
            self.device = Device(
                model, self.settings, mesh, windows_vary=vary, grammars=grammars, store=store
            )
        self.scheduler = self._new_scheduler()
        self._floor = Traits()

    # --- requests -----------------------------------------------------------------------

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuses a prompt that cannot be decoded.

        Raises:
          InputError: the prompt is empty, has ids outside the vocabulary or, with its
            ``max_tokens``, exceeds ``max_model_len``; or its options do not fit the model.
        """
        request = Request(-1, prompt, params)
        self.scheduler.check(request)
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
            raise InputError("prompt_token_ids: expected a flat list of integers")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            worst = int(ids.min() if ids.min() < 0 else ids.max())
            raise InputError(
                f"prompt token id {worst} lies outside the vocabulary of {self.config.vocab_size}"
            )
        if params.mode == "paper" and self.config.has_drafter:
            raise InputError(
                "mode: expected verified or ar, not paper: a drafter's masks only propose tokens, "
                "which the model must verify"
            )
        check_options(params, self.settings.stop_ids(params), self.settings.vocabulary)
        self.check_grammar(params)

    def check_grammar(self, params: SamplingParams) -> None:
        """Refuses, with an `InputError`, a grammar that cannot be followed. This compiles the
        grammar, which takes seconds if it is large; `check` then finds it compiled. May be called
        from any thread."""
        if params.grammar is not None:
            if self._grammars is None:
                raise InputError(f"{params.grammar[0]}: needs a tokenizer, but there is none")
            self._grammars.check(params)

    def check_window(self, window: int) -> None:
        """Refuses, with an `InputError`, a request's window that is wider than the engine's."""
        most = self.settings.window
        if 0 <= window <= most:
            return
        if most == 0:
            why = "has no windows" if self.config.knows_masks else "was not trained on masks"
            raise InputError(f"window_size: expected 0, not {window!r}: this model {why}")
        raise InputError(f"window_size: expected 0 to {most}, the engine's widest, not {window!r}")

    def most_tokens(self, request: Request) -> int:
        """Returns the largest ``max_tokens`` that a request's prompt leaves room for."""
        return self.scheduler.most_tokens(request)

    def step(
        self,
        submitted: Sequence[Request] = (),
        aborted: Sequence[int] = (),
        *,
        max_forwards: int | None = None,
        seconds: float | None = None,
        ahead: bool = False,
        program: Traits | None = None,
    ) -> list[Event]:
        """Accepts new requests, runs a burst of forwards, and returns events.

        Args:
          submitted: checked requests, in order of arrival.
          aborted: numbers of requests to abort; they cause no more events.
          max_forwards, seconds, ahead: see `Scheduler.step`.
          program: traits of the program to run, from `compiled_for`; by default the engine chooses
            one, and compiles it if needed.

        Returns:
          new tokens, traced forwards, finished requests and failed requests.
        """
        self.scheduler.submit(submitted)
        self.scheduler.abort(aborted)
        with self._on_mesh():
            if self.scheduler.sequences:
                self._prepare(program)
            return self.scheduler.step(max_forwards=max_forwards, seconds=seconds, ahead=ahead)

    def decode(
        self,
        requests: Sequence[Request],
        told: Callable[[int], None] | None = None,
        max_forwards: int | None = None,
    ) -> list[Completion]:
        """Decodes a batch of requests and returns their completions, in order.

        Args:
          told: called after each burst with the number of requests that have finished.
          max_forwards: maximum forwards of each burst, as in `step`.

        Raises:
          InputError: a request cannot be decoded.
        """
        results: dict[int, Completion] = {}
        events = self.step(requests, max_forwards=max_forwards, ahead=True)
        while True:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    results[event.number] = event.result
            if told is not None:
                told(len(results))
            if not self.has_work:
                return [results[request.number] for request in requests]
            events = self.step(max_forwards=max_forwards, ahead=True)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or its refusal has not been returned yet."""
        return self.scheduler.has_work

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its completion together."""
        return self.settings.max_text

    @property
    def kv_cache_dtype(self) -> str | None:
        """ "int8", or None where keys and values have the parameters' dtype."""
        return "int8" if self.settings.cache_dtype == "int8" else None

    @property
    def counters(self) -> Counters:
        """The scheduler's counters."""
        return self.scheduler.counters

    def traits_of(self, request: Request) -> Traits:
        """Returns the traits that a program must have to decode a request."""
        window = self.windows.widest(request)
        traits = Traits.of(request.params, window, self.windows.lookup(request))
        if self.windows.is_free(request):
            traits = traits.union(Traits(autoregressive=True))
        return traits.union(self._watched()) if request.traced else traits

    def _watched(self) -> Traits:
        """Returns the traits of the program for traced requests. Users who watch one mode usually
        watch the others next, so a single program serves all modes and windows."""
        settings = self.settings
        every = Traits.everything(settings.window, settings.lookup, grammar=False)
        return Traits(
            every.window,
            every.paper,
            every.verified,
            every.lookup,
            every.autoregressive,
            traced=True,
        )

    # --- programs and weights -----------------------------------------------------------

    def expect(self, params: Sequence[SamplingParams]) -> None:
        """Makes later programs cover requests with these options, so that none of them waits for
        another compilation."""
        for one in params:
            self._floor = self._floor.union(self.traits_of(Request(-1, (), one)))

    def compile(self) -> None:
        """Compiles the programs for the expected requests (see `expect`). If windows or drafts are
        chosen by cost, this also measures the cost of forwards."""
        with self._on_mesh():
            self.device.compile(self._traits())
            self._prepare()

    @property
    def everything(self) -> Traits:
        """The traits of a program that decodes any request that this engine accepts."""
        settings, grammar = self.settings, self._grammars is not None
        return Traits.everything(settings.window, settings.lookup, grammar=grammar)

    def traits_with(self, requests: Sequence[Request]) -> Traits:
        """Returns the traits of a program that decodes these requests and all current ones."""
        traits = self._traits()
        for request in requests:
            traits = traits.union(self.traits_of(request))
        return traits

    def compiled_for(self, traits: Traits) -> Traits | None:
        """Returns the traits of the smallest compiled program that serves sequences with
        ``traits``; None if there is none yet."""
        known = [one for one in self.device.programs.traits if one.holds(traits)]
        # The smallest is the one that the most others include.
        return max(known, key=lambda one: sum(o.holds(one) for o in known), default=None)

    def compile_program(self, traits: Traits) -> None:
        """Compiles the programs for sequences with these traits. May be called from any thread,
        while the engine's own thread calls `step`."""
        with self._on_mesh():
            self.device.compile(traits)

    def restart(self) -> None:
        """Forgets all requests and all cached prefixes. Needed after `step` has raised, which
        leaves the scheduler unusable."""
        self.device.forget_sequences()
        self.scheduler = self._new_scheduler()

    def update(self, model: Transformer) -> None:
        """Replaces the weights with others of the same shapes; nothing is recompiled.

        Raises:
          RuntimeError: requests are running or waiting.
        """
        self.scheduler.forget_prefixes()
        self.device.update(with_layers_apart(model) if runs_apart() else model)

    def release(self) -> None:
        """Frees weights and pages, but keeps the compiled programs for a later `update`."""
        self.device.release()
        self.scheduler = self._new_scheduler()

    def run_model(self, function: Any, *arguments: Any, **static: Any) -> Any:
        """Calls a jitted function with the model's graph, its parameters and these arguments."""
        with self._on_mesh():
            return self.device.run_model(function, *arguments, **static)

    @property
    def num_parameters(self) -> int:
        return sum(int(x.size) for x in jax.tree.leaves(self.device.parameters))

    def clock(self) -> DecodeClock:
        """Returns a clock that starts now and counts compiling apart."""
        return DecodeClock(self)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        return self.device.programs.seconds

    @property
    def num_programs(self) -> int:
        """The number of programs compiled so far."""
        return len(self.device.programs)

    def _prepare(self, program: Traits | None = None) -> None:
        """Prepares the device for all current requests. Where windows or drafts are chosen by cost,
        this measures the costs before the first such request is admitted; if other requests are
        already running, costs are learnt while they decode."""
        traits = self._program() if program is None else program
        widest = Traits(self.settings.window, autoregressive=True)
        chosen = isinstance(self.windows, AutoWindows) and traits.holds(widest)
        copies = traits.lookup and not (self.settings.window or self.settings.deterministic)
        if (chosen or copies) and self.windows.costs is None:
            if self.scheduler.is_running:  # measuring would overwrite the pages in use
                sizes = self.settings.program(traits).sizes.tokens
                self.windows.costs = self.device.costs = CostTable(sizes)
            else:
                self.device.prepare(traits)
                folder = None if self._store is None else self._store.folder
                table = forward_costs(self.device, self.mesh, folder)
                self.windows.costs = self.device.costs = table
        self.device.prepare(traits)

    def _traits(self) -> Traits:
        traits = self._floor
        for sequence in self.scheduler.sequences:
            if sequence.traits is None:
                sequence.traits = self.traits_of(sequence.request)
        for one in {sequence.traits for sequence in self.scheduler.sequences}:
            assert one is not None
            traits = traits.union(one)
        return traits

    def _program(self) -> Traits:
        """Chooses the program for all current requests. While any is running, a program that is
        already compiled is preferred. Traits that only earlier requests needed are dropped once no
        request is running."""
        needed, present = self._traits(), self.device.traits
        if needed == present or not self.scheduler.is_running:
            return needed
        return self.compiled_for(needed) or needed.union(present)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.device, self.settings, self.windows)

    @contextlib.contextmanager
    def _on_mesh(self) -> Iterator[None]:
        if self.mesh is None:
            yield
        else:
            with jax.set_mesh(self.mesh):
                yield


def _widest(window_size: int | str, model: Transformer) -> int:
    """Returns the widest window of masks. A drafter's masks are worth little beyond the width that
    they were trained for, so no wider window is chosen for them."""
    if window_size != "auto":
        return int(window_size)
    usual = AUTO_WINDOW.get(jax.default_backend(), AUTO_WINDOW["gpu"])
    trained = model.lora.window_size if model.lora is not None and model.config.has_drafter else 0
    return max(min(usual, trained or usual), 2)


def runs_apart() -> bool:
    """Returns whether layers run faster unstacked: on a CPU, XLA copies each out of the stack."""
    return jax.default_backend() == "cpu"
