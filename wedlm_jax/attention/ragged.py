"""Attention of spans over pages: one dispatch, three backends.

A span is a prompt chunk, an autoregressive token or a window. It follows what its sequence has
computed, and is causal in physical order. Keys and values are written first, so that tokens attend
to themselves through the pages, with the rounding of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from wedlm_jax.attention.int8 import Int8Rows
from wedlm_jax.attention.pages import Pages, Spans, allocate_pages, token_places
from wedlm_jax.attention.pages import write_pages as _write_shard
from wedlm_jax.attention.ragged_tpu import LiveSpans, attend_tpu, live_first
from wedlm_jax.attention.ragged_xla import Tiles, attend_xla, make_tiles
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import AXIS_RULES

__all__ = [
    "RAGGED_BACKENDS",
    "Pages",
    "Plan",
    "Spans",
    "allocate_pages",
    "attend_pages",
    "attention_plan",
    "check_ragged_backend",
    "token_places",
    "write_pages",
]

RAGGED_BACKENDS = {
    "xla": "plain XLA, for any device: the reference",
    "gather": "plain XLA in few large products, for GPUs",
    "rpa": "a kernel for TPUs that comes with JAX",
}
"""The backends by name, and what each is for."""

Plan = Tiles | LiveSpans
"""What a forward computes once for all layers; the type depends on the backend."""


def check_ragged_backend(
    name: str | None, platform: str, config: ModelConfig, *, int8: bool = False
) -> str:
    """Returns the backend to use, and refuses one that cannot run.

    Args:
      name: a name in `RAGGED_BACKENDS`; None for the platform's default.
      platform: JAX's name of the devices' platform.
      config: config of the model.
      int8: whether the pages hold 8-bit integers.

    Raises:
      InputError: an unknown name, or a kernel that does not fit devices, heads or pages.
    """
    fits = config.head_dim % 128 == 0 and not int8
    if name is None:
        defaults = {"cpu": "xla", "tpu": "rpa" if fits else "xla"}
        return defaults.get(platform, "gather")
    if name not in RAGGED_BACKENDS:
        names = ", ".join(RAGGED_BACKENDS)
        raise InputError(f"attention: expected one of {names}, not {name!r}")
    if name == "rpa":
        if platform != "tpu":
            raise InputError(f"attention 'rpa' is for TPUs, not for {platform!r}: use 'xla'")
        if int8:
            raise InputError("attention 'rpa' cannot read an int8 cache: use 'xla'")
        if not fits:
            raise InputError(
                f"attention 'rpa' needs a head_dim that is a multiple of 128, not {config.head_dim}"
            )
    return name


def attention_plan(
    spans: Spans,
    num_tokens: int,
    page_size: int,
    *,
    implementation: str,
    deterministic: bool = False,
) -> Plan:
    """Computes what the attention of T flat tokens needs once for all layers.

    Args:
      spans: spans of this forward.
      num_tokens: T.
      page_size: tokens per page.
      implementation: a name in `RAGGED_BACKENDS`.
      deterministic: compute all spans in the same way, so that not a bit of a token's result
        depends on how its sequence is divided into spans.
    """
    if implementation not in RAGGED_BACKENDS:
        raise ValueError(f"attention {implementation!r}: not in {list(RAGGED_BACKENDS)}")
    if implementation == "rpa":
        return live_first(spans)
    return make_tiles(
        spans,
        num_tokens,
        page_size,
        deterministic=deterministic,
        together=implementation == "gather",
    )


def write_pages(
    pages: Pages, keys: Array, values: Array, places: Array, layer: Array | int, num_pages: int
) -> Pages:
    """Writes keys and values ``[T, K, head_dim]`` of flat tokens into a layer's pages, in place.

    Args:
      pages: the pool, of one replica.
      keys, values: ``[T, K, head_dim]``.
      places: int32 ``[T]``, from `token_places`.
      layer: its number, from 0.
      num_pages: number of pages per layer.
    """

    def local(pages: Pages, keys: Array, values: Array, places: Array, layer: Array) -> Pages:
        return _write_shard(pages, keys, values, places, layer, num_pages)

    specs = [_pool_spec(pages), _HEADS, _HEADS, PartitionSpec(), PartitionSpec()]
    run = _on_own_heads(local, specs, specs[0])
    return run(pages, keys, values, places, layer)  # type: ignore[no-any-return]


def attend_pages(
    queries: Array,
    pages: Pages,
    plan: Plan,
    layer: Array | int,
    num_pages: int,
    *,
    scale: float | None = None,
) -> Array:
    """Computes causal softmax attention of flat tokens over the pages of their sequences.

    A token that is j tokens before the end of the span of sequence i sees the places before
    ``kv_lengths[i] - j``. Scores, softmax and sums are float32.

    Args:
      queries: ``[T, H, head_dim]``; heads ``k * G`` to ``k * G + G - 1`` read KV head k.
      pages: the pool of one replica, which must already hold these tokens.
      plan: from `attention_plan`; it determines the backend.
      layer: its number, from 0.
      num_pages: number of pages per layer.
      scale: scale of the scores; ``head_dim ** -0.5`` by default.

    Returns:
      ``[T, H, head_dim]`` in the dtype of ``queries``; arbitrary finite numbers for padding.
    """
    factor = queries.shape[-1] ** -0.5 if scale is None else scale

    def local(queries: Array, pages: Pages, plan: Plan, layer: Array) -> Array:
        if isinstance(plan, Tiles):
            return attend_xla(queries, pages, plan, layer, num_pages, factor)
        if isinstance(pages, Int8Rows):
            raise ValueError("attention 'rpa' cannot read an int8 cache")
        return attend_tpu(queries, pages, plan, layer, num_pages, factor)

    whole = PartitionSpec()
    run = _on_own_heads(local, [_HEADS, _pool_spec(pages), whole, whole], _HEADS)
    return run(queries, pages, plan, layer)  # type: ignore[no-any-return]


_HEADS = PartitionSpec(None, AXIS_RULES["attention_heads"])


def _pool_spec(pages: Pages) -> Any:
    spec = PartitionSpec(None, None, AXIS_RULES["attention_heads"])
    return jax.tree.map(lambda _: spec, pages)


def _on_own_heads(function: Callable[..., Any], specs: list[Any], out: Any) -> Callable[..., Any]:
    """Makes each device run ``function`` on its own heads, since the compiler cannot partition a
    kernel and must not gather a pool. Returns ``function`` itself if heads are not sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape[axis] for axis in AXIS_RULES["attention_heads"]) == 1:
        return function
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(
        function, in_specs=tuple(specs), out_specs=out, axis_names=free, check_vma=False
    )
