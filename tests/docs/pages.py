"""The pages of the project: their blocks of code, links and headings."""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "wedlm_jax" / "embedded" / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LANGUAGES = ("bash", "python", "yaml", "json", "text")

FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
COMMENT = re.compile(r"<!-- ([^>]*) -->\s*\Z")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, from its opening fence's line; ``comment`` is the HTML comment before it."""

    page: Path
    line: int
    language: str
    text: str
    comment: str

    @property
    def name(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages, pages=PAGES):
    """Returns the fenced blocks in these languages, or all of them."""
    found = [block for page in pages for block in _blocks(page)]
    return [block for block in found if not languages or block.language in languages]


def _blocks(page):
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        before = text[: match.start()]
        comment = COMMENT.search(before)
        lines = (line.removeprefix(indent) for line in body.splitlines(keepends=True))
        line = before.count("\n") + 1
        yield Block(page, line, language, "".join(lines), comment[1] if comment else "")


def prose(page):
    """Returns a page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page):
    """Returns the links and images of a page: what they show, and where they lead."""
    return LINK.findall(prose(page))


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in HEADING.findall(prose(page)):
        shown = LINK.sub(r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        assert anchor not in found, f"{page}: two headings make the anchor {anchor}"
        found.add(anchor)
    return found
