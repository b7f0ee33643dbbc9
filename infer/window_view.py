"""The decoding of one sequence as text: committed tokens, filled slots, masks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from wedlm_jax.engine.interface import WindowView
from wedlm_jax.text import TextCodec

MASK = "░"
TAIL = 40
"""Characters of committed text that a plain line keeps, to stay one line."""

FILLED_STYLE = "#101010 on #8fbf6f"
MASK_STYLE = "bright_black"
LEGEND = Text.assemble(
    "committed  ", (" filled ", FILLED_STYLE), "  ", (MASK + " masked", MASK_STYLE)
)


def styled(codec: TextCodec, committed: Sequence[int], window: WindowView | None) -> Text:
    """Shows committed text as it is, filled slots on a coloured ground, masks as shaded cells."""
    text = Text(codec.complete_text(list(committed)))
    for token in window.tokens if window else ():
        if token is None:
            text.append(MASK, MASK_STYLE)
        else:
            text.append(_visible(codec, token), FILLED_STYLE)
    return text


def plain(codec: TextCodec, committed: Sequence[int], window: WindowView) -> str:
    """Shows the same without colours: the end of the committed text, then the window with filled
    slots in brackets and masks as underscores, in one line."""
    slots = (
        "_" if token is None else f"[{_visible(codec, token).strip(' ')}]"
        for token in window.tokens
    )
    text = _one_line(codec.complete_text(list(committed)))
    tail = text if len(text) <= TAIL else "…" + text[1 - TAIL :]
    return f"{tail}|{''.join(slots)}"


def _visible(codec: TextCodec, token: int) -> str:
    return _one_line(codec.decode([token])) or "·"


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎")
