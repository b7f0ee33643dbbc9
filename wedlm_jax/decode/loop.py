"""Streaming decode as one `lax.while_loop`: a burst of forwards over flat tokens.

Each iteration plans the spans of all sequences, runs the layers and the head over them, commits
and fills tokens, and advances the windows. Sequences advance at their own pace, and a finished one
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
from wedlm_jax.decode.backup import next_backup
from wedlm_jax.decode.forward import (
    Predictions,
    Program,
    no_hidden_states,
    predict,
    predicted_slots,
    run_layers,
)
from wedlm_jax.decode.logits import TokenUse, token_use, with_committed
from wedlm_jax.decode.logprobs import Logprobs
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.spans import Allowance, SpanPlan, has_room, plan_spans
from wedlm_jax.decode.state import (
    NOTHING,
    DecodeState,
    Emitted,
    LastForward,
    is_filled,
    leading,
    no_backup,
)
from wedlm_jax.model import Transformer

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BurstCounters:
    """Counters of one replica's burst, int32.

    Attributes:
      forwards: the number of forwards.
      tokens: real tokens that went through the layers, prompts included.
      by_size: ``[S]``, how often the layers ran at each static size.
    """

    forwards: Array
    tokens: Array
    by_size: Array


Carry = tuple[DecodeState, Pages, Array, TokenUse | None, BurstCounters, LastForward | None]


def run_burst(
    model: Transformer,
    program: Program,
    state: DecodeState,
    pages: Pages,
    options: Options,
    allowance: Allowance,
    changed: Array,
    hidden: Array | None = None,
) -> tuple[DecodeState, Pages, BurstCounters, LastForward | None]:
    """Runs forwards until the allowance is used up.

    A burst also ends when a sequence's pages or ``state.emitted`` lack room for what its next
    forward may commit.

    Args:
      changed: bool ``[N]``, whether each sequence's window has changed since the last burst.
      hidden: the final hidden states from `run_layers_ahead`, given the same arguments; the burst
        then consists of the rest of that one forward. By default forwards run whole.

    Returns:
      state, pages, counters, and the last forward if the program has the trait "traced".
    """
    state = begin(state, options, changed)
    page_size, begun = pages.shape[1], state.running.sum()
    layers_are_due = hidden is None
    most = allowance.max_forwards if layers_are_due else jnp.minimum(allowance.max_forwards, 1)

    def more(carry: Carry) -> Array:
        state, counters = carry[0], carry[4]
        finished = begun - state.running.sum()
        due = counters.forwards < most
        due &= finished < allowance.until_finished[0]
        return due & may_run(state, allowance, page_size)

    def body(carry: Carry) -> Carry:
        state, pages, hidden, use, counters, last = carry
        plan = plan_spans(state, allowance, program.sizes, page_size)
        if layers_are_due:
            hidden, pages = run_layers(model, state, pages, hidden, plan, allowance, program)
        state = _count_forward(state, plan)
        predictions = predict(model, state, hidden, plan, options, use, program)
        decision = decide(state, predictions, plan, options, program)
        after = advance(state, predictions, decision, plan, options, program)
        if program.traits.lookup:
            after = with_copies(after, decision, options, allowance, program)
        counters = _update_counters(counters, plan, program)
        if program.traits.traced:
            has_row = predicted_slots(state, plan, options, program.traits)
            last = _recorded(state, predictions, decision, has_row)
        return after, pages, hidden, with_committed(use, state, after), counters, last

    use = token_use(state, options, model.config.vocab_size)
    none = jnp.int32(0)
    start = BurstCounters(none, none, jnp.zeros(len(program.sizes.tokens), jnp.int32))
    hidden = no_hidden_states(model, program) if hidden is None else hidden
    last = _nothing_recorded(state) if program.traits.traced else None
    carry = state, pages, hidden, use, start, last
    state, pages, _, _, counters, last = jax.lax.while_loop(more, body, carry)
    return state, pages, counters, last


def run_layers_ahead(
    model: Transformer,
    program: Program,
    state: DecodeState,
    pages: Pages,
    options: Options,
    allowance: Allowance,
    changed: Array,
) -> tuple[Array, Pages]:
    """Runs the layers of the next forward, which do not depend on the tokens that grammars allow:
    the host computes these at the same time. `run_burst` does the rest of the forward.
    Returns the final hidden states ``[T, D]``, and the pages."""
    state, page_size = begin(state, options, changed), pages.shape[1]
    hidden = no_hidden_states(model, program)

    due = (allowance.max_forwards > 0) & (allowance.until_finished[0] > 0)
    due &= may_run(state, allowance, page_size)

    def body(carry: tuple[Array, Array, Pages]) -> tuple[Array, Array, Pages]:
        _, hidden, pages = carry
        plan = plan_spans(state, allowance, program.sizes, page_size)
        hidden, pages = run_layers(model, state, pages, hidden, plan, allowance, program)
        return jnp.bool(False), hidden, pages

    # A loop of at most one turn, like a burst's: it overwrites the pages in place.
    _, hidden, pages = jax.lax.while_loop(lambda carry: carry[0], body, (due, hidden, pages))
    return hidden, pages


def begin(state: DecodeState, options: Options, changed: Array) -> DecodeState:
    """Returns the state at the start of a burst: nothing emitted yet, and the windows of
    ``options`` for the ``changed [N]`` sequences."""
    emitted = dataclasses.replace(state.emitted, count=jnp.zeros_like(state.emitted.count))
    return with_windows(dataclasses.replace(state, emitted=emitted), options, changed)


def may_run(state: DecodeState, allowance: Allowance, page_size: int) -> Array:
    """Returns whether some sequence runs, and all that do have room for another forward."""
    ready = has_room(state, allowance, page_size)
    fits = state.emitted.count + state.tokens.shape[1] < state.emitted.tokens.shape[1]
    return state.running.any() & (~state.running | (ready & fits)).all()


class Decision(NamedTuple):
    """A forward's decisions for each window.

    Attributes:
      tokens, logprobs: ``[N, P]``, whose first ``committed`` entries are new text.
      committed: int32 ``[N]``, the number of new tokens.
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
    state: DecodeState, predictions: Predictions, plan: SpanPlan, options: Options, program: Program
) -> Decision:
    """Decides what is committed, filled and kept.

    A program with both policies computes both for every sequence, which then takes the result of
    its own policy: a compiled loop cannot branch per sequence.
    """
    traits, slots = program.traits, state.tokens.shape[1]
    anchored = options.anchored
    # In physical order the tokens of the leading run come first, each preceded by exactly the text
    # before it, so their keys and values are final. A filled slot after a mask saw an incomplete
    # prefix and is computed again by the next forward.
    run = leading(is_filled(state))
    # In mode "paper" the new text is the leading filled slots; in anchored sequences it is what the
    # rows of the leading run chose.
    at = jnp.minimum(state.known[:, None] + jnp.arange(slots), slots - 1)
    new = (_at_slots(state.tokens, at), jax.tree.map(lambda x: _at_slots(x, at), state.logprobs))
    count = run - state.known
    kept = state.filled
    fills = jnp.zeros_like(state.filled)
    if traits.paper:
        fills = paper.filled_by(
            state, options, predictions.tokens[:, :-1], predictions.entropies[:, :-1]
        )
    if traits.anchored:
        budget = program.draft_budget(options)
        checked = verified.verify(state, budget, predictions.tokens, predictions.entropies)
        predicted = jax.tree.map(lambda x: x[:, 1:], (predictions.tokens, predictions.logprobs))
        new = _pick(anchored, predicted, new)
        run = jnp.where(anchored, checked.run, run)
        count = jnp.where(anchored, checked.run, count)
        fills = jnp.where(anchored[:, None], checked.drafts, fills)
        kept = jnp.where(anchored[:, None], checked.kept, kept)
    # The predictions of a sequence that only computed a chunk of its prompt are meaningless.
    ran = plan.window & state.running
    run, count = jnp.where(ran, run, 0), jnp.where(ran, count, 0)
    return Decision(*new, count, run, fills & ran[:, None], kept, ran)


