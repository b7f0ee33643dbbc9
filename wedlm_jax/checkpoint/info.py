"""`wedlm info`: describes a checkpoint folder from its headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wedlm_jax.checkpoint import TITLES
from wedlm_jax.checkpoint.hf import values_by_dtype
from wedlm_jax.checkpoint.open import find_model, open_checkpoint
from wedlm_jax.config import ModelConfig, read_object
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.storage import file_sizes

CACHE_BYTES = {"bfloat16": 2, "float32": 4}


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm info",
        description="Describes a checkpoint: size, shape, dtype, files, tokenizer, and how it can\n"
        "be decoded. Only headers are read, so a large checkpoint takes no longer than a small\n"
        "one; works for Hugging Face and orbax folders.",
        epilog="examples:\n"
        "  wedlm info                                   the included model\n"
        "  wedlm info runs/my/hf                        a checkpoint of your own\n"
        "  wedlm info ./WeDLM-8B --json | jq .parameters.total",
    )
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="a checkpoint folder [the included model]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    facts = describe(options.folder)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if options.json else as_text(facts))
    return 0


def describe(folder: str | Path | None) -> dict[str, Any]:
    """Returns the facts about a checkpoint folder (None for the included model), as `wedlm info
    --json` prints them: counts in parameters, sizes in bytes, lengths in tokens.

    Raises:
      InputError: a file is missing, truncated or malformed; the message names it.
    """
    folder = find_model(folder, download=False)
    checkpoint = open_checkpoint(folder)
    config, raw = checkpoint.config, checkpoint.raw_config
    dtypes, files = values_by_dtype(checkpoint.tensors.values()), file_sizes(folder)
    return {
        "folder": str(folder),
        "format": checkpoint.kind,
        "model_type": config.model_type,
        "parameters": {
            "total": config.num_parameters(),
            "without_embeddings": config.num_parameters(embeddings=False),
            "stored": sum(dtypes.values()),
        },
        "dtypes": dtypes,
        "tensors": len(checkpoint.tensors),
        "files": {"count": len(files), "bytes": sum(files.values())},
        "architecture": {
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
        },
        "rope": {
            "theta": config.rope.theta,
            "type": config.rope.rope_type,
            **dict(config.rope.parameters),
        },
        "context": config.max_position_embeddings,
        "kv_cache_bytes_per_token": {
            name: 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
            for name, size in CACHE_BYTES.items()
        },
        "token_ids": {
            "mask": config.mask_token_id,
            "mask_in_config": raw.get("mask_token_id") is not None,
            "pad": config.pad_token_id,
            "eos": list(config.eos_token_ids),
        },
        "tokenizer": _tokenizer(checkpoint.tokenizer_folder),
        "decodes": ["wedlm", "ar"] if config.knows_masks else ["ar"],
        "role": _role(config),
    }


def _tokenizer(folder: Path) -> dict[str, bool]:
    present = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    template = (folder / "chat_template.jinja").exists()
    content = read_object(folder / "tokenizer_config.json") or {}
    template = template or bool(content.get("chat_template"))
    return {"present": present, "chat_template": present and template}


def _role(config: ModelConfig) -> str:
    if config.knows_masks:
        return "WeDLM model"
    if config.model_type == "wedlm":
        return "no mask_token_id in config.json: set it for WeDLM decoding"
    return "can be trained into a WeDLM"


def as_text(facts: dict[str, Any]) -> str:
    lines = _lines(facts)
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _lines(facts: dict[str, Any]) -> dict[str, str]:
    shape, counts, files = (facts[name] for name in ("architecture", "parameters", "files"))
    cache, ids, dtypes = (
        facts[name] for name in ("kv_cache_bytes_per_token", "token_ids", "dtypes")
    )
    parts = {"qkv_bias": "QKV bias", "out_bias": "output bias", "qk_norm": "QK-norm"}
    heads = [f"{shape['heads']} of {shape['head_dim']}, {shape['kv_heads']} for keys and values"]
    heads += [text for name, text in parts.items() if shape[name]]
    rope = dict(facts["rope"])
    ropes = [f"θ {rope.pop('theta'):,.0f}"]
    if (kind := rope.pop("type")) != "default":
        ropes.append(kind)
    ropes += [f"{name} {value}" for name, value in rope.items()]
    mask = "none" if ids["mask"] is None else str(ids["mask"])
    if ids["mask"] is not None and not ids["mask_in_config"]:
        mask += ", not in config.json: the published models' id"
    tokenizer = "none: token ids only"
    if facts["tokenizer"]["present"]:
        without = "with" if facts["tokenizer"]["chat_template"] else "without"
        tokenizer = f"present, {without} chat template"
    decoders = "WeDLM or AR" if "wedlm" in facts["decodes"] else "AR, with drafts from the text"
    lines = {
        "folder": facts["folder"],
        "format": f"{TITLES[facts['format']]}, {files['count']} files, "
        f"{_scaled(files['bytes'], ('GB', 'MB', 'kB'), ' bytes')}",
        "model_type": facts["model_type"],
        "parameters": f"{_scaled(counts['total'])} ({counts['total']:,}), "
        f"{_scaled(counts['without_embeddings'])} without embeddings",
        "dtype": ", ".join(f"{name} ({count:,} values)" for name, count in dtypes.items())
        if len(dtypes) > 1
        else next(iter(dtypes)),
        "layers": f"{shape['layers']}, hidden {shape['hidden_size']:,}, "
        f"intermediate {shape['intermediate_size']:,}" + ", MLP bias" * shape["mlp_bias"],
        "heads": ", ".join(heads),
        "vocabulary": f"{shape['vocab_size']:,}, {'tied' if shape['tied_head'] else 'own'} head",
        "RoPE": ", ".join(ropes),
        "context": f"{facts['context']:,} tokens",
        "KV cache": f"{cache['bfloat16']:,} bytes per token in bfloat16, {cache['float32']:,} in "
        "float32",
        "mask token": mask,
        "EOS token": ", ".join(map(str, ids["eos"])) or "none",
        "tokenizer": tokenizer,
        "decodes as": f"{decoders} ({facts['role']})",
    }
    # Some exporters write a tied head although it is the embedding.
    spare = shape["vocab_size"] * shape["hidden_size"] if shape["tied_head"] else 0
    if counts["stored"] - counts["total"] not in (0, spare):
        lines["warning"] = (
            f"the files hold {counts['stored']:,} values, but config.json describes "
            f"{counts['total']:,}: this will not load"
        )
    return lines


def _scaled(number: int, units: tuple[str, str, str] = ("B", "M", "K"), unscaled: str = "") -> str:
    space = " " if unscaled else ""
    for size, unit in zip((1e9, 1e6, 1e3), units, strict=True):
        if number >= size:
            return f"{number / size:.2f}{space}{unit}"
    return f"{number}{unscaled}"
