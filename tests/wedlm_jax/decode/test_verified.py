"""Verified decoding gives the tokens of autoregressive decoding, whatever the masks draft."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from infer.evaluate import chat_prompt
from infer.heldout import read_questions
from tests.decode_examples import TINY, Row, rows, run
from tests.reference.sampling import softmax, truncate
from wedlm_jax import batch_sizes, predictions
from wedlm_jax.batch_sizes import BatchSizes
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.llm import EMBEDDED_MODEL, LLM
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import Transformer
from wedlm_jax.row_params import OptionSizes
from wedlm_jax.row_result import RowResult
from wedlm_jax.params import SamplingParams
from wedlm_jax.scheduler import Scheduler
from wedlm_jax.verification import accepted, draft_rule, rejected

BUDGETS = (0.0, 1.0, 3.0, 1e6)


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    chosen = jnp.array([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    drafts = jnp.array([[5, 6, 7, 0], [5, 0, 7, 0], [0, 6, 7, 0]])
    is_draft = jnp.arange(4) < 3
    right = accepted(chosen, drafts, jnp.broadcast_to(is_draft, (3, 4)))
    assert right.sum(axis=1).tolist() == [3, 1, 0]
    filled = jnp.array([[True, True, True, True, False]] * 3)
    gone = rejected(filled, 1 + right.sum(axis=1), jnp.array([True, True, False]))
    assert gone.astype(int).tolist() == [[0, 0, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]


def test_masks_draft_until_the_budget_is_spent_but_never_the_first() -> None:
    entropies = jnp.array([[9.0, 5.0, 0.3, 0.3, 0.3, 0.1]] * 3)
    is_mask = jnp.array([[False, True, True, True, True, True]] * 3)
    drafts = draft_rule(entropies, is_mask, jnp.array([0.0, 0.7, 100.0]))
    assert drafts.astype(int).tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
    ]


def in_mode(row: Row, mode: str, **changes: object) -> Row:
    params = dataclasses.replace(row.params, mode=mode, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(row, params=params)


@st.composite
def mixed_rows(draw: st.DrawFn) -> list[Row]:
    """Four rows: two verified, one of each of the other modes, in any order."""
    modes = draw(st.permutations(["verified", "verified", "ar", "paper"]))
    return [
        in_mode(draw(rows()), mode, draft_budget=draw(st.sampled_from(BUDGETS))) for mode in modes
    ]


def same(ours: RowResult, theirs: RowResult) -> bool:
    return (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)


@given(batch=mixed_rows())
def test_a_verified_row_has_the_tokens_of_an_autoregressive_one(
    streaming_engine: Engine, batch: list[Row]
) -> None:
    expected = run(streaming_engine, [in_mode(row, "ar") for row in batch])
    for row, ours, theirs in zip(batch, run(streaming_engine, batch), expected, strict=True):
        if row.params.mode != "paper":
            assert same(ours, theirs)
        if row.params.mode == "verified":
            assert ours.num_forwards <= theirs.num_forwards, "each adds one token at least"


@given(batch=mixed_rows())
def test_a_paper_row_beside_verified_ones_is_as_alone(
    streaming_engine: Engine, batch: list[Row]
) -> None:
    results = run(streaming_engine, batch)
    for row, result in zip(batch, results, strict=True):
        if row.params.mode == "paper":
            assert run(streaming_engine, [row]) == [result]


@given(requests=st.lists(mixed_rows(), min_size=1, max_size=3), slots=st.sampled_from([1, 2, 4]))
def test_rows_that_come_and_go_have_the_tokens_of_autoregressive_ones(
    streaming_engine: Engine, requests: list[list[Row]], slots: int
) -> None:
    every = [row for some in requests for row in some]
    scheduler = Scheduler(streaming_engine, [(r.prompt, r.params) for r in every], rows=slots)
    results = dict(item for some in scheduler.run() for item in some)
    expected = [
        r for some in requests for r in run(streaming_engine, [in_mode(x, "ar") for x in some])
    ]
    for number, (row, theirs) in enumerate(zip(every, expected, strict=True)):
        assert row.params.mode == "paper" or same(results[number], theirs)


@given(batch=mixed_rows(), changes=st.lists(st.sampled_from([0, 1, 2, 4]), min_size=1, max_size=6))
def test_the_window_may_change_at_any_time(
    tiny_model: Transformer, streaming_engine: Engine, batch: list[Row], changes: list[int]
) -> None:
    verified = [in_mode(row, "verified") for row in batch]
    expected = run(streaming_engine, [in_mode(row, "ar") for row in batch])
    running = streaming_engine.start([r.prompt for r in verified], [r.params for r in verified])
    for window in changes:
        running.set_windows(window)
        running.advance(2)
    assert running.advance()
    assert all(map(same, running.results(), expected))


# --- with drafts that are mostly right ---------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    llm, regimes = LLM(window_size=0), read_questions(EMBEDDED_MODEL / "heldout.jsonl")
    return [chat_prompt(llm, question) for some in regimes.values() for question in some[:3]]


@pytest.fixture(scope="module")
def autoregressive(prompts: list[list[int]]) -> dict[float, list[list[int]]]:
    llm = LLM(window_size=0)
    return {t: completions(llm, prompts, t, "ar")[0] for t in (0.0, 0.8)}


def completions(
    llm: LLM, prompts: list[list[int]], temperature: float, mode: str
) -> tuple[list[list[int]], int]:
    """Token ids, and the forwards of all together."""
    params = SamplingParams(mode=mode, temperature=temperature, max_tokens=48)
    results = llm.generate(prompts, params)
    return [r.token_ids for r in results], sum(r.num_forwards for r in results)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 4, 8, 16, 32])
def test_the_trained_model_says_the_same_in_fewer_forwards(
    window: int, prompts: list[list[int]], autoregressive: dict[float, list[list[int]]]
) -> None:
    llm = LLM(window_size=window)
    for temperature, expected in autoregressive.items():
        token_ids, forwards = completions(llm, prompts, temperature, "verified")
        assert token_ids == expected
        if window > 2 and temperature == 0:
            assert sum(map(len, token_ids)) > 1.5 * forwards


# --- the distribution -----------------------------------------------------------------------

SMALL = dataclasses.replace(TINY, vocab_size=7, mask_token_id=6, eos_token_ids=())
LENGTH, SAMPLES, AT_ONCE = 4, 200_000, 4096
BOLD = SamplingParams(mode="verified", temperature=1.0, max_tokens=LENGTH, draft_budget=100.0)


PROMPT = (1, 2)


def small_engine() -> Engine:
    return Engine(Transformer(SMALL, rngs=nnx.Rngs(3)), window_size=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


@pytest.fixture(autouse=True)
def no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sizes, "SMALLEST_PROMPT_BUCKET", len(PROMPT))


def sequences(engine: Engine, params: SamplingParams) -> np.ndarray:
    """The completions of many seeds: int ``[SAMPLES, LENGTH]``."""
    sizes = BatchSizes(AT_ONCE, 16, LENGTH, num_stops=4, options=OptionSizes.of([params]))
    batch, rows, prompts = engine.open(sizes), range(AT_ONCE), [PROMPT] * AT_ONCE
    batch.prefill([(row, 0, np.array(PROMPT)) for row in rows])
    found = []
    for first in range(0, SAMPLES, AT_ONCE):
        # The prompts stand in the cache, and are not prefilled again.
        batch.open(rows, prompts, [with_seed(params, first + row) for row in rows])
        assert batch.advance()
        found.append(np.array(batch._state.output[:, :LENGTH]))
    return np.concatenate(found)[:SAMPLES]


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """As `dataclasses.replace`, which checks all of them again for each of many seeds."""
    changed = copy.copy(params)
    object.__setattr__(changed, "seed", seed)
    return changed


def p_value(found: np.ndarray, params: SamplingParams) -> float:
    """Of Pearson's test against the product of the model's own next-token distributions."""
    length = found.shape[1]
    every = np.array(list(itertools.product(range(6), repeat=length)))
    model = Transformer(SMALL, rngs=nnx.Rngs(3))
    tokens = np.concatenate([np.full((len(every), 2), [1, 2]), every], axis=1)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    hidden = model(jnp.array(tokens), jnp.array(positions), CausalMask())
    logits = np.array(model.logits(hidden))[:, 1:-1]
    logits[..., 6] = -np.inf
    next_token = np.array([
        [softmax(truncate(row / params.temperature, 0, params.top_p)[0]) for row in sequence]
        for sequence in logits
    ])  # fmt: skip
    chosen = np.take_along_axis(next_token, every[..., None], axis=2)[..., 0]
    expected = chosen.prod(axis=1) * len(found)
    counts = np.bincount(found @ 6 ** np.arange(length)[::-1], minlength=len(every))
    assert counts[expected == 0].sum() == 0, "what is left out never comes"
    # Cells too small for the approximation are counted together.
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    return float(stats.chisquare(counts[keep], expected[keep]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_samples_are_distributed_as_autoregressive_ones(
    engine: Engine, temperature: float, top_p: float
) -> None:
    params = dataclasses.replace(BOLD, temperature=temperature, top_p=top_p)
    found = sequences(engine, params)
    assert all(p_value(found[:, :length], params) > 1e-3 for length in (3, 4))


@pytest.mark.slow
def test_a_rule_that_accepts_every_draft_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "accepted", lambda tokens, drafts, is_draft: is_draft)
    jax.clear_caches()  # the loop is traced anew, with this rule
    found = sequences(small_engine(), BOLD)
    jax.clear_caches()
    # In a draft's place the choice of the row before it is put in any case, so a window's first
    # draft, here of the third token, comes out right; what stands behind has seen a wrong one.
    assert p_value(found, BOLD) < 1e-12


# --- refused ----------------------------------------------------------------------------------


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InputError, match="mode: expected one of paper, verified, ar"):
        SamplingParams(mode="fast")
