"""GGUF files: tensors, configuration and tokenizer as Hugging Face's, and what is refused."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("gguf")

from tests.examples.checkpoints import hf_values
from tests.examples.gguf_file import (
    SOME_TOKENIZER,
    example,
    gguf_tensors,
    made,
    metadata_of,
    write_gguf,
)
from train.data.tokenizer import train_tokenizer
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.gguf import QUANTIZED, SPLITS, GGUFCheckpoint, write_tokenizer
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.errors import InputError
from wedlm_jax.text import TextCodec


@pytest.mark.parametrize(
    ("kind", "dtype", "changes"),
    [
        ("llama", "float32", {}),
        ("llama with biases", "bfloat16", {"tie_word_embeddings": True}),
        ("qwen2", "float16", {}),
        ("qwen3", "float32", {"tie_word_embeddings": True}),
    ],
)
def test_tensors_and_config_come_back(tmp_path, kind, dtype, changes):
    kept = np.dtype(getattr(ml_dtypes, dtype, dtype))
    file = made(tmp_path / "model.gguf", kind, kept, **changes)
    done = convert(file, tmp_path / "out")
    assert done.format == "hf"
    expected, found = hf_values(tmp_path / "original"), hf_values(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        stored = value.astype(kept) if value.ndim == 2 else value
        assert found[name].dtype == stored.dtype, name
        assert found[name].tobytes() == stored.tobytes(), name
    original = HFCheckpoint(tmp_path / "original").config
    read = HFCheckpoint(tmp_path / "out").config
    names = ("rms_norm_eps", "eos_token_ids", "bos_token_id")  # float32 there; the tokenizer's
    same = [name for name in vars(original) if name not in names]
    assert [getattr(read, name) for name in same] == [getattr(original, name) for name in same]
    assert read.rms_norm_eps == pytest.approx(original.rms_norm_eps)
    assert read.eos_token_ids == (22,)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_a_file_becomes_orbax_too_and_is_cast(tmp_path):
    file = made(tmp_path / "model.gguf")
    convert(file, tmp_path / "orbax", to="orbax", dtype="bfloat16")
    convert(tmp_path / "orbax", tmp_path / "out")
    found = hf_values(tmp_path / "out")
    for name, value in hf_values(tmp_path / "original").items():
        assert found[name].tobytes() == value.astype(ml_dtypes.bfloat16).tobytes(), name
    assert (tmp_path / "orbax" / "tokenizer.json").exists()


SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}


def five_bits(stored, kind):
    """Computes the values of blocks of 32: a scale, a minimum in Q5_1, a fifth bit each, four bits
    each, those of the second half above those of the first."""
    values = []
    for block in stored.reshape(-1, 22 if kind == "Q5_0" else 24).tolist():
        numbers = np.array(block[:4], np.uint8).view(np.float16).astype(np.float32)
        high, low = block[-20:-16], block[-16:]
        for place in range(32):
            four = low[place % 16] >> 4 if place >= 16 else low[place % 16] & 15
            five = four | (high[place // 8] >> (place % 8) & 1) << 4
            scale, least = numbers[0], numbers[1] if kind == "Q5_1" else -16 * numbers[0]
            values.append(scale * np.float32(five) + least)
    return np.array(values)


def test_every_quantization_is_computed_as_by_transformers(tmp_path):
    """Transformers has an implementation of its own, in PyTorch."""
    torch = pytest.importorskip("torch")
    import gguf
    from transformers.integrations.gguf.dequant import dequantize

    config = {**SIZES, "tie_word_embeddings": True}
    tensors = gguf_tensors(example(tmp_path / "original", "qwen3", **config), "qwen3")
    matrices = [name for name, value in tensors.items() if value.ndim == 2]
    random = np.random.default_rng(0)
    types = dict(zip(matrices, QUANTIZED, strict=False))
    assert len(types) == len(QUANTIZED)
    for name, kind in types.items():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        rows, columns = tensors[name].shape
        # Whatever bits: but scales in float16, which begin at even bytes, stay finite.
        stored = random.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
        stored[:, 1::2] &= 0xBF
        tensors[name] = stored
    metadata = {**metadata_of("qwen3", **config), **SOME_TOKENIZER}
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors, types=types, architecture="qwen3")
    convert(file, tmp_path / "out")
    found = gguf_tensors(hf_values(tmp_path / "out"), "qwen3")
    for name, kind in types.items():
        if kind in ("Q5_0", "Q5_1"):  # which it lacks
            theirs = five_bits(tensors[name], kind)
        else:
            number = int(gguf.GGMLQuantizationType[kind])
            theirs = dequantize(torch.from_numpy(tensors[name]), number).numpy()
        assert theirs.std() > 0, kind
        np.testing.assert_allclose(
            found[name], theirs.reshape(found[name].shape), rtol=1e-6, atol=1e-7, err_msg=kind
        )


def llama3_factors(theta, head_dim, factor):
    """What llama.cpp's converter writes for the RoPE of a Llama 3."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    factors = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_extended_contexts(tmp_path):
    changes = {"rope_theta": 500000.0, "head_dim": 32}
    tensors = gguf_tensors(example(tmp_path / "original", **changes))
    metadata = {**metadata_of(**changes), **SOME_TOKENIZER}
    factors = llama3_factors(500000.0, 32, 32.0)
    assert len(set(factors)) == 3
    file = write_gguf(tmp_path / "a.gguf", metadata, {**tensors, "rope_freqs.weight": factors})
    rope = GGUFCheckpoint(file).config.rope
    assert (rope.theta, rope.rope_type) == (500000.0, "llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    assert dict(rope.parameters) == dict(zip(names, (32.0, 1.0, 4.0, 8192), strict=True))
    odd = {**tensors, "rope_freqs.weight": factors[::-1].copy()}
    with pytest.raises(InputError, match="not the RoPE factors of a Llama 3"):
        GGUFCheckpoint(write_gguf(tmp_path / "b.gguf", metadata, odd))
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    yarn |= {"llama.rope.scaling.original_context_length": 16}
    rope = GGUFCheckpoint(write_gguf(tmp_path / "c.gguf", metadata | yarn, tensors)).config.rope
    assert (rope.rope_type, rope.get("factor")) == ("yarn", 4.0)
    assert rope.get("original_max_position_embeddings") == 16


@pytest.mark.full
def test_logits_are_those_of_transformers(tmp_path):
    """Read by transformers from the same file, and by us from the folder that is made of it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # transformers' reader wants it
    import jax.numpy as jnp
    import transformers

    from tests.wedlm_jax.checkpoint.test_hf_parity import forward
    from wedlm_jax.checkpoint.model import load_checkpoint

    file = made(tmp_path / "model.gguf", head_dim=4, num_hidden_layers=2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, dtype=torch.float32
    ).eval()
    convert(file, tmp_path / "out")
    tokens = np.random.default_rng(0).integers(0, 24, (2, 17))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    positions = jnp.broadcast_to(jnp.arange(17), (2, 17))
    ours = forward(load_checkpoint(tmp_path / "out"), jnp.asarray(tokens), positions)
    np.testing.assert_allclose(np.asarray(ours), expected, atol=2e-4 * np.abs(expected).max())


ONLY_GGUF = "truncated or not a valid GGUF file"
Q_PROJ = "blk.0.attn_q.weight"


def of_unknown_type(content):
    place = content.index(Q_PROJ.encode()) + len(Q_PROJ) + 4 + 16
    return content[:place] + (99).to_bytes(4, "little") + content[place + 4 :]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"architecture": "gemma3"}, "'gemma3' is not supported (only llama, qwen2, qwen3)"),
        ({"architecture": "qwen2moe"}, "architecture 'qwen2moe' is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ({"llama.attention.head_count_kv": [1, 2, 2]}, "head_count_kv differs between layers"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale 0.5 is not supported"),
        ({"llama.embedding_length": None}, "its metadata lacks llama.embedding_length"),
        ({"llama.block_count": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"llama.rope.dimension_count": 16}, "count 16 is not supported (only 32, the dimensions"),
        ({"split.count": 3}, "one of 3 parts; join them"),
        ({"tokenizer.ggml.pre": "jais"}, "pre-tokenizer 'jais' is not supported (only gpt-2, "),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not supported"),
        ({"TQ2_0": np.zeros((256, 66), np.uint8)}, f"tensor {Q_PROJ!r} is of type TQ2_0, which is"),
        ({"content": of_unknown_type}, "a tensor has the unknown type 99"),
        ({"blk.1.ffn_up.weight": None}, "tensor 'blk.1.ffn_up.weight' is missing"),
        ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
        (
            {"blk.0.ffn_x.weight": np.zeros((12, 16), np.float32)},
            "'blk.0.ffn_x.weight' is not part of this model",
        ),
        (
            {"blk.2.ffn_down.weight": np.zeros((16, 4), np.float32)},
            "down.weight' has shape [16, 4], expected [16, 12]",
        ),
        ({"content": lambda content: content[:-100]}, ONLY_GGUF),
        ({"content": lambda content: content[:900]}, ONLY_GGUF),
        ({"content": lambda content: content[:10]}, ONLY_GGUF),
        ({"content": lambda _: b""}, "not a GGUF file, or truncated in its first bytes"),
        ({"content": lambda _: b"PK\x03\x04 and more"}, "not a GGUF file, or truncated in its"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path, capsys, fault, message):
    shape = {"head_dim": 32, "num_attention_heads": 8}
    tensors = gguf_tensors(example(tmp_path / "original", **shape))
    metadata, types = {**metadata_of(**shape), **SOME_TOKENIZER}, {}
    for name, value in fault.items():
        if name == "TQ2_0":
            tensors[Q_PROJ], types[Q_PROJ] = value, name
        elif name.startswith(("blk.", "token_embd")):
            tensors[name] = value
        elif "." in name:
            metadata[name] = value
    tensors = {name: value for name, value in tensors.items() if value is not None}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    architecture = fault.get("architecture", "llama")
    file = tmp_path / "x.gguf"
    write_gguf(file, metadata, tensors, types=types, architecture=architecture)
    file.write_bytes(fault.get("content", bytes)(file.read_bytes()))
    assert main(["convert", str(file), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wedlm convert: {file}: ")
    assert error.count("\n") == 1, error
    assert message in error
    assert not list(tmp_path.glob("*out*")), "something was written"


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    file = made(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r'needs gguf, .*: pip install "wedlm-jax\[gguf\]"'):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the tokenizer: the tokens that transformers makes with the same file -----------------

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
    pieces = [*sorted(words, key=len), *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
    tokens += pieces
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
    ("pre", "add_bos_token", "begins"),
    [
        ("qwen2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", True, True),
    ],
)
def test_texts_begin_as_the_file_says(pre, add_bos_token, begins, tmp_path):
    metadata = byte_level(pre)
    if add_bos_token is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos_token
    write_tokenizer(tmp_path / "x.gguf", metadata, tmp_path)
    codec = TextCodec.load(tmp_path)
    begin = metadata["tokenizer.ggml.bos_token_id"]
    assert (codec.encode("cat")[0] == begin) == begins


def test_the_template_and_the_special_tokens_go_along(tmp_path):
    metadata = byte_level("qwen2")
    write_tokenizer(tmp_path / "x.gguf", metadata, tmp_path)
    codec = TextCodec.load(tmp_path)
    assert codec.has_chat_template
    assert codec.chat_end == "<end>"
    vocabulary = codec.tokenizer.get_vocab()
    assert "<think>" in vocabulary
    assert not {"[PAD400]", "[PAD401]"} & set(vocabulary), "rows that no token uses"
    assert codec.decode(codec.encode("a<think>b<end>")) == "a<think>b"
