"""One process of a job of two that imports a checkpoint onto a mesh and exports it again, as often
as there are destinations.

python -m tests.hf_process INDEX PORT SOURCE DESTINATION ...
"""

import sys

import jax

import wedlm_jax.checkpoint.names
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import make_mesh


def main(index, port, source, *destinations):
    jax.config.update("jax_num_cpu_devices", 2)
    wedlm_jax.checkpoint.names.PIECE_BYTES = 200  # so that matrices take several
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    model = load_checkpoint(source, mesh=make_mesh({"fsdp": 2, "tensor": 2}))
    for destination in destinations:
        save_checkpoint(model, model.config, destination, shard_bytes=8000)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    except InputError as error:
        sys.exit(f"process {sys.argv[1]}: {error}")