def advance(
    state: DecodeState,
    predictions: Predictions,
    decision: Decision,
    plan: SpanPlan,
    options: Options,
    program: Program,
) -> DecodeState:
    """Returns the state after a forward: tokens committed, masks filled, windows moved."""
    run, fills, ran = decision.run, decision.fills, decision.ran
    # Only the keys and values of the prompt's chunk and of the run are final. Those of other slots
    # are in the pages, too, but are not counted, so the next forward overwrites them.
    reached = state.num_computed + plan.chunk + run
    checked = jnp.where(options.anchored & ran, is_filled(state).sum(axis=1) - 1, 0)
    state = append(state, options, decision.tokens, decision.logprobs, decision.committed, checked)
    state = dataclasses.replace(
        state,
        num_computed=jnp.minimum(reached, state.text_length),
        tokens=jnp.where(fills, predictions.tokens[:, :-1], state.tokens),
        logprobs=_pick(
            fills, jax.tree.map(lambda x: x[:, :-1], predictions.logprobs), state.logprobs
        ),
        filled=jnp.where(ran[:, None], decision.kept | fills, state.filled),
    )
    state = move_windows(state, options, run)
    going_on = options.anchored & ran & state.running
    if program.traits.anchored:
        state = put_in_front(state, going_on, options)
    if program.backup:
        of_drafts = fills, predictions.entropies[:, :-1], run
        planned = next_backup(*of_drafts, options.window, program.backup, going_on)
        backup = _pick(ran, planned, state.backup)
        state = dataclasses.replace(state, backup=backup)
    return state


