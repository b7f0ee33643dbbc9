"""The compiled programs of the engine: a few, of static shapes, on the state of a batch.

Each takes the model as its graph (static) and its parameters, and the state, whose buffers it
reuses. What differs from row to row comes as arrays with an entry a row of the batch, made by
the host; an entry counts where the mask beside it is True.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.cache import copy_entries, copy_rows, read_rows, set_entries, write_rows
from wedlm_jax.decode_state import DecodeState, idle_state, open_next, placed, set_window
from wedlm_jax.decoding import decode, prefill
from wedlm_jax.logprobs import Logprobs
from wedlm_jax.model import Transformer
from wedlm_jax.predictions import first_token
from wedlm_jax.sampling import RowParams

Graph = nnx.GraphDef[Transformer]


@partial(
    jax.jit,
    static_argnames=(
        "graph",
        "rows",
        "window",
        "max_output",
        "cache_size",
        "num_logprobs",
        "kv_cache_dtype",
    ),
)
def allocate_state(
    graph: Graph,
    parameters: nnx.State,
    *,
    rows: int,
    window: int,
    max_output: int,
    cache_size: int,
    num_logprobs: int | None = None,
    kv_cache_dtype: str | None = None,
) -> DecodeState:
    """An empty batch: every row is done."""
    model = nnx.merge(graph, parameters)
    state = idle_state(
        model.config, model.embed_tokens[...].dtype,
        rows=rows, window=window, max_output=max_output, cache_size=cache_size,
        num_logprobs=num_logprobs, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    return placed(state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """Pieces of prompts that go into the cache together; see `wedlm_jax.cache.write_rows`.

    Attributes:
      tokens: int32 ``[N, T]``, padded behind.
      places: int32 ``[N]``, the row of each.
      starts: int32 ``[N]``, tokens of its prompt that the row holds already.
      counts: int32 ``[N]``, tokens of each.
      valid: bool ``[N]``, False for an entry that fills up the shape.
      lengths: int32 ``[B]``, tokens each row holds afterwards; negative for other rows. A row
        that is done still writes its window, at its length: there it must not hit what was
        prefilled.
    """

    tokens: Array
    places: Array
    starts: Array
    counts: Array
    valid: Array
    lengths: Array


@partial(jax.jit, static_argnames=("graph", "live"), donate_argnames="state")
def prefill_pieces(
    graph: Graph, parameters: nnx.State, state: DecodeState, pieces: Pieces, *, live: int
) -> DecodeState:
    """Computes the keys and values of pieces of prompts, for rows that are done.

    Args:
      live: cache rows that a piece can see before itself; 0 where all are beginnings.
    """
    model = nnx.merge(graph, parameters)
    before = read_rows(state.cache, pieces.places, live) if live else None
    kv, ends = prefill(
        model, pieces.tokens, pieces.starts, pieces.counts, before, int8_kv=state.cache.is_int8
    )
    cache = write_rows(state.cache, kv, pieces.places, pieces.starts, pieces.valid)
    ends = set_entries(state.prompt_end, ends, pieces.places, pieces.valid)
    moved = _moved(state, pieces.lengths)
    return placed(dataclasses.replace(state, cache=cache, prompt_end=ends, lengths=moved))


@partial(jax.jit, donate_argnames="state")
def copy_prefixes(
    state: DecodeState, sources: Array, places: Array, valid: Array, lengths: Array
) -> DecodeState:
    """Gives rows that are done the cache of other rows and what stands at the end of their
    prompts, and committed lengths ``[B]`` where they are not negative; see
    `wedlm_jax.cache.copy_rows`."""
    cache = copy_rows(state.cache, sources, places, valid)
    ends = copy_entries(state.prompt_end, sources, places, valid)
    moved = _moved(state, lengths)
    return placed(dataclasses.replace(state, cache=cache, prompt_end=ends, lengths=moved))


def _moved(state: DecodeState, lengths: Array) -> Array:
    return jnp.where(lengths >= 0, lengths, state.lengths)


@partial(jax.jit, static_argnames=("graph", "anchored"), donate_argnames="state")
def open_rows(
    graph: Graph,
    parameters: nnx.State,
    state: DecodeState,
    params: RowParams,
    new: Array,
    lengths: Array,
    last: Array,
    *,
    anchored: bool,
) -> DecodeState:
    """Begins the rows that are ``new [B]``: their prompts of these lengths stand in the cache,
    and end with these tokens.

    Args:
      anchored: whether rows may be. Prefill has said what their first token is.
    """
    zeros = jnp.zeros_like(state.lengths)
    nothing = jnp.zeros_like(state.filled)
    blank = dataclasses.replace(
        state, lengths=lengths, last=last, filled=nothing, known=zeros > 0, active=zeros,
        num_output=zeros, done=params.max_tokens <= 0, num_forwards=zeros,
        num_token_instances=zeros,
    )  # fmt: skip
    if anchored:
        model = nnx.merge(graph, parameters)
        blank = open_next(blank, params, *first_token(model, blank, params))
    return _where(new, set_window(blank, params), state)


@partial(jax.jit, donate_argnames="state")
def change_windows(state: DecodeState, params: RowParams) -> DecodeState:
    """Gives the rows that are decoding the windows of ``params``."""
    return _where(~state.done, set_window(state, params), state)


@partial(jax.jit, donate_argnames="state")
def end_rows(state: DecodeState, rows: Array) -> DecodeState:
    """Ends ``rows [B]``: they change no more."""
    return placed(dataclasses.replace(state, done=state.done | rows))


def _where(rows: Array, new: DecodeState, old: DecodeState) -> DecodeState:
    def pick(x: Array, y: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    before = old.rows()
    picked = {name: jax.tree.map(pick, value, before[name]) for name, value in new.rows().items()}
    return placed(DecodeState(cache=old.cache, **picked))


@partial(
    jax.jit, static_argnames=("graph", "windows", "refill", "live", "attention"),
    donate_argnames="state",
)  # fmt: skip
def advance_state(
    graph: Graph,
    parameters: nnx.State,
    state: DecodeState,
    params: RowParams,
    max_forwards: Array,
    until_done: Array,
    *,
    windows: tuple[int, ...],
    refill: str,
    live: int,
    attention: str,
) -> DecodeState:
    """The decode loop; see `wedlm_jax.decoding.decode`."""
    model = nnx.merge(graph, parameters)
    state = decode(
        model, state, params, windows=windows, refill=refill, live=live, attention=attention,
        max_forwards=max_forwards, until_done=until_done,
    )  # fmt: skip
    return placed(state)


@jax.jit
def standing(state: DecodeState) -> Array:
    """What the host looks at between two slices, int32 ``[5, B]``: one array is fetched in a
    fifth of the time of five."""
    return jnp.stack([
        state.done.astype(jnp.int32), state.lengths, state.num_output, state.num_forwards,
        state.num_token_instances,
    ])  # fmt: skip


@jax.jit
def outputs_of(state: DecodeState, places: Array) -> tuple[Array, Array, Array, Logprobs | None]:
    """The outputs of rows ``places [N]``, and the counts and log-probabilities beside them, each
    ``[N, M]``."""
    outputs = (
        state.output, state.output_forwards, state.output_instances, state.output_logprobs
    )  # fmt: skip
    return jax.tree.map(lambda x: jnp.take(x, places, axis=0), outputs)  # type: ignore[no-any-return]
