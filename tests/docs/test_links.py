"""Links resolve, and the site builds without warnings and loads nothing from other hosts."""

import ast
import os
import re

import pytest

from tests.docs.pages import LANGUAGES, PAGES, ROOT, anchors, blocks, links
from tests.examples.child import run_python

NAME = re.compile(r"`([A-Za-z_][\w.]*)`")


def target_of(page, link):
    return (page.parent / link.partition("#")[0]).resolve() if link[0] != "#" else page


def names_in(file):
    """What a Python file defines: functions, classes, methods as `Class.method`, constants."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {name.id for name in node.targets if isinstance(name, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def broken_links(page):
    """Links to no file, to no heading, and with a name that the linked Python file has not."""
    wrong = []
    for shown, link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        target, anchor = target_of(page, link), link.partition("#")[2]
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
        elif target.suffix == ".py" and not set(NAME.findall(shown)) <= names_in(target):
            wrong.append(f"{shown} in {link}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []
    assert anchors(page)  # of which no two are the same


def test_every_page_is_in_the_site_and_is_linked_to():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    linked = {target_of(page, link) for page in PAGES for _, link in links(page)}
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in site, page.name
        assert page in linked, page.name


def test_every_block_says_what_language_it_is_in():
    assert [block.name for block in blocks() if block.language not in LANGUAGES] == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](#two) [`nothing`](there.py) ![b](gone.svg) [c](#one)\n")
    (tmp_path / "there.py").write_text("something = 1\n")
    assert broken_links(page) == ["#two", "`nothing` in there.py", "gone.svg"]


LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the site needs the extra 'docs'")
    folder = tmp_path_factory.mktemp("site")
    build = ["-m", "mkdocs", "build", "--strict", "--site-dir"]
    done = run_python(*build, folder, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    for page in (".", *(page.stem for page in (ROOT / "docs").glob("*.md"))):
        assert (folder / page / "index.html").exists(), page
    return folder


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
