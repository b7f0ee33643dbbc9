"""A copy of a run's parameters for each of its processes, so that each can compute alone.

What processes compute together they must compute in step, but a decode loop ends when its rows
do. So the processes of a run decode apart: each its own prompts, on its own devices, with a whole
copy of the parameters cut over these.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from wedlm_jax.sharding import tree_shardings


def mesh_of_processes(mesh: Mesh) -> Mesh:
    """The devices of ``mesh``, ``data`` over the processes and ``fsdp`` over the devices of each;
    its ``local_mesh`` is a process's own."""
    devices = sorted(mesh.devices.flat, key=lambda device: device.process_index)
    processes = len({device.process_index for device in devices})
    shape = (processes, len(devices) // processes, *[1] * (len(mesh.axis_names) - 2))
    return Mesh(np.array(devices).reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)


def own_copy(processes: Mesh, tree: Any) -> Any:
    """Parameters copied whole to each process's own devices. All processes call this together;
    none holds more than its copy.

    Args:
      processes: from `mesh_of_processes`; a process's devices divide the hidden axis.
      tree: arrays on the same devices, laid out in any way, with the names that
        `wedlm_jax.sharding` knows.

    Returns:
      the tree, of arrays on ``processes.local_mesh``.
    """

    def as_own(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        pieces = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    copies = jax.device_put(tree, tree_shardings(processes, tree))
    return jax.tree.map(as_own, copies, tree_shardings(processes.local_mesh, tree))
