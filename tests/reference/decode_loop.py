"""Streaming, block-wise and autoregressive decoding of one text in plain Python.

No cache, no batch, no static shapes: every forward runs the committed text and the window
from the start. Source: WeDLM section 5.
"""

import dataclasses

import numpy as np

from tests.reference.logit_options import adjusted, left_masked, logprobs
from tests.reference.sampling import choose_token, entropy, masks_to_fill
from wedlm_jax.decode.logprobs import TokenLogprob


@dataclasses.dataclass
class Decoded:
    """A completion, its counts of forwards and slots, and the smallest margin of
    all the choices that led to it."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    num_forwards: int = 0
    num_token_instances: int = 0
    forwards_at: list[int] = dataclasses.field(default_factory=list)
    instances_at: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    margin: float = np.inf

    def count_forward(self, active_slots):
        self.num_forwards += 1
        self.num_token_instances += active_slots

    def commit(self, token, logprob, stop_ids, params):
        self.token_ids.append(token)
        if params.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), logprob]
        self.forwards_at.append(self.num_forwards)
        self.instances_at.append(self.num_token_instances)
        if token in stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == params.max_tokens:
            self.finish_reason = "length"


def decode(forward, prompt, params, *, window, mask_token_id, eos_token_ids=(), refill="streaming"):
    """Decodes with a window of W > 0 masks; with W = 0, autoregressively."""
    stop_ids = {*eos_token_ids, *params.stop_token_ids}

    def predict(ids, positions):
        logits = np.array(forward(ids, positions), np.float64)
        logits[:, mask_token_id] = -np.inf  # a mask is never emitted
        return logits

    if window == 0:
        return _autoregressive(predict, prompt, params, stop_ids)

    text, out = list(prompt), Decoded()
    slots = [None] * window
    filled_with = {}  # by position in the text
    while True:
        start = len(text)
        filled = [s for s, token in enumerate(slots) if token is not None]
        masks = [s for s, token in enumerate(slots) if token is None]
        order = filled + masks
        tokens = [mask_token_id if token is None else token for token in slots]
        logits = predict(
            text + [tokens[s] for s in order], [*range(start), *(start + s for s in order)]
        )
        out.count_forward(len(slots))

        run = _leading_run(slots)
        for token in slots[:run]:
            assert token is not None
            text.append(token)
            out.commit(token, filled_with[len(text) - 1], stop_ids, params)
            if out.finish_reason:
                return out

        if masks:
            raw = logits[start + len(filled) :]
            first = start - len(prompt)
            # The window as the forward has seen it: what it commits stands in it still.
            completion = [*text[len(prompt) : start], *slots]
            at_masks = [
                adjusted(row, params, prompt, completion, first + s, stop_ids)
                for row, s in zip(raw, masks, strict=True)
            ]
            chosen, margin = masks_to_fill(
                [entropy(row) for row in at_masks],
                masks,
                params.entropy_threshold,
                params.position_penalty,
            )
            out.margin = min(out.margin, margin)
            for i in chosen:
                token, margin = choose_token(at_masks[i], params, out.num_forwards, masks[i])
                out.margin = min(out.margin, margin)
                slots[masks[i]] = token
                filled_with[start + masks[i]] = TokenLogprob(
                    *logprobs(raw[i], token, params.logprobs or 0)
                )
            new = [first + masks[i] for i in chosen]
            for place in left_masked([*completion[:first], *slots], new, params):
                slots[place - first] = None

        slots = slots[run:]
        if refill == "streaming":
            # W slots must be left when the next forward has committed its leading run.
            slots += [None] * (window + _leading_run(slots) - len(slots))
        elif not slots:
            slots = [None] * window


def _autoregressive(predict, prompt, params, stop_ids):
    text, out = list(prompt), Decoded()
    while out.finish_reason is None:
        logits = predict(text, range(len(text)))
        place = len(out.token_ids)
        out.count_forward(1)
        at_next = adjusted(logits[-1], params, prompt, out.token_ids, place, stop_ids)
        token, margin = choose_token(at_next, params, place + 1, 0)
        out.margin = min(out.margin, margin)
        text.append(token)
        logprob = TokenLogprob(*logprobs(logits[-1], token, params.logprobs or 0))
        out.commit(token, logprob, stop_ids, params)
    return out


def _leading_run(slots):
    return slots.index(None) if None in slots else len(slots)
