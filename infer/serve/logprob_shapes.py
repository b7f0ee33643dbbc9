"""Log-probabilities as OpenAI's API has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.text import TextCodec

IMPOSSIBLE = -9999.0
"""What the API has for a probability of 0: JSON has no −∞."""


class LogprobShapes:
    """Names tokens as texts, so that no two have the same name; without a tokenizer, by their
    ids."""

    def __init__(self, codec: TextCodec | None):
        @functools.lru_cache(maxsize=2**16)
        def token_bytes(token_id: int) -> bytes:
            return str(token_id).encode() if codec is None else codec.token_bytes(token_id)

        self._bytes = token_bytes
        self._special = frozenset(() if codec is None else codec.special_ids)

    def of_chat(self, token_ids: Sequence[int], said: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns those of a piece of a chat's answer."""
        content = [
            self._entry(token_id, one.logprob)
            | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for token_id, one in zip(token_ids, said, strict=True)
        ]
        return {"content": content, "refusal": None}

    def of_text(
        self, token_ids: Sequence[int], said: Sequence[TokenLogprob], offset: int
    ) -> dict[str, Any]:
        """Returns those of a piece of a completion, which begins ``offset`` characters into it."""
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += self._length(token_id)
        return {
            "tokens": [self._named(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(one.logprob) for one in said],
            "top_logprobs": [
                {self._named(other): _finite(value) for other, value in reversed(one.top)}
                for one in said
            ],
            "text_offset": offsets,
        }

    def length(self, token_ids: Sequence[int]) -> int:
        """Returns how many characters of the text the tokens make; special tokens make none."""
        return sum(map(self._length, token_ids))

    def _length(self, token_id: int) -> int:
        if token_id in self._special:
            return 0
        # A character counts where its first byte is.
        return sum(byte & 0b1100_0000 != 0b1000_0000 for byte in self._bytes(token_id))

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        text = data.decode("utf-8", "backslashreplace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _named(self, token_id: int) -> str:
        """Returns a token's text; of one that is not whole characters its bytes, said to be so."""
        data = self._bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode("utf-8", "backslashreplace")


def _finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)
