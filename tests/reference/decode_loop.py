"""Streaming, block-wise, verified and autoregressive decoding of one text in plain Python.

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
    """A completion, its counts of forwards and slots, the smallest margin of all the choices that
    led to it, and how many drafts came from backup masks."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    num_forwards: int = 0
    num_token_instances: int = 0
    forwards_at: list[int] = dataclasses.field(default_factory=list)
    instances_at: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    margin: float = np.inf
    from_backup: int = 0

    def count_forward(self, active_slots):
        self.num_forwards += 1
        self.num_token_instances += active_slots

    def commit(self, token, logits, stop_ids, params):
        """Appends a token that was chosen by ``logits``, before options changed them."""
        self.token_ids.append(token)
        if params.logprobs is not None:
            chosen = TokenLogprob(*logprobs(logits, token, params.logprobs))
            self.logprobs = [*(self.logprobs or []), chosen]
        self.forwards_at.append(self.num_forwards)
        self.instances_at.append(self.num_token_instances)
        if token in stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == params.max_tokens:
            self.finish_reason = "length"

    def note(self, margin):
        self.margin = min(self.margin, margin)


def _predictor(forward, mask_token_id):
    """Returns a function that gives the logits ``[T, V]`` of a text, of which a mask is never
    chosen."""

    def predict(ids, positions):
        logits = np.array(forward(ids, positions), np.float64)
        logits[:, mask_token_id] = -np.inf
        return logits

    return predict


def decode(forward, prompt, params, *, window, mask_token_id, eos_token_ids=(), refill="streaming"):
    """Decodes with a window of W > 0 masks; with W = 0, autoregressively."""
    model = {"mask_token_id": mask_token_id, "eos_token_ids": eos_token_ids}
    if window == 0:
        return decode_verified(forward, prompt, params, window=0, backup=0, **model)
    stop_ids = {*eos_token_ids, *params.stop_token_ids}
    predict = _predictor(forward, mask_token_id)
    text, out = list(prompt), Decoded()
    slots = [None] * window
    chosen_by = {}  # logits, by position in the text
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
            out.commit(token, chosen_by[len(text) - 1], stop_ids, params)
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
            out.note(margin)
            for i in chosen:
                token, margin = choose_token(at_masks[i], params, out.num_forwards, masks[i])
                out.note(margin)
                slots[masks[i]] = token
                chosen_by[start + masks[i]] = raw[i]
            new = [first + masks[i] for i in chosen]
            for place in left_masked([*completion[:first], *slots], new, params):
                slots[place - first] = None

        slots = slots[run:]
        if refill == "streaming":
            # W slots must be left when the next forward has committed its leading run.
            slots += [None] * (window + _leading_run(slots) - len(slots))
        elif not slots:
            slots = [None] * window


def decode_verified(forward, prompt, params, *, window, backup, mask_token_id, eos_token_ids=()):
    """Decodes with W = ``window`` masks and at most ``backup`` backup masks. The rows of text, the
    window's masks and the backup masks are each computed from the start."""
    stop_ids = {*eos_token_ids, *params.stop_token_ids}
    predict = _predictor(forward, mask_token_id)
    out, drafts, start = Decoded(), [], None

    def rows(seen, masks):
        """Logits of all rows: ``seen``, then masks."""
        ids = [*seen, *[mask_token_id] * masks]
        return predict(ids, range(len(ids)))

    def choose(row, seen, place):
        at = adjusted(row, params, prompt, seen, place, stop_ids)
        token, margin = choose_token(at, params, place + 1, 0)
        out.note(margin)
        return token, entropy(at)

    def drafted(seen, masks):
        """The drafts of masks after ``seen``, and their entropies."""
        if masks < 2:  # the first one's token is known
            return []
        logits, chosen, spent = rows([*prompt, *seen], masks), [], 0.0
        for number in range(1, masks):
            row = logits[len(prompt) + len(seen) + number]
            token, uncertain = choose(row, seen, len(seen) + number)
            spent += uncertain
            out.note(abs(spent - params.draft_budget))
            if spent >= params.draft_budget:
                break
            chosen.append((token, uncertain))
        return chosen

    while True:
        before = list(out.token_ids)
        count = min(window, backup) if start is not None else 0
        out.count_forward(1 + len(drafts) + window + count)
        logits = rows([*prompt, *before, *drafts], 0)
        for accepted in range(len(drafts) + 1):
            seen = [*before, *drafts[:accepted]]
            row = logits[len(prompt) + len(seen) - 1]
            token, _ = choose(row, seen, len(seen))
            out.commit(token, row, stop_ids, params)
            if out.finish_reason:
                return out
            if accepted == len(drafts) or token != drafts[accepted]:
                break
        if accepted == len(drafts):
            new = drafted([*before, *drafts], window)
        elif count and accepted == start - 1:
            new = drafted([*before, *drafts[:accepted]], count)
            out.from_backup += len(new)
        else:
            new = []
        drafts, start = [token for token, _ in new], None
        if new and min(window, backup) > 1:
            right = np.exp(-np.array([uncertain for _, uncertain in new]))
            wrong = np.cumprod([1, *right[:-1]]) * (1 - right)
            start = 1 + int(np.argmax(wrong)) if wrong.max() >= 0.2 else None
            out.note(abs(wrong.max() - 0.2))
            if len(wrong) > 1:
                first, second = np.sort(wrong)[::-1][:2]
                out.note(first - second)


def _leading_run(slots):
    return slots.index(None) if None in slots else len(slots)
