"""Imports a checkpoint onto eight devices, exports it, and prints what memory that took.

    python -m tests.hf_memory SOURCE DESTINATION SHARD_BYTES
    python -m tests.hf_memory SOURCE QUANTIZATION

The second imports it for decoding: layers apart, matrices rounded.
A process of its own, since a peak is the process's. SOURCE is removed when it has been read.
Linux only: the peak is that of the kernel, which unlike `getrusage` forgets the parent's.
"""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.names import arrays_from_model
from wedlm_jax.model.quantization import rounded_alone
from wedlm_jax.sharding import make_mesh


def memory(field):
    """Bytes: "VmRSS" is what is resident now, "VmHWM" the most that ever was."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def size_of(model):
    return sum(value.nbytes for value in arrays_from_model(model).values())


def main(source, destination, shard_bytes):
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    jnp.zeros(8).block_until_ready()
    before, start = memory("VmRSS"), time.monotonic()
    model = load_checkpoint(source, mesh=mesh)
    shutil.rmtree(source)
    facts = {
        "parameters": size_of(model),
        "import": memory("VmHWM") - before,
        "import_s": time.monotonic() - start,
    }
    start = time.monotonic()
    save_checkpoint(model, model.config, destination, shard_bytes=shard_bytes)
    facts |= {"export": memory("VmHWM") - before, "export_s": time.monotonic() - start}
    print(json.dumps(facts))


def import_rounded(source, quantization):
    mesh = make_mesh({"tensor": 8})
    # What rounding takes besides is compiled before.
    matrix = jnp.ones((8, 8), jnp.bfloat16)
    rounded_alone(matrix, "weight")
    before = memory("VmRSS")
    model = load_checkpoint(source, mesh=mesh, stacked=False, quantization=quantization)
    print(json.dumps({"parameters": size_of(model), "import": memory("VmHWM") - before}))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    if len(sys.argv) == 3:
        import_rounded(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
