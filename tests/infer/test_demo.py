"""The demo shows every prompt, measures decoders, explains its columns, and draws a picture; the
window is text, on one line or in colour."""

import re

import pytest

import infer.demo
import infer.evaluate
from infer.demo import FILLED_STYLE, MASK, MASK_STYLE, TAIL, _views, plain, styled
from infer.score import columns
from tests.infer.few_questions import PROMPTS, write_questions
from train.data.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.params import SamplingParams
from wedlm_jax.text import TextCodec

DECODERS_AT = infer.evaluate.decoders_at


@pytest.fixture(autouse=True)
def embedded(checkpoint, tmp_path, monkeypatch):
    """A tiny model, few questions and short answers in the place of the embedded ones."""
    path = write_questions(tmp_path / "heldout.jsonl")
    monkeypatch.setattr("wedlm_jax.checkpoint.open.EMBEDDED_MODEL", checkpoint)
    monkeypatch.setattr("infer.evaluate.EMBEDDED_QUESTIONS", path)

    def decoders_at(*arguments, **options):
        small = {"window_size": 4, "batch_size": 4, "max_tokens": 24}
        return DECODERS_AT(*arguments, **options | small)

    monkeypatch.setattr("infer.evaluate.decoders_at", decoders_at)


def test_without_a_terminal_it_prints_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(infer.demo, "PASSES", 1)
    assert infer.demo.main(["--samples", "4"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert all(f"> {prompt}" in printed for prompt in PROMPTS)
    assert printed.count(" forwards (AR: ") == 2 * len(PROMPTS)
    assert "wrong: expected 'no'" in printed
    table, explained = printed.split(" measured ")[1].split("\n\n", 1)
    assert "paper τ=0.4" in table
    assert max(map(len, table.splitlines())) <= 80
    for name, meaning in columns("AR").items():
        shown = name.replace("/\n", "/").replace("\n", " ")
        assert re.search(rf"{re.escape(shown)}\s+{re.escape(meaning[:30])}", explained), name


@pytest.mark.parametrize("mode", ["paper", "verified"])
def test_each_forward_is_shown_as_it_saw_the_text(llm, mode):
    """Committed text, then filled slots, which are the text's next tokens if they stay, and W
    masks."""
    prompt, params = llm.as_ids(PROMPTS[0]), SamplingParams(mode=mode, max_tokens=12)
    *forwards, last = _views(llm, prompt, params)
    (answer,) = llm.generate([prompt], params)
    assert last == (answer.token_ids, [], answer.num_forwards)
    assert forwards[0] == ([], [None] * 4, 1)
    for number, view in enumerate(forwards, 1):
        assert view.num_forwards == number
        assert view.token_ids == last.token_ids[: len(view.token_ids)]
        filled = [token for token in view.window if token is not None]
        if mode == "verified":
            assert view.window == [*filled, *[None] * 4]
        else:
            run = view.window.index(None)
            assert len(view.window) == 4 + run
            after = last.token_ids[len(view.token_ids) :]
            assert view.window[:run][: len(after)] == after[:run]
    texts = [len(view.token_ids) for view in (*forwards, last)]
    assert texts == sorted(texts)


@pytest.mark.full
def test_the_picture_has_a_line_for_each_forward(tmp_path, capsys):
    picture = tmp_path / "demo.svg"
    assert infer.demo.main(["--record", str(picture)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {picture}\n")
    first = picture.read_bytes()
    drawn = first.decode().replace("&#160;", " ")
    assert drawn.startswith("<svg")
    assert "url(" not in drawn.replace("url(#", ""), "loads something from elsewhere"
    forwards = [int(n) for n in re.findall(r">forward (\d+)", drawn)]
    assert forwards[:2] == [1, 2]
    assert drawn.count(">answer") == 2
    assert len(re.findall(r"\(AR: \d+\)", drawn)) == 2
    assert infer.demo.main(["--record", str(picture)]) == 0
    assert picture.read_bytes() == first


# --- the window as text ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    # Specials and bytes only: a character of ASCII is a token, € is three.
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([], 260), folder)
    return TextCodec.load(folder)


def window(codec, slots):
    """A window with "_" for a mask."""
    return [None if slot == "_" else codec.encode(slot)[0] for slot in slots]


def cells(codec, committed, slots):
    """What `styled` shows, as pieces with their style; committed text has none."""
    text = styled(codec, codec.encode(committed), slots)
    start = min((span.start for span in text.spans), default=len(text.plain))
    spans = [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]
    return [(text.plain[:start], ""), *spans]


def test_styled_tells_committed_filled_and_masked_apart(codec):
    mask = (MASK, MASK_STYLE)
    shown = cells(codec, "ab", window(codec, "c_d_"))
    assert shown == [("ab", ""), ("c", FILLED_STYLE), mask, ("d", FILLED_STYLE), mask]
    brackets = "a\n[bold]x[/]"
    assert cells(codec, brackets, []) == [(brackets, "")], "no markup"


def test_plain_is_one_line_and_keeps_the_end_of_the_text(codec):
    line = plain(codec, codec.encode("a\nb"), window(codec, "c_\n_"))
    assert line == "a⏎b|[c]_[⏎]_"
    for length in (0, 1, TAIL - 1, TAIL, TAIL + 1, 3 * TAIL):
        committed = ("0123456789" * length)[:length]
        tail = plain(codec, codec.encode(committed), window(codec, "_")).removesuffix("|_")
        assert tail == (committed if length <= TAIL else "…" + committed[-(TAIL - 1) :])


def test_parts_of_characters_are_shown_in_slots_alone(codec):
    """A special token has no text, and a byte alone is no character; every slot shows something."""
    end, mask, euro = codec.encode("<|im_end|><|mask|>€")[:3]
    slots = [end, mask, euro, None]
    assert plain(codec, [], slots) == "|[·][·][�]_"
    assert [piece for piece, _ in cells(codec, "", slots)] == ["", "·", "·", "�", MASK]
    ids = codec.encode("x€")[:-1]
    assert plain(codec, ids, window(codec, "_")) == "x|_"
    assert styled(codec, ids).plain == "x"
