"""Batches of prompts through the compiled decoder.

The engine turns prompts of any length into a few static shapes, prefills them, and runs
the decode loop in slices, so that a caller can report progress or stream between them.
It knows token ids only; text is `wedlm_jax.llm`'s.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from wedlm_jax.cache import allocate
from wedlm_jax.decoding import (
    REFILLS,
    DecodeState,
    decode,
    initial_state,
    num_slots,
    physical_order,
    prefill,
)
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.sampling import NO_STOP, RowParams, SamplingParams
from wedlm_jax.sharding import shards

SMALLEST_PROMPT_BUCKET = 32
SMALLEST_OUTPUT_BUCKET = 32
UNTIL_DONE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class RowResult:
    """What a row has committed so far.

    Attributes:
      token_ids: completion tokens, a stop token included.
      finish_reason: "stop", "length", or None while it is decoding.
      num_forwards: decode forwards this row took part in; prefill is not counted.
      num_token_instances: active window slots over those forwards.
      forwards_at, instances_at: those two counts when each token was committed.
    """

    token_ids: list[int]
    finish_reason: str | None
    num_forwards: int
    num_token_instances: int
    forwards_at: list[int]
    instances_at: list[int]

    def cut(self, length: int) -> RowResult:
        """The row as if it had stopped at its first ``length`` (at least 1) tokens."""
        return RowResult(
            self.token_ids[:length],
            "stop",
            self.forwards_at[length - 1],
            self.instances_at[length - 1],
            self.forwards_at[:length],
            self.instances_at[:length],
        )


@dataclasses.dataclass(frozen=True)
class WindowView:
    """The open window of one row as the next forward will see it, in logical order.

    Attributes:
      start: logical position of the first slot.
      tokens: the token of each active slot, None where it is masked.
      order: the slots in physical order.
    """

    start: int
    tokens: list[int | None]
    order: list[int]


def bucket(size: int, smallest: int) -> int:
    """The smallest power of two times ``smallest`` that holds ``size``."""
    while smallest < size:
        smallest *= 2
    return smallest


def cache_bucket(size: int) -> int:
    """The cache rows for ``size``: the next power of two or one and a half times one, from 64.

    A third of it stands idle at most; in return prompts of all lengths share few programs.
    """
    power = bucket(size, 64)
    return power * 3 // 4 if power >= 128 and size <= power * 3 // 4 else power


class Engine:
    """Compiled decoding of one model at one window width.

    Args:
      model: parameters in the compute dtype.
      window_size: W; 0 decodes autoregressively.
      refill: "streaming", or "blockwise" for the paper's baseline.
      max_model_len: prompt and completion tokens together, at most.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        window_size: int = 16,
        refill: str = "streaming",
        max_model_len: int | None = None,
    ):
        if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 0:
            raise InputError(f"window_size: expected an integer of at least 0, not {window_size!r}")
        if refill not in REFILLS:
            raise InputError(f"refill: expected one of {', '.join(REFILLS)}, not {refill!r}")
        if window_size > 0:
            model.config.require_mask_token_id()
        limit = model.config.max_position_embeddings
        self.max_model_len = limit if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= limit:
            raise InputError(
                f"max_model_len: expected 1 to {limit}, the model's context, not {max_model_len!r}"
            )
        self.config, self.window_size, self.refill = model.config, window_size, refill
        self._graph, self._parameters = nnx.split(model)
        self._programs: dict[Any, Any] = {}
        self.compile_seconds = 0.0

    def update(self, model: Transformer) -> None:
        """Decodes with other weights of the same shapes from now on; nothing is compiled anew."""
        self._parameters = nnx.state(model)

    @property
    def num_parameters(self) -> int:
        return sum(int(x.size) for x in jax.tree.leaves(self._parameters))

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuses a prompt that cannot be decoded.

        Raises:
          InputError: it is empty, has ids outside the vocabulary, or does not fit with its
            ``max_tokens`` into ``max_model_len``.
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
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise InputError(
                f"a prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} exceed "
                f"max_model_len {self.max_model_len}"
            )

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        windows: Sequence[int] | None = None,
    ) -> Batch:
        """Prefills prompts that decode together.

        Args:
          prompts: token ids.
          params: one for each.
          windows: each row's own window, at most ``window_size``; that by default.
        """
        for prompt, row in zip(prompts, params, strict=True):
            self.check(prompt, row)
        count = len(prompts)
        rows = bucket(count, shards("batch"))  # on a mesh, each device has its own
        length = bucket(max(map(len, prompts)), SMALLEST_PROMPT_BUCKET)
        max_output = bucket(max(p.max_tokens for p in params), SMALLEST_OUTPUT_BUCKET)
        tokens = np.zeros((rows, length), np.int32)
        lengths = np.ones(rows, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
        # Room for a whole window behind the last token; see `wedlm_jax.cache.write`.
        room = max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True))
        size = max(length, room) + num_slots(self.window_size)
        row_params = self._row_params(list(params), windows, rows)
        state = self._run(
            _start, (jnp.asarray(tokens), jnp.asarray(lengths), row_params),
            window=self.window_size, max_output=max_output, cache_size=cache_bucket(size),
        )  # fmt: skip
        return Batch(
            self, state, row_params, [set(map(int, s)) for s in row_params.stop_ids], count
        )

    def _run(self, function: Any, arguments: tuple[Any, ...], **static: Any) -> Any:
        """Calls a jitted function, compiling it first where the shapes are new.

        Compilation is kept apart so that its time is known and never counted as decoding.
        """
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(arguments))
        key = (function, shapes, tuple(static.items()))
        if key not in self._programs:
            started = time.monotonic()
            lowered = function.lower(self._graph, self._parameters, *arguments, **static)
            self._programs[key] = lowered.compile()
            self.compile_seconds += time.monotonic() - started
        return self._programs[key](self._parameters, *arguments)

    def _row_params(
        self, params: list[SamplingParams], windows: Sequence[int] | None, rows: int
    ) -> RowParams:
        """Arrays ``[rows]``; rows behind the prompts have no tokens to make and are done."""
        idle = dataclasses.replace(SamplingParams(), max_tokens=1)
        padded = params + [idle] * (rows - len(params))
        width = [self.window_size] * rows if windows is None else list(windows)
        stops = [(*self.config.eos_token_ids, *p.stop_token_ids) for p in padded]
        stop_ids = np.full((rows, bucket(max(map(len, stops)), 4)), NO_STOP, np.int32)
        for i, ids in enumerate(stops):
            stop_ids[i, : len(ids)] = ids
        vocab = self.config.vocab_size

        def column(values: list[Any], dtype: Any) -> Array:
            return jnp.asarray(np.array(values), dtype)

        return RowParams(
            window=column(width + [self.window_size] * (rows - len(width)), jnp.int32),
            temperature=column([p.temperature for p in padded], jnp.float32),
            top_p=column([p.top_p for p in padded], jnp.float32),
            top_k=column([min(p.top_k, vocab) for p in padded], jnp.int32),
            max_tokens=column(
                [p.max_tokens for p in params] + [0] * (rows - len(params)), jnp.int32
            ),
            entropy_threshold=column(
                [-np.inf if p.entropy_threshold is None else p.entropy_threshold for p in padded],
                jnp.float32,
            ),
            position_penalty=column([p.position_penalty for p in padded], jnp.float32),
            seed=column([p.seed for p in padded], jnp.uint32),
            stop_ids=jnp.asarray(stop_ids),
        )


