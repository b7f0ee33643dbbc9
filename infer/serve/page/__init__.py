"""The page at `/`: a model decodes, seen forward by forward, with AR decoding beside it.

It is one HTML document without anything from elsewhere; here it is put together from its parts.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
SCRIPTS = ("trace.js", "stream.js", "strip.js", "map.js", "lane.js", "page.js")
"""In order: each knows those before it."""


def document() -> tuple[str, str]:
    """Returns the page, and the Content-Security-Policy that lets its own style and script alone
    run, and lets it call this server alone."""
    style = _read("style.css")
    script = '"use strict";\n' + "\n".join(map(_read, SCRIPTS))
    page = _read("index.html").replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
