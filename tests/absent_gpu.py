"""Lowering for a GPU on a machine without one."""

from contextlib import nullcontext

import jax
from jax.sharding import AbstractMesh, AxisType

from wedlm_jax.sharding import MESH_AXES


def on_a_gpu_that_is_not_here():
    """Newer versions of JAX want to be told what GPU a kernel is lowered for."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    types = (AxisType.Auto,) * len(MESH_AXES)
    mesh = AbstractMesh((1,) * len(MESH_AXES), MESH_AXES, types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
