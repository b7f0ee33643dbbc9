import json

import pytest

from benchmarks import tradeoffs
from infer.bench.subject import regimes_of
from infer.evaluate import Decoder, decoders_at
from infer.score import Score
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import Question

REGIMES = ("low_entropy", "prose")


def score(decoder, regime, right, seconds):
    """A score of ten answers of ten tokens; prose has no right ones."""
    return Score(
        decoder=decoder,
        regime=regime,
        questions=10,
        judged=0 if regime == "prose" else 10,
        right=right,
        cut=0,
        tokens=100,
        forwards=50,
        instances=400,
        as_first=1.0,
        ar_agrees=1.0,
        seconds=[seconds],
    )


@pytest.fixture
def calls(monkeypatch):
    """Decoders without a model, whose scores depend on the threshold; what was evaluated."""
    calls = []

    def decoders_at(model, thresholds, *, window_size):
        taus = {"AR": None, **{f"paper τ={x:g}": x for x in thresholds}, "verified": None}
        return [
            Decoder(name, None, SamplingParams(mode="paper", entropy_threshold=tau))
            for name, tau in taus.items()
        ]

    def evaluate_all(decoders, regimes, *, passes):
        calls.append([(one.name, one.params.position_penalty) for one in decoders])
        return [
            score(one.name, regime, 10 - (one.params.entropy_threshold == 0.9), 2.0 - place / 10)
            for regime in REGIMES
            for place, one in enumerate(decoders)
        ]

    def block_wise(decoders, window, regimes):
        of = {"kind": "block-wise", "decoder": "block-wise τ=0.4", "threshold": 0.4}
        counts = {"accuracy": 1.0, "tokens_per_forward": 3.0, "p_cache": 0.4}
        where = {"regime": "low_entropy", "window": window, "penalty": 0.02}
        return [{**of, **where, **counts, "speed": None}]

    monkeypatch.setattr(tradeoffs, "decoders_at", decoders_at)
    monkeypatch.setattr(tradeoffs, "evaluate_all", evaluate_all)
    monkeypatch.setattr(tradeoffs, "block_wise", block_wise)
    return calls


ARGUMENTS = ["--windows", "4", "16", "--penalties", "0", "0.02", "--thresholds", "0.4", "0.9"]


def test_an_interrupted_run_goes_on_where_it_stopped(calls, tmp_path, monkeypatch):
    arguments = [*ARGUMENTS, "--output", str(tmp_path / "figures.json")]
    usual = tradeoffs.evaluate_all

    def stops(decoders, regimes, *, passes):
        if len(calls) == 3:
            raise KeyboardInterrupt
        return usual(decoders, regimes, passes=passes)

    monkeypatch.setattr(tradeoffs, "evaluate_all", stops)
    with pytest.raises(KeyboardInterrupt):
        tradeoffs.main(arguments)
    monkeypatch.setattr(tradeoffs, "evaluate_all", usual)
    assert tradeoffs.main(arguments) == 0
    assert len(calls) == 4
    made = json.loads((tmp_path / "figures.json").read_text())
    assert list(made["groups"]) == [
        f"W = {window}, λ = {penalty}" for window in (4, 16) for penalty in ("0", "0.02")
    ]
    rows = [row for group in made["groups"].values() for row in group]
    # Verified and block-wise decoding have one λ only; AR is in every group.
    assert [len(group) for group in made["groups"].values()] == [6, 9, 6, 9]
    assert {row["speed"] for row in rows if row["kind"] == "AR"} == {1.0}
    assert [name for name, _ in calls[0]] == ["AR", "paper τ=0.4", "paper τ=0.9"]
    assert {penalty for _, penalty in calls[0]} == {0.0}


def test_figures_are_drawn_and_those_of_other_settings_are_not_mixed(calls, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="--output: expected a file"):
        tradeoffs.main([])
    assert not calls, "it is needed before anything is measured"
    plot = tmp_path / "figures.svg"
    arguments = [*ARGUMENTS, "--output", str(tmp_path / "figures.json")]
    assert tradeoffs.main([*arguments, "--plot", str(plot)]) == 0
    text = plot.read_text()
    assert "low entropy" in text
    assert "prose" in text
    assert "AR agrees, %" in text, "prose has no right answers"
    assert "block-wise" in text
    assert "None" not in capsys.readouterr().out
    with pytest.raises(InputError, match=r"figures\.json: has figures for other settings"):
        tradeoffs.main([*arguments, "--samples", "5"])
    with pytest.raises(InputError, match="--regime: expected one of low_entropy, "):
        tradeoffs.main([*arguments, "--regime", "poems"])


def test_block_wise_decoding_finishes_a_window_before_the_next_one_opens(checkpoint):
    """Where a forward fills every mask, the next one commits them all."""
    decoders = decoders_at(
        str(checkpoint), [0.0, 99.0], window_size=4, max_tokens=11, ignore_eos=True
    )
    questions = [Question(prompt, "x", "exact", regime="r") for prompt in ("the cat", "12 + 30 =")]
    careful, bold = tradeoffs.block_wise(decoders, 4, [questions])
    assert (careful["decoder"], bold["decoder"]) == ("block-wise τ=0", "block-wise τ=99")
    for row in (careful, bold):
        assert (row["regime"], row["questions"], row["tokens"], row["cut"]) == ("r", 2, 22, 2)
        assert (row["accuracy"], row["speed"]) == (0.0, None)
    assert (bold["forwards"], bold["instances"]) == (2 * 6, 2 * 6 * 4)
    assert (bold["tokens_per_forward"], bold["p_cache"]) == (22 / 12, 22 / 48)
    # One mask a forward, and the window is not refilled while it is committed.
    assert careful["forwards"] > 22
    assert careful["instances"] < 4 * careful["forwards"]


def test_block_wise_decoding_is_compared_with_ar():
    decoders = decoders_at(None, [0.4], window_size=4, kinds=["paper"])
    questions = regimes_of({"regime": ["reasoning"]})["reasoning"][:2]
    (row,) = tradeoffs.block_wise(decoders, 4, [questions])
    assert row["accuracy"] == 1
    assert row["ar_agrees"] > 0.9


def test_the_front_has_what_no_other_point_beats():
    points = [(1.0, 0.9), (0.9, 1.5), (0.95, 1.5), (1.0, 0.8), (0.7, 1.4), (0.5, 2.0)]
    rows = [{"accuracy": right, "tokens_per_forward": tokens} for right, tokens in points]
    front = [(row["accuracy"], row["tokens_per_forward"]) for row in tradeoffs.pareto(rows)]
    assert front == [(1.0, 0.9), (0.95, 1.5), (0.5, 2.0)]
    prose = [
        {"accuracy": None, "ar_agrees": share, "tokens_per_forward": tokens}
        for share, tokens in ((1.0, 1.0), (0.8, 1.3), (0.8, 1.2))
    ]
    assert tradeoffs.pareto(prose) == prose[:2], "where nothing is judged, AR decides"
