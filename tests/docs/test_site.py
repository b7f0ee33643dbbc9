"""The site builds without a warning, and needs nothing from elsewhere."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("material", reason="the site needs the extra 'docs'")

LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_every_page_is_built(site):
    assert (site / "index.html").exists()
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.stem / "index.html").exists(), page.name


def test_nothing_is_loaded_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    loaded = {page.name: LOADED.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: found for name, found in loaded.items() if found} == {}


def test_links_to_code_lead_to_its_text(site):
    text = (site / "how-it-works" / "index.html").read_text(encoding="utf-8")
    linked = set(re.findall(r'href="(\.\./code/[^"#]+)"', text))
    assert linked
    for link in linked:
        assert (site / "how-it-works" / link / "index.html").exists(), link