def with_copies(
    state: DecodeState, decision: Decision, options: Options, allowance: Allowance, program: Program
) -> DecodeState:
    """Copies drafts from the text into windows for which no mask made any; ``state`` is the one
    after the forward that made the ``decision``."""
    known, most = state.lookup, program.traits.lookup
    assert known is not None
    assert options.lookup is not None
    assert options.unpriced is not None
    assert allowance.seconds is not None
    known = lookup.learn(known, decision.tokens, decision.committed)
    known = dataclasses.replace(known, **lookup.find(state.text, state.text_length, most)._asdict())
    drafted = leading(is_filled(state)) - 1
    free = options.anchored & decision.ran & state.running & (drafted == 0)
    # The last token of a completion needs no draft: the row before it chooses it.
    room = jnp.minimum(options.lookup, options.max_tokens - state.num_output - 1)
    room = jnp.minimum(room, state.tokens.shape[1] - state.active)
    room = jnp.where(free & (known.match > 0), room, 0)
    unpriced = jnp.where(options.unpriced, room, 0)
    gains = lookup.gains(known, room - unpriced)
    prompts = jnp.where(state.running, state.window_start - state.num_computed, 0).sum()
    tokens = jnp.where(state.running, state.active + state.backup.count + unpriced, 0).sum()
    tokens += jnp.minimum(prompts, allowance.chunk_tokens)
    # What the forward commits without these copies: each sequence's choice, and either its drafts,
    # which are mostly right, or the mean number that its masks' drafts add, if that is more.
    committed = 1 + jnp.maximum(drafted + unpriced, known.masks)
    committed = jnp.where(state.running, committed, 0.0)
    costs = lookup.ForwardCosts(program.sizes.tokens, allowance.seconds[0])
    # Bursts end early, once some of their sequences have finished, only if others wait.
    others_wait = allowance.until_finished[0] < state.running.sum()
    value = lookup.worth(state.num_output, state.num_forwards, others_wait)
    least = jnp.where(others_wait, lookup.GAIN, lookup.GAIN_ALONE)
    count = unpriced + lookup.paying_drafts(gains, tokens, committed, costs, value, least)

    slot = jnp.arange(state.tokens.shape[1])
    fills = (slot >= 1) & (slot <= count[:, None])
    copies = _at_slots(known.tokens, jnp.clip(slot - 1, 0, most - 1) + 0 * count[:, None])
    return dataclasses.replace(
        state,
        tokens=jnp.where(fills, copies, state.tokens),
        filled=jnp.where(fills, True, state.filled),
        active=state.active + count,
        lookup=dataclasses.replace(known, copied=jnp.where(decision.ran, count, known.copied)),
    )


