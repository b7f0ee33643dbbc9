"""A GGUF file of llama.cpp, opened: its configuration, and its tensors under Hugging Face's names.

Quantized values are computed in float32 from their integers and scales, a few rows at a time, by
the package ``gguf`` and without PyTorch; what the file holds in float16 or bfloat16 stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from wedlm_jax.checkpoint.gguf_tokenizer import write_tokenizer
from wedlm_jax.checkpoint.hf_folder import PART_TENSORS
from wedlm_jax.checkpoint.names import GGUF_NAMES, parameter_entries
from wedlm_jax.config import config_from_hf, config_to_hf
from wedlm_jax.errors import InputError, require_extra, shortened

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""What they are called there and here. Mistral's files say "llama", too."""

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
"""Keys of an architecture's metadata, and the fields of a ``config.json`` that they are."""

OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "rope.scaling.finetuned": (True, False),
}
"""Further keys that may stand there: the values under which they change nothing."""

CHECKED_APART = (
    *("vocab_size", "attention.value_length", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
)

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds what Llama 3's frequencies are divided by."""

ROWS_AT_ONCE = 256


class GGUFCheckpoint:
    """An opened file.

    Attributes:
      folder: the file itself, for messages.
      metadata: what the file says of itself, by key.
      raw_config, config: the architecture, as of a Hugging Face folder.
      tensors: by Hugging Face name; all are in this object.

    Raises:
      InputError: naming the file and what was expected of it; or the package is not installed.
    """

    def __init__(self, path: Path):
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{path}: not a GGUF file, or cut off at its first bytes")
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
                f"{path}: one of {self.metadata['split.count']} parts, which are not read; join "
                "them with `llama-gguf-split --merge`"
            )
        self._by_gguf_name = {tensor.name: tensor for tensor in reader.tensors}
        self._check_types()
        self._llama3_factors = self._by_gguf_name.pop(ROPE_FACTORS, None)
        self.raw_config = self._raw_config()
        try:
            self.config = config_from_hf(self.raw_config)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        self._stored = self._checked()
        self.raw_config = config_to_hf(self.config, dtype=self._most_frequent_dtype())
        self.tensors = dict.fromkeys(self._stored, self)

    def _fail(self, what: str) -> InputError:
        return InputError(f"{self.folder}: {what}")

    def _check_types(self) -> None:
        for name, tensor in self._by_gguf_name.items():
            kind = tensor.tensor_type.name
            if kind not in (*PLAIN, *QUANTIZED):
                raise self._fail(
                    f"tensor {name!r} is of type {kind}, which is not supported (only "
                    f"{', '.join((*PLAIN, *QUANTIZED))})"
                )

    def _raw_config(self) -> dict[str, Any]:
        """Returns what the metadata is as the content of a ``config.json``.

        Raises:
          InputError: it asks for what is not supported, or lacks a number.
        """
        architecture = self.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise self._fail(
                f"architecture {architecture!r} is not supported (only {', '.join(ARCHITECTURES)})"
            )
        prefix = f"{architecture}."
        said = {
            name.removeprefix(prefix): value
            for name, value in self.metadata.items()
            if name.startswith(prefix)
        }
        for name, value in said.items():
            known = name in FIELDS or name in CHECKED_APART
            if not known and value not in WITHOUT_EFFECT.get(name, ()):
                shown = shortened(str(value), 60)
                raise self._fail(f"{prefix}{name} {shown} is not supported")
        raw: dict[str, Any] = {"model_type": architecture}
        for name, field in FIELDS.items():
            if name not in said and name not in OPTIONAL:
                raise self._fail(f"its metadata lacks {prefix}{name}")
            if isinstance(said.get(name), list):
                raise self._fail(f"{prefix}{name} differs between layers, which is not supported")
            if name in said:
                raw[field] = said[name]
        embedding = self._by_gguf_name.get("token_embd.weight")
        if embedding is None:
            raise self._fail("tensor 'token_embd.weight' is missing")
        raw["vocab_size"] = len(embedding.data)
        raw["tie_word_embeddings"] = "output.weight" not in self._by_gguf_name
        first_layer = {name for name in self._by_gguf_name if name.startswith("blk.0.")}
        for part, tensor in PART_TENSORS.items():
            raw[part] = _gguf_name(f"model.layers.0.{tensor}") in first_layer
        raw.setdefault("head_dim", raw["hidden_size"] // max(1, raw["num_attention_heads"]))
        for name in ("attention.value_length", "rope.dimension_count"):
            if said.get(name, raw["head_dim"]) != raw["head_dim"]:
                raise self._fail(
                    f"{prefix}{name} {said[name]} is not supported, where a head has "
                    f"{raw['head_dim']} dimensions"
                )
        raw["rope_scaling"] = self._rope_scaling(said, raw)
        return raw | self._token_ids()

    def _rope_scaling(self, said: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
        kind = said.get("rope.scaling.type", "none")
        if self._llama3_factors is not None:
            return self._llama3_scaling(raw)
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": said.get("rope.scaling.factor")}
        if (length := said.get("rope.scaling.original_context_length")) is not None:
            scaling["original_max_position_embeddings"] = length
        return scaling

    def _llama3_scaling(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the numbers of Llama 3's scaling, of which the file holds the outcome alone.

        Raises:
          InputError: it is not the outcome of the numbers that Llama 3.1 to 3.3 have.
        """
        from wedlm_jax.model.rope import inverse_frequencies

        factors = self._rows_of(self._llama3_factors, slice(None)).reshape(-1)
        scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), **LLAMA3}
        plain, scaled = (
            inverse_frequencies(config_from_hf({**raw, "rope_scaling": given}))[0]
            for given in (None, scaling)
        )
        if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4):
            raise self._fail(f"tensor {ROPE_FACTORS!r}: not the RoPE factors of a Llama 3")
        return scaling

    def _token_ids(self) -> dict[str, Any]:
        def said(name: str) -> Any:
            return self.metadata.get(f"tokenizer.ggml.{name}_token_id")

        ends = [said(name) for name in ("eos", "eot", "eom")]
        ends = list(dict.fromkeys(end for end in ends if end is not None))
        return {"bos_token_id": said("bos"), "pad_token_id": said("padding"), "eos_token_id": ends}

    def _checked(self) -> dict[str, Any]:
        """Returns the file's tensors by Hugging Face name.

        Raises:
          InputError: naming the first missing, extra or misshapen tensor.
        """
        expected = {
            name: entry.hf_shape
            for entry in parameter_entries(self.config)
            for name in entry.hf_names
        }
        found = dict(self._by_gguf_name)
        stored = {}
        for name, shape in expected.items():
            own = _gguf_name(name)
            if own not in found:
                raise self._fail(f"tensor {own!r} is missing")
            stored[name] = tensor = found.pop(own)
            if (has := _shape(tensor)) != shape:
                raise self._fail(f"tensor {own!r} has shape {list(has)}, expected {list(shape)}")
        for own in found:
            raise self._fail(f"tensor {own!r} is not part of a {self.config.model_type} model")
        return stored

    def _most_frequent_dtype(self) -> str:
        sizes: dict[str, int] = {}
        for name, tensor in self._stored.items():
            sizes[self.dtype(name)] = sizes.get(self.dtype(name), 0) + int(tensor.n_elements)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def dtypes(self) -> set[str]:
        return {self.dtype(name) for name in self._stored}

    def shape(self, name: str) -> tuple[int, ...]:
        return _shape(self._stored[name])

    def dtype(self, name: str) -> str:
        kind = self._stored[name].tensor_type.name
        return str(PLAIN.get(kind, PLAIN["F32"]).name)

    def read(self, name: str) -> np.ndarray:
        """Returns the values of a tensor, in `dtype`."""
        values = np.concatenate([rows for _, rows in self.read_rows(name)])
        return values.reshape(self.shape(name))

    def write_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer's files; see `wedlm_jax.checkpoint.gguf_tokenizer`."""
        write_tokenizer(self.folder, self.metadata, folder)

    def read_rows(self, name: str, rows: slice = slice(None)) -> Iterator[tuple[int, np.ndarray]]:
        """Yields some rows at a time, as `SafetensorsFile.read_rows`."""
        tensor, order = self._stored[name], self._order(name)
        first, end, _ = rows.indices(self.shape(name)[0])
        for start in range(first, end, ROWS_AT_ONCE):
            part = slice(start, min(start + ROWS_AT_ONCE, end))
            values = self._rows_of(tensor, part if order is None else order[part])
            yield start, values.reshape(part.stop - start, -1)

    def _rows_of(self, tensor: Any, rows: Any) -> np.ndarray:
        from gguf.quants import dequantize

        data, kind = tensor.data[rows], tensor.tensor_type
        if kind.name == "BF16":
            return np.ascontiguousarray(data).view(ml_dtypes.bfloat16)
        return np.asarray(data) if kind.name in PLAIN else dequantize(data, kind)

    def _order(self, name: str) -> np.ndarray | None:
        """Returns the row of the file for each row of a tensor; None if they are in order.

        A Llama's query and key rows are interleaved there: row 2i of a head is row i of its first
        half, and row 2i + 1 that of its second, as a RoPE of neighbouring pairs wants them.
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


def _opened(path: Path) -> Any:
    """Returns a `gguf.GGUFReader` of a file.

    Raises:
      InputError: it is truncated, or none.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:
        # The reader takes whatever stands where a number should, and many things can follow.
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            kind = f"a tensor is of type {unknown[1]}, which is not known"
            raise InputError(f"{path}: {kind}") from None
        raise InputError(f"{path}: truncated or not a sound GGUF file") from None


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _gguf_name(name: str) -> str:
    """Returns the file's name of a tensor of Hugging Face's."""
    parts = name.split(".")
    if parts[1] == "layers":
        return GGUF_NAMES[".".join([*parts[:2], "{}", *parts[3:]])].format(parts[2])
    return GGUF_NAMES[name]
