"""Grammars over bare token ids, for models without text: random automata."""

import numpy as np

from tests.examples.decode import TINY
from wedlm_jax.errors import InputError

STATES = 5
END = TINY.eos_token_ids[0]


class Automaton:
    """A random automaton over tokens that may end in its last state; if ``dead``, one has no way
    on."""

    def __init__(self, seed, *, dead):
        rng = np.random.default_rng(seed)
        mask, vocab = TINY.mask_token_id, TINY.vocab_size
        self.next = np.where(
            rng.random((STATES, vocab)) < 0.3, rng.integers(0, STATES, (STATES, vocab)), -1
        )
        self.next[:, [END, mask]] = -1
        way_on = [token for token in range(vocab) if token not in (END, mask)]
        for state in range(STATES):
            self.next[state, rng.choice(way_on)] = (state + 1) % STATES
        if dead:
            self.next[0] = np.where(self.next[0] >= 0, 1, -1)
            self.next[1] = -1

    def allowed(self, state):
        """bool ``[V]``."""
        tokens = self.next[state] >= 0
        tokens[END] = state == STATES - 1
        return tokens

    def walk(self, tokens):
        """The state behind these tokens; −1 where one of them is not allowed."""
        state = 0
        for token in tokens:
            state = int(self.next[state, token]) if state >= 0 else -1
        return state


class Walker:
    """See `wedlm_jax.grammar.masks.Matcher`."""

    def __init__(self, automaton):
        self.automaton, self.text = automaton, []

    def consume_tokens(self, sampled_tokens):
        self.text += sampled_tokens
        return self.automaton.walk(self.text) >= 0

    def is_accepting(self):
        return self.automaton.walk(self.text) == STATES - 1

    def get_error(self):
        return ""


def automaton_of(params):
    """That of ``regex="7"``; ``"7 dead"`` has a state without a way on."""
    seed, _, dead = params.regex.partition(" ")
    return Automaton(int(seed), dead=bool(dead))


class RandomAutomata:
    """See `wedlm_jax.grammar.masks.Grammars`; nothing is filled behind a draft not allowed."""

    def check(self, params):
        if params.regex == "wrong":
            raise InputError("regex: wrong")

    def matcher(self, params):
        return Walker(automaton_of(params))

    def fill(self, places, masks):
        for matcher, row, drafts in places:
            for count in range(len(drafts) + 1):
                state = matcher.automaton.walk([*matcher.text, *drafts[:count]])
                if state < 0:
                    break
                bits = np.packbits(matcher.automaton.allowed(state), bitorder="little")
                masks[row + count] = 0
                masks[row + count].view(np.uint8)[: len(bits)] = bits
