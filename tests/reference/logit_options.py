"""What a row's options do to one position's logits, a token at a time, in float64."""

from collections import Counter

import numpy as np


def adjusted(logits, params, prompt, completion, place, stop_ids):
    """``logits [V]`` for the token at ``place`` of the completion, in which masks are None."""
    logits = np.array(logits, np.float64)
    counts = Counter(token for token in completion if token is not None)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*counts, *prompt}:
        factor = params.repetition_penalty
        logits[token] *= 1 / factor if logits[token] > 0 else factor
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if place < params.min_tokens:
        logits[[*stop_ids]] = -np.inf
    for token in range(len(logits)) if params.bad_words else ():
        there = [*completion, *[None] * (place + 1 - len(completion))]
        there[place] = token
        if any(place in word for word in bad_words_in(there, params)):
            logits[token] = -np.inf
    return logits


def bad_words_in(completion, params):
    """Where a bad word stands, whole."""
    found = []
    for word in params.bad_words:
        for start in range(len(completion) - len(word) + 1):
            if tuple(completion[start : start + len(word)]) == word:
                found.append(range(start, start + len(word)))
    return found


def left_masked(completion, new, params):
    """Of the places that one forward has filled, ``new``, the last in each bad word."""
    return {
        max(set(word) & set(new))
        for word in bad_words_in(completion, params)
        if set(word) & set(new)
    }


def logprobs(logits, token, count):
    """Of ``token``, and the ``count`` most probable ones with theirs."""
    logits = np.asarray(logits, np.float64)
    normal = logits - logits.max()
    normal -= np.log(np.exp(normal).sum())
    best = np.argsort(-normal, kind="stable")[:count].tolist()
    return float(normal[token]), [(t, float(normal[t])) for t in best]
