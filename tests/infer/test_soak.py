"""What a long run is judged by."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer import soak
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM


def sampled(*resident: float) -> list[dict[str, float]]:
    return [{"resident_mib": mib} for mib in resident]


@pytest.mark.parametrize(
    ("resident", "programs", "status"),
    [
        # The first quarter may still grow.
        ((500, 1000, 1001, 1002, 1001), 7, 0),
        ((1000,), 7, 0),
        ((500, 1000, 1030, 1060, 1100), 7, 1),
        ((1000, 1000, 1000, 1000, 1000), 8, 1),
    ],
)
def test_memory_must_stay_flat_and_nothing_be_compiled(
    resident: tuple[float, ...], programs: int, status: int
) -> None:
    assert soak._judge(sampled(*resident), 7, programs) == status


def test_memory_in_use_is_seen_to_grow() -> None:
    before = soak.resident_bytes()
    held = bytearray(b"x" * 2**26)
    assert soak.resident_bytes() - before > len(held) // 2


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="--minutes"):
        soak.main(["--minutes", "0"])


def test_too_little_time_for_a_prompt_is_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "warm_up", lambda llm, params: None)
    with pytest.raises(InputError, match=r"--minutes 1e-09: over before the first prompt"):
        soak.main(["--model", str(checkpoint), "--minutes", "1e-9"])
