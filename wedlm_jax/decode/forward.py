"""One forward: the layers over the flat tokens of all spans, then the head over rows that predict.

Both run at the smallest of a few static sizes that holds the real tokens; the pages are updated in
place. Predictions are returned by window slot, ``[N, P+1]``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.ragged import (
    Pages,
    attend_pages,
    attention_plan,
    token_places,
    write_pages,
)
from wedlm_jax.decode import backup, paper, verified
from wedlm_jax.decode.chain import Candidates, chained_drafts, likeliest
from wedlm_jax.decode.logits import TokenUse, adjusted_logits, token_logits
from wedlm_jax.decode.logprobs import Logprobs, empty_logprobs, token_logprobs
from wedlm_jax.decode.options import Options, Traits, Vocabulary
from wedlm_jax.decode.sampling import choose_tokens, entropy
from wedlm_jax.decode.spans import (
    Allowance,
    ForwardSizes,
    SpanPlan,
    attention_spans,
    flat_tokens,
    in_parts,
    owner,
)
from wedlm_jax.decode.state import DecodeState, HeadRows, is_filled
from wedlm_jax.model import Transformer
from wedlm_jax.params import MOST_LOGPROBS

USUAL_BUDGET, BOLD_BUDGET = 2.0, 4.0
"""The default draft budget of a window in nats, without backup masks and with them."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The static description for which a burst is compiled.

    Attributes:
      sizes: the static sizes at which forwards run.
      traits: the sampling options that its sequences may use.
      attention: a name in `wedlm_jax.attention.RAGGED_BACKENDS`.
      vocabulary: the tokens that may be chosen.
      backup: maximum number of backup masks of a sequence.
    """

    sizes: ForwardSizes
    traits: Traits
    attention: str
    vocabulary: Vocabulary
    backup: int = 0

    def draft_budget(self, options: Options) -> Array | None:
        """Returns each sequence's budget for drafts in nats, ``[N]``; None where none drafts.

        With backup masks a wrong draft costs less, so the default budget is larger.
        """
        given = options.draft_budget
        if given is None:
            return None
        return jnp.where(jnp.isnan(given), BOLD_BUDGET if self.backup else USUAL_BUDGET, given)


class Predictions(NamedTuple):
    """The head's predictions for window slots, ``[N, P+1]`` each; zeros where it was not run.

    Attributes:
      tokens: int32.
      entropies: float32, in nats.
      logprobs: log-probabilities of the tokens; None where no sequence asks for them.
      candidates: ``[.., C]``, while drafts are chosen; None unless the model has a previous-token
        head.
    """

    tokens: Array
    entropies: Array
    logprobs: Logprobs | None
    candidates: Candidates | None


def no_hidden_states(model: Transformer, program: Program) -> Array:
    """Allocates the final hidden states ``[T, D]``, which all forwards of a burst overwrite.

    Clearing them for each forward would take as long as a layer of a small model.
    """
    # The last part may reach past the forward's end. `dynamic_update_slice` would shift it back to
    # fit and so overwrite other tokens; hence the room for one more part.
    rows = program.sizes.total + program.sizes.tokens[-1]
    return jnp.zeros((rows, model.config.hidden_size), model.embed_tokens[...].dtype)


def run_layers(
    model: Transformer,
    state: DecodeState,
    pages: Pages,
    hidden: Array,
    plan: SpanPlan,
    allowance: Allowance,
    program: Program,
) -> tuple[Array, Pages]:
    """Runs the layers over the plan's tokens.

    Returns the final hidden states ``[T, D]``, meaningless after the plan's tokens, and the pages
    with these tokens' keys and values. Overwrites ``hidden``, which comes from `no_hidden_states`
    or from the previous forward.
    """
    config = model.config
    sizes = program.sizes.tokens
    num_pages = pages.shape[0] // config.num_hidden_layers
    page_size = pages.shape[1]
    # A model without a mask token decodes without masks, or its drafter has an embedding for them.
    mask_token_id = config.mask_token_id or 0
    copies = None
    if program.backup:
        copies = backup.page_copies(state, allowance.page_table, page_size, plan.window)

    def run(size: int, start: Array, carry: tuple[Array, Pages]) -> tuple[Array, Pages]:
        out, pages = carry
        flat = flat_tokens(plan, state, start, size, mask_token_id)
        spans = attention_spans(
            plan, state, allowance, start, size, page_size if program.backup else None
        )
        places = token_places(spans, size, page_size)
        attention = attention_plan(
            spans,
            size,
            page_size,
            implementation=program.attention,
            deterministic=len(sizes) == 1,
        )

        def attend(
            pages: Pages, layer: Array | int, q: Array, k: Array, v: Array
        ) -> tuple[Array, Pages]:
            pages = write_pages(pages, k, v, places, layer, num_pages, copies)
            return attend_pages(q, pages, attention, layer, num_pages), pages

        part, pages = model.run(flat.tokens, flat.positions, attend, pages, is_mask=flat.is_mask)
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=0), pages

    return in_parts(sizes, plan.num_tokens, run, (hidden, pages))


def predict(
    model: Transformer,
    state: DecodeState,
    hidden: Array,
    plan: SpanPlan,
    options: Options,
    use: TokenUse | None,
    program: Program,
) -> Predictions:
    """Runs the head on the rows that predict a slot, a limited number of rows at a time.

    The logits of all slots at once would be the largest array of a forward by far: a vocabulary of
    150k tokens in float32 takes 0.6 MB per row.
    """
    has_row = predicted_slots(state, plan, options, program.traits)
    if program.backup:
        more = backup.backup_rows(state, program.backup) & plan.window[:, None]
        has_row = jnp.concatenate([has_row, more], axis=1)
    sequences, columns = has_row.shape
    # Rows are ordered by sequence and slot, so a slot's rank among the slots with rows is its row.
    flat = has_row.reshape(-1)
    rank = (jnp.cumsum(flat, dtype=jnp.int32) - 1).reshape(has_row.shape)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), rank[:, -1] + 1])
    count = starts[-1]
    rows = sequences * (columns - 1) + program.sizes.head[-1]
    empty = Predictions(
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, jnp.float32),
        empty_logprobs((rows,), MOST_LOGPROBS) if program.traits.logprobs else None,
        None,
    )
    if is_chained(model, program):
        none = jax.eval_shape(likeliest, jnp.zeros((rows, model.config.vocab_size)))
        candidates = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), none)
        empty = empty._replace(candidates=candidates)

    def run(size: int, start: Array, out: Predictions) -> Predictions:
        head, at = _head_rows(state, options, plan, has_row, starts, start, size)
        predictions = _guess(model, state, hidden[at], head, options, use, program)

        def put(whole: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)

        return jax.tree.map(put, out, predictions)

    predictions = in_parts(program.sizes.head, count, run, empty)
    index = jnp.maximum(rank, 0)
    found: Predictions = jax.tree.map(lambda x: _where_row(has_row, x[index]), predictions)
    if found.candidates is not None:
        drafts = chained_drafts(
            model, state, hidden, plan, options, found.tokens, found.entropies, found.candidates
        )
        found = found._replace(tokens=drafts[0], entropies=drafts[1], candidates=None)
    if not program.backup:
        return found
    used = backup.is_used(state, verified.right_run(state, found.tokens))
    return jax.tree.map(lambda x: backup.by_slot(state, x, used), found)  # type: ignore[no-any-return]


def is_chained(model: Transformer, program: Program) -> bool:
    """Returns whether each draft of a window depends on the draft before it."""
    return model.previous_token is not None and bool(program.traits.window)


def _where_row(has_row: Array, values: Array) -> Array:
    return jnp.where(has_row.reshape(*has_row.shape, *[1] * (values.ndim - 2)), values, 0)


def predicted_slots(state: DecodeState, plan: SpanPlan, options: Options, traits: Traits) -> Array:
    """Returns the slots whose token the head predicts in this forward, bool ``[N, P+1]``."""
    parts = []
    if traits.paper:
        parts.append(paper.predicted_slots(state) & ~options.anchored[:, None])
    if traits.anchored:
        parts.append(verified.predicted_slots(state) & options.anchored[:, None])
    has_row = parts[0] if len(parts) == 1 else parts[0] | parts[1]
    return has_row & plan.window[:, None]


def _head_rows(
    state: DecodeState,
    options: Options,
    plan: SpanPlan,
    has_row: Array,
    starts: Array,
    start: Array,
    size: int,
) -> tuple[HeadRows, Array]:
    """Returns rows ``start`` to ``start + size`` of the rows that go through the head, and the flat
    place of each, int32 ``[R]``.

    Args:
      has_row: bool ``[N, P+1+M]``, first by slot, then by backup mask.
      starts: int32 ``[N+1]``, each sequence's first row.
    """
    sequence, offset = owner(starts, size, start)
    # A row's column is the one that has a row itself, and ``offset`` columns with rows before it.
    ranks = jnp.cumsum(has_row, axis=1, dtype=jnp.int32)[sequence]
    column = (ranks <= offset[:, None]).sum(axis=1, dtype=jnp.int32)
    valid = start + jnp.arange(size) < starts[-1]
    column = jnp.where(valid, jnp.minimum(column, has_row.shape[1] - 1), 0)
    sequence = jnp.where(valid, sequence, 0)

    slots = plan.order.shape[1]
    number = column - (slots + 1)  # of a backup mask; negative for slots
    first = state.backup.start[sequence]
    slot = jnp.where(number < 0, column, first + number)
    num_filled = is_filled(state).sum(axis=1, dtype=jnp.int32)[sequence]
    is_mask = ~(options.anchored[sequence] & (slot <= num_filled)) | (number >= 0)
    sees = jnp.where(number < 0, jnp.where(is_mask, slots, slot), first)
    # The row of a mask predicts the mask's own token, any other row the token after its own.
    row_slot = jnp.clip(jnp.where(is_mask, slot, slot - 1), 0, slots - 1)
    physical = plan.place[sequence, row_slot]
    physical = jnp.where(number < 0, physical, state.active[sequence] + number)
    at = plan.starts[sequence] + plan.chunk[sequence] + physical
    return HeadRows(sequence, slot, is_mask, sees), jnp.where(valid, at, 0)


def _guess(
    model: Transformer,
    state: DecodeState,
    hidden: Array,
    head: HeadRows,
    options: Options,
    use: TokenUse | None,
    program: Program,
) -> Predictions:
    raw, traits = token_logits(model, hidden, program.vocabulary), program.traits
    logits = adjusted_logits(raw, state, options, head, use)
    tokens = choose_tokens(logits, state, options, head)
    logprobs = token_logprobs(raw, tokens, MOST_LOGPROBS) if traits.logprobs else None
    needed = traits.window or traits.traced
    entropies = entropy(logits) if needed else jnp.zeros(head.slot.shape, jnp.float32)
    candidates = likeliest(logits) if is_chained(model, program) else None
    return Predictions(tokens, entropies, logprobs, candidates)
