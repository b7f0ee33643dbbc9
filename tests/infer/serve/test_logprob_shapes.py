"""Log-probabilities of tokens that are parts of characters: true bytes, and a name of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.serve.shapes import LogprobShapes
from tests.wedlm_jax.test_text import byte_tokenizer, write_tokenizer
from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.text import TextCodec

CODEC = TextCodec.load(EMBEDDED_MODEL)
assert CODEC is not None


def said(ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(-0.5, [(token_id, -0.5)]) for token_id in ids]


@given(st.text(max_size=12))
def test_bytes_of_tokens_join_to_those_of_the_text(text: str) -> None:
    assert CODEC is not None
    ids = CODEC.encode(text)
    assert b"".join(map(CODEC.token_bytes, ids)) == text.encode()
    shapes = LogprobShapes(CODEC)
    entries = shapes.of_chat(ids, said(ids))["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    assert shapes.length(ids) == len(text)


def test_parts_of_characters_have_names_of_their_own() -> None:
    assert CODEC is not None
    first, second, third = CODEC.encode("€")
    shapes = LogprobShapes(CODEC)
    pair = [TokenLogprob(-0.5, [(first, -0.5), (second, -1.0), (third, -2.0)])]
    text = shapes.of_text([first], pair, 0)
    assert text["tokens"] == ["bytes:\\xe2"]
    assert text["top_logprobs"] == [{"bytes:\\xac": -2.0, "bytes:\\x82": -1.0, "bytes:\\xe2": -0.5}]
    (entry,) = shapes.of_chat([first], pair)["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xe2", [0xE2])
    assert [other["token"] for other in entry["top_logprobs"]] == ["\\xe2", "\\x82", "\\xac"]
    whole = CODEC.encode("a€b")
    assert shapes.of_text(whole, said(whole), 7)["text_offset"] == [7, 8, 9, 9, 9]


def test_every_token_has_a_name_of_its_own() -> None:
    assert CODEC is not None
    shapes = LogprobShapes(CODEC)
    ids = sorted(CODEC.token_ids)
    names = shapes.of_text(ids, said(ids), 0)["tokens"]
    assert len(set(names)) == len(ids)


def test_special_and_unknown_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<naïve>"])
    codec = TextCodec.load(write_tokenizer(tmp_path, tokenizer))
    assert codec is not None
    end = tokenizer.token_to_id("<|im_end|>")
    own = tokenizer.token_to_id("<naïve>")
    assert codec.token_bytes(end) == b"<|im_end|>"
    assert codec.token_bytes(own) == "<naïve>".encode()
    assert codec.token_bytes(9999) == b""
    assert LogprobShapes(codec).length([end, own]) == len("<naïve>")


@pytest.mark.parametrize("ids", [[5, 12], []])
def test_without_a_tokenizer_they_are_numbers(ids: list[int]) -> None:
    assert LogprobShapes(None).of_text(ids, said(ids), 0)["tokens"] == [str(i) for i in ids]
