"""The one place that knows which form of attention runs.

Scores, softmax and their sums are float32 in every form. A row that sees nothing (padding)
gives zeros. Nothing falls back to another form in silence.
"""

from __future__ import annotations

from jax import Array

from wedlm_jax.attention.blockwise import attend_blockwise
from wedlm_jax.attention.dense import attend_pieces
from wedlm_jax.attention.streams import attend_streams
from wedlm_jax.cache import LayerCache
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CachedMask, CausalMask, DualStreamMask, Mask

IMPLEMENTATIONS = {
    "dense": "the whole mask and all scores in memory: the reference",
    "streams": "dense products of the parts that see each other; for short rows",
    "blockwise": "visible tiles only, in plain XLA, for any device; for long rows",
    "splash": "visible tiles only, in a TPU kernel",
    "triton": "visible tiles only, in kernels for NVIDIA GPUs",
}
"""The forms by name, and what each is for."""

_PLATFORMS = {
    "splash": ("tpu", "TPUs"),
    "ragged": ("tpu", "TPUs"),
    "triton": ("gpu", "NVIDIA GPUs"),
    "ragged_triton": ("gpu", "NVIDIA GPUs"),
}


def check_runs_on(implementation: str, platform: str) -> None:
    """Refuses a kernel on devices that it is not for.

    Args:
      implementation: a name in `IMPLEMENTATIONS` or `WINDOW_IMPLEMENTATIONS`.
      platform: of a device, as JAX names it.

    Raises:
      InputError: naming both.
    """
    own, name = _PLATFORMS.get(implementation, (platform, ""))
    if own != platform:
        raise InputError(
            f"attention implementation {implementation!r} is for {name}, not for {platform!r}"
        )


WINDOW_IMPLEMENTATIONS = {
    "dense": "all rows of the cache up to the longest; for any device",
    "ragged": "the live part of each row's cache, in a TPU kernel",
    "ragged_triton": "the live part of each row's cache, in a kernel for NVIDIA GPUs",
}
"""Those of a decode window over a cache."""


def reads_live_part(implementation: str) -> bool:
    """Whether a form reads of each row what there is and no more, so that one program serves all
    lengths."""
    return implementation != "dense"


def window_implementation(platform: str, head_dim: int) -> str:
    """Which of `WINDOW_IMPLEMENTATIONS` a platform ("cpu", "gpu", "tpu") takes where none is named.

    On TPUs a cache of narrower heads than a vector lies transposed in memory: for the kernel all
    of it would have to be turned round.
    """
    return "ragged" if platform == "tpu" and head_dim % 128 == 0 else "dense"


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    cache: LayerCache | None = None,
    implementation: str = "streams",
) -> Array:
    """Softmax attention of queries over the keys that ``mask`` lets them see.

    Args:
      q: ``[B, T, H, head_dim]``.
      k, v: ``[B, K, T, head_dim]``, K dividing H.
      mask: the specification; `CachedMask` goes with ``cache``, the others without.
      cache: keys and values that stand before the queries' own.
      implementation: a name in `IMPLEMENTATIONS`; with a cache also one in
        `WINDOW_IMPLEMENTATIONS`; there all other names mean "dense": a window is short.

    Returns:
      ``[B, T, H, head_dim]`` in the dtype of ``q``.
    """
    cached = isinstance(mask, CachedMask)
    names = [*IMPLEMENTATIONS, *(WINDOW_IMPLEMENTATIONS if cached else ())]
    if implementation not in names:
        raise ValueError(f"attention implementation {implementation!r}: not in {names}")
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # Queries of one KV head side by side, [B, K, G, T, head_dim]: plain batched products.
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    if isinstance(mask, CachedMask):
        if cache is None:
            raise ValueError("a CachedMask needs a cache")
        out = _attend_cached(grouped, k, v, mask, cache, implementation)
    elif implementation == "blockwise":
        out = attend_blockwise(grouped, k, v, mask)
    elif implementation == "splash":
        # Pallas takes a while to import, and only TPUs need it.
        from wedlm_jax.attention.splash import attend_splash

        out = attend_splash(grouped, k, v, mask)
    elif implementation == "triton":
        # Likewise, for GPUs.
        from wedlm_jax.attention.triton import attend_triton

        out = attend_triton(grouped, k, v, mask)
    elif implementation == "streams" and isinstance(mask, DualStreamMask):
        out = attend_streams(grouped, k, v, mask)
    else:
        visible = mask.dense(batch, length) if isinstance(mask, CausalMask) else mask.dense()
        out = attend_pieces(grouped, [(k, v)], [visible])
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _attend_cached(
    q: Array, k: Array, v: Array, mask: CachedMask, cache: LayerCache, implementation: str
) -> Array:
    if implementation == "ragged":
        # See "splash".
        from wedlm_jax.attention.ragged import attend_ragged

        return attend_ragged(q, k, v, cache, mask.lengths)
    if implementation == "ragged_triton":
        # Likewise.
        from wedlm_jax.attention.ragged_triton import attend_ragged_triton

        return attend_ragged_triton(q, k, v, cache, mask.lengths)
    before = cache.rows(k.dtype)
    size = before[0].shape[2]
    visible = mask.dense(size, k.shape[2])
    return attend_pieces(q, [before, (k, v)], [visible[..., :size], visible[..., size:]])
