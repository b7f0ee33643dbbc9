"""Runs the tests on the CPU, the same examples every time, on one tiny model."""

import atexit
import gc
import math
import os
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# `tests` is not installed: what a test starts, wherever it runs, finds its helpers as pytest does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)

# A shell without job control starts what it puts into the background with Ctrl-C ignored, and so
# would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What one test, worker or child process has compiled, the others need not: compiling is most
# of what the tests do, and half of that is small. The folder lives as long as this run of them.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="wedlm-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# LLVM's expensive passes make little faster what runs for milliseconds, and take half the time; of
# the rest, the emitters of fusions by MLIR take half again.
# `JAX_DISABLE_MOST_OPTIMIZATIONS=false make test` compiles all as users do; of the goldens, a part
# always is.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "true":
    quick = "--xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10."):  # 0.12 refuses the flag
        quick += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"

import hypothesis
import jax
import pytest
from flax import nnx

# Imported here only: each module that imported it would get a bucket of its own, and a test could
# tell one bucket to refuse what its clients ask of another.
from tests.emulated_bucket import bucket as bucket
from tests.examples.decode import DRAWN, TINY, small_engine
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.forward_sizes import one_size, two_sizes
from tests.reference.full_forward import full_forward as reference_forward
from wedlm_jax.engine.engine import Engine
from wedlm_jax.host import notices, progress
from wedlm_jax.model import Transformer

# Devices for the tests of sharding. What is not sharded runs on the first alone.
jax.config.update("jax_num_cpu_devices", 8)

one_size()

# How long something compiles is no part of what a command says.
progress.FIRST_LINE_S = math.inf


def pytest_configure(config):
    """Chooses how many examples a property is tried on: `make test-all` tries five times as many.

    A test that wants more than usual asks for a multiple of `hypothesis.settings.default`.
    """
    everything = "not full" not in config.option.markexpr
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,  # a first example compiles
        derandomize=True,
        max_examples=75 if everything else 15,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tests")


MOST_MAPS = 30_000
"""Memory maps of a process after which its compiled programs are let go, to be read from the disk
again when they are wanted. Each has dozens, Linux allows 65,530, and LLVM crashes without a word
when none are left."""


@pytest.fixture(scope="module", autouse=True)
def bounded_programs():
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        for thing in gc.get_objects():
            if type(thing) is Engine:
                thing.device.programs.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def plain_notices():
    """A server gives the notices of its process a time and a level."""
    yield
    notices.log("%(message)s")


@pytest.fixture(scope="session")
def tiny_model():
    return Transformer(TINY, rngs=nnx.Rngs(7))


# Engines keep what they compiled, and compiling is what takes the time: one of each kind
# serves all the tests.


@pytest.fixture(scope="session")
def streaming_engine(tiny_model):
    """For every option and mode, with forwards of two sizes."""
    with two_sizes():
        engine = small_engine(tiny_model)
        engine.compile()
    return engine


@pytest.fixture(scope="session")
def one_size_engine(tiny_model):
    """The same at one size, for greedy and sampled sequences without other options."""
    return small_engine(tiny_model, DRAWN, deterministic=True)


@pytest.fixture(scope="session")
def autoregressive_engine(tiny_model):
    return small_engine(tiny_model, window_size=0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny model's folder, not to be changed."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def full_forward(tiny_model):
    """Logits ``[T, V]`` of a text under a plain causal mask, without a cache."""
    return reference_forward(tiny_model)
