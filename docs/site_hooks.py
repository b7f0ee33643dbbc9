"""Adds what the site has besides the pages: README as its home, and the files that pages link to.

mkdocs calls these functions (`hooks` in mkdocs.yml). On GitHub a link to a file of the code leads
to that file; on the site it leads to a page with its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOME = "index.md"
LINK = re.compile(r"(\]\()(\.\./)?([^)#\s:]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", "": "text"}


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the home page, and a page for each file outside docs/ that a page links to."""
    home = (ROOT / "README.md").read_text(encoding="utf-8")
    texts = [page.read_text(encoding="utf-8") for page in Path(config.docs_dir).glob("*.md")]
    outside = {found for text in texts for found in _outside(text, inside_docs=True)}
    outside |= _outside(home, inside_docs=False)
    files.append(File.generated(config, HOME, content=_linked(home, inside_docs=False)))
    for path in sorted(outside):
        files.append(File.generated(config, f"code/{path}.md", content=_as_page(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Points links to files outside docs/ to their pages."""
    written = page.file.abs_src_path is not None
    return _linked(markdown, inside_docs=True) if written else markdown


def _outside(text: str, *, inside_docs: bool) -> set[str]:
    """Returns the paths, from the root, of linked files that are not pages of docs/."""
    return {path for _, path in _links(text, inside_docs) if not path.startswith("docs/")}


def _links(text: str, inside_docs: bool) -> list[tuple[str, str]]:
    found = []
    for match in LINK.finditer(text):
        path = ("" if match[2] else "docs/" if inside_docs else "") + match[3]
        if (ROOT / path).is_file():
            found.append((match[0], path))
    return found


def _linked(text: str, *, inside_docs: bool) -> str:
    for link, path in _links(text, inside_docs):
        target = path.removeprefix("docs/") if path.startswith("docs/") else f"code/{path}.md"
        anchor = link[link.find("#") : -1] if "#" in link else ""
        text = text.replace(link, f"]({target}{anchor})")
    return text


def _as_page(path: str) -> str:
    """Returns a file as a page: Markdown unchanged, anything else as a block of code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return _links_to_pages(text, path)
    fence = "`" * (1 + max([2, *(len(run) for run in re.findall("`+", text))]))
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{text}{fence}\n"


def _links_to_pages(text: str, path: str) -> str:
    """Points links from a page outside docs/ to pages of docs/, as the site arranges them."""
    up = "../" * path.count("/")
    return text.replace(f"]({up}docs/", f"]({up}../")
