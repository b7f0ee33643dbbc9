"""Rows that decode together: prompts are put into free rows, advanced, read, and replaced.

The shapes of a batch are fixed when it is opened, so nothing is compiled anew when one row
ends and the next begins. All arrays an entry a row are made here, on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from wedlm_jax import programs
from wedlm_jax.attention import reads_live_part
from wedlm_jax.batch_sizes import (
    LONGEST_PIECE,
    BatchSizes,
    Tokens,
    cache_bucket,
    piece_bucket,
    state_sizes,
    stop_ids,
)
from wedlm_jax.buckets import bucket
from wedlm_jax.decode_state import DecodeState, physical_order
from wedlm_jax.logprobs import as_list
from wedlm_jax.row_params import idle_params, set_row
from wedlm_jax.row_result import RowResult, WindowView
from wedlm_jax.sampling import RowParams, SamplingParams
from wedlm_jax.sharding import shards

if TYPE_CHECKING:
    from wedlm_jax.engine import Engine

SMALLEST_LIVE = 128
PREFILL_TOKENS = 1024
"""Tokens that are prefilled at once, of all rows together, where prompts are shorter."""
UNTIL_DONE = 2**31 - 1
LOOKAHEAD = 64
"""Tokens a row may gain before a longer part of the cache has to be read."""


Piece = tuple[int, int, np.ndarray]
"""A row, the tokens of its prompt that it holds already, and those that follow, at most
`LONGEST_PIECE`."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where the rows of a batch stand: NumPy arrays ``[rows]``; see `DecodeState`."""

    done: np.ndarray
    lengths: np.ndarray
    num_output: np.ndarray
    num_forwards: np.ndarray
    num_token_instances: np.ndarray


