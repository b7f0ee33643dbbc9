"""A real browser without a screen, driven by its own protocol (Chrome DevTools)."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

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

    def __init__(self, socket: ClientConnection):
        self._socket, self._numbers = socket, itertools.count()
        self.wrong: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls the browser."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv(timeout=60))
            if said.get("id") == number:
                assert "error" not in said, (method, said["error"])
                return said["result"]  # type: ignore[no-any-return]
            self._note(said)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Runtime.exceptionThrown":
            self.wrong.append(str(event["params"]["exceptionDetails"]))
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.wrong.append(event["params"]["entry"]["text"])

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, condition: str, seconds: float = 120) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < deadline, f"it does not come to hold: {condition}"
            time.sleep(0.05)

    def key(self, key: str, code: int, *, ctrl: bool = False) -> None:
        """Presses a key."""
        own = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 2 if ctrl else 0}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **own)
        self.call("Input.dispatchKeyEvent", type="keyUp", **own)

    def open(self, url: str, *, width: int, height: int) -> None:
        """Opens an address in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
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


def _address(port_file: Path) -> str:
    """The first tab's address, once the browser has written its port."""
    import httpx2

    deadline = time.monotonic() + 60
    while not (port_file.exists() and port_file.read_text().count("\n")):
        assert time.monotonic() < deadline, "chromium does not start"
        time.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    tabs = httpx2.get(f"http://127.0.0.1:{port}/json").json()
    return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
