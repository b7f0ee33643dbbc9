"""The tokenizer of a GGUF file: the tokens that transformers makes with the same file."""

import json

import numpy as np
import pytest

pytest.importorskip("gguf")

from tests.examples.gguf_file import write_gguf
from train.data.tokenizer import train_tokenizer
from wedlm_jax.checkpoint.gguf import SPLITS, write_tokenizer
from wedlm_jax.text import TextCodec

TEXTS = [
    "The cat sat on the mat, and it isn't Ann's: 12,345 DON'T!",
    "naïve café 日本語 ключ   three  spaces\n\n\ttabs\r\nand more ...   ",
    "x = [i**2 for i in range(10)]  # squares/cubes",
]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}<end>{% endfor %}"


def byte_level(pre):
    """Returns the GGUF metadata of a byte-level BPE tokenizer trained on `TEXTS`."""
    made = json.loads(train_tokenizer(TEXTS, 400, special_tokens=["<begin>", "<end>"]).to_str())
    tokens = [*made["model"]["vocab"], "<think>", "[PAD400]", "[PAD401]"]
    types = [3 if token in ("<begin>", "<end>") else 1 for token in tokens]
    types[-3:] = [4, 5, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in made["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<begin>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<end>"),
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece():
    """Returns the GGUF metadata of a SentencePiece vocabulary: pieces, scores, single bytes."""
    words = [
        *("▁the", "▁cat", "▁sat", "▁on", "▁mat", "▁and", "th", "he", "▁t", "ca", "at"),
        *("▁s", "sa", "▁o", "on", "ma", "an", "nd", "▁a", "▁c", "▁m"),
    ]
    letters = sorted({letter for text in TEXTS[:1] for letter in text if letter != " "} | {"▁"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(tokens)
    for rank, piece in enumerate([*sorted(words, key=len), *letters]):
        tokens.append(piece)
        types.append(1)
        scores.append(-float(rank))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def both(folder, metadata):
    """Returns our tokenizer and transformers', of one file."""
    pytest.importorskip("torch", reason="transformers reads GGUF files with PyTorch")
    from transformers import AutoTokenizer

    config = {"llama.block_count": 1, "llama.embedding_length": 8, "llama.context_length": 64}
    config |= {"llama.attention.head_count": 1, "llama.feed_forward_length": 8}
    config |= {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    tensors = {"token_embd.weight": np.zeros((8, 8), np.float32)}
    write_gguf(folder / "x.gguf", config | metadata, tensors)
    write_tokenizer(folder / "x.gguf", metadata, folder)
    codec = TextCodec.load(folder)
    assert codec is not None
    return codec, AutoTokenizer.from_pretrained(str(folder), gguf_file="x.gguf")


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken"])
def test_byte_level_tokens_are_those_of_transformers(pre, tmp_path):
    codec, theirs = both(tmp_path, byte_level(pre) | {"tokenizer.ggml.add_bos_token": False})
    for text in [*TEXTS, "<begin>a<think> b<end>"]:
        ours = codec.encode_rendered(text)
        assert ours == theirs(text, add_special_tokens=False)["input_ids"]
        assert codec.tokenizer.decode(ours) == text


def test_digits_and_words_are_cut_as_the_file_says(tmp_path):
    """What transformers has no pattern for, or not that of the original."""
    pieces = {}
    for pre in SPLITS:
        write_tokenizer(tmp_path, byte_level(pre), tmp_path)
        codec = TextCodec.load(tmp_path)
        assert codec is not None
        cut = codec.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
        pieces[pre] = [piece for piece, _ in cut("a 1234's/b\n!")]
    assert pieces["gpt-2"] == ["a", "Ġ1234", "'s", "/", "b", "Ċ", "!"]
    assert pieces["smollm"] == ["a", "Ġ", "1", "2", "3", "4", "'s", "/", "b", "Ċ", "!"]
    assert pieces["qwen2"] == ["a", "Ġ", "1", "2", "3", "4", "'s", "/b", "Ċ", "!"]
    assert pieces["llama-bpe"] == ["a", "Ġ", "123", "4", "'s", "/b", "Ċ", "!"]
    assert pieces["tekken"] == ["a", "Ġ", "1", "2", "3", "4", "'s", "/b", "Ċ", "!"]


def test_sentencepiece_tokens_are_those_of_transformers(tmp_path):
    codec, theirs = both(tmp_path, sentencepiece())
    for text in [*TEXTS, "sat on</s>"]:
        ours = codec.encode_rendered(text)
        assert ours == theirs(text, add_special_tokens=False)["input_ids"], text
        assert codec.tokenizer.decode(ours) == text
    # Texts begin with the BOS token, as llama.cpp has it for such a vocabulary.
    assert codec.encode("the cat")[0] == 1
    assert codec.encode("the cat")[1:] == codec.encode_rendered("the cat")


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [
        ("qwen2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", True, True),
    ],
)
def test_texts_begin_as_the_file_says(pre, said, begins, tmp_path):
    metadata = byte_level(pre)
    if said is not None:
        metadata["tokenizer.ggml.add_bos_token"] = said
    write_tokenizer(tmp_path / "x.gguf", metadata, tmp_path)
    codec = TextCodec.load(tmp_path)
    assert codec is not None
    begin = metadata["tokenizer.ggml.bos_token_id"]
    assert (codec.encode("cat")[0] == begin) == begins


def test_the_template_and_the_special_tokens_go_along(tmp_path):
    metadata = byte_level("qwen2")
    write_tokenizer(tmp_path / "x.gguf", metadata, tmp_path)
    codec = TextCodec.load(tmp_path)
    assert codec is not None
    assert codec.has_chat_template
    assert codec.chat_end == "<end>"
    vocabulary = codec.tokenizer.get_vocab()
    assert "<think>" in vocabulary
    assert not {"[PAD400]", "[PAD401]"} & set(vocabulary), "rows that no token uses"
    assert codec.tokenizer.decode(codec.encode("a<think>b<end>"), skip_special_tokens=True) == (
        "a<think>b"
    )
