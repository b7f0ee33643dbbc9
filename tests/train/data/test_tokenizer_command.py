"""`wedlm tokenizer` makes a folder that `wedlm tokenize` and training take as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from train.data.command import main as tokenize
from train.data.tokenizer_command import main, texts_of
from wedlm_jax.errors import InputError
from wedlm_jax.text import TextCodec

TURNS = [{"role": "user", "content": "ping ping"}, {"role": "assistant", "content": "pong pong"}]


def write_input(folder: Path) -> Path:
    folder.mkdir()
    lines = [{"messages": TURNS}] * 4 + [{"text": "quince quince"}] * 4 + [{"token_ids": [1]}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"text": "\\ud800"}\nnot json\n'
    (folder / "chats.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_words_of_texts_and_messages_become_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = write_input(tmp_path / "in"), tmp_path / "tokenizer"
    options = ["--input", str(source), "--vocab-size", "300", "--output", str(folder)]
    assert main(options) == 0
    said = capsys.readouterr().out
    assert "all that the input has, learnt from 12 texts of" in said
    assert "3 records left out; the first:" in said
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ping pong quince").tokens == ["ping", "Ġpong", "Ġquince"]
    codec = TextCodec.load(folder)
    assert codec is not None
    assert codec.tokenizer.mask_token == "<|mask|>"
    assert codec.tokenizer.eos_token == "<|im_end|>"
    assert codec.decode(codec.encode_chat(TURNS[:1])) == "user\nping ping\nassistant\n"
    with pytest.raises(InputError, match="is there already"):
        main(options)
    rows = ["--tokenizer", str(folder), "--row-length", "64", "--output", str(tmp_path / "rows")]
    assert tokenize(["--input", str(source), *rows]) == 0


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        ('{"text": "x"}\n', "259", "--vocab-size must be at least 260"),
        ('{"token_ids": [1]}\n', "300", "no text in the input; .*no text or messages"),
    ],
)
def test_what_gives_no_tokenizer_is_refused(
    tmp_path: Path, content: str, size: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    output = tmp_path / "out"
    options = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
    with pytest.raises(InputError, match=message):
        main([*options, "--vocab-size", size])
    assert not output.exists()


def test_only_whole_texts_are_learnt_from() -> None:
    assert texts_of("a") == ["a"]
    assert texts_of({"text": "a"}) == ["a"]
    assert texts_of({"messages": TURNS}) == ["ping ping", "pong pong"]
    odd = [{"text": 1}, {"text": ""}, {"messages": 1}, {"messages": ["x", {"content": None}]}, {}]
    assert [texts_of(record) for record in odd] == [[]] * 5
