"""Random sequences in the middle of decoding, as lists and as the arrays that the device has."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.examples.decode import logit_options
from wedlm_jax.decode.options import HostOptions, Traits
from wedlm_jax.decode.state import HeadRows, idle_state
from wedlm_jax.params import SamplingParams

VOCAB = 12
WINDOW = 4
SLOTS = 2 * WINDOW
LONGEST_TEXT = 40
STOPS = (1, 5)

ALL_TRAITS = Traits(
    window=WINDOW,
    paper=True,
    verified=True,
    autoregressive=True,
    sampled=True,
    truncated=True,
    min_tokens=True,
    penalties=True,
    biases=True,
    bad_words=True,
    grammar=True,
)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A sequence between two forwards.

    Attributes:
      prompt, completion: what its text is made of.
      window: the active slots, None where masked; that of an anchored sequence begins with the
        last token of the text.
      params: its mode among them.
      num_forwards: how many it has had.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    window: tuple[int | None, ...]
    params: SamplingParams
    num_forwards: int = 1

    @property
    def anchored(self):
        return self.params.mode != "paper"

    @property
    def known(self):
        return int(self.anchored)

    def place(self, slot):
        """Which token of the completion a slot is."""
        return len(self.completion) - self.known + slot

    def rows(self):
        """What its rows predict: the slot, and whether the row is a mask."""
        filled = sum(token is not None for token in self.window)
        masks = [(slot, True) for slot, token in enumerate(self.window) if token is None]
        if self.anchored:
            # What the first mask stands for, the row before it says.
            return [*((slot, False) for slot in range(1, filled + 1)), *masks[1:]]
        return masks


tokens = st.integers(0, VOCAB - 2)


@st.composite
def option_params(draw, mode):
    """Any of the options that change logits."""
    limits = {
        "top_k": st.integers(1, VOCAB),
        "top_p": st.sampled_from([0.2, 0.7]),
        "min_p": st.sampled_from([0.05, 0.3]),
    }
    return SamplingParams(
        mode=mode,
        max_tokens=30,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 2.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
        **draw(st.fixed_dictionaries({}, optional=limits)),
        **draw(logit_options(VOCAB - 2)),
    )


@st.composite
def sequences(draw, *modes):
    """A sequence in one of the ``modes``, by default any."""
    mode = draw(st.sampled_from(modes or ("paper", "verified", "ar")))
    prompt = tuple(draw(st.lists(tokens, min_size=1, max_size=6)))
    completion = tuple(draw(st.lists(tokens, max_size=8)))
    if mode == "paper":
        window = tuple(draw(st.lists(st.none() | tokens, min_size=1, max_size=SLOTS)))
    else:
        drafts = draw(st.lists(tokens, max_size=WINDOW)) if mode == "verified" else []
        masks = draw(st.integers(1, WINDOW)) if mode == "verified" else 0
        window = ((prompt + completion)[-1], *drafts[: SLOTS - masks - 1], *[None] * masks)
    return Decoding(prompt, completion, window, draw(option_params(mode)), draw(st.integers(1, 9)))


def state_of(some, *, emitted=1):
    """The state of these, and of one that is not there behind them; with room for ``emitted``
    tokens."""
    room = {"window": WINDOW, "text": LONGEST_TEXT, "emitted": emitted, "with_logprobs": False}
    empty = idle_state(len(some) + 1, **room)
    arrays = {
        field.name: np.array(getattr(empty, field.name))
        for field in dataclasses.fields(empty)
        if field.name not in ("logprobs", "emitted", "lookup", "backup")
    }
    # What stands where nothing is known must not matter.
    rng = np.random.default_rng(len(some))
    for name in ("text", "tokens"):
        arrays[name][:] = rng.integers(0, 3, arrays[name].shape)
    arrays["filled"][:] = True
    for i, one in enumerate(some):
        text = one.prompt + one.completion
        arrays["text"][i, : len(text)] = text
        arrays["text_length"][i] = len(text)
        arrays["prompt_length"][i] = len(one.prompt)
        arrays["num_computed"][i] = len(text) - one.known
        arrays["prefill_length"][i] = len(one.prompt) - one.known
        arrays["active"][i] = len(one.window)
        arrays["running"][i] = True
        arrays["num_forwards"][i] = one.num_forwards
        for slot, token in enumerate(one.window):
            arrays["filled"][i, slot] = token is not None
            if token is not None:
                arrays["tokens"][i, slot] = token
    return dataclasses.replace(empty, **{k: jnp.asarray(v) for k, v in arrays.items()})


def options_of(some, traits=ALL_TRAITS, window=WINDOW):
    host = HostOptions(len(some) + 1, traits)
    for i, one in enumerate(some):
        host.set(i, one.params, window=window, stops=STOPS)
    return host.options()


def rows_of(some, *, padding=2):
    """The rows of all of them one behind the other, and for each ``(sequence, slot, is_mask)``."""
    named = [(i, *row) for i, one in enumerate(some) for row in one.rows()]
    padded = [*named, *[(0, 0, False)] * padding]
    sequence, slot, is_mask = (jnp.array(column) for column in zip(*padded, strict=True))
    sees = jnp.where(is_mask, SLOTS, slot)
    return HeadRows(sequence, slot, is_mask, sees), named


ROWS = 40


def forward_of(some):
    """State, options and rows of a forward, padded to `ROWS` rows; and what its rows are."""
    _, named = rows_of(some, padding=0)
    rows, _ = rows_of(some, padding=ROWS - len(named))
    return (state_of(some), options_of(some), rows), named


def some_logits(seed):
    """float32 ``[ROWS, V]``, the last token never possible."""
    logits = 3 * np.random.default_rng(seed).normal(size=(ROWS, VOCAB))
    logits[:, -1] = -np.inf
    return logits.astype(np.float32)
