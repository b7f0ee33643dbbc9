"""Attention under a mask: the single dispatch to its backends.

All backends compute scores, softmax and sums in float32, and return zeros for a row that sees
nothing (padding). No backend silently falls back to another.
"""

from __future__ import annotations

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.attention.blockwise import attend_blockwise
from wedlm_jax.attention.dense import attend_parts
from wedlm_jax.attention.residuals import ATTENDED
from wedlm_jax.attention.streams import attend_streams
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask, DualStreamMask, Mask

IMPLEMENTATIONS = {
    "dense": "the whole mask and all scores in memory: the reference",
    "streams": "dense products of the parts that see each other; for short rows",
    "blockwise": "visible tiles only, in plain XLA, for any device; for long rows",
    "splash": "visible tiles only, in a TPU kernel",
}
"""The backends by name, and what each is for."""

_PLATFORMS = {
    "splash": ("tpu", "TPUs"),
}


def check_runs_on(implementation: str, platform: str) -> None:
    """Refuses a kernel on devices that it does not run on.

    Args:
      implementation: a name in `IMPLEMENTATIONS`.
      platform: JAX's name of a device's platform.

    Raises:
      InputError: the kernel does not run there; the message names both.
    """
    required, name = _PLATFORMS.get(implementation, (platform, ""))
    if required != platform:
        raise InputError(
            f"attention backend {implementation!r} is for {name}, not for {platform!r}"
        )


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    implementation: str = "streams",
    tile: int = 0,
) -> Array:
    """Computes softmax attention of queries over the keys that ``mask`` lets them see.

    Args:
      q: ``[B, T, H, head_dim]``.
      k, v: ``[B, K, T, head_dim]``, K dividing H.
      mask: which keys each query sees.
      implementation: a name in `IMPLEMENTATIONS`.
      tile: side of the splash kernel's tiles; 0 for what suits the chip.

    Returns:
      ``[B, T, H, head_dim]`` in the dtype of ``q``.
    """
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"attention backend {implementation!r}: not in {names}")
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # Grouped by KV head, [B, K, G, T, head_dim], attention is plain batched products.
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    if implementation == "blockwise":
        out = attend_blockwise(grouped, k, v, mask)
    elif implementation == "splash":
        # Pallas takes a while to import, and only TPUs need it.
        from wedlm_jax.attention.splash import attend_splash

        out = attend_splash(grouped, k, v, mask, tile=tile)
    elif implementation == "streams" and isinstance(mask, DualStreamMask):
        out = checkpoint_name(attend_streams(grouped, k, v, mask), ATTENDED)
    else:
        visible = mask.dense(batch, length) if isinstance(mask, CausalMask) else mask.dense()
        out = checkpoint_name(attend_parts(grouped, [(k, v)], [visible]), ATTENDED)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