def _nothing_recorded(state: DecodeState) -> LastForward:
    slots, nobody = jnp.zeros_like(state.tokens), jnp.zeros_like(state.running)
    entropies = jnp.zeros((slots.shape[0], slots.shape[1] + 1), jnp.float32)
    count = jnp.zeros_like(state.active)
    return LastForward(nobody, count, count, slots, entropies, slots, slots > 0)


def _recorded(
    state: DecodeState, predictions: Predictions, decision: Decision, has_row: Array
) -> LastForward:
    """Returns the record of a forward over ``state`` that predicted the slots where ``has_row``,
    bool ``[N, P+1]``."""
    held = is_filled(state)
    return LastForward(
        ran=decision.ran,
        start=state.window_start,
        active=state.active,
        held=jnp.where(held, state.tokens, NOTHING),
        entropies=jnp.where(has_row, predictions.entropies, jnp.nan),
        drafted=jnp.where(decision.fills, predictions.tokens[:, :-1], NOTHING),
        rejected=held & ~decision.kept,
    )


def _count_forward(state: DecodeState, plan: SpanPlan) -> DecodeState:
    """Counts the forward for each sequence whose window it runs. The first slot of an anchored
    window may be the prompt's last token, whose row chooses the completion's first token; so AR
    takes exactly one forward per token."""
    return dataclasses.replace(
        state,
        num_forwards=state.num_forwards + plan.window,
        num_token_instances=state.num_token_instances
        + jnp.where(plan.window, state.active + state.backup.count, 0),
    )


def _update_counters(counters: BurstCounters, plan: SpanPlan, program: Program) -> BurstCounters:
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


# --- Changes of the state after a forward ----------------------------------------------------


