"""The page at `/`: as it is sent, and in a real browser."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from infer.serve.app import page as document
from infer.trace import read_trace
from tests.infer.serve.chromium import Page, chromium
from tests.infer.serve.running_server import MODEL, RunningServer
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

QUESTION = "Count from 12 to 40 in steps of 2."
PARAMS = SamplingParams(max_tokens=96)


def test_it_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    answer = httpx2.get(f"{server.url}/")
    html, policy = document()
    assert answer.text == html
    assert answer.headers["content-security-policy"] == policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.findall(r"https?://|//\w+\.|@import|url\(", html)
    assert not re.findall(r"""\s(?:style|on\w+)=["']""", html), "the policy forbids them"
    assert html.count("<script>") == html.count("<style>") == 1


@pytest.mark.full
def test_a_traced_answer_is_the_same_answer(client: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24}
    plain = client.completions.create(**asked)
    whole = client.completions.create(**asked, extra_body={"return_trace": True})
    (choice,) = whole.choices
    assert choice.text == plain.choices[0].text
    assert not plain.choices[0].model_extra
    trace = (choice.model_extra or {})["trace"]
    assert (trace["mode"], trace["window_size"]) == ("verified", 8)
    assert trace["finish_reason"] == choice.finish_reason
    assert whole.usage is not None
    assert trace["forwards"][-1]["num_forwards"] == (whole.usage.model_extra or {})["num_forwards"]
    assert "".join(one["text"] for one in trace["forwards"]) == choice.text


def test_it_shows_a_race_and_replays_it(
    server: RunningServer, offline: LLM, tmp_path: Path
) -> None:
    (expected,) = offline.chat([{"role": "user", "content": QUESTION}], PARAMS)
    assert expected.text is not None
    with chromium(tmp_path) as page:
        page.open(f"{server.url}/", width=360, height=740)
        page.wait(f"document.getElementById('model').textContent === '{MODEL}'")
        page.js("document.getElementById('pace').value = '0'")
        assert page.js("document.getElementById('prompt').value") == QUESTION
        page.js("document.getElementById('prompt').focus()")
        page.key("Enter", 13, ctrl=True)
        page.wait("/AR: .*tokens\\.$/.test(document.getElementById('status').textContent)")
        answers = "[...document.querySelectorAll('.answer')].map((one) => one.textContent)"
        assert page.js(answers) == [expected.text] * 2
        tokens, forwards = len(expected.token_ids), expected.num_forwards
        said = page.js("document.getElementById('status').textContent")
        took = f"WeDLM: {tokens} tokens in {forwards} forwards. AR: {tokens} in {tokens}."
        assert said.startswith(took)
        assert said.endswith("The same tokens.")
        assert page.js("document.documentElement.scrollWidth") == 360
        check_replay(page, tokens)
        check_file(page, tmp_path, tokens)
        check_opening(page, server)
        check_lost_server(page)
    server.wait_until_idle()


def check_replay(page: Page, tokens: int) -> None:
    """The slider, by its keys: forwards are shown as they were."""
    page.js("document.getElementById('slider').focus()")
    page.key("Home", 36)
    assert page.js("document.querySelector('.answer').textContent") == ""
    page.key("ArrowRight", 39)
    page.key("ArrowRight", 39)
    at = page.js("document.getElementById('at').textContent")
    assert at.startswith("2 / ")
    counters = "[...document.querySelectorAll('[data-is={}]')].map((one) => one.textContent)"
    ours, theirs = page.js(counters.format("tokens"))
    assert 2 <= int(ours) < tokens
    assert theirs == "2"
    assert page.js(counters.format("rate"))[1] == "1.00"
    committed = "document.querySelectorAll('.first .strip .commit').length"
    assert page.js(committed) >= 1
    label = page.js("document.querySelector('.first .strip').getAttribute('aria-label')")
    assert f"{page.js(committed)} committed" in label


def check_file(page: Page, folder: Path, tokens: int) -> None:
    """What the page saves is what `wedlm plot` reads."""
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.js("document.getElementById('save').click()")
    saved = folder / "trace.json"
    deadline = time.monotonic() + 30
    while not saved.exists():
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.05)
    ours, theirs = read_trace(saved)
    assert (ours["mode"], theirs["mode"]) == ("verified", "ar")
    assert sum(len(one["committed"]) for one in ours["forwards"]) == tokens
    assert len(theirs["forwards"]) == tokens


def check_opening(page: Page, server: RunningServer) -> None:
    """A trace that is opened while another prompt decodes is what stays to be seen."""
    page.js("self.kept = new File([asFile(race.lanes.map((one) => one.trace))], 'kept.json')")
    page.js("document.getElementById('ask').requestSubmit()")
    page.wait("race.lanes[0].trace.length > 0")
    page.js("open(kept)")
    status = "document.getElementById('status').textContent"
    page.wait(f"{status}.startsWith('kept.json: WeDLM, verified: ')")
    server.wait_until_idle()
    time.sleep(0.3)
    assert page.js(status).startswith("kept.json: WeDLM, verified: ")
    assert page.js("document.getElementById('stop').disabled")


def check_lost_server(page: Page) -> None:
    """Browsers tell of a server that is gone in words of their own."""
    page.js("self.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.js("document.getElementById('ask').requestSubmit()")
    said = "The server does not answer. Is it running?"
    page.wait(f"document.getElementById('status').textContent === '{said}'")
    assert page.js("document.getElementById('status').classList.contains('wrong')")
    assert not page.js("race.playing")


def test_a_stream_brings_every_forward_once(client: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "n": 2}
    own = {"return_trace": True, "mode": "paper", "entropy_threshold": None}
    stream = client.completions.create(**asked, seed=3, stream=True, extra_body=own)
    texts, forwards = ["", ""], [[], []]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            news = (choice.model_extra or {}).get("trace", {"forwards": []})
            assert ("mode" in news) == (bool(news["forwards"]) and not forwards[choice.index])
            forwards[choice.index] += news["forwards"]
    for text, trace in zip(texts, forwards, strict=True):
        assert "".join(one["text"] for one in trace) == text
        # With a threshold of None each forward fills one mask, whether or not any is committed.
        assert [len(one["filled"]) for one in trace] == [1] * len(trace)
        assert [one["num_forwards"] for one in trace] == list(range(1, len(trace) + 1))
