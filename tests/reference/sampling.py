"""Which masks to fill and with what, a position at a time, in float64.

Each choice is returned with its margin: how far the numbers were from another outcome. A
test compares only where the margin is far above float32 rounding.
"""

import jax
import numpy as np


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def entropy(logits):
    """In nats; a token of probability 0 adds nothing."""
    probability = softmax(np.asarray(logits, np.float64))
    probability = probability[probability > 0]
    return float(-(probability * np.log(probability)).sum())


def masks_to_fill(entropies, slots, threshold, penalty):
    """Indices of the masks to fill, in order, and the margin."""
    adjusted = [h + penalty * (s - slots[0]) for h, s in zip(entropies, slots, strict=True)]
    if threshold is None:
        below, margin = [], np.inf
    else:
        below = [i for i, h in enumerate(adjusted) if h < threshold]
        margin = min(abs(h - threshold) for h in adjusted)
    if below:
        return below, margin
    return [int(np.argmin(adjusted))], min(margin, _gap(-np.array(adjusted)))


def truncate(logits, top_k, top_p, min_p=0.0):
    """``logits [V]`` with −inf where min-p, then top-k, then top-p of the rest, leave out; the
    margin."""
    if min_p > 0:
        above = np.asarray(logits, np.float64) - logits.max() - np.log(min_p)
        left, margin = truncate(np.where(above >= 0, logits, -np.inf), top_k, top_p)
        return left, min(margin, float(np.abs(above).min()))
    by_rank = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    candidates = by_rank[: top_k or None]
    probability = softmax(logits[candidates])
    kept = []
    margin, reached = np.inf, 0.0
    for token, p in zip(candidates, probability, strict=True):
        if kept:
            margin = min(margin, abs(reached - top_p)) if top_p < 1 else margin
            if reached >= top_p:
                break
        kept.append(token)
        reached += p
    if len(candidates) < len(by_rank) and np.isfinite(logits[candidates[-1]]):
        margin = min(margin, logits[candidates[-1]] - logits[by_rank[len(candidates)]])
    out = np.full(len(logits), -np.inf)
    out[kept] = logits[kept]
    return out, float(margin)


def choose_token(logits, params, forward, slot):
    """The token for one mask, and the margin.

    The random numbers are named by seed, forward and slot, so that a row draws the same
    ones wherever it runs.
    """
    logits = np.asarray(logits, np.float64)
    if params.temperature > 0:
        limits = params.top_k, params.top_p, params.min_p
        logits, margin = truncate(logits / params.temperature, *limits)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(params.seed), forward), slot)
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        logits = logits + np.asarray(jax.random.gumbel(key, logits.shape, np.float32))
    else:
        margin = np.inf
    return int(np.argmax(logits)), min(margin, _gap(logits))


def _gap(values):
    """How far the largest value stands above the next."""
    if len(values) == 1:
        return np.inf
    second, first = np.sort(values)[-2:]
    return float(first - second)
