"""Runs the ragged paged attention kernel that JAX ships in the TPU interpreter, on a CPU.

The interpreter lacks two things that the kernel uses: stores under a mask, and views of a buffer
after a copy into it. Both are put in their places here, as what they mean; the rest of the kernel
runs as it is shipped, its copies and semaphores included. Memory that nobody has written holds NaN.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel


class Loaded:
    """A buffer that was read whole, with the views that the kernel takes of it."""

    def __init__(self, values):
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, index):
        return self.values[index]

    def reshape(self, *shape):
        return Loaded(self.values.reshape(*shape))

    def bitcast(self, dtype):
        """As on a TPU: a wider number is made of rows that follow each other, the first lowest."""
        packed = jnp.dtype(dtype).itemsize // self.dtype.itemsize
        rows = self.values.reshape(-1, packed, self.shape[-1])
        return Loaded(jax.lax.bitcast_convert_type(rows.swapaxes(1, 2), dtype))


def _masked_store(ref, values, *, mask=None):
    ref[...] = values if mask is None else jnp.where(mask, values, ref[...])


def _wait(self):
    for copy in self._async_copies:
        copy.wait()
    return Loaded(self._vmem_buf[...])


@contextlib.contextmanager
def interpreted_kernel(monkeypatch):
    """Interprets kernels that are traced inside."""
    with monkeypatch.context() as patch:
        patch.setattr(pltpu, "store", _masked_store)
        patch.setattr(kernel.MultiPageAsyncCopyDescriptor, "wait", _wait)
        # A trace that another test has kept would not see them.
        jax.clear_caches()
        parameters = pltpu.InterpretParams(uninitialized_memory="nan")
        with pltpu.force_tpu_interpret_mode(parameters):
            yield
    jax.clear_caches()
