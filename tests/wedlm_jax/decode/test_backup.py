"""Decoding with backup masks: the compiled loop equals a Python loop, in every engine."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import (
    DRAWN,
    SAFE_MARGIN,
    TINY,
    batches,
    cases_with_options,
    in_mode,
    on_mesh,
    random_cases,
    reference,
    run,
    small_engine,
)
from wedlm_jax.sharding import make_mesh


def counted(one):
    return one.token_ids, one.num_forwards, one.num_token_instances


# --- against the loop in Python ----------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_model):
    return small_engine(tiny_model, backup_masks=3)


@st.composite
def verified_batches(draw):
    some = draw(batches())
    if draw(st.booleans()):
        some[0] = draw(cases_with_options())
    budgets = st.sampled_from([0.0, 1.0, 3.0, 1e6])
    # Where one token is nearly certain, no draft is doubtful enough for backup masks.
    options = {"draft": "masks", **draw(st.sampled_from([{}, {"logit_bias": {5: 8.0}}]))}
    return [in_mode(one, "verified", draft_budget=draw(budgets), **options) for one in some]


@given(batch=verified_batches())
def test_it_decodes_as_the_loop_in_python(engine, full_forward, batch):
    for case, ours in zip(batch, run(engine, batch), strict=True):
        theirs = reference(full_forward, TINY, case, backup=3)
        if theirs.margin > SAFE_MARGIN:
            assert counted(ours) == counted(theirs)


# --- the same in every engine ----------------------------------------------------------------


CASES = random_cases(7, 5, draft_budget=1e6)
"""More than decode together; with a budget that never ends they draft in every forward whose drafts
were right."""


@pytest.fixture(scope="module")
def expected(full_forward):
    """The loop's completions; some of their drafts are from backup masks, and were right."""
    found, without = (
        [reference(full_forward, TINY, one, backup=most) for one in CASES] for most in (3, 0)
    )
    assert min(one.margin for one in found) > SAFE_MARGIN
    assert sum(one.from_backup for one in found) > 10
    forwards = [sum(one.num_forwards for one in some) for some in (found, without)]
    assert forwards[0] < forwards[1]
    return [counted(one) for one in found]


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "deterministic": True},
        {"page_size": 16, "chunk_tokens": 3, "attention": "gather"},
        pytest.param({"mesh": {"data": 2}, "max_batch_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_pages_and_sizes_change_neither_tokens_nor_forwards(tiny_model, expected, options):
    given = {"backup_masks": 3, **options}
    if sizes := given.pop("mesh", None):
        given["mesh"] = make_mesh(sizes, jax.devices()[:2])
        tiny_model = on_mesh(tiny_model, given["mesh"])
    results = run(small_engine(tiny_model, DRAWN, **given), CASES)
    assert list(map(counted, results)) == expected


def test_there_are_no_more_backup_masks_than_masks_in_a_window(tiny_model, expected):
    """A preempted sequence may take more forwards, since it resumes without drafts."""
    engine = small_engine(tiny_model, DRAWN, backup_masks=8, num_pages=27)
    assert engine.settings.backup == engine.settings.window == 4
    results = run(engine, CASES)
    assert engine.counters.preemptions
    assert [one.token_ids for one in results] == [tokens for tokens, *_ in expected]
