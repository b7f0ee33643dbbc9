"""The engine behind the server: what it does when a step fails, and while it compiles."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.infer.serve.conftest import SMALL
from tests.infer.serve.running_server import RunningServer, running_server
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

ASK = {"prompt": "the cat", "max_tokens": 8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model of one layer, with its plain program alone compiled."""
    llm = LLM(write_tiny_checkpoint(tmp_path_factory.mktemp("model")), **SMALL)
    llm.warm_up(SamplingParams())
    return llm


@pytest.fixture
def plain_program_alone(tiny: LLM) -> None:
    """Leaves the engine with its plain program, without those that earlier tests compiled."""
    tiny.engine.device.programs.clear()
    tiny.warm_up(SamplingParams())


@pytest.fixture
def own_server(tiny: LLM) -> Iterator[RunningServer]:
    with running_server(tiny) as server:
        yield server
        server.wait_until_idle()
        # The engine is every test's: a program that comes late would be the next one's.
        server.wait(lambda: not server.service.engine.programs.is_compiling)


def ask(server: RunningServer, timeout: float = 60, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json=ASK | fields, timeout=timeout)


def failing(monkeypatch: pytest.MonkeyPatch, server: RunningServer, times: int) -> list[int]:
    """Makes the device fail in its next steps, so many; returns how often it has."""
    device, failed = server.service.engine.engine.device, []
    collect = device.collect

    def fails(*ticket: Any) -> Any:
        if len(failed) < times:
            failed.append(1)
            raise RuntimeError("RESOURCE_EXHAUSTED: the device is out of memory, and of 'secrets'")
        return collect(*ticket)

    monkeypatch.setattr(device, "collect", fails)
    return failed


def test_a_step_that_fails_is_a_500_and_the_engine_begins_anew(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ask(own_server)
    failing(monkeypatch, own_server, 1)
    failed = ask(own_server)
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "server_error"
    assert "secrets" not in failed.text
    after = ask(own_server)
    assert after.status_code == 200
    assert after.json()["choices"] == before.json()["choices"]
    metrics = httpx2.get(f"{own_server.url}/metrics").text
    assert "wedlm_engine_restarts_total 1.0" in metrics
    assert "wedlm_errors_total 1.0" in metrics
    assert httpx2.get(f"{own_server.url}/health").status_code == 200


def test_a_stream_that_fails_ends_with_the_error(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, own_server, 1)
    answer = ask(own_server, stream=True)
    assert answer.status_code == 200
    assert '"type":"server_error"' in answer.text
    assert "[DONE]" not in answer.text
    assert ask(own_server, stream=True).text.endswith("data: [DONE]\n\n")


def test_an_engine_that_cannot_begin_anew_says_so(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(tiny) as server, monkeypatch.context() as patch:
        failing(patch, server, 1)
        patch.setattr(tiny.engine, "restart", lambda: 1 / 0)
        assert ask(server).status_code == 500
        assert ask(server).status_code == 500
        assert httpx2.get(f"{server.url}/health").status_code == 503
    tiny.engine.restart()


def test_others_go_on_while_a_program_is_compiled(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One asks for what no program has yet."""
    engine = own_server.service.engine.engine
    begun, released = threading.Event(), threading.Event()
    compile_program = engine.compile_program

    def slowly(traits: Any) -> None:
        begun.set()
        assert released.wait(30)
        compile_program(traits)

    monkeypatch.setattr(engine, "compile_program", slowly)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        special = pool.submit(ask, own_server, logprobs=2)
        assert begun.wait(10)
        plain = [pool.submit(ask, own_server) for _ in range(6)]
        assert all(one.result(30).status_code == 200 for one in plain)
        assert not special.done()
        assert own_server.service.engine.num_held == 1
        released.set()
        answer = special.result(60).json()["choices"][0]
    assert answer["text"] == plain[0].result().json()["choices"][0]["text"]
    assert len(answer["logprobs"]["tokens"]) == 8
    assert ask(own_server).status_code == 200


@pytest.mark.usefixtures("plain_program_alone")
def test_a_program_that_cannot_be_compiled_fails_those_alone_that_want_it(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = own_server.service.engine.engine
    compile_program, fails = engine.compile_program, [True]

    def once(traits: Any) -> None:
        if fails.pop():
            raise RuntimeError("too large")
        compile_program(traits)

    monkeypatch.setattr(engine, "compile_program", once)
    assert ask(own_server, frequency_penalty=0.5).status_code == 500
    assert ask(own_server).status_code == 200
    fails.append(False)
    assert ask(own_server, frequency_penalty=0.5).status_code == 200


@pytest.mark.usefixtures("plain_program_alone")
def test_who_goes_while_a_program_is_compiled_leaves_nothing(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = own_server.service.engine.engine
    released = threading.Event()
    monkeypatch.setattr(engine, "compile_program", lambda traits: released.wait(30))
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(
            f"{own_server.url}/v1/completions", json=ASK | {"bad_words": ["x"]}, timeout=0.3
        )
    own_server.wait(lambda: not own_server.service.engine.is_busy)
    released.set()
    assert ask(own_server).status_code == 200


def test_a_request_that_breaks_the_tokenizer_is_its_own_500(
    own_server: RunningServer, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "as_ids", lambda prompt: 1 / 0)
    assert ask(own_server).status_code == 500
    monkeypatch.undo()
    assert ask(own_server).status_code == 200


def test_a_slow_grammar_is_refused_and_holds_up_nobody(
    own_server: RunningServer, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def slow(params: SamplingParams) -> None:
        assert params.grammar is None or released.wait(30)

    monkeypatch.setattr(tiny.engine, "check_grammar", slow)
    monkeypatch.setattr("infer.serve.calls.GRAMMAR_SECONDS", 3.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, own_server, structured_outputs={"regex": "a+"})
        assert ask(own_server).status_code == 200
        assert not asked.done()
        answer = asked.result(30)
        released.set()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert answer.json()["error"]["message"] == "regex: expected one that is compiled within 3 s"


def test_tokens_of_short_bursts_are_delivered_together(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream gets its first tokens at once; later ones wait while bursts are shorter than asked
    for, unless a stop string may stand in them."""

    def pieces(server: RunningServer, **fields: Any) -> list[str]:
        fields = {"max_tokens": 40, "window_size": 0, "ignore_eos": True, "stream": True} | fields
        lines = ask(server, **fields).text.split("\n\n")
        return [line for line in lines if line.startswith("data: {")]

    monkeypatch.setattr("wedlm_jax.engine.scheduling.scheduler.SOON_FORWARDS", 1)
    with running_server(tiny, burst_seconds=30) as server:
        hurried = pieces(server, stop=["no text has this"])
        assert len(pieces(server)) < len(hurried)
