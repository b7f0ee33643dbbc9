"""Warnings that `LLM` gives once, with the first prompt to which they apply."""

from __future__ import annotations

from wedlm_jax.host.notices import notice
from wedlm_jax.params import SamplingParams
from wedlm_jax.text import Prompt, TextCodec


class ToldOnce:
    """Warns of behaviour that a caller may not expect, each kind once.

    Args:
      name: name of the model.
      codec: its tokenizer; None if it has none.
      replaces_modes: the ``model_type`` of a model that was not trained on masks and so decodes
        autoregressively, without being asked to; None for other models.
    """

    def __init__(self, name: str, codec: TextCodec | None, replaces_modes: str | None):
        self._name = name
        self._chat_end = codec and codec.chat_end
        self._replaces_modes = replaces_modes

    def of_prompt(self, prompt: Prompt) -> None:
        """Warns if a text is completed without the model's chat template."""
        end = self._chat_end
        if not end or not isinstance(prompt, str) or end in prompt:
            return
        self._chat_end = None
        notice(
            "plain-text prompts are completed without the chat template of %s; for answers use "
            "LLM.chat, --chat or records with messages",
            self._name,
        )

    def of_mode(self, params: SamplingParams) -> None:
        """Warns if another mode was requested and AR replaces it."""
        kind = self._replaces_modes
        if kind is None or params.mode != "paper":
            return
        self._replaces_modes = None
        notice(
            "%s (%s) was not trained on masks: decoding autoregressively, as with a window of 0",
            *(self._name, kind),
        )
