"""Reads and writes weights: Hugging Face and orbax folders, PEFT adapters, training runs, GGUF."""

HF, ORBAX, PEFT, RUN, GGUF = "hf", "orbax", "peft", "run", "gguf"
"""The kinds of checkpoint. `ORBAX` is also the folder of the arrays, `GGUF` the file's suffix."""
TITLES = {HF: "Hugging Face", ORBAX: "orbax", PEFT: "LoRA adapters (PEFT)"}

ADAPTER_CONFIG = "adapter_config.json"
"""The file that marks a folder of adapters."""

RUN_STATES = "checkpoints"
"""In a run's folder: its states, one folder per state."""
RUN_MODEL = "model"
"""In a run's folder: its model's ``config.json`` and tokenizer."""
RUN_DRAFTER = "drafter"
"""In the folder of a run that trains a drafter: the exported drafter."""
RUN_BASE = "base"
"""In the folder of a run that trains adapters: the other parameters, in Hugging Face's format."""
