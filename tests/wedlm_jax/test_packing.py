"""Block-aligned packing: every sample in exactly one row, at a block's start."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wedlm_jax.errors import InputError
from wedlm_jax.packing import TokenisedSample, pack, row_arrays

BLOCK, ROW = 4, 24


def sample(length, prompt=0, first=100):
    """Tokens that count up from ``first``, so that a test can tell where each came from."""
    tokens = np.arange(first, first + length, dtype=np.int32)
    return TokenisedSample(tokens, np.arange(length) >= prompt)


def room(length):
    """What a sample takes: whole blocks."""
    return -(-length // BLOCK) * BLOCK


def packed_lengths(lengths, **options):
    rows = pack([sample(n) for n in lengths], row_length=ROW, block_size=BLOCK, **options)
    return [[len(member.tokens) for member in row] for row in rows]


lists_of_lengths = st.lists(st.integers(1, ROW), max_size=30)


@given(lengths=lists_of_lengths, open_rows=st.integers(1, 5))
def test_each_sample_comes_out_once_and_rows_do_not_overflow(lengths, open_rows):
    samples = [sample(n, first=1000 * i) for i, n in enumerate(lengths)]
    rows = list(pack(samples, row_length=ROW, block_size=BLOCK, open_rows=open_rows))
    out = [member.tokens[0] // 1000 for row in rows for member in row]
    assert sorted(out) == list(range(len(lengths)))
    for row in rows:
        assert row
        assert sum(room(len(member.tokens)) for member in row) <= ROW
        numbers = [member.tokens[0] for member in row]
        assert numbers == sorted(numbers)


@given(lengths=lists_of_lengths)
def test_a_row_opens_only_where_no_row_before_it_has_room(lengths):
    rows = packed_lengths(lengths, open_rows=30)
    used = [sum(map(room, row)) for row in rows]
    first = [room(row[0]) for row in rows]
    for i in range(len(used)):
        for j in range(i + 1, len(used)):
            assert used[i] + first[j] > ROW


@pytest.mark.parametrize(
    ("lengths", "options", "rows"),
    [
        ([20, 12, 4, 12], {}, [[20, 4], [12, 12]]),  # the first row with room is taken
        ([13, 9], {}, [[13], [9]]),  # 22 tokens would fit, 16 + 12 places do not
        ([13, 8], {}, [[13, 8]]),
        ([12, 16, 20, 12], {"open_rows": 2}, [[16], [12, 12], [20]]),  # the fullest leaves
    ],
)
def test_which_row_a_sample_goes_to(lengths, options, rows):
    assert packed_lengths(lengths, **options) == rows


def test_rows_leave_before_the_samples_end():
    """Packing is lazy: an endless corpus must not be read to its end."""
    seen = []

    def endless():
        while True:
            seen.append(None)
            yield sample(ROW)

    rows = pack(endless(), row_length=ROW, block_size=BLOCK, open_rows=3)
    assert len(next(rows)) == 1
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("length", "row", "message"),
    [
        (0, ROW, "sample 1 has 0 tokens"),
        (ROW + 1, ROW, f"sample 1 has {ROW + 1} tokens"),
        (3, 10, "multiple of the block size 4"),
    ],
)
def test_what_cannot_be_packed_is_refused(length, row, message):
    with pytest.raises(InputError, match=message):
        list(pack([sample(3), sample(length)], row_length=row, block_size=BLOCK))


@given(data=st.data())
def test_samples_can_be_read_back_from_their_row(data):
    lengths, used = [], 0
    for length in data.draw(st.lists(st.integers(1, 9), max_size=6)):
        if used + room(length) <= ROW:
            lengths.append(length)
            used += room(length)
    samples = [sample(n, prompt=n // 2, first=100 * i) for i, n in enumerate(lengths, 1)]
    row = row_arrays(samples, row_length=ROW, block_size=BLOCK, pad_token_id=9)
    kinds = {"tokens": "int32", "positions": "int32", "segment_ids": "int32", "trainable": "bool"}
    assert {name: str(value.dtype) for name, value in row.items()} == kinds
    for segment, member in enumerate(samples, 1):
        (where,) = np.nonzero(row["segment_ids"] == segment)
        assert where[0] % BLOCK == 0
        np.testing.assert_array_equal(row["tokens"][where], member.tokens)
        np.testing.assert_array_equal(row["positions"][where], np.arange(len(member.tokens)))
        np.testing.assert_array_equal(row["trainable"][where], member.trainable)
    assert (row["segment_ids"] > 0).sum() == sum(lengths)
    padding = row["segment_ids"] == 0
    assert (row["tokens"][padding] == 9).all()
    assert not row["positions"][padding].any()
    assert not row["trainable"][padding].any()
