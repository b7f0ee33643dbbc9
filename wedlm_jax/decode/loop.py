"""Streaming decode as one `lax.while_loop`: a burst of forwards over flat tokens.

Each iteration plans the spans of all sequences, runs the layers and the head over them, commits
and fills tokens, and moves the windows on. Sequences advance at their own pace, and a finished one
costs nothing. Source: WeDLM section 5.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.ragged import Pages
from wedlm_jax.decode import lookup, paper, verified
from wedlm_jax.decode.commit import append, leading, move_windows, put_in_front, with_windows
from wedlm_jax.decode.forward import (
    Predictions,
    Program,
    no_hidden_states,
    predict,
    run_layers,
    wanted_slots,
)
from wedlm_jax.decode.last_forward import LastForward, last_forward, no_forward
from wedlm_jax.decode.logits import TokenUse, token_use, with_committed
from wedlm_jax.decode.logprobs import Logprobs
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.spans import Allowance, SpanPlan, has_room, plan_spans
from wedlm_jax.decode.state import DecodeState, Emitted, is_filled
from wedlm_jax.model import Transformer

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BurstCounters:
    """Holds what a burst of one replica computed, int32.

    Attributes:
      forwards: how many.
      tokens: real tokens that passed the layers, prompts included.
      by_size: ``[S]``, how often the layers ran at each static size.
    """

    forwards: Array
    tokens: Array
    by_size: Array


Carry = tuple[DecodeState, Pages, Array, TokenUse | None, BurstCounters, LastForward | None]


def run_burst(
    model: Transformer,
    state: DecodeState,
    pages: Pages,
    options: Options,
    allowance: Allowance,
    changed: Array,
    program: Program,
) -> tuple[DecodeState, Pages, BurstCounters, LastForward | None]:
    """Runs forwards until the allowance is used up.

    A burst also ends when a sequence lacks room, in its pages or in ``state.emitted``, for what its
    next forward may commit.

    Args:
      changed: bool ``[N]``, sequences whose window has changed since the last burst.

    Returns:
      state, pages, counters, and the last forward where the program has trait "traced".
    """
    state = with_windows(_with_nothing_emitted(state), options, changed)
    begun = state.running.sum()

    def more(carry: Carry) -> Array:
        state, counters = carry[0], carry[4]
        ready = ~state.running | has_room(state, allowance)
        fits = state.emitted.count + state.tokens.shape[1] < state.emitted.tokens.shape[1]
        fits |= ~state.running
        finished = begun - state.running.sum()
        due = (counters.forwards < allowance.max_forwards) & state.running.any()
        return due & (finished < allowance.until_finished[0]) & (ready & fits).all()

    def body(carry: Carry) -> Carry:
        state, pages, hidden, use, counters, last = carry
        plan = plan_spans(state, allowance, program.sizes)
        hidden, pages = run_layers(model, state, pages, hidden, plan, allowance, program)
        state = _count(state, plan)
        said = predict(model, state, hidden, plan, options, use, program)
        decided = decide(state, said, plan, options, program)
        after = advance(state, said, decided, plan, options, program)
        if program.traits.lookup:
            after = with_copies(after, decided, options, allowance, program)
        counters = _counted(counters, plan, program)
        if program.traits.traced:
            last = _noted(state, said, decided, plan, options, program)
        return after, pages, hidden, with_committed(use, state, after), counters, last

    use = token_use(state, options, model.config.vocab_size)
    none = jnp.int32(0)
    start = BurstCounters(none, none, jnp.zeros(len(program.sizes.tokens), jnp.int32))
    hidden = no_hidden_states(model, program)
    last = no_forward(*state.tokens.shape) if program.traits.traced else None
    carry = state, pages, hidden, use, start, last
    state, pages, _, _, counters, last = jax.lax.while_loop(more, body, carry)
    return state, pages, counters, last


class Decision(NamedTuple):
    """Holds what a forward decides for each window.

    Attributes:
      tokens, logprobs: ``[N, P]``, of which the first ``committed`` are new text.
      committed: int32 ``[N]``.
      run: int32 ``[N]``, slots that leave the front of the window.
      fills, kept: bool ``[N, P]``, masks that are filled, and filled slots that stay.
      ran: bool ``[N]``, whether the forward ran the window at all.
    """

    tokens: Array
    logprobs: Logprobs | None
    committed: Array
    run: Array
    fills: Array
    kept: Array
    ran: Array


def decide(
    state: DecodeState, said: Predictions, plan: SpanPlan, options: Options, program: Program
) -> Decision:
    """Decides what is committed, filled and kept.

    Both policies are computed where the program has both, and each sequence takes its own's result:
    a branch by sequence does not exist in a compiled loop.

    Args:
      said: what the head predicts for the window slots.
    """
    traits, slots = program.traits, state.tokens.shape[1]
    anchored = options.anchored
    run = paper.committed_run(state)
    # New text in mode "paper": the leading filled slots. In anchored sequences: what the rows of
    # the leading run chose.
    at = jnp.minimum(state.known[:, None] + jnp.arange(slots), slots - 1)
    new = (_at_slots(state.tokens, at), jax.tree.map(lambda x: _at_slots(x, at), state.logprobs))
    count = run - state.known
    kept = state.filled
    fills = jnp.zeros_like(state.filled)
    if traits.paper:
        fills = paper.filled_by(state, options, said.tokens[:, :-1], said.entropies[:, :-1])
    if traits.anchored:
        checked = verified.verify(state, options, said.tokens, said.entropies)
        said_new = jax.tree.map(lambda x: x[:, 1:], (said.tokens, said.logprobs))
        new = _pick(anchored, said_new, new)
        run = jnp.where(anchored, checked.run, run)
        count = jnp.where(anchored, checked.run, count)
        fills = jnp.where(anchored[:, None], checked.drafts, fills)
        kept = jnp.where(anchored[:, None], checked.kept, kept)
    # A sequence that only computed a chunk of its prompt has predictions of no meaning.
    ran = plan.window & state.running
    run, count = jnp.where(ran, run, 0), jnp.where(ran, count, 0)
    return Decision(*new, count, run, fills & ran[:, None], kept, ran)


def advance(
    state: DecodeState,
    said: Predictions,
    decided: Decision,
    plan: SpanPlan,
    options: Options,
    program: Program,
) -> DecodeState:
    """Returns the state after a forward: tokens committed, masks filled, windows moved."""
    run, fills, ran = decided.run, decided.fills, decided.ran
    # Keys and values that are final: the chunk of the prompt, and the run. Those of other slots are
    # in the pages, too, and are overwritten by the next forward, as nothing counts them.
    reached = state.num_computed + plan.chunk + run
    checked = jnp.where(options.anchored & ran, is_filled(state).sum(axis=1) - 1, 0)
    state = append(state, options, decided.tokens, decided.logprobs, decided.committed, checked)
    state = dataclasses.replace(
        state,
        num_computed=jnp.minimum(reached, state.text_length),
        tokens=jnp.where(fills, said.tokens[:, :-1], state.tokens),
        logprobs=_pick(fills, jax.tree.map(lambda x: x[:, :-1], said.logprobs), state.logprobs),
        filled=jnp.where(ran[:, None], decided.kept | fills, state.filled),
    )
    state = move_windows(state, options, run, program.refill)
    if program.traits.anchored:
        state = put_in_front(state, options.anchored & ran & state.running, options)
    return state


def with_copies(
    state: DecodeState, decided: Decision, options: Options, allowance: Allowance, program: Program
) -> DecodeState:
    """Fills windows in which no mask drafted with drafts copied from the text.

    Args:
      state: after the forward.
      decided: what the forward decided.
    """
    known, most = state.lookup, program.traits.lookup
    assert known is not None
    assert options.lookup is not None
    assert options.unpriced is not None
    assert allowance.seconds is not None
    known = lookup.learn(known, decided.tokens, decided.committed)
    known = dataclasses.replace(known, **lookup.find(state.text, state.text_length, most)._asdict())
    drafted = leading(is_filled(state)) - 1
    free = options.anchored & decided.ran & state.running & (drafted == 0)
    # The last token of a completion needs no draft: the row before it chooses it.
    room = jnp.minimum(options.lookup, options.max_tokens - state.num_output - 1)
    room = jnp.minimum(room, state.tokens.shape[1] - state.active)
    room = jnp.where(free & (known.match > 0), room, 0)
    unpriced = jnp.where(options.unpriced, room, 0)
    gains = lookup.gains(known, room - unpriced)
    prompts = jnp.where(state.running, state.window_start - state.num_computed, 0).sum()
    tokens = jnp.where(state.running, state.active + unpriced, 0).sum()
    tokens += jnp.minimum(prompts, allowance.chunk_tokens)
    # What the forward commits anyway: a choice of each sequence, and drafts that are mostly right,
    # or what its masks draft for the next.
    committed = 1 + jnp.maximum(drafted + unpriced, known.masks)
    committed = jnp.where(state.running, committed, 0.0).sum()
    costs = lookup.ForwardCosts(program.sizes.tokens, allowance.seconds[0])
    count = unpriced + lookup.paying_drafts(gains, tokens, committed, costs)

    slot = jnp.arange(state.tokens.shape[1])
    fills = (slot >= 1) & (slot <= count[:, None])
    copies = _at_slots(known.tokens, jnp.clip(slot - 1, 0, most - 1) + 0 * count[:, None])
    return dataclasses.replace(
        state,
        tokens=jnp.where(fills, copies, state.tokens),
        filled=jnp.where(fills, True, state.filled),
        active=state.active + count,
        lookup=dataclasses.replace(known, copied=jnp.where(decided.ran, count, known.copied)),
    )


def _noted(
    state: DecodeState,
    said: Predictions,
    decided: Decision,
    plan: SpanPlan,
    options: Options,
    program: Program,
) -> LastForward:
    wanted = wanted_slots(state, plan, options, program.traits)
    entropies = jnp.where(wanted, said.entropies, jnp.nan)
    tokens = said.tokens[:, :-1]
    return last_forward(state, decided.ran, tokens, entropies, decided.fills, decided.kept)


def _count(state: DecodeState, plan: SpanPlan) -> DecodeState:
    """Counts the forward for each sequence whose window it runs. An anchored window's first slot
    may be the prompt's last token: its row chooses the first token of the completion, so AR takes
    exactly one forward a token."""
    return dataclasses.replace(
        state,
        num_forwards=state.num_forwards + plan.window,
        num_token_instances=state.num_token_instances + jnp.where(plan.window, state.active, 0),
    )


def _counted(counters: BurstCounters, plan: SpanPlan, program: Program) -> BurstCounters:
    return BurstCounters(
        counters.forwards + 1,
        counters.tokens + plan.num_tokens,
        counters.by_size + program.sizes.runs(plan.num_tokens),
    )


def _at_slots(x: Array, slots: Array) -> Array:
    return x[jnp.arange(x.shape[0])[:, None], slots]


def _pick(condition: Array, new: Tree, old: Tree) -> Tree:
    def pick(x: Array, y: Array) -> Array:
        shape = (*condition.shape, *[1] * (x.ndim - condition.ndim))
        return jnp.where(condition.reshape(shape), x, y)

    return jax.tree.map(pick, new, old)  # type: ignore[no-any-return]


def _with_nothing_emitted(state: DecodeState) -> DecodeState:
    emitted: Emitted = dataclasses.replace(state.emitted, count=jnp.zeros_like(state.emitted.count))
    return dataclasses.replace(state, emitted=emitted)
