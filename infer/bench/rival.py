"""Decoding with transformers (PyTorch): AR, its prompt lookup, its assisted generation, and mode
"paper" by whole forwards without a cache, with the same weights and prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wedlm_jax.checkpoint.open import find_model, read_architecture
from wedlm_jax.config import STOCK, ModelConfig, config_to_hf, with_model_type
from wedlm_jax.errors import InputError, errors_at, require_extra
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from infer.bench.subject import Subject

RIVALS = ("transformers",)
RIVAL = "transformers, AR"
RIVAL_LOOKUP = "transformers, lookup"
RIVAL_ASSISTED = "transformers, assisted"
RIVAL_RECOMPUTE = "transformers, recomputed"
"""Names in tables: plain decoding, prompt lookup, assisted generation, and mode "paper" without a
cache."""
LOOKUP_TOKENS = 10
"""Number of drafts of its lookup, as in its documentation."""


def check_rival() -> None:
    """Refuses a comparison that cannot be made, before anything is measured."""
    require_extra("--rival transformers", "rival", "torch")


class Rival:
    """A model of transformers that decodes greedily, on the CPU.

    Args:
      subject: model whose weights are used; if they are random, only its shape is used.
      assistant: what drafts for its assisted generation: a folder with a smaller model of the same
        vocabulary, or the number of the model's own first layers that do; None for neither.

    Attributes:
      forwards: forwards of all layers so far, those of prompts included; a batch counts once.
      drafters: options of transformers' `generate` for each of its ways to draft, by name.
    """

    def __init__(self, subject: Subject, assistant: str | None = None):
        self._config = subject.config
        self._model = _load(subject.config, subject.folder, subject.dtype)
        self.forwards = 0
        self._model.register_forward_hook(self._count)
        self.drafters: dict[str, Mapping[str, Any]] = {
            RIVAL_LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        }
        if assistant is not None:
            with errors_at("--assistant"):
                self.drafters[RIVAL_ASSISTED] = self._assisted_by(assistant, subject.dtype)

    def _assisted_by(self, assistant: str, dtype: str) -> Mapping[str, Any]:
        if assistant.isdecimal():
            layers = self._config.num_hidden_layers
            if not 0 < int(assistant) < layers:
                raise InputError(
                    f"expected fewer than the model's {layers} layers, at least 1, not {assistant}"
                )
            return {"assistant_early_exit": int(assistant)}
        folder = find_model(assistant)
        config = read_architecture(folder)
        if config.vocab_size != self._config.vocab_size:
            raise InputError(
                f"{folder} has {config.vocab_size:,} tokens, the model "
                f"{self._config.vocab_size:,}; they need the same tokenizer"
            )
        return {"assistant_model": _load(config, folder, dtype)}

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sequences: int,
        drafter: str | None = None,
    ) -> list[list[int]]:
        """Completes prompts greedily in order, ``sequences`` at a time, padded on the left; returns
        the tokens of each completion, its end of text included, as in `Completion.token_ids`.

        Args:
          drafter: one of `drafters`, which take one sequence at a time; None for AR.
        """
        answers: list[list[int]] = []
        options = {} if drafter is None else self.drafters[drafter]
        for start in range(0, len(prompts), sequences):
            batch = prompts[start : start + sequences]
            answers += self._generate(batch, max_tokens, self._config.eos_token_ids, **options)
        return answers

    def recompute(
        self, prompts: Sequence[Sequence[int]], *, window: int, params: SamplingParams
    ) -> list[list[int]]:
        """Completes prompts greedily in mode "paper", one after another, without a cache: each
        forward runs over the whole text and its window, as diffusion decoders without a causal
        window have to. Returns the same as `decode`.

        Args:
          window: W, the uncommitted slots.
          params: max_tokens, entropy_threshold and position_penalty.
        """
        return [self._recompute(prompt, window, params) for prompt in prompts]

    def _recompute(self, prompt: Sequence[int], window: int, params: SamplingParams) -> list[int]:
        mask = self._config.require_mask_token_id()
        text, slots = list(prompt), list[int | None]([None] * window)
        limit = len(prompt) + params.max_tokens
        while True:
            start = len(text)
            filled = [slot for slot, token in enumerate(slots) if token is not None]
            masks = [slot for slot, token in enumerate(slots) if token is None]
            run = masks[0] if masks else len(slots)
            ids = [*text, *(slots[slot] for slot in filled), *[mask] * len(masks)]
            positions = [*range(start), *(start + slot for slot in filled + masks)]
            entropies, predicted = self._predict_last(ids, positions, len(masks))
            for token in slots[:run]:
                assert token is not None, "the leading run is filled"
                text.append(token)
                if token in self._config.eos_token_ids or len(text) == limit:
                    return text[len(prompt) :]
            if masks:
                adjusted = entropies + params.position_penalty * (np.array(masks) - masks[0])
                threshold = params.entropy_threshold
                fills = np.flatnonzero(adjusted < (-np.inf if threshold is None else threshold))
                for i in fills if len(fills) else [adjusted.argmin()]:
                    slots[masks[i]] = int(predicted[i])
            slots = slots[run:]
            leading = slots.index(None) if None in slots else len(slots)
            slots += [None] * (window + leading - len(slots))

    def _predict_last(
        self, ids: Sequence[int | None], positions: Sequence[int], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the entropy and the most likely token of each of the last ``count`` rows."""
        import torch

        with torch.inference_mode():
            inputs = torch.tensor([ids])
            out = self._model(
                input_ids=inputs,
                # Without a mask, transformers takes jumps in positions for packed texts.
                attention_mask=torch.ones_like(inputs),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                logits_to_keep=max(count, 1),
            )
            logits = out.logits[0].float()
            logits[:, self._config.require_mask_token_id()] = -torch.inf
            entropies = torch.distributions.Categorical(logits=logits).entropy()
            return entropies.numpy(), logits.argmax(-1).numpy()

    def _count(self, *_: object) -> None:
        # While its first layers draft, transformers makes the model believe that it has no more.
        self.forwards += self._model.config.num_hidden_layers == self._config.num_hidden_layers

    def milliseconds_per_token(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Times a forward that adds a token to every prompt, not counting prefill."""
        times = []
        for count in (1, tokens + 1):
            started = time.perf_counter()
            self._generate(prompts, count, ())
            times.append(time.perf_counter() - started)
        return (times[1] - times[0]) / tokens * 1e3

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        ends: Sequence[int],
        **options: Any,
    ) -> list[list[int]]:
        import torch

        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attended[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=attended,
                max_new_tokens=max_tokens,
                do_sample=False,
                use_cache=True,
                eos_token_id=list(ends) or None,
                pad_token_id=0,
                **options,
            )
        return [_until_end(row, ends) for row in out[:, longest:].tolist()]


def _load(config: ModelConfig, folder: Path | None, dtype: str) -> Any:
    """Loads a checkpoint into transformers, or makes a model of its shape with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs: Any = AutoConfig.for_model(**config_for_transformers(config, dtype))
    options = {"config": theirs, "dtype": getattr(torch, dtype)}
    model: Any
    if folder is None:
        model = AutoModelForCausalLM.from_config(**options)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    # Decoding is greedy, even if the checkpoint advises sampling.
    model.generation_config = type(model.generation_config)()
    return model.eval()


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def config_for_transformers(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns a model's ``config.json`` for transformers, which does not know the type "wedlm"."""
    with errors_at("--rival transformers"):
        return with_model_type(config_to_hf(config, dtype=dtype), STOCK, config)
