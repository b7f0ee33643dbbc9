"""`wedlm info`: what a checkpoint folder is, told from its headers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from wedlm_jax.checkpoint.find_model import packaged
from wedlm_jax.checkpoint.hf_folder import EMBEDDED_MODEL, HFCheckpoint
from wedlm_jax.checkpoint.model_folder import OrbaxCheckpoint, format_of
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.storage import as_path, file_sizes

CACHE_BYTES = {"bfloat16": 2, "float32": 4}

Shapes = dict[str, tuple[tuple[int, ...], str]]


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm info",
        description="Tells what a checkpoint is: size, shape, dtype, files, tokenizer, and how it\n"
        "can be decoded. Only headers are read, so a large checkpoint answers as fast as a\n"
        "small one; Hugging Face and orbax folders alike.",
        epilog="examples:\n"
        "  wedlm info                                   the embedded model\n"
        "  wedlm info runs/my/hf                        a checkpoint of your own\n"
        "  wedlm info ./WeDLM-8B --json | jq .parameters.total",
    )
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="a checkpoint folder [the embedded model]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.folder is None and not EMBEDDED_MODEL.is_dir():
        raise InputError(f"{EMBEDDED_MODEL}: the embedded model is not here; name a folder")
    facts = describe(EMBEDDED_MODEL if options.folder is None else options.folder)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if options.json else as_text(facts))
    return 0


def describe(folder: str | Path) -> dict[str, Any]:
    """Collects the facts about a checkpoint folder, as `wedlm info --json` prints them.

    Args:
      folder: a Hugging Face or an orbax checkpoint.

    Returns:
      counts in parameters, sizes in bytes, lengths in tokens.

    Raises:
      InputError: naming the file that is missing, cut off or not what it should be.
    """
    folder = as_path(packaged(folder))
    found = format_of(folder)
    checkpoint = OrbaxCheckpoint(folder) if found == "orbax" else HFCheckpoint(folder)
    config, raw, shapes = checkpoint.config, checkpoint.raw_config, _shapes(checkpoint)
    return {
        "folder": str(folder),
        "format": found,
        "model_type": config.model_type,
        "parameters": {
            "total": config.num_parameters(),
            "without_embeddings": config.num_parameters(embeddings=False),
            "stored": sum(math.prod(shape) for shape, _ in shapes.values()),
        },
        "dtypes": _dtype_counts(shapes),
        "tensors": len(shapes),
        "files": _files(folder),
        "architecture": _architecture(config),
        "rope": {
            "theta": config.rope.theta,
            "type": config.rope.rope_type,
            **dict(config.rope.parameters),
        },
        "context": config.max_position_embeddings,
        "kv_cache_bytes_per_token": {
            name: _cache_values(config) * size for name, size in CACHE_BYTES.items()
        },
        "token_ids": {
            "mask": config.mask_token_id,
            "mask_in_config": raw.get("mask_token_id") is not None,
            "pad": config.pad_token_id,
            "eos": list(config.eos_token_ids),
        },
        "tokenizer": _tokenizer(folder),
        **_decoding(config),
    }


def _shapes(checkpoint: HFCheckpoint | OrbaxCheckpoint) -> Shapes:
    if isinstance(checkpoint, OrbaxCheckpoint):
        return checkpoint.arrays
    return {name: (file.shape(name), file.dtype(name)) for name, file in checkpoint.tensors.items()}


def _dtype_counts(shapes: Shapes) -> dict[str, int]:
    """Counts the parameters held in each dtype, the most frequent first."""
    counts: dict[str, int] = {}
    for shape, dtype in shapes.values():
        counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _files(folder: Path) -> dict[str, int]:
    sizes = file_sizes(folder)
    return {"count": len(sizes), "bytes": sum(sizes.values())}


def _architecture(config: ModelConfig) -> dict[str, Any]:
    return {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_out_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm,
        "tied_head": config.tie_word_embeddings,
    }


def _cache_values(config: ModelConfig) -> int:
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def _tokenizer(folder: Path) -> dict[str, Any]:
    """Says whether there is a tokenizer, and whether it has a chat template."""
    present = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    template = (folder / "chat_template.jinja").exists()
    path = folder / "tokenizer_config.json"
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            template = template or bool(content.get("chat_template"))
        except (OSError, ValueError, AttributeError):
            raise InputError(f"{path}: not a valid JSON object") from None
    return {"present": present, "chat_template": present and template}


def _decoding(config: ModelConfig) -> dict[str, Any]:
    """Says how the model can be decoded: with masks if it was trained on them and has a mask
    token."""
    if config.model_type == "wedlm" and config.mask_token_id is not None:
        return {"decodes": ["wedlm", "ar"], "role": "WeDLM model"}
    if config.model_type == "wedlm":
        role = "no mask_token_id in config.json: set it for WeDLM decoding"
    else:
        role = "can be trained into a WeDLM"
    return {"decodes": ["ar"], "role": role}


def as_text(facts: dict[str, Any]) -> str:
    """Formats the facts as aligned lines."""
    width = max(len(name) for name, _ in _lines(facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in _lines(facts))


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    shape, counts, cache = (
        facts[name] for name in ("architecture", "parameters", "kv_cache_bytes_per_token")
    )
    heads = f"{shape['heads']} of {shape['head_dim']}, {shape['kv_heads']} for keys and values"
    names = {"qkv_bias": "QKV bias", "out_bias": "output bias", "qk_norm": "QK-norm"}
    extras = [text for name, text in names.items() if shape[name]]
    format_name = {"hf": "Hugging Face", "orbax": "orbax"}[facts["format"]]
    files = facts["files"]
    lines = [
        ("folder", facts["folder"]),
        ("format", f"{format_name}, {files['count']} files, {_bytes(files['bytes'])}"),
        ("model_type", facts["model_type"]),
        (
            "parameters",
            f"{_count(counts['total'])} ({counts['total']:,}), "
            f"{_count(counts['without_embeddings'])} without embeddings",
        ),
        ("dtype", _dtype_text(facts["dtypes"])),
        (
            "layers",
            f"{shape['layers']}, hidden {shape['hidden_size']:,}, "
            f"intermediate {shape['intermediate_size']:,}" + ", MLP bias" * shape["mlp_bias"],
        ),
        ("heads", ", ".join([heads, *extras])),
        ("vocabulary", f"{shape['vocab_size']:,}, {'tied' if shape['tied_head'] else 'own'} head"),
        ("RoPE", _rope_text(facts["rope"])),
        ("context", f"{facts['context']:,} tokens"),
        (
            "KV cache",
            f"{cache['bfloat16']:,} bytes a token in bfloat16, {cache['float32']:,} in float32",
        ),
        ("mask token", _mask_text(facts["token_ids"])),
        ("EOS token", ", ".join(map(str, facts["token_ids"]["eos"])) or "none"),
        ("tokenizer", _tokenizer_text(facts["tokenizer"])),
        ("decodes as", f"{_decoder_text(facts['decodes'])} ({facts['role']})"),
    ]
    return lines + _warnings(facts)


def _warnings(facts: dict[str, Any]) -> list[tuple[str, str]]:
    counts, shape = facts["parameters"], facts["architecture"]
    # Some exporters write a tied head out although it is the embedding.
    spare = shape["vocab_size"] * shape["hidden_size"] if shape["tied_head"] else 0
    if counts["stored"] - counts["total"] in (0, spare):
        return []
    return [
        (
            "warning",
            f"the files hold {counts['stored']:,} values where config.json describes "
            f"{counts['total']:,}: this will not load",
        ),
    ]


def _dtype_text(dtypes: dict[str, int]) -> str:
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{name} ({count:,} values)" for name, count in dtypes.items())


def _rope_text(rope: dict[str, Any]) -> str:
    rest = {name: value for name, value in rope.items() if name not in ("theta", "type")}
    parts = [f"θ {rope['theta']:,.0f}", *([] if rope["type"] == "default" else [rope["type"]])]
    return ", ".join([*parts, *(f"{name} {value}" for name, value in rest.items())])


def _mask_text(ids: dict[str, Any]) -> str:
    if ids["mask"] is None:
        return "none"
    where = "" if ids["mask_in_config"] else ", not in config.json: the published models' id"
    return f"{ids['mask']}{where}"


def _tokenizer_text(tokenizer: dict[str, bool]) -> str:
    if not tokenizer["present"]:
        return "none: token ids only"
    return "present, " + ("with" if tokenizer["chat_template"] else "without") + " chat template"


def _decoder_text(decodes: list[str]) -> str:
    return "WeDLM or AR" if "wedlm" in decodes else "AR, with drafts from the text"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return str(number)


def _bytes(number: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} bytes"
