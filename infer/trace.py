"""Traces: what every forward saw of a sequence's window, and what it did.

A trace file is one JSON object. Slots are counted from the front of the window, places in the
completion from its first token, so that −1 is the prompt's last token::

    {"format": "wedlm-trace", "version": 1, "sequences": [{
      "model": "WeDLM-8B", "prompt": "Count to ten.",      absent if unknown
      "mode": "verified", "window_size": 16,               0: AR; null: chosen
      "prompt_tokens": 12, "finish_reason": "stop",
      "options": {"temperature": 0.0, ...},                those of `TOLD`
      "tokens": {"15": "0", ...},                          the text of each id below
      "forwards": [{
        "seconds": 0.031,          since the first forward began
        "start": -1,               the place of slot 0
        "slots": [220, 16, null],  the ids that it ran; null is a mask
        "entropies": [null, 0.02, 1.31, 2.4],   nats, of what it predicted for each slot and the
                                   one after the last; null where it predicted nothing
        "filled": [[2, 17]],       masks that it filled, [slot, id]
        "out_of_order": [],        those of them after a mask that was not filled
        "rejected": [],            slots with drafts that verification rejected
        "committed": [16],         ids that it added to the completion
        "text": "1",               text that they add: whole characters, no special tokens; null
                                   without a tokenizer
        "num_forwards": 1, "num_token_instances": 17       of the sequence so far
      }]}]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import written_beside
from wedlm_jax.text import GrowingText

if TYPE_CHECKING:
    from wedlm_jax.engine.interface import Traced
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.text import TextCodec

FORMAT, VERSION = "wedlm-trace", 1

TOLD = ("entropy_threshold", "position_penalty", "draft_budget", "temperature", "top_p", "top_k")
"""Sampling options that a trace records."""


class SequenceTrace:
    """The trace of one sequence while it decodes.

    Args:
      window_size: W; None or "auto" if the engine chooses.
      known: further entries for the file: the model's name, the prompt's text.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        params: SamplingParams,
        prompt_tokens: int,
        window_size: int | str | None,
        **known: str,
    ):
        self._codec = codec
        self._growing = None if codec is None else GrowingText(codec)
        self._shown = 0
        self._began: float | None = None
        self._prompt, self._length = prompt_tokens, prompt_tokens
        autoregressive = params.mode == "ar" or window_size == 0
        self._head: dict[str, Any] = {
            **known,
            "mode": "ar" if autoregressive else params.mode,
            "window_size": 0 if autoregressive else window_size if window_size != "auto" else None,
            "prompt_tokens": prompt_tokens,
            "options": {name: getattr(params, name) for name in TOLD},
        }
        self._tokens: dict[str, str] = {}
        self._forwards: list[dict[str, Any]] = []
        self._told: tuple[int, int] | None = None

    def take(self, event: Traced) -> None:
        """Adds a forward."""
        seen = event.forward
        if self._began is None:
            self._began = seen.ended - seen.seconds
        filled = [(slot, id_) for slot, id_ in enumerate(seen.drafted) if id_ is not None]
        # A window that begins with the text's last token drafts in order.
        in_order = seen.start < self._length
        masked = [
            slot
            for slot, id_ in enumerate(seen.held)
            if id_ is None and seen.drafted[slot] is None and not in_order
        ]
        self._length += len(event.committed)
        for id_ in {*seen.held, *seen.drafted, *event.committed} - {None}:
            assert id_ is not None
            if str(id_) not in self._tokens:
                self._tokens[str(id_)] = "" if self._codec is None else self._codec.decode([id_])
        self._forwards.append(
            {
                "seconds": round(seen.ended - self._began, 6),
                "start": seen.start - self._prompt,
                "slots": seen.held,
                "entropies": [None if h is None else round(h, 4) for h in seen.entropies],
                "filled": filled,
                "out_of_order": [slot for slot, _ in filled if masked and masked[0] < slot],
                "rejected": seen.rejected,
                "committed": event.committed,
                "text": self._new_text(event.committed),
                "num_forwards": event.num_forwards,
                "num_token_instances": event.num_token_instances,
            }
        )

    def _new_text(self, token_ids: list[int]) -> str | None:
        if self._growing is None:
            return None
        text = self._growing.add(token_ids)
        new, self._shown = text[self._shown :], max(len(text), self._shown)
        return new

    def news(self) -> dict[str, Any] | None:
        """Returns what is new since the last call, or None: "forwards" and "tokens", to append to
        earlier ones. The first call also returns everything else except the finish reason."""
        first = self._told is None
        forwards, tokens = self._told or (0, 0)
        if len(self._forwards) == forwards:
            return None
        self._told = len(self._forwards), len(self._tokens)
        return {
            **(self._head if first else {}),
            "tokens": dict(list(self._tokens.items())[tokens:]),
            "forwards": self._forwards[forwards:],
        }

    def whole(self, finish_reason: str | None) -> dict[str, Any]:
        """Returns the trace of the finished sequence."""
        end = {"finish_reason": finish_reason}
        return {**self._head, **end, "tokens": self._tokens, "forwards": self._forwards}


def write_trace(path: Path, sequences: Sequence[dict[str, Any]]) -> None:
    """Writes a trace file."""
    whole = {"format": FORMAT, "version": VERSION, "sequences": list(sequences)}
    with written_beside(path) as file:
        file.write(json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Returns the sequences of a trace file. Raises an `InputError` if the file is not a trace or
    has another version; fields are not checked further, as only this program writes them."""
    try:
        whole = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: expected a trace in JSON, as --trace writes it") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise InputError(f'{path}: expected an object with "format": "{FORMAT}"')
    if whole.get("version") != VERSION:
        raise InputError(f"{path}: version {whole.get('version')!r}; expected {VERSION}")
    sequences: list[dict[str, Any]] = whole.get("sequences", [])
    return sequences
