"""Verified decoding of one text in plain Python, with backup masks.

No cache, no batch, no static shapes: the rows of text, the window's masks and the backup masks are
each computed from the start.
"""

import numpy as np

from tests.reference.decode_loop import Decoded
from tests.reference.logit_options import adjusted, logprobs
from tests.reference.sampling import choose_token, entropy
from wedlm_jax.decode.logprobs import TokenLogprob


def decode_verified(
    forward, prompt, params, *, window, backup, mask_token_id, eos_token_ids=(), most=10_000
):
    """Decodes with W = ``window`` masks and at most ``backup`` backup masks, for at most ``most``
    forwards; returns the completion, and how often drafts came from backup masks."""
    stop_ids = {*eos_token_ids, *params.stop_token_ids}
    out, drafts, start, from_backup = Decoded(), [], None, 0

    def rows(seen, masks):
        """Logits of all rows: ``seen``, then masks."""
        ids = [*seen, *[mask_token_id] * masks]
        logits = np.array(forward(ids, range(len(ids))), np.float64)
        logits[:, mask_token_id] = -np.inf
        return logits

    def choose(row, seen, place):
        at = adjusted(row, params, prompt, seen, place, stop_ids)
        token, margin = choose_token(at, params, place + 1, 0)
        out.margin = min(out.margin, margin)
        return token, entropy(at)

    def drafted(seen, masks):
        """The drafts of masks after ``seen``, and their entropies."""
        logits, chosen, spent = rows([*prompt, *seen], masks), [], 0.0
        for number in range(1, masks):
            row = logits[len(prompt) + len(seen) + number]
            token, uncertain = choose(row, seen, len(seen) + number)
            spent += uncertain
            out.margin = min(out.margin, abs(spent - params.draft_budget))
            if spent >= params.draft_budget:
                break
            chosen.append((token, uncertain))
        return chosen

    for _ in range(most):
        before = list(out.token_ids)
        count = min(window, backup) if start is not None else 0
        out.count_forward(1 + len(drafts) + window + count)
        logits = rows([*prompt, *before, *drafts], 0)
        for accepted in range(len(drafts) + 1):
            seen = [*before, *drafts[:accepted]]
            row = logits[len(prompt) + len(seen) - 1]
            token, _ = choose(row, seen, len(seen))
            logprob = TokenLogprob(*logprobs(row, token, params.logprobs or 0))
            out.commit(token, logprob, stop_ids, params)
            if out.finish_reason:
                return out, from_backup
            if accepted == len(drafts) or token != drafts[accepted]:
                break
        if accepted == len(drafts):
            new = drafted([*before, *drafts], window)
        elif count and accepted == start - 1:
            new = drafted([*before, *drafts[:accepted]], count)
            from_backup += len(new)
        else:
            new = []
        drafts, start = [token for token, _ in new], None
        if new and min(window, backup) > 1:
            right = np.exp(-np.array([uncertain for _, uncertain in new]))
            wrong = np.cumprod([1, *right[:-1]]) * (1 - right)
            start = 1 + int(np.argmax(wrong)) if wrong.max() >= 0.2 else None
            out.margin = min(out.margin, abs(wrong.max() - 0.2))
            if len(wrong) > 1:
                first, second = np.sort(wrong)[::-1][:2]
                out.margin = min(out.margin, first - second)
    return out, from_backup
