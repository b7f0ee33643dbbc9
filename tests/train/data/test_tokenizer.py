"""A tokenizer spells any text and keeps its special tokens whole; `wedlm tokenizer` makes one."""

import json
from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from examples.embedded.corpus import generate
from train.data.command import main as tokenize
from train.data.tokenizer import SPECIAL_TOKENS, main, save_tokenizer, train_tokenizer
from wedlm_jax.errors import InputError
from wedlm_jax.text import TextCodec

VOCAB_SIZE = 400


def corpus_texts():
    return [f"{s.prompt}\n{s.answer}\n" for s in islice(generate(3, 300, split="train"), 300)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(corpus_texts(), VOCAB_SIZE)


@given(text=st.text(max_size=80))
@example(text="  two  spaces \n\n\ttab\r\n trailing ")
@example(text="naïve café 日本語 🙂 e\u0301 \x00")
@example(text="12 + 30 = 42, 7 x 6 = 42.")
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < VOCAB_SIZE for i in ids)


@pytest.mark.parametrize(("number", "token"), enumerate(SPECIAL_TOKENS))
def test_a_special_token_is_one_token_anywhere(tokenizer, number, token):
    assert tokenizer.token_to_id(token) == number
    around = [tokenizer.encode(text).ids for text in ("the 4", " box")]
    assert tokenizer.encode(f"the 4{token} box").ids == [*around[0], number, *around[1]]
    assert tokenizer.decode([number]) == ""


def test_vocabulary_has_the_size_asked_for_and_every_byte(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert set(tokenizer.get_vocab().values()) == set(range(VOCAB_SIZE))
    # Bytes that no training text holds are still one token each.
    assert len(tokenizer.encode("\u0378").ids) == 2


def test_a_number_is_the_same_token_after_a_word_a_sign_and_a_line_end():
    counting = [", ".join(map(str, range(100)))] * 3 + ["12345678 12345678"] * 9
    tokenizer = train_tokenizer(counting, VOCAB_SIZE)
    for text in ("12", "a 12", "3 + 12", "3 x 12", "= 12", "a\n12", '"age": 12', "12 a"):
        assert [t for t in tokenizer.encode(text).tokens if "2" in t] == ["12"], text
    assert tokenizer.encode("12345678").tokens == ["123", "456", "78"], "at most three digits"


def test_training_twice_gives_the_same_tokenizer(tokenizer):
    assert train_tokenizer(corpus_texts(), VOCAB_SIZE).to_str() == tokenizer.to_str()


def test_saved_folder_is_read_by_transformers(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "new" / "folder")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.mask_token_id == SPECIAL_TOKENS.index("<|mask|>")
    text = "Count from 3 to 9."
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    message = [{"role": "user", "content": text}]
    chat = loaded.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert chat == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


TURNS = [{"role": "user", "content": "ping ping"}, {"role": "assistant", "content": "pong pong"}]


def test_words_of_texts_and_messages_become_tokens(tmp_path, capsys):
    source, folder = tmp_path / "chats.jsonl", tmp_path / "tokenizer"
    lines = [{"messages": TURNS}] * 4 + [{"text": "quince quince"}] * 4 + [{"token_ids": [1]}]
    lines += [{"text": 1}, {"text": ""}, {"messages": 1}, {"messages": ["x", {"content": None}]}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"text": "\\ud800"}\nnot json\n'
    source.write_text(text, encoding="utf-8")
    options = ["--input", str(source), "--vocab-size", "300", "--output", str(folder)]
    assert main(options) == 0
    said = capsys.readouterr().out
    assert "all that the input has, learnt from 12 texts of" in said
    assert "7 records left out; the first:" in said
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ping pong quince").tokens == ["ping", "Ġpong", "Ġquince"]
    codec = TextCodec.load(folder)
    assert codec.decode(codec.encode_chat(TURNS[:1])) == "user\nping ping\nassistant\n"
    with pytest.raises(InputError, match="already exists"):
        main(options)
    rows = ["--tokenizer", str(folder), "--row-length", "64", "--output", str(tmp_path / "rows")]
    assert tokenize(["--input", str(source), *rows]) == 0


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        ('{"text": "x"}\n', "259", "--vocab-size: expected 260 to "),
        ('{"text": "x"}\n', "99999999999", "--vocab-size: expected 260 to "),
        ('{"token_ids": [1]}\n', "300", "no text in the input; .*no text or messages"),
    ],
)
def test_what_gives_no_tokenizer_is_refused(tmp_path, content, size, message):
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    output = tmp_path / "out"
    options = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
    with pytest.raises(InputError, match=message):
        main([*options, "--vocab-size", size])
    assert not output.exists()
