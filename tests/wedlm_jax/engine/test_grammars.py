"""Sequences under a grammar say what autoregressive decoding would, in any company, or fail."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import (
    SAFE_MARGIN,
    TINY,
    Case,
    cases,
    events_of,
    in_mode,
    on_mesh,
    requests_of,
    run,
    say_the_same,
    small_engine,
)
from tests.examples.grammar import END, RandomAutomata, automaton_of
from tests.reference.logit_options import adjusted
from tests.reference.sampling import choose_token
from tests.wedlm_jax.engine.accounts import check_accounts
from wedlm_jax.engine.loop import EngineLoop
from wedlm_jax.errors import InputError
from wedlm_jax.generation import Generation
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh

EXPECTED = [
    SamplingParams(mode="paper", temperature=1.0, top_k=3),
    SamplingParams(mode="verified", regex="0"),
    SamplingParams(mode="ar", regex="0"),
]


@pytest.fixture(scope="module")
def engine(tiny_model):
    """Pages for little more than one sequence of full length: among several, some are preempted."""
    return small_engine(
        tiny_model, EXPECTED, num_pages=24, deterministic=True, grammars=RandomAutomata()
    )


@st.composite
def constrained(draw):
    case = draw(cases())
    return in_mode(
        case,
        draw(st.sampled_from(["verified", "ar"])),
        regex=str(draw(st.integers(0, 30))),
        draft_budget=draw(st.sampled_from([0.0, 2.0, 100.0])),
        stop_token_ids=(),
    )


def in_plain_python(forward, case):
    """What autoregressive decoding says, and the smallest margin of its choices."""
    automaton, out, least = automaton_of(case.params), list[int](), np.inf
    while len(out) < case.params.max_tokens and END not in out:
        text = [*case.prompt, *out]
        logits = np.array(forward(text, range(len(text)))[-1], np.float64)
        logits[TINY.require_mask_token_id()] = -np.inf
        place = len(out)
        logits = adjusted(logits, case.params, case.prompt, out, place, {END})
        logits = np.where(automaton.allowed(automaton.walk(out)), logits, -np.inf)
        token, margin = choose_token(logits, case.params, place + 1, 0)
        out.append(token)
        least = min(least, margin)
    return out, least


@given(some=st.lists(constrained(), min_size=2, max_size=4), others=st.lists(cases(), max_size=3))
def test_it_is_ar_decoding_with_the_other_tokens_impossible(engine, full_forward, some, others):
    """In mode "verified" too, and in any company."""
    results = run(engine, [*some, *others])
    for case, result in zip(some, results, strict=False):
        expected, margin = in_plain_python(full_forward, case)
        if margin > SAFE_MARGIN:
            assert result.token_ids == expected
            assert result.finish_reason == ("stop" if END in expected else "length")
    assert engine.counters.pages_used == 0
    check_accounts(engine.scheduler)


def test_the_host_follows_grammars_while_the_layers_run(engine, monkeypatch):
    order = []
    for owner, name in [
        (engine.device.programs, "layers"),
        (engine.device._grammars, "commit"),
        (engine.device._grammars, "allowed"),
    ]:
        called = getattr(owner, name)

        def note(*arguments, name=name, called=called, **options):
            order.append(name)
            return called(*arguments, **options)

        monkeypatch.setattr(owner, name, note)
    case = Case((3, 9), SamplingParams(mode="ar", max_tokens=4, regex="7"), 4)
    list(events_of(engine, requests_of([case]), ahead=True))
    assert order[:3] == ["layers", "allowed", "layers"], "the second forward is begun at once"
    assert order[3:6] == ["commit", "allowed", "layers"]


def test_a_failure_ends_one_prompt_of_a_call_with_all_its_samples(engine):
    params = SamplingParams(mode="ar", max_tokens=12, regex="7", temperature=1.0, seed=1)
    prompts = [((3 + i, 9), params) for i in range(5)]
    expected = dict(item for some in Generation(EngineLoop(engine), None, prompts) for item in some)
    prompts[2] = (4, 9), dataclasses.replace(params, regex="7 dead", n=3)
    failed = []
    note = lambda *told: failed.append(told)  # noqa: E731
    done = Generation(EngineLoop(engine), None, prompts, on_failure=note)
    results = dict(item for some in done for item in some)
    assert [place for place, _ in failed] == [2]
    del expected[2]
    assert results.keys() == expected.keys()
    assert all(say_the_same(results[place], expected[place]) for place in expected)
    assert not engine.has_work
    loop = EngineLoop(engine)
    with pytest.raises(InputError, match=r"^regex: the completion cannot continue"):
        list(Generation(loop, None, prompts))
    loop.close()
    assert not engine.has_work


def test_a_grammar_that_cannot_be_followed_is_refused_before_anything_runs(
    engine, autoregressive_engine
):
    with pytest.raises(InputError, match=r"^regex: wrong$"):
        engine.check((3, 4), SamplingParams(max_tokens=4, regex="wrong"))
    with pytest.raises(InputError, match=r"^json_schema: needs a tokenizer"):
        autoregressive_engine.check((3, 4), SamplingParams(max_tokens=4, json_schema={}))


@pytest.mark.full
def test_on_a_mesh_they_are_what_they_are_on_one_device():
    config = dataclasses.replace(TINY, num_attention_heads=4, num_key_value_heads=2)
    model = Transformer(config, rngs=nnx.Rngs(7))
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    options = {"deterministic": True, "grammars": RandomAutomata()}
    batch = [
        Case((3 + i, 5, 9), SamplingParams(mode=mode, regex=str(i), max_tokens=12), 4)
        for i, mode in enumerate(["verified", "ar", "verified"] * 3)
    ]
    expected = run(small_engine(model, EXPECTED[1:], **options), batch)
    sharded = run(small_engine(on_mesh(model, mesh), EXPECTED[1:], mesh=mesh, **options), batch)
    assert all(map(say_the_same, sharded, expected))
