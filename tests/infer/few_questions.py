"""A few questions of two kinds, for tests of what asks them."""

from tests.examples.data import write_jsonl

PROMPTS = ("one two", "the cat", "12 + 30", "日本")


def write_questions(path):
    """Writes a file in which no answer is right, and half of the questions have no right answer."""
    rows = [
        {
            "regime": regime,
            "messages": [{"role": "user", "content": prompt}],
            "answer": "no",
            "match": match,
        }
        for regime, match in (("low_entropy", "exact"), ("prose", None))
        for prompt in PROMPTS
    ]
    return write_jsonl(path, rows)
