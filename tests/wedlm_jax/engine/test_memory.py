"""How many pages are planned for a machine's memory."""

import pytest

from tests.examples.decode import TINY
from wedlm_jax.engine.settings import CPU_TOKENS, SPARE, bytes_per_page, plan_pages
from wedlm_jax.errors import InputError

PAGE = 16
EACH = bytes_per_page(TINY, PAGE, "float32")


def planned(platform, *, tokens, limit):
    """The plan for 4 sequences of so many tokens on a device of ``limit`` pages."""
    return plan_pages(
        TINY,
        weights=0,
        working=0,
        page_size=PAGE,
        pages_per_sequence=tokens // PAGE,
        sequences=4,
        dtype="float32",
        platform=platform,
        limit=limit * EACH,
    )


def test_a_cpu_holds_all_sequences_of_a_short_context():
    assert planned("cpu", tokens=512, limit=10**6).cached_tokens == SPARE * 4 * 512


def test_a_long_context_takes_a_cpu_no_more_memory_than_a_usual_one():
    usual = SPARE * 4 * CPU_TOKENS
    assert planned("cpu", tokens=4096, limit=10**6).cached_tokens == usual
    # One sequence may be as long as the context.
    assert planned("cpu", tokens=32768, limit=10**6).cached_tokens == 32768


def test_an_accelerator_gives_pages_what_is_left():
    assert planned("tpu", tokens=32768, limit=10_000).num_pages == 9500


def test_a_context_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="lower max_model_len"):
        planned("tpu", tokens=32768, limit=1000)