def append(
    state: DecodeState,
    options: Options,
    tokens: Array,
    logprobs: Logprobs | None,
    count: Array,
    drafts: Array,
) -> DecodeState:
    """Appends the first ``count [N]`` of ``tokens [N, C]`` to the texts, up to the first stop
    token or ``max_tokens``; a sequence that reaches either stops running.

    Args:
      drafts: int32 ``[N]``, how many drafts the forward checked. One of the committed tokens counts
        as a row's choice, the others as accepted drafts.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == options.stop_ids[:, None, :]).any(axis=-1)
    is_stop &= index < count[:, None]
    stops = is_stop.any(axis=1)
    # The stop token itself is appended; what follows it is not.
    through = jnp.where(stops, jnp.argmax(is_stop, axis=1) + 1, count)
    taken = jnp.clip(options.max_tokens - state.num_output, 0, through)
    # max_tokens may cut before the stop token: then the sequence ends by length.
    stopped = stops & (taken == through)
    here = index < taken[:, None]

    def put(old: Array, start: Array, values: Array) -> Array:
        return _put(old, start, values, here)

    was = state.emitted
    copied = jnp.zeros_like(stops) if state.lookup is None else state.lookup.copied > 0
    code = jnp.where(index == 0, draft_code(drafts, taken - 1, copied)[:, None], jnp.uint32(0))
    emitted = Emitted(
        tokens=put(was.tokens, was.count, tokens),
        forwards=put(was.forwards, was.count, _as_wide(state.num_forwards, tokens)),
        instances=put(was.instances, was.count, _as_wide(state.num_token_instances, tokens)),
        drafts=put(was.drafts, was.count, code),
        logprobs=jax.tree.map(lambda old, new: put(old, was.count, new), was.logprobs, logprobs),
        count=was.count + taken,
    )
    num_output = state.num_output + taken
    finished = state.running & (stopped | (num_output >= options.max_tokens))
    return dataclasses.replace(
        state,
        text=put(state.text, state.text_length, tokens),
        text_length=state.text_length + taken,
        running=state.running & ~finished,
        stopped=state.stopped | (state.running & stopped),
        emitted=emitted,
    )


def draft_code(drafts: Array, accepted: Array, copied: Array) -> Array:
    """Packs the draft counts of a forward into one number, uint32 ``[N]``, which
    `wedlm_jax.completion.Drafts` reads. From the lowest bit: 12 bits each for checked and accepted
    drafts of masks, then 4 bits each for copied drafts.

    Args:
      drafts, accepted: int32 ``[N]``, drafts checked and accepted.
      copied: bool ``[N]``, whether they were copied from the text.
    """
    accepted = jnp.clip(accepted, 0, drafts).astype(jnp.uint32)
    drafts = drafts.astype(jnp.uint32)
    return jnp.where(copied, drafts << 24 | accepted << 28, drafts | accepted << 12)


def _as_wide(values: Array, like: Array) -> Array:
    return jnp.broadcast_to(values[:, None], like.shape)


def _put(old: Array, start: Array, values: Array, here: Array) -> Array:
    """Writes ``values [N, C, ..]`` into ``old [N, E, ..]`` from column ``start [N]`` on, but only
    where ``here [N, C]``."""
    # The others go to a column that does not exist and are dropped, which keeps shapes static.
    place = jnp.where(here, start[:, None] + jnp.arange(here.shape[1]), old.shape[1])
    rows = jnp.arange(old.shape[0])[:, None]
    return old.at[rows, place].set(values, mode="drop")


def move_windows(state: DecodeState, options: Options, run: Array) -> DecodeState:
    """Drops the ``run [N]`` from the front of each window and opens new masks at its end."""
    slots = state.tokens.shape[1]
    if slots == 1:
        return dataclasses.replace(state, filled=state.filled & (run == 0)[:, None])
    # Slot s takes the content of slot s + run: the window slides by the run.
    source = jnp.arange(slots) + run[:, None]
    inside = source < state.active[:, None]
    source = jnp.minimum(source, slots - 1)
    rows = jnp.arange(source.shape[0])[:, None]
    filled = state.filled[rows, source] & inside
    # Always W uncommitted slots after what the next forward commits (WeDLM section 5).
    active = options.window + leading(filled)
    return dataclasses.replace(
        state,
        tokens=state.tokens[rows, source],
        logprobs=jax.tree.map(lambda x: x[rows, source], state.logprobs),
        filled=filled,
        active=active.astype(jnp.int32),
    )


def put_in_front(state: DecodeState, sequences: Array, options: Options) -> DecodeState:
    """Puts the last token of the text into slot 0 of ``sequences [N]``. This token is known, and
    the next forward computes its keys and values."""
    token = jnp.take_along_axis(state.text, jnp.maximum(state.text_length - 1, 0)[:, None], axis=1)
    here = sequences[:, None] & (jnp.arange(state.tokens.shape[1]) == 0)
    filled = state.filled | here
    active = options.window + leading(filled)
    return dataclasses.replace(
        state,
        tokens=jnp.where(here, token, state.tokens),
        filled=filled,
        active=jnp.where(sequences, active, state.active).astype(jnp.int32),
    )


def with_windows(state: DecodeState, options: Options, changed: Array) -> DecodeState:
    """Gives the ``changed [N]`` sequences the windows of ``options``.

    A narrower window drops the tokens beyond its end, and the part of the leading run that leaves
    no room for its masks (see `wedlm_jax.decode.state.num_slots`). The window of an anchored
    sequence starts with the last token of its text; a sequence that was not anchored before
    computes that token again.
    """
    changed &= state.running
    again = changed & options.anchored & (state.known == 0)
    most = state.text_length - again
    filled = is_filled(state) & ~again[:, None]
    whole = leading(filled)
    run = jnp.minimum(whole, jnp.maximum(options.window, 1))
    active = (options.window + run).astype(jnp.int32)
    # If the run is cut, no drafts after it are kept. No mask would follow the last draft, but the
    # forward that accepts a draft also fills the slot after it.
    end = jnp.where(options.anchored & (run < whole), run, active)
    filled &= jnp.arange(filled.shape[1]) < end[:, None]
    narrowed = dataclasses.replace(
        state,
        filled=jnp.where(changed[:, None], filled, state.filled),
        active=jnp.where(changed, active, state.active),
        backup=_pick(changed, no_backup(len(changed)), state.backup),
        num_computed=jnp.minimum(state.num_computed, most),
        prefill_length=jnp.minimum(state.prefill_length, most),
    )
    return put_in_front(narrowed, again, options)
