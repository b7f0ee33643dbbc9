"""Simple commands of a shell script, as far as documents need them."""

import re
import shlex

KEYWORDS = ("do", "then", "else", "!", "{", "(", "time")
ENDS = re.compile(r"[();<>|&\n]+")


def commands(script):
    """Yields the words of every simple command, those in quotes of another one included.

    Variables and arithmetic count as the number 1; assignments and redirections are left out.
    """
    script = re.sub(r"(^|\s)#[^\n]*", r"\1", script)
    script = re.sub(r"\\\n\s*", " ", script)
    script = re.sub(r"\d>&\d", "", script)
    script = re.sub(r"\$\(\(.*?\)\)|\$\{?\w+\}?", "1", script)
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words = []
    skip = False
    for word in [*lexer, "\n"]:
        if ENDS.fullmatch(word):
            skip = ">" in word or "<" in word
            if not skip:
                yield from _command(words)
                words = []
        elif skip:
            skip = False
        else:
            words.append(word)


def _command(words):
    while words and (words[0] in KEYWORDS or re.match(r"\w+=", words[0])):
        if "=" in words[0] and " " in words[0]:  # a command kept in a variable
            yield from commands(words[0].partition("=")[2])
        words = words[1:]
    if not words:
        return
    yield words
    for word in words[1:]:
        if re.search(r"\s", word) and re.search(r"\b(wedlm|python3?|pip|make) ", word):
            yield from commands(word)