class Batch:
    """Prompts that decode together: advanced in slices, read in between."""

    def __init__(
        self,
        engine: Engine,
        state: DecodeState,
        params: RowParams,
        stop_ids: list[set[int]],
        count: int,
    ):
        self._engine, self._state, self._params = engine, state, params
        self._stop_ids, self._count = stop_ids, count

    def advance(self, max_forwards: int = UNTIL_DONE) -> bool:
        """Runs at most so many forwards; returns whether every row is done."""
        engine = self._engine
        self._state = engine._run(
            _advance, (self._state, self._params, jnp.int32(max_forwards)),
            window=engine.window_size, refill=engine.refill,
        )  # fmt: skip
        return bool(self._state.done.all())

    def finish(self, row: int) -> None:
        """Ends a row early: it changes no more, and no longer holds up the batch."""
        self._state = dataclasses.replace(self._state, done=self._state.done.at[row].set(True))

    def results(self) -> list[RowResult]:
        """What each row has committed so far, in order."""
        state = self._state
        counts = (state.num_output, state.done, state.num_forwards, state.num_token_instances)
        outputs = (state.output, state.output_forwards, state.output_instances)
        counts, outputs = jax.device_get((counts, outputs))
        results = []
        for i in range(self._count):
            length, done, forwards, instances = (column[i].item() for column in counts)
            ids, forwards_at, instances_at = (x[i, :length].tolist() for x in outputs)
            stopped = bool(ids) and ids[-1] in self._stop_ids[i]
            reason = ("stop" if stopped else "length") if done else None
            results.append(RowResult(ids, reason, forwards, instances, forwards_at, instances_at))
        return results

    def window(self, row: int) -> WindowView:
        """The open window of a row, before its next forward."""
        state = self._state
        order = physical_order(state.filled, state.active)
        start, active, tokens, filled, order = jax.device_get(
            (state.lengths[row], state.active[row], state.tokens[row], state.filled[row],
             order[row])
        )  # fmt: skip
        slots = [int(t) if f else None for t, f in zip(tokens, filled, strict=True)]
        return WindowView(int(start), slots[:active], [int(s) for s in order[:active]])


