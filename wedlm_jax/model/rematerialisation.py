"""Policies, by name, for what is kept of each layer for the backward pass and what is recomputed.

A layer names its intermediate results: queries, keys and values before RoPE (``projected``), the
output of attention (``attended``), the hidden states after attention (``mixed``), and the two inner
products of its MLP (``gate``, ``up``). Each policy keeps some of them in addition to the layer's
input; the rest is recomputed, except the last product, which no gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax

from wedlm_jax.attention.tiles import ATTENDED

_ATTENTION = (ATTENDED,)
_PROJECTIONS = (*_ATTENTION, "projected", "mixed")
_GATE = (*_PROJECTIONS, "gate")

KEPT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "products": (*_GATE, "up"),
        "gate": _GATE,
        "projections": _PROJECTIONS,
        "attention": _ATTENTION,
        "full": (),
        "offload": (),
    }
)
"""The results that each policy keeps, from the policy that keeps most to the one that keeps least.
Before them all comes ``none``, which keeps everything."""

LAYER_INPUT = "layer_input"
"""The name of a layer's input. ``offload`` moves it to the host's memory and back."""

POLICIES: tuple[str, ...] = ("none", *KEPT)


def checkpoint_policy(name: str) -> Callable | None:
    """Returns the policy for `jax.checkpoint`; None if nothing is recomputed.

    Args:
      name: one of `POLICIES`.
    """
    if name == "none":
        return None
    if name == "offload":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*KEPT[name])
