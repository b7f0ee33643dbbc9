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


def test_the_first_row_with_room_is_taken():
    assert packed_lengths([20, 12, 4, 12]) == [[20, 4], [12, 12]]


def test_a_sample_takes_whole_blocks():
    # 13 + 9 tokens would fit by count; 16 + 12 places do not.
    assert packed_lengths([13, 9]) == [[13], [9]]
    assert packed_lengths([13, 8]) == [[13, 8]]


def test_the_fullest_open_row_leaves_when_none_fits():
    assert packed_lengths([12, 16, 20, 12], open_rows=2) == [[16], [12, 12], [20]]


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


@pytest.mark.parametrize("length", [0, ROW + 1])
def test_a_sample_that_fits_no_row_is_named(length):
    with pytest.raises(InputError, match=f"sample 1 has {length} tokens"):
        packed_lengths([3, length])


def test_a_row_of_broken_blocks_is_refused():
    with pytest.raises(InputError, match="multiple of the block size 4"):
        list(pack([sample(3)], row_length=10, block_size=BLOCK))


def test_the_arrays_of_one_row():
    row = row_arrays(
        [sample(5, prompt=2), sample(3, first=200)], row_length=16, block_size=BLOCK, pad_token_id=9
    )
    expected = {
        "tokens": [100, 101, 102, 103, 104, 9, 9, 9, 200, 201, 202, 9, 9, 9, 9, 9],
        "positions": [0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0],
        "segment_ids": [1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0, 0, 0, 0, 0],
        "trainable": [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0],
    }
    assert {name: value.astype(int).tolist() for name, value in row.items()} == expected
    assert {name: value.dtype for name, value in row.items()} == {
        "tokens": np.int32,
        "positions": np.int32,
        "segment_ids": np.int32,
        "trainable": np.bool_,
    }


@given(data=st.data())
def test_samples_can_be_read_back_from_their_row(data):
    lengths, used = [], 0
    for length in data.draw(st.lists(st.integers(1, 9), max_size=6)):
        if used + room(length) <= ROW:
            lengths.append(length)
            used += room(length)
    samples = [sample(n, prompt=n // 2, first=100 * i) for i, n in enumerate(lengths, 1)]
    row = row_arrays(samples, row_length=ROW, block_size=BLOCK, pad_token_id=0)
    for segment, member in enumerate(samples, 1):
        (where,) = np.nonzero(row["segment_ids"] == segment)
        assert where[0] % BLOCK == 0
        np.testing.assert_array_equal(row["tokens"][where], member.tokens)
        np.testing.assert_array_equal(row["positions"][where], np.arange(len(member.tokens)))
        np.testing.assert_array_equal(row["trainable"][where], member.trainable)
    assert (row["segment_ids"] > 0).sum() == sum(lengths)
    assert not row["trainable"][row["segment_ids"] == 0].any()
