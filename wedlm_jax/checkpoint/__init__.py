"""Weights in and out: Hugging Face's and orbax's folders, PEFT's adapters, training runs, GGUF
files."""

HF, ORBAX, PEFT, RUN, GGUF = "hf", "orbax", "peft", "run", "gguf"
"""The kinds of checkpoint. `ORBAX` is also the folder of the arrays, `GGUF` the file's suffix."""
TITLES = {HF: "Hugging Face", ORBAX: "orbax", PEFT: "LoRA adapters (PEFT)"}

ADAPTER_CONFIG = "adapter_config.json"
"""In a folder of adapters: what makes it one."""

RUN_STATES = "checkpoints"
"""In a run's folder: its states, a folder each."""
RUN_MODEL = "model"
"""In a run's folder: its model's ``config.json`` and tokenizer."""
RUN_DRAFTER = "drafter"
"""In the folder of a run that trains a drafter: what it exports."""
RUN_BASE = "base"
"""In the folder of a run that trains adapters: the other parameters, in Hugging Face's format."""
