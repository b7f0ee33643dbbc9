"""The window as text: what is committed, filled and masked, on one line or in colour."""

import pytest

from infer.window_view import FILLED_STYLE, MASK, MASK_STYLE, TAIL, plain, styled
from train.data.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.engine.interface import WindowView
from wedlm_jax.text import TextCodec


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    # Specials and bytes only: a character of ASCII is a token, € is three.
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([], 260), folder)
    loaded = TextCodec.load(folder)
    assert loaded is not None
    return loaded


def window(codec, slots):
    """A window with "_" for a mask."""
    tokens = [None if slot == "_" else codec.encode(slot)[0] for slot in slots]
    return WindowView(0, tokens, list(range(len(tokens))))


def cells(codec, committed, view):
    """What `styled` shows, as pieces with their style; committed text has none."""
    text = styled(codec, codec.encode(committed), view)
    start = min((span.start for span in text.spans), default=len(text.plain))
    spans = [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]
    return [(text.plain[:start], ""), *spans]


def test_styled_tells_committed_filled_and_masked_apart(codec):
    assert cells(codec, "ab", window(codec, "c_d_")) == [
        ("ab", ""),
        ("c", FILLED_STYLE),
        (MASK, MASK_STYLE),
        ("d", FILLED_STYLE),
        (MASK, MASK_STYLE),
    ]


def test_styled_takes_text_for_text(codec):
    """Square brackets in a completion are no markup."""
    assert cells(codec, "a\n[bold]x[/]", None) == [("a\n[bold]x[/]", "")]


def test_plain_is_one_line(codec):
    line = plain(codec, codec.encode("a\nb"), window(codec, "c_\n_"))
    assert line == "a⏎b|[c]_[⏎]_"


def test_every_filled_slot_shows_something(codec):
    """A special token has no text, and a byte alone is no character."""
    end, mask, euro = codec.encode("<|im_end|><|mask|>€")[:3]
    view = WindowView(5, [end, mask, euro, None], [0, 1, 2, 3])
    assert plain(codec, [], view) == "|[·][·][�]_"
    assert [piece for piece, _ in cells(codec, "", view)] == ["", "·", "·", "�", MASK]


@pytest.mark.parametrize("length", [0, 1, TAIL - 1, TAIL, TAIL + 1, 3 * TAIL])
def test_plain_keeps_the_end_of_the_text(codec, length):
    committed = ("0123456789" * length)[:length]
    tail = plain(codec, codec.encode(committed), window(codec, "_")).removesuffix("|_")
    if length <= TAIL:
        assert tail == committed
    else:
        assert len(tail) == TAIL
        assert tail == "…" + committed[-(TAIL - 1) :]


def test_cut_off_character_is_not_shown_as_committed(codec):
    ids = codec.encode("x€")[:-1]
    assert plain(codec, ids, window(codec, "_")) == "x|_"
    assert styled(codec, ids, None).plain == "x"
