"""Draws docs/drawings/*.svg: `python -m docs.drawings`.

Rows of labelled cells. Attention and reordering are computed by the code that they illustrate.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_name("drawings")

COLOURS = {
    "text": "#c5cae9",
    "filled": "#a5d6a7",
    "draft": "#fff59d",
    "mask": "#eeeeee",
    "chunk": "#bbdefb",
    "wrong": "#ef9a9a",
    "none": "none",
}
INK, FAINT = "#212121", "#757575"
HEIGHT, GAP = 26, 4


@dataclasses.dataclass
class Drawing:
    """Collects shapes, and the room that they take."""

    shapes: list[str] = dataclasses.field(default_factory=list)
    width: float = 0
    height: float = 0

    def _room(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def cell(self, x: float, y: float, width: float, label: str, kind: str) -> None:
        """Draws a cell; a mask has a dashed outline."""
        stroke = "none" if kind == "none" else FAINT
        dash = ' stroke-dasharray="3 2"' if kind == "mask" else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="3" '
            f'fill="{COLOURS[kind]}" stroke="{stroke}"{dash}/>'
        )
        self.write(x + width / 2, y + 17, label, anchor="middle")
        self._room(x + width, y + HEIGHT)

    def write(
        self, x: float, y: float, label: str, *, anchor: str = "start", faint: bool = False
    ) -> None:
        colour = FAINT if faint else INK
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">'
            f"{escape(label)}</text>"
        )
        self._room(x + (8 * len(label) if anchor == "start" else 0), y + 4)

    def row(
        self, y: float, title: str, cells: Sequence[tuple[str, str]], *, x: float, width: float
    ) -> None:
        """Draws a title and cells of (label, kind) from ``x`` on."""
        self.write(8, y + 17, title, faint=True)
        for number, (label, kind) in enumerate(cells):
            self.cell(x + number * (width + GAP), y, width, label, kind)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.shapes.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{FAINT}" fill="none" '
            'marker-end="url(#head)"/>'
        )

    def legend(self, y: float, kinds: Mapping[str, str], *, x: float) -> None:
        for kind, meaning in kinds.items():
            self.cell(x, y, 18, "", kind)
            self.write(x + 24, y + 17, meaning, faint=True)
            x += 40 + 7.5 * len(meaning)

    def svg(self) -> str:
        """Returns the SVG text; the background is white, to be readable on a dark page, too."""
        width, height = self.width + 8, self.height + 8
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
                f'width="{width:g}" height="{height:g}" '
                'font-family="system-ui, sans-serif" font-size="13">',
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/>'
                "</marker></defs>",
                f'<rect width="{width:g}" height="{height:g}" rx="6" fill="white"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def reordering() -> Drawing:
    """Draws one window in logical and in physical order, as `physical_place` computes it."""
    import jax.numpy as jnp

    from wedlm_jax.decode.spans import physical_place

    labels = ["is", "", "", "64", ""]
    filled = jnp.array([[bool(label) for label in labels]])
    place = physical_place(filled, jnp.array([len(labels)]))[0].tolist()
    drawing, x, width = Drawing(), 150, 46
    kinds = ["filled" if label else "mask" for label in labels]
    drawing.row(8, "logical order", list(zip(labels, kinds, strict=True)), x=x, width=width)
    order = sorted(range(len(labels)), key=lambda slot: place[slot])
    drawing.row(96, "physical order", [(labels[s], kinds[s]) for s in order], x=x, width=width)
    positions = [(f"n+{slot}" if slot else "n", "none") for slot in order]
    drawing.row(122, "position for RoPE", positions, x=x, width=width)
    for slot, to in enumerate(place):
        middle = x + width / 2
        drawing.arrow(middle + slot * (width + GAP), 38, middle + to * (width + GAP), 92)
    drawing.legend(160, {"filled": "filled", "mask": "mask"}, x=x)
    return drawing


def streaming() -> Drawing:
    """Draws a text and its window of three masks over four forwards."""
    words = ["The", "answer", "is", "8", "x", "8", "=", "64", ".", "", "", ""]
    kinds = {"t": "text", "f": "filled", "m": "mask"}
    drawing = Drawing()
    for number, state in enumerate(["tttmmm", "tttfmfm", "ttttfffmmm", "tttttttffmmm"]):
        cells = [
            ("" if letter == "m" else word, kinds[letter])
            for word, letter in zip(words, state, strict=False)
        ]
        drawing.row(8 + 34 * number, f"before forward {number + 1}", cells, x=130, width=52)
    meaning = {"text": "committed, in the cache", "filled": "filled", "mask": "mask"}
    drawing.legend(152, meaning, x=130)
    return drawing


def dual_stream() -> Drawing:
    """Draws a training sample: the memory stream, and the prediction stream, where masks come last
    in each block."""
    import jax
    import numpy as np

    from wedlm_jax.corruption import PackedRows, dual_stream, sample_masks

    words = list("abcdefgh")
    length, block = len(words), 4
    tokens = np.arange(length, dtype=np.int32)[None]
    ones = np.ones((1, length), np.int32)
    rows = PackedRows(tokens, tokens, ones, ones.astype(bool))  # type: ignore[arg-type]
    masked, ratio = sample_masks(jax.random.key(4), rows.trainable, block)
    batch = dual_stream(rows, masked, ratio, block_size=block, mask_token_id=-1)
    ids, positions = batch.token_ids[0].tolist(), batch.positions[0].tolist()
    drawing, x, width = Drawing(), 130, 34
    cells = [(words[i], "text") if i >= 0 else ("", "mask") for i in ids]
    drawing.row(30, "input", cells, x=x, width=width)
    drawing.row(58, "position", [(str(p), "none") for p in positions], x=x, width=width)
    targets = [words[i] for i in batch.targets[0].tolist()]
    said = [(words[(i + 1) % length] if i + 1 < length else "", "none") for i in range(length)]
    hidden = batch.masked[0].tolist()
    said += [(t if m else "", "none") for t, m in zip(targets, hidden, strict=True)]
    drawing.row(84, "target", said, x=x, width=width)
    step = width + GAP
    drawing.write(x, 20, "memory stream")
    drawing.write(x + length * step, 20, "prediction stream, blocks of 4")
    return drawing


def attention_mask() -> Drawing:
    """Draws the dual-stream mask of eight tokens in blocks of four, from `DualStreamMask`."""
    import numpy as np

    from wedlm_jax.masks import DualStreamMask

    length, block, size = 8, 4, 20
    segments = np.ones((1, length), np.int32)
    seen = np.asarray(DualStreamMask(segments, block).dense()[0])  # type: ignore[arg-type]
    drawing, left, top = Drawing(), 150, 30
    for i, j in np.ndindex(*seen.shape):
        kind = "text" if i < length else "chunk" if j < length else "filled"
        fill = COLOURS[kind] if seen[i, j] else "#fafafa"
        drawing.shapes.append(
            f'<rect x="{left + j * size}" y="{top + i * size}" width="{size - 1}" '
            f'height="{size - 1}" fill="{fill}"/>'
        )
    end = left + 2 * length * size
    drawing.write(left, 20, "sees memory")
    drawing.write(left + length * size, 20, "sees prediction")
    drawing.write(8, top + 80, "memory row", faint=True)
    drawing.write(8, top + 240, "prediction row", faint=True)
    drawing.write(end + 12, top + 80, "causal", faint=True)
    drawing.write(end + 12, top + 180, "own block, causally", faint=True)
    drawing.write(end + 12, top + 260, "memory of earlier blocks,", faint=True)
    drawing.write(end + 12, top + 278, "own block, causally", faint=True)
    drawing._room(end, top + 2 * length * size)
    return drawing


def verified() -> Drawing:
    """Draws a window of verified decoding before and after a forward."""
    drawing, x, width = Drawing(), 180, 62
    before = [("12", "text"), (",", "draft"), ("14", "draft"), (";", "draft")]
    before += [("", "mask")] * 4
    drawing.row(8, "window", before, x=x, width=width)
    says = [",", "14", ",", "", "", "", "", ""]
    cells = [(word, "none") for word in says]
    drawing.row(54, "its row chooses the next", cells, x=x, width=width)
    for number in range(3):
        start = x + number * (width + GAP) + width / 2
        drawing.arrow(start, 58, start + width + GAP - 10, 38)
    after = [("12", "text"), (",", "text"), ("14", "text"), (",", "text"), *[("", "mask")] * 5]
    drawing.row(100, "text after it", after[:8], x=x, width=width)
    said = "two drafts were right; the third was not, and the row's own choice"
    drawing.write(x, 146, said, faint=True)
    drawing.write(x, 162, "takes its place: three tokens in one forward", faint=True)
    drawing.legend(176, {"text": "text", "draft": "draft", "mask": "mask"}, x=x)
    return drawing


def spans() -> Drawing:
    """Draws the flat tokens of one forward."""
    drawing, x, width = Drawing(), 110, 30
    parts = [("0", "ccccmm"), ("1", "ffmm"), ("2", "f"), ("3", "ccc"), ("", "..")]
    kinds = {"c": "chunk", "f": "filled", "m": "mask", ".": "none"}
    names = [(name, "none") for name, some in parts for _ in some]
    cells = [("", kinds[letter]) for _, some in parts for letter in some]
    drawing.row(8, "sequence", names, x=x, width=width)
    drawing.row(36, "token", cells, x=x, width=width)
    says = ["prompt ends, window", "window", "AR", "more prompt", "padding"]
    place = x
    for number, ((_, some), said) in enumerate(zip(parts, says, strict=True)):
        drawing.write(place, 80 + 16 * (number % 2), said, faint=True)
        place += len(some) * (width + GAP)
    meaning = {"chunk": "chunk of a prompt", "filled": "filled slot", "mask": "mask"}
    drawing.legend(110, meaning, x=x)
    return drawing


DRAWINGS = {
    draw.__name__.replace("_", "-"): draw
    for draw in (reordering, streaming, dual_stream, attention_mask, verified, spans)
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    print(f"wrote {len(DRAWINGS)} drawings to {FOLDER}", file=sys.stderr)
