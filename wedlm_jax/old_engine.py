"""The model and its compiled programs, and what a prompt must be to be decoded.

The engine knows token ids only; text is `wedlm_jax.llm`'s. Rows that decode together are a
`wedlm_jax.batch.Batch`; who gets a row, and when, is `wedlm_jax.scheduler`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from wedlm_jax import programs
from wedlm_jax.attention import WINDOW_IMPLEMENTATIONS, window_implementation
from wedlm_jax.batch import Batch
from wedlm_jax.batch_sizes import BatchSizes, state_sizes, stop_ids
from wedlm_jax.decode_state import DecodeState
from wedlm_jax.decoding import REFILLS
from wedlm_jax.errors import InputError
from wedlm_jax.memory_plan import check_memory
from wedlm_jax.model import Transformer
from wedlm_jax.row_params import check_options
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.width_policy import WidthPolicy

DEFAULT_WINDOW = 16
AUTO_WINDOWS = (0, 4, 8, 16, 32)
"""The widths that are chosen from where ``window_size`` is "auto"."""


class Engine:
    """Compiled decoding of one model.

    Args:
      model: parameters in the compute dtype.
      window_size: W; 0 decodes autoregressively; "auto" lets `wedlm_jax.width_policy` choose
        while a batch is decoded.
      refill: "streaming", or "blockwise" for the paper's baseline.
      max_model_len: prompt and completion tokens together, at most.
      windows: every window that a row may have; W alone by default.
      kv_cache_dtype: None for the parameters' dtype, or "int8": half the memory of bfloat16 and
        half of what a forward reads of it, and keys and values rounded to 8 bits.
      attention: of the decode windows, a name in `wedlm_jax.attention.WINDOW_IMPLEMENTATIONS`; by
        default what `wedlm_jax.attention.window_implementation` says.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        window_size: int | str = 16,
        refill: str = "streaming",
        max_model_len: int | None = None,
        windows: Sequence[int] | None = None,
        attention: str | None = None,
        kv_cache_dtype: str | None = None,
    ):
        self.chooses_width = window_size == "auto"
        if self.chooses_width:
            window_size, windows = DEFAULT_WINDOW, AUTO_WINDOWS
        if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 0:
            raise InputError(
                f"window_size: expected an integer of at least 0 or 'auto', not {window_size!r}"
            )
        if refill not in REFILLS:
            raise InputError(f"refill: expected one of {', '.join(REFILLS)}, not {refill!r}")
        if kv_cache_dtype not in (None, "int8"):
            raise InputError(f"kv_cache_dtype: expected None or 'int8', not {kv_cache_dtype!r}")
        if attention is None:
            platform = jax.default_backend()
            fitting = window_implementation(platform, model.config.head_dim)
            attention = "dense" if kv_cache_dtype else fitting
        if attention not in WINDOW_IMPLEMENTATIONS:
            raise InputError(
                f"attention: expected one of {', '.join(WINDOW_IMPLEMENTATIONS)}, not {attention!r}"
            )
        if kv_cache_dtype and attention != "dense":
            raise InputError(f"attention: {attention!r} reads no int8 cache; 'dense' does")
        if attention == "ragged_triton":
            # Pallas takes a while to import.
            from wedlm_jax.attention.ragged_triton import check_heads

            check_heads(model.config.head_dim)
        self.attention, self.kv_cache_dtype = attention, kv_cache_dtype
        self.windows = tuple(sorted({window_size, *(windows or ())}))
        if self.windows[-1] > 0:
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
        self._policies: dict[BatchSizes, WidthPolicy] = {}
        self.compile_seconds = 0.0

    def update(self, model: Transformer) -> None:
        """Decodes with other weights of the same shapes from now on; nothing is compiled anew."""
        self._parameters = nnx.state(model)

    def release(self) -> None:
        """Lets the weights go; the programs are kept for those that `update` gives next."""
        self._parameters = nnx.State({})

    @property
    def num_parameters(self) -> int:
        return sum(int(x.size) for x in jax.tree.leaves(self._parameters))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that one device holds."""
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(self._parameters)
        )

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

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
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise InputError(
                f"a prompt of {len(prompt)} tokens and max_tokens {params.max_tokens} exceed "
                f"max_model_len {self.max_model_len}"
            )
        check_options(params, stop_ids(self, params), self.config.vocab_size)

    def open(self, sizes: BatchSizes) -> Batch:
        """An empty batch of these sizes.

        Raises:
          InputError: the device has not the memory for it; with the numbers, and rows that fit.
        """
        check_memory(self, sizes)
        return Batch(self, sizes)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        windows: Sequence[int] | None = None,
    ) -> Batch:
        """Prefills prompts that decode together, in a batch just large enough for them.

        Args:
          prompts: token ids.
          params: one for each.
          windows: each row's own window; ``window_size`` by default.
        """
        for prompt, row in zip(prompts, params, strict=True):
            self.check(prompt, row)
        sizes = BatchSizes.for_rows(self, list(zip(prompts, params, strict=True)))
        batch = self.open(sizes)
        if self.chooses_width:
            batch.set_windows(self.window_size)
        batch.admit(range(len(prompts)), prompts, params, windows)
        return batch

    def policy(self, batch: Batch) -> WidthPolicy | None:
        """Who chooses the batch's windows, if they are to be chosen. What is learnt of one batch
        serves the next of equal sizes."""
        if not self.chooses_width:
            return None
        if batch.sizes not in self._policies:
            self._policies[batch.sizes] = WidthPolicy(batch.windows)
        return self._policies[batch.sizes]

    def run(self, function: Any, *arguments: Any, model: bool = True, **static: Any) -> Any:
        """Calls a jitted function; see `compiled`."""
        parameters = (self._parameters,) if model else ()
        return self.compiled(function, *arguments, model=model, **static)(*parameters, *arguments)

    def compiled(
        self, function: Any, *arguments: Any, model: bool = True, **static: Any
    ) -> jax.stages.Compiled:
        """A jitted function for these arguments, or for their shapes, compiled where they are new.

        Compilation is kept apart so that its time is known and never counted as decoding.

        Args:
          model: whether the function takes the model's graph and parameters first.
        """
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(arguments))
        # The structure says which options there are.
        key = (function, shapes, jax.tree.structure(arguments), tuple(static.items()))
        if key not in self._programs:
            started = time.monotonic()
            first = (self._graph, self._parameters) if model else ()
            self._programs[key] = function.lower(*first, *arguments, **static).compile()
            self.compile_seconds += time.monotonic() - started
        return self._programs[key]

    def shapes_of(self, sizes: BatchSizes) -> DecodeState:
        """The state of a batch of these sizes, as shapes alone."""
        return jax.eval_shape(
            partial(programs.allocate_state, self._graph, **state_sizes(self, sizes)),
            self._parameters,
        )
