"""Names of TPU topologies are understood or refused, without a TPU's library."""

import importlib.util

import pytest

from tests.examples.child import run_python
from wedlm_jax.aot.topology import Chip, Roofline, describe_topology, parse_topology
from wedlm_jax.errors import InputError


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("v5p:4x4x4", ("v5p", (4, 4, 4), 1)),
        ("v5e:16x16", ("v5e", (16, 16), 1)),
        ("v5p:8x8x8*2", ("v5p", (8, 8, 8), 2)),
    ],
)
def test_a_name_is_a_chip_a_shape_and_slices(name, parsed):
    assert parse_topology(name) == parsed


@pytest.mark.parametrize("name", ["", "v5p", "v5p-128", "h100:8", "v5p:", "v5p:4x", "v5p:4x4x4*"])
def test_other_names_are_refused_with_an_example(name):
    with pytest.raises(InputError, match=r"topology .* expected a chip .* v5p:4x4x4"):
        parse_topology(name)


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(InputError, match=r'^compiling .* pip install "wedlm-jax\[tpu\]"$'):
        describe_topology("v5p:2x2x1")


@pytest.mark.parametrize(
    ("work", "times", "slowest"),
    [
        ((200, 10, 0, 0), (2.0, 1.0, 0.0, 0.0), "compute"),
        ((200, 30, 5, 4), (2.0, 3.0, 1.0, 4.0), "slices"),
        ((200, 30, 5, 1), (2.0, 3.0, 1.0, 1.0), "memory"),
        ((0, 10, 20, 0), (0.0, 1.0, 4.0, 0.0), "network"),
    ],
)
def test_each_resource_has_its_own_time_and_the_slowest_alone_counts(work, times, slowest):
    chip = Chip(1, peak_flops=100.0, hbm_bandwidth=10.0, ici_bandwidth=5.0, dcn_bandwidth=1.0)
    names = ("flops", "hbm_bytes", "sent_bytes", "slice_bytes")
    bound = chip.bounds(**dict(zip(names, work, strict=True)))
    assert (bound, bound.bound, bound.seconds) == (Roofline(*times), slowest, max(times))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(
    "name",
    ["v6e:1x1", *(pytest.param(n, marks=pytest.mark.full) for n in ("v5e:1x1", "v5p:1x1x1"))],
)
def test_a_single_chip_is_a_topology(name):
    """In a process of its own: the compiler's library wants one to itself."""
    code = "import sys; from wedlm_jax.aot.topology import describe_topology as of; " + (
        "print(len(of(sys.argv[1]).devices))"
    )
    done = run_python("-c", code, name)
    assert done.stdout == "1\n", done.stderr
