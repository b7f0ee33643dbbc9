"""The page at `/`: as it is sent, and in a real browser."""

import contextlib
import itertools
import json
import re
import shutil
import subprocess
import time

import httpx2
import pytest
from websockets.sync.client import connect

from infer.serve.app import page as document
from infer.trace import read_trace
from tests.infer.serve.running_server import MODEL, wait_until
from wedlm_jax.__main__ import main
from wedlm_jax.params import SamplingParams

QUESTION = "Count from 12 to 40 in steps of 2."
PARAMS = SamplingParams(max_tokens=96)


def test_it_needs_nothing_from_elsewhere(server):
    answer = httpx2.get(f"{server.url}/")
    html, policy = document()
    assert answer.text == html
    assert answer.headers["content-security-policy"] == policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.findall(r"https?://|//\w+\.|@import|url\(", html)
    assert not re.findall(r"""\s(?:style|on\w+)=["']""", html), "the policy forbids them"
    assert html.count("<script>") == html.count("<style>") == 1


def test_it_shows_a_race_and_replays_it(server, offline, tmp_path):
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


def check_replay(page, tokens):
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


def check_file(page, folder, tokens):
    """What the page saves is what `wedlm plot` reads."""
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.js("document.getElementById('save').click()")
    saved = folder / "trace.json"
    wait_until(saved.exists, 30, "nothing was saved")
    assert main(["plot", str(saved)]) == 0
    ours, theirs = read_trace(saved)
    assert (ours["mode"], theirs["mode"]) == ("verified", "ar")
    assert sum(len(one["committed"]) for one in ours["forwards"]) == tokens
    assert len(theirs["forwards"]) == tokens


def check_opening(page, server):
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


def check_lost_server(page):
    """Browsers tell of a server that is gone in words of their own."""
    page.js("self.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.js("document.getElementById('ask').requestSubmit()")
    said = "The server does not answer. Is it running?"
    page.wait(f"document.getElementById('status').textContent === '{said}'")
    assert page.js("document.getElementById('status').classList.contains('wrong')")
    assert not page.js("race.playing")


def test_a_stream_brings_every_forward_once(client):
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "n": 2, "seed": 3}
    asked["extra_body"] = {"return_trace": True, "mode": "paper", "entropy_threshold": None}
    texts, traces = ["", ""], [{}, {}]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            trace, news = traces[choice.index], (choice.model_extra or {}).get("trace", {})
            assert not trace or news.keys() <= {"tokens", "forwards"}, "all else comes once"
            tokens = trace.get("tokens", {}) | news.pop("tokens", {})
            forwards = trace.get("forwards", []) + news.pop("forwards", [])
            trace |= news | {"tokens": tokens, "forwards": forwards}
    whole = client.completions.create(**asked).choices
    for choice, text, trace in zip(whole, texts, traces, strict=True):
        forwards, expected = trace["forwards"], choice.model_extra["trace"]
        assert choice.text == text == "".join(one["text"] for one in forwards)
        # With a threshold of None each forward fills one mask, whether or not any is committed.
        assert [len(one["filled"]) for one in forwards] == [1] * len(forwards)
        assert [one["num_forwards"] for one in forwards] == list(range(1, len(forwards) + 1))
        assert expected.pop("finish_reason") == choice.finish_reason
        for one in (*forwards, *expected["forwards"]):
            del one["seconds"], one["entropies"]  # numbers that no run repeats
        assert trace == expected


FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--remote-debugging-port=0", "about:blank"),
)


class Page:
    """A tab.

    Attributes:
      wrong: what the page's console said of errors.
    """

    def __init__(self, socket):
        self._socket, self._numbers = socket, itertools.count()
        self.wrong = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Calls the browser."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv(timeout=60))
            if said.get("id") == number:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            if said["method"] == "Runtime.exceptionThrown":
                self.wrong.append(str(said["params"]["exceptionDetails"]))
            if said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.wrong.append(said["params"]["entry"]["text"])

    def js(self, expression):
        """The value of an expression in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, condition, seconds=120):
        """Waits until an expression is true."""
        wait_until(lambda: self.js(condition), seconds, f"it does not come to hold: {condition}")

    def key(self, key, code, *, ctrl=False):
        """Presses a key."""
        pressed = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 2 if ctrl else 0}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def open(self, url, *, width, height):
        """Opens an address in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")


@contextlib.contextmanager
def chromium(folder):
    """Runs Chromium with a profile in ``folder``, where downloads go, too. The test is skipped
    where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed: the page is not tried in a browser")
    profile = folder / "profile"
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with connect(_address(profile / "DevToolsActivePort"), max_size=None) as browser:
            tab = Page(browser)
            yield tab
            assert tab.wrong == []
    finally:
        process.terminate()
        process.wait(30)


def _address(port_file):
    """The first tab's address, once the browser has written its port."""
    wait_until(
        lambda: port_file.exists() and "\n" in port_file.read_text(), 60, "chromium does not start"
    )
    port = port_file.read_text().splitlines()[0]
    tabs = httpx2.get(f"http://127.0.0.1:{port}/json").json()
    return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
