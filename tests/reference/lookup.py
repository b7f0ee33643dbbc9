"""Prompt lookup in plain Python, one text at a time."""

import itertools


def find(text, most, longest, farthest):
    """What followed the latest occurrence of the longest ending of at most ``longest`` tokens, and
    over how many tokens, at most ``farthest``, the text before it is the ending of the text. No
    tokens where the last one never occurred before."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        ending = list(text[-size:])
        for end in range(len(text) - 1, size - 1, -1):
            if list(text[end - size : end]) == ending:
                shared = size
                while shared < min(farthest, end) and (
                    text[end - shared - 1] == text[len(text) - shared - 1]
                ):
                    shared += 1
                return list(itertools.islice(itertools.cycle(text[end:]), most)), shared
    return [], 0


def evidence(copies, match, committed, farthest):
    """What committed tokens say of copies: the length of the ending, and whether the copy after it
    was right."""
    said = []
    for k, (copy, token) in enumerate(zip(copies, committed, strict=False)):
        said.append((min(match + k, farthest), copy == token))
        if copy != token:
            break
    return said


def best_drafts(gains, tokens, committed, seconds, value):
    """The most tokens per second of all ways to choose drafts; a sequence's count by its value."""
    rates = []
    for counts in itertools.product(*(range(len(own) + 1) for own in gains)):
        worth = sum(
            each * (one + sum(own[:count]))
            for each, one, own, count in zip(value, committed, gains, counts, strict=True)
        )
        rates.append(worth / seconds(tokens + sum(counts)))
    return max(rates)
