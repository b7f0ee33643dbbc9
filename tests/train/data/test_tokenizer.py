"""The embedded model's tokenizer spells any text and keeps its special tokens whole."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from train.data.tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer
from train.embedded.corpus import generate

VOCAB_SIZE = 400


def corpus_texts() -> list[str]:
    return [f"{s.prompt}\n{s.answer}\n" for s in islice(generate(3, 300, split="train"), 300)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus_texts(), VOCAB_SIZE)


@given(text=st.text(max_size=80))
@example(text="  two  spaces \n\n\ttab\r\n trailing ")
@example(text="naïve café 日本語 🙂 e\u0301 \x00")
@example(text="12 + 30 = 42, 7 x 6 = 42.")
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < VOCAB_SIZE for i in ids)


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_special_token_is_one_token_anywhere(tokenizer: Tokenizer, token: str) -> None:
    number = SPECIAL_TOKENS.index(token)
    assert tokenizer.token_to_id(token) == number
    assert tokenizer.encode(token).ids == [number]
    around = [tokenizer.encode(text).ids for text in ("the 4", " box")]
    assert tokenizer.encode(f"the 4{token} box").ids == [*around[0], number, *around[1]]
    assert tokenizer.decode([number]) == ""


def test_vocabulary_has_the_size_asked_for_and_every_byte(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert set(tokenizer.get_vocab().values()) == set(range(VOCAB_SIZE))
    # Bytes that no training text holds are still one token each.
    assert len(tokenizer.encode("\u0378").ids) == 2


def test_a_number_is_the_same_token_after_a_word_a_sign_and_a_line_end() -> None:
    counting = [", ".join(map(str, range(100)))] * 3
    tokenizer = train_tokenizer(counting, VOCAB_SIZE)
    assert tokenizer.encode("12").tokens == ["12"]
    for text in ("a 12", "3 + 12", "3 x 12", "= 12", "a\n12", '"age": 12', "12 a"):
        assert [t for t in tokenizer.encode(text).tokens if "2" in t] == ["12"], text


def test_no_token_has_more_than_three_digits() -> None:
    tokenizer = train_tokenizer(["12345678 12345678"] * 9, VOCAB_SIZE)
    assert tokenizer.encode("12345678").tokens == ["123", "456", "78"]


def test_training_twice_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(corpus_texts(), VOCAB_SIZE).to_str() == tokenizer.to_str()


def test_saved_folder_is_read_by_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "new" / "folder")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.mask_token_id == SPECIAL_TOKENS.index("<|mask|>")
    text = "Count from 3 to 9."
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    message = [{"role": "user", "content": text}]
    chat = loaded.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert chat == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    settings = json.loads((tmp_path / "new/folder/tokenizer_config.json").read_text())
    assert settings["pad_token"] == "<|endoftext|>"
