"""Reads GGUF files of llama.cpp: the configuration, the tensors under Hugging Face's names, and the
tokenizer as Hugging Face's files.

Quantized values are computed in float32 from their integers and scales, a few rows at a time, by
the package ``gguf`` and without PyTorch; float16 and bfloat16 values stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from wedlm_jax.checkpoint import GGUF
from wedlm_jax.checkpoint.hf import PART_TENSORS, Checkpoint, values_by_dtype
from wedlm_jax.checkpoint.names import PARAMETER_TABLE
from wedlm_jax.checkpoint.safetensors import DeferredArray, Rows, array_in_rows
from wedlm_jax.config import config_from_hf, config_to_hf
from wedlm_jax.errors import InputError, errors_at, require_extra, shortened

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architecture names, the same in GGUF and here. Mistral's files also say "llama"."""

PLAIN: dict[str, np.dtype] = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype("bfloat16"),
}
QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)

FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Keys of an architecture's metadata, and the fields of ``config.json`` they correspond to."""

OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "rope.scaling.finetuned": (True, False),
}
"""Further keys that are accepted with these values, which change nothing."""

CHECKED_APART = (
    *("vocab_size", "attention.value_length", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
)

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisors of Llama 3's frequencies."""

ROWS_AT_ONCE = 256


HF_NAMES = {theirs: name for _, name, theirs in PARAMETER_TABLE}
GGUF_NAMES = {name: theirs for theirs, name in HF_NAMES.items()}


class GGUFCheckpoint(Checkpoint):
    """An open file, which is its own ``folder``, and its ``metadata`` by key.

    Raises:
      InputError: the file cannot be used, or the package ``gguf`` is not installed.
    """

    kind = GGUF

    def __init__(self, path: Path):
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{path}: not a GGUF file, or truncated in its first bytes")
        require_extra(f"{path}: a GGUF file", "gguf", "gguf")
        self.folder = path
        reader = _opened(path)
        self.metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        if self.metadata.get("split.count", 1) > 1:
            raise InputError(
                f"{path}: one of {self.metadata['split.count']} parts; join them with "
                "`llama-gguf-split --merge`"
            )
        known = (*PLAIN, *QUANTIZED)
        for tensor in reader.tensors:
            if (kind := tensor.tensor_type.name) not in known:
                raise self._fail(
                    f"tensor {tensor.name!r} is of type {kind}, which is not supported (only "
                    f"{', '.join(known)})"
                )
        self._stored = {_renamed(tensor.name, HF_NAMES): tensor for tensor in reader.tensors}
        self._llama3_factors = self._stored.pop(ROPE_FACTORS, None)
        raw = self._raw_config()
        with errors_at(path):
            self.config = config_from_hf(raw)
        self.tensors = {name: self._tensor(name, tensor) for name, tensor in self._stored.items()}
        dtype = next(iter(values_by_dtype(self.tensors.values())))
        self.raw_config = config_to_hf(self.config, dtype=dtype)

    def _fail(self, what: str) -> InputError:
        return InputError(f"{self.folder}: {what}")

    def _raw_config(self) -> dict[str, Any]:
        """Returns the metadata as the content of a ``config.json``."""
        architecture = self.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise self._fail(
                f"architecture {architecture!r} is not supported (only {', '.join(ARCHITECTURES)})"
            )
        prefix = f"{architecture}."
        fields = {
            name.removeprefix(prefix): value
            for name, value in self.metadata.items()
            if name.startswith(prefix)
        }
        for name, value in fields.items():
            known = name in FIELDS or name in CHECKED_APART
            if not known and value not in WITHOUT_EFFECT.get(name, ()):
                shown = shortened(str(value), 60)
                raise self._fail(f"{prefix}{name} {shown} is not supported")
        raw: dict[str, Any] = {"model_type": architecture}
        for name, field in FIELDS.items():
            if name not in fields and name not in OPTIONAL:
                raise self._fail(f"its metadata lacks {prefix}{name}")
            if isinstance(fields.get(name), list):
                raise self._fail(f"{prefix}{name} differs between layers, which is not supported")
            if name in fields:
                raw[field] = fields[name]
        embedding = self._stored.get("model.embed_tokens.weight")
        if embedding is None:
            raise self._fail("tensor 'token_embd.weight' is missing")
        raw["vocab_size"] = len(embedding.data)
        raw["tie_word_embeddings"] = "lm_head.weight" not in self._stored
        for part, tensor in PART_TENSORS.items():
            raw[part] = f"model.layers.0.{tensor}" in self._stored
        raw.setdefault("head_dim", raw["hidden_size"] // max(1, raw["num_attention_heads"]))
        for name in ("attention.value_length", "rope.dimension_count"):
            if fields.get(name, raw["head_dim"]) != raw["head_dim"]:
                raise self._fail(
                    f"{prefix}{name} {fields[name]} is not supported (only {raw['head_dim']}, the "
                    "dimensions of a head)"
                )
        raw["rope_scaling"] = self._rope_scaling(fields, raw)
        ends = [self._token_id(name) for name in ("eos", "eot", "eom")]
        return raw | {
            "bos_token_id": self._token_id("bos"),
            "pad_token_id": self._token_id("padding"),
            "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        }

    def _rope_scaling(self, fields: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
        kind = fields.get("rope.scaling.type", "none")
        if self._llama3_factors is not None:
            return self._llama3_scaling(raw)
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": fields.get("rope.scaling.factor")}
        if (length := fields.get("rope.scaling.original_context_length")) is not None:
            scaling["original_max_position_embeddings"] = length
        return scaling

    def _llama3_scaling(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters of Llama 3's scaling (3.1 to 3.3), of which the file has only the
        resulting factors."""
        from wedlm_jax.model.rope import inverse_frequencies

        factors = _values(self._llama3_factors, slice(None)).reshape(-1)
        scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), **LLAMA3}
        plain, scaled = (
            inverse_frequencies(config_from_hf({**raw, "rope_scaling": given}))[0]
            for given in (None, scaling)
        )
        if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4):
            raise self._fail(f"tensor {ROPE_FACTORS!r}: not the RoPE factors of a Llama 3")
        return scaling

    def _token_id(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}_token_id")

    def stored_name(self, name: str) -> str:
        return _renamed(name, GGUF_NAMES)

    def write_tokenizer(self, destination: Path) -> None:
        write_tokenizer(self.folder, self.metadata, destination)

    def _tensor(self, name: str, tensor: Any) -> DeferredArray:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        dtype = PLAIN.get(tensor.tensor_type.name, PLAIN["F32"])

        def read_rows(rows: slice) -> Rows:
            order = self._order(name)
            first, end, _ = rows.indices(shape[0])
            for start in range(first, end, ROWS_AT_ONCE):
                part = slice(start, min(start + ROWS_AT_ONCE, end))
                values = _values(tensor, part if order is None else order[part])
                yield start, values.reshape(part.stop - start, -1)

        return array_in_rows(name, shape, dtype, read_rows)

    def _order(self, name: str) -> np.ndarray | None:
        """Returns the row of the file for each row of a tensor; None if they are in order.

        In the file, a Llama's query and key rows are interleaved for a RoPE of neighbouring pairs:
        row 2i of a head is row i of its first half, and row 2i + 1 is row i of its second.
        """
        projection = name.split(".")[-2]
        heads = {
            "q_proj": self.config.num_attention_heads,
            "k_proj": self.config.num_key_value_heads,
        }
        if self.config.model_type != "llama" or projection not in heads:
            return None
        pairs = np.arange(heads[projection] * self.config.head_dim)
        return pairs.reshape(heads[projection], -1, 2).swapaxes(1, 2).reshape(-1)


def _values(tensor: Any, rows: Any) -> np.ndarray:
    """Returns rows of a tensor, dequantized."""
    from gguf.quants import dequantize

    data, kind = tensor.data[rows], tensor.tensor_type
    if kind.name == "BF16":
        return np.ascontiguousarray(data).view(ml_dtypes.bfloat16)
    return np.asarray(data) if kind.name in PLAIN else dequantize(data, kind)


def _opened(path: Path) -> Any:
    """Returns a `gguf.GGUFReader` of a file; refuses one that is truncated or not GGUF."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:
        # The reader takes any bytes for numbers, so a damaged file can raise anything.
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            raise InputError(f"{path}: a tensor has the unknown type {unknown[1]}") from None
        raise InputError(f"{path}: truncated or not a valid GGUF file") from None


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Returns a tensor's name on the other side of the table; unchanged if it has none."""
    layer = re.search(r"(?<=\.)\d+(?=\.)", name)
    if layer is None:
        return names.get(name, name)
    other = names.get(f"{name[: layer.start()]}{{}}{name[layer.end() :]}")
    return name if other is None else other.format(layer[0])


CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
"""GGUF's token types with special treatment; unused tokens pad the vocabulary."""

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How texts are split before pairs are merged: the pattern of words, None for GPT-2's pattern, or
# "digits" for GPT-2's pattern after splitting off single digits.
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": "digits",
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
}
BEGINS_TEXTS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Pre-tokenizers whose texts begin with the BOS token unless the file says otherwise. With these,
words that are tokens are not merged from pairs."""


def write_tokenizer(path: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``, the chat template in the latter, of
    a GGUF file with this metadata.

    Raises:
      InputError: it has no tokenizer, or one of a kind that is not supported.
    """
    fields = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    kind, tokens = fields.get("model"), fields.get("tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise InputError(f"{path}: tokenizer {kind!r} is not supported (only gpt2, llama)")
    types = fields.get("token_type") or [1] * len(tokens)
    known = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges", ())]
    if kind == "gpt2":
        tokenizer, begins = _byte_level(path, fields.get("pre"), known, merges)
    else:
        tokenizer, begins = _sentencepiece(fields, known, merges), True
    for of_type in (CONTROL, USER_DEFINED):
        special = of_type == CONTROL
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, i in known.items()
            if types[i] == of_type
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    names = {
        name: _token(tokens, fields.get(f"{key}_token_id"))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    if (bos := names["bos"]) is not None and fields.get("add_bos_token", begins):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, known[bos])]
        )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in names.items() if token is not None},
        "clean_up_tokenization_spaces": False,
    }
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _token(tokens: list[str], number: Any) -> str | None:
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _byte_level(
    path: Path, name: Any, known: dict[str, int], merges: list[Any]
) -> tuple[Tokenizer, bool]:
    """Returns a BPE of bytes with the pre-tokenizer ``name``, and whether its texts begin with the
    BOS token by default."""
    if name not in SPLITS:
        raise InputError(
            f"{path}: pre-tokenizer {name!r} is not supported (only {', '.join(SPLITS)})"
        )
    begins = name in BEGINS_TEXTS
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=merges, ignore_merges=begins))
    split, by_pattern = SPLITS[name], False
    steps: list[Any] = []
    if split == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif split is not None:
        steps, by_pattern = [pre_tokenizers.Split(Regex(split), behavior="isolated")], True
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not by_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, begins


def _sentencepiece(
    fields: Mapping[str, Any], known: dict[str, int], merges: list[Any]
) -> Tokenizer:
    """Returns a BPE of characters, spaces written as "▁", that falls back to bytes."""
    unknown = _token(fields["tokens"], fields.get("unknown_token_id", 0))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=known,
            merges=merges or _merges(known, fields.get("scores") or []),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _merges(known: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the pairs that SentencePiece would merge, in its order: by descending score of the
    token that they make."""
    ranked = []
    for token, number in known.items():
        score = scores[number] if number < len(scores) else -float(number)
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                ranked.append((-score, known[left], known[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
