"""The report describes a server under load. Its client: tests/infer/serve/test_soak.py."""

import pytest

from benchmarks.load_client import Heard
from benchmarks.serve_load import BETWEEN, FIRST, draw_loads, load_of
from wedlm_jax.errors import InputError


def test_speeds_are_of_all_answers_together_and_times_are_drawn(tmp_path):
    heard = [Heard([1] * 3, first, [0.5, 1.5], "length") for first in (1.0, 2.0, 9.0)]
    load = load_of(2, heard, 4.5, (8.0, 4.0), 0.1)
    assert (load["requests"], load["tokens/s"]) == (3, 2.0)
    assert (load["of the job's"], load["of one as wide"]) == (0.25, 0.5)
    times = [load[f"{what}, {how}"] for what in (FIRST, BETWEEN) for how in ("ms", "95 %")]
    assert times == pytest.approx([2000, 8300, 1000, 1500])
    draw_loads([load, load_of(4, heard, 1.0, (1.0, 1.0), 0.1)], tmp_path / "load.svg")
    drawn = (tmp_path / "load.svg").read_text(encoding="utf-8")
    assert all(f"ms {what}" in drawn for what in (FIRST, BETWEEN))


def test_a_call_that_failed_is_named():
    heard = [Heard([1], finish_reason="stop"), Heard(error="it broke"), Heard(error="it too")]
    with pytest.raises(InputError, match="2 calls failed; the first: it broke"):
        load_of(1, heard, 1.0, (1.0, 1.0), 0.1)