class Batch:
    """Rows of one size, each free or decoding a prompt.

    Rows are numbered from 0. On a mesh whose ``data`` axes cut the batch into shards, each
    shard has its own run of consecutive rows.
    """

    def __init__(self, engine: Engine, sizes: BatchSizes):
        self.sizes = sizes
        self._engine, self._shards = engine, shards("batch")
        self._default_window = engine.window_size
        self._windows = self._with_ar(engine.windows)
        self._anchored = 0 in self._windows or sizes.options.verified
        self._state: DecodeState = engine.run(programs.allocate_state, **state_sizes(engine, sizes))
        self._host = idle_params(sizes, engine.window_size)
        self._autoregressive = np.zeros(sizes.rows, bool)
        """Rows whose mode is "ar": they keep their window of 0."""
        self._lengths = np.zeros(sizes.rows, np.int64)
        """Tokens that each row's cache holds, as far as the host knows."""
        self._ends = np.zeros(sizes.rows, np.int64)
        """Tokens that each row's prompt and completion have together, at most; of a row that is
        free, those of its last request."""
        self._logprobs: list[int | None] = [None] * sizes.rows
        self._admitted: list[int] = []
        self._params = self._upload()

    # --- putting prompts into rows ------------------------------------------------------

    def admit(
        self,
        rows: Iterable[int],
        prompts: Sequence[Tokens],
        params: Sequence[SamplingParams],
        windows: Sequence[int] | None = None,
    ) -> None:
        """Prefills prompts into free rows, which decode from the next `advance` on.

        Args:
          rows: a free row for each prompt.
          prompts, params: checked, and held by `sizes`.
          windows: each row's own window, one of the engine's or smaller.
        """
        rows = list(rows)
        self._prefill(rows, [np.asarray(p, np.int32) for p in prompts])
        self.open(rows, prompts, params, windows)

    def open(
        self,
        rows: Sequence[int],
        prompts: Sequence[Tokens],
        params: Sequence[SamplingParams],
        windows: Sequence[int] | None = None,
    ) -> None:
        """Begins to decode rows whose prompts have been prefilled."""
        new = np.zeros(self.sizes.rows, bool)
        last = np.zeros(self.sizes.rows, np.int32)
        for i, (row, prompt, one) in enumerate(zip(rows, prompts, params, strict=True)):
            new[row], last[row] = True, prompt[-1]
            self._lengths[row] = len(prompt)
            self._ends[row] = len(prompt) + one.max_tokens
            self._logprobs[row] = one.logprobs
            self._autoregressive[row] = one.mode == "ar"
            set_row(
                self._host, row, one, stops=stop_ids(self._engine, one), prompt=prompt,
                window=self._default_window if windows is None else windows[i],
                vocab=self._engine.config.vocab_size,
            )  # fmt: skip
        self._params = self._upload()
        self._state = self._engine.run(
            programs.open_rows, self._state, self._params, new, self._lengths.astype(np.int32),
            last, anchored=self._anchored,
        )  # fmt: skip
        self._admitted = sorted({*self._admitted, *rows})

    def _prefill(self, rows: Sequence[int], prompts: Sequence[np.ndarray]) -> None:
        """Piece by piece: the first pieces of all prompts, then the second ones, and so on."""
        for start in range(0, max(map(len, prompts)), LONGEST_PIECE):
            self.prefill([
                (row, start, prompt[start : start + LONGEST_PIECE])
                for row, prompt in zip(rows, prompts, strict=True)
                if len(prompt) > start
            ])  # fmt: skip

    def prefill(self, pieces: Sequence[Piece]) -> None:
        """Prefills pieces of prompts, for rows that are free."""
        by_shape: dict[tuple[int, int], list[Piece]] = {}
        for piece in pieces:
            _, start, tokens = piece
            live = min(bucket(start, SMALLEST_LIVE), self.sizes.cache_size) if start else 0
            shape = (piece_bucket(len(tokens), start), live)
            by_shape.setdefault(shape, []).append(piece)
        for (length, live), group in by_shape.items():
            many = min(self._rows_per_shard, max(PREFILL_TOKENS // length, 1))
            for entries in self._entries([row for row, _, _ in group], many):
                self._run_pieces(entries, group, length, live)

    def _run_pieces(self, entries: _Entries, group: list[Piece], length: int, live: int) -> None:
        tokens = np.zeros((len(entries.places), length), np.int32)
        starts, counts = np.zeros((2, len(entries.places)), np.int32)
        lengths = np.full(self.sizes.rows, -1, np.int32)
        for entry, index in entries.taken:
            row, start, piece = group[index]
            tokens[entry, : len(piece)] = piece
            starts[entry], counts[entry] = start, len(piece)
            lengths[row] = self._lengths[row] = start + len(piece)
        arrays = (tokens, entries.places, starts, counts, entries.valid, lengths)
        pieces = programs.Pieces(*arrays)  # type: ignore[arg-type]
        self._state = self._engine.run(programs.prefill_pieces, self._state, pieces, live=live)

    def copy_prefix(
        self, sources: Sequence[int], rows: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Gives free rows the first tokens of other rows' prompts, so that these need no prefill.

        Args:
          sources: rows of the same shard, whose prompts begin alike.
          rows: a free row for each.
          lengths: how many tokens each takes over.
        """
        for entries in self._entries(rows, self._rows_per_shard):
            origins = np.zeros(len(entries.places), np.int32)
            taken = np.full(self.sizes.rows, -1, np.int32)
            for entry, index in entries.taken:
                origins[entry] = sources[index] % self._rows_per_shard
                taken[rows[index]] = self._lengths[rows[index]] = lengths[index]
            arrays = (origins, entries.places, entries.valid, taken)
            self._state = self._engine.run(
                programs.copy_prefixes, self._state, *arrays, model=False
            )

    @property
    def _rows_per_shard(self) -> int:
        return self.sizes.rows // self._shards

    def _entries(self, rows: Sequence[int], many: int) -> Iterator[_Entries]:
        """What to do with ``rows``, in rounds of ``many`` a shard or of one, so that no more
        than two shapes are compiled."""
        per_shard = self._rows_per_shard
        queues: list[list[int]] = [[] for _ in range(self._shards)]
        for index, row in enumerate(rows):
            queues[row // per_shard].append(index)
        while any(queues):
            each = many if 2 * max(map(len, queues)) > many else 1
            entries = _Entries(
                np.zeros(each * self._shards, np.int32), np.zeros(each * self._shards, bool), []
            )
            for shard, queue in enumerate(queues):
                for entry, index in enumerate(queue[:each], shard * each):
                    entries.places[entry] = rows[index] % per_shard
                    entries.valid[entry] = True
                    entries.taken.append((entry, index))
            queues = [queue[each:] for queue in queues]
            yield entries

    def _upload(self) -> RowParams:
        # Copies: the device may read them where they lie, and later than this.
        copies = {name: values.copy() for name, values in self._host.items()}
        return RowParams(**jax.device_put(copies))

    # --- decoding -----------------------------------------------------------------------

    def advance(self, max_forwards: int = UNTIL_DONE) -> bool:
        """Runs at most so many forwards; returns whether every row is done."""
        spent, before = 0, self.look()
        while not before.done.all() and spent < max_forwards:
            self.dispatch(max_forwards - spent)
            after = self.look()
            # Some row was running throughout, and has counted every forward.
            spent += int((after.num_forwards - before.num_forwards).max())
            before = after
        return bool(before.done.all())

    def dispatch(
        self,
        max_forwards: int = UNTIL_DONE,
        until_done: int = UNTIL_DONE,
        *,
        live: int | None = None,
    ) -> None:
        """Sends the device off to run forwards, without waiting: ``max_forwards`` at most, until
        ``until_done`` rows are done, or until a row needs a longer part of the cache than
        ``live``, which by default leaves room for some tokens."""
        engine = self._engine
        if reads_live_part(engine.attention):
            live = self.sizes.cache_size
        elif live is None:
            # Room for some tokens more, but none for more than a row may have.
            needed = np.minimum(self._lengths + LOOKAHEAD, self._ends)
            live = self._live(int(needed.max(initial=0, where=self._lengths > 0)))
        self._state = engine.run(
            programs.advance_state, self._state, self._params, np.int32(max_forwards),
            np.int32(until_done), windows=self._windows, refill=engine.refill, live=live,
            attention=engine.attention,
        )  # fmt: skip

    def _with_ar(self, windows: tuple[int, ...]) -> tuple[int, ...]:
        """Every window that a row may have, if it may have one of ``windows``."""
        return tuple(sorted({*windows, 0})) if self.sizes.options.autoregressive else windows

    def _live(self, size: int) -> int:
        return min(cache_bucket(size, SMALLEST_LIVE), self.sizes.cache_size)

    def look(self) -> Standing:
        """Where the rows stand; waits for the device."""
        now = np.asarray(self._engine.run(programs.standing, self._state, model=False))
        standing = Standing(now[0].astype(bool), *now[1:])
        self._lengths = np.where(standing.done, 0, standing.lengths)
        return standing

    def set_windows(self, window: int) -> None:
        """Gives every row this window from now on, one of the engine's; forwards are then no
        wider than it needs."""
        self._windows, self._default_window = self._with_ar((window,)), window
        self._host["window"][~self._autoregressive] = window
        self._params = self._upload()
        self._state = self._engine.run(
            programs.change_windows, self._state, self._params, model=False
        )

    def finish(self, *rows: int) -> None:
        """Ends rows early: they change no more, and no longer hold up the batch."""
        ended = np.zeros(self.sizes.rows, bool)
        ended[list(rows)] = True
        self._state = self._engine.run(programs.end_rows, self._state, ended, model=False)

    @property
    def chooses_width(self) -> bool:
        """Whether windows are chosen while decoding, for all rows together."""
        return self._engine.chooses_width

    def fits(self, start: int, length: int) -> bool:
        """Whether the pieces of a prompt of ``length`` from ``start`` on, padded, end within the
        cache."""
        for at in range(start, length, LONGEST_PIECE):
            piece = min(length - at, LONGEST_PIECE)
            if at + piece_bucket(piece, at) > self.sizes.cache_size:
                return False
        return True

    @property
    def windows(self) -> tuple[int, ...]:
        """Every window that a row may have."""
        return self._engine.windows

    def shard_of(self, row: int) -> int:
        """Which shard of the rows it is in, from 0."""
        return row // self._rows_per_shard

    # --- reading ------------------------------------------------------------------------

    def results(self) -> list[RowResult]:
        """What each row that was ever admitted has committed so far, in the order of the rows."""
        return self.gather(self._admitted, self.look()).results()

    def gather(self, rows: Sequence[int], standing: Standing) -> Gathered:
        """Copies what rows have committed on the device, to be fetched when there is time.

        Args:
          standing: as last looked up, nothing having been dispatched since.
        """
        places = np.zeros(bucket(len(rows), 1), np.int32)
        places[: len(rows)] = rows
        outputs = self._engine.run(programs.outputs_of, self._state, places, model=False)
        stops = [set(self._host["stop_ids"][row].tolist()) for row in rows]
        logprobs = [self._logprobs[row] for row in rows]
        return Gathered(list(rows), outputs, standing, stops, logprobs)

    def window(self, row: int) -> WindowView:
        """The open window of a row, before its next forward."""
        state = self._state
        order = physical_order(state.filled, state.active)
        start, active, tokens, filled, order = jax.device_get(
            (state.lengths[row], state.active[row], state.tokens[row], state.filled[row],
             order[row])
        )  # fmt: skip
        slots = [int(t) if f else None for t, f in zip(tokens, filled, strict=True)]
        return WindowView(int(start), slots[:active], [int(s) for s in order[:active]])


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What some rows had committed at one moment, still on the device."""

    rows: list[int]
    outputs: Any
    standing: Standing
    stop_ids: list[set[int]]
    num_logprobs: list[int | None]

    def results(self) -> list[RowResult]:
        """Fetches it."""
        (*outputs, logprobs), now = jax.device_get(self.outputs), self.standing
        results = []
        for i, row in enumerate(self.rows):
            length = int(now.num_output[row])
            ids, forwards_at, instances_at = (x[i, :length].tolist() for x in outputs)
            stopped = bool(ids) and ids[-1] in self.stop_ids[i]
            reason = ("stop" if stopped else "length") if now.done[row] else None
            forwards, instances = now.num_forwards[row], now.num_token_instances[row]
            asked = self.num_logprobs[i]
            results.append(
                RowResult(
                    ids, reason, int(forwards), int(instances), forwards_at, instances_at,
                    None if asked is None else as_list(logprobs, i, length, asked),
                )
            )  # fmt: skip
        return results


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Rows to be changed by one program: their places within their shards ``[N]``, which
    entries count ``[N]``, and for each of these its number and that of what it is for."""

    places: np.ndarray
    valid: np.ndarray
    taken: list[tuple[int, int]]