@partial(jax.jit, static_argnames=("graph", "window", "max_output", "cache_size"))
def _start(
    graph: nnx.GraphDef[Transformer],
    parameters: nnx.State,
    prompts: Array,
    lengths: Array,
    params: RowParams,
    *,
    window: int,
    max_output: int,
    cache_size: int,
) -> DecodeState:
    model = nnx.merge(graph, parameters)
    dtype = model.embed_tokens[...].dtype
    cache = allocate(model.config, prompts.shape[0], cache_size, dtype)
    cache, last = prefill(model, cache, prompts, lengths)
    return initial_state(cache, lengths, last, params, window=window, max_output=max_output)


@partial(jax.jit, static_argnames=("graph", "window", "refill"), donate_argnames="state")
def _advance(
    graph: nnx.GraphDef[Transformer],
    parameters: nnx.State,
    state: DecodeState,
    params: RowParams,
    max_forwards: Array,
    *,
    window: int,
    refill: str,
) -> DecodeState:
    model = nnx.merge(graph, parameters)
    return decode(model, state, params, window=window, refill=refill, max_forwards=max_forwards)


def lower_programs(
    graph: nnx.GraphDef[Transformer],
    parameters: nnx.State,
    prompts: Array,
    lengths: Array,
    params: RowParams,
    *,
    window: int,
    max_output: int,
    cache_size: int,
    place: Callable[[DecodeState], DecodeState],
) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """The programs of a batch, prefill and streaming decode loop, lowered for shapes alone.

    Args:
      parameters, prompts, lengths, params: `jax.ShapeDtypeStruct` for every array.
      place: gives the shapes of the state between the two programs their shardings.
    """
    arguments = (graph, parameters, prompts, lengths, params)
    sizes = {"window": window, "max_output": max_output, "cache_size": cache_size}
    state = place(jax.eval_shape(partial(_start, graph, **sizes), *arguments[1:]))
    forwards: Any = jax.ShapeDtypeStruct((), jnp.int32)
    started = _start.lower(*arguments, **sizes)
    advanced = _advance.lower(
        graph, parameters, state, params, forwards, window=window, refill=REFILLS[0]
    )
    return started, advanced
