from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.scheduling.pages import PageError
from wedlm_jax.engine.scheduling.replica import Replica
from wedlm_jax.engine.scheduling.sequence import SequenceState
from wedlm_jax.params import SamplingParams

NUMBERS = count()


def new_replica(*, num_pages=12, number=0, reuse=True):
    table = np.zeros((3, 10), np.int32)
    return Replica(
        number, num_sequences=3, num_pages=num_pages, page_size=4, table=table, reuse=reuse
    )


def new_sequence(*tokens):
    number = next(NUMBERS)
    return SequenceState(Request(number, tokens, SamplingParams(max_tokens=8)), number)


def test_admission_shares_what_is_cached_and_takes_the_rest():
    replica = new_replica(number=2)
    one = new_sequence(*range(10))
    replica.admit(one, replica.cached(one), 13)
    assert one.index == 6
    assert replica.capacity(one) == 16
    one.num_computed = 9
    replica.store(one)
    assert (len(one.nodes), len(one.own)) == (2, 2)
    two = new_sequence(*range(10))
    nodes = replica.cached(two)
    assert nodes == one.nodes
    replica.admit(two, nodes, 13)
    assert two.num_computed == 8
    assert two.index == 7
    assert replica._table[0, :2].tolist() == replica._table[1, :2].tolist()
    assert not set(one.own) & set(two.own)
    replica.check()


def test_never_all_of_a_text_is_reused():
    replica = new_replica()
    one = new_sequence(*range(8))
    replica.admit(one, [], 9)
    one.num_computed = 8
    replica.store(one)
    assert len(replica.cached(new_sequence(*range(8)))) == 1
    assert len(replica.cached(new_sequence(*range(9)))) == 2


def test_only_what_is_final_is_stored():
    replica = new_replica()
    one = new_sequence(*range(12))
    replica.admit(one, [], 13)
    for computed, stored in ((3, 0), (4, 1), (11, 2), (12, 3)):
        one.num_computed = computed
        replica.store(one)
        assert len(one.nodes) == stored
        replica.check()


def test_who_computed_the_same_goes_on_with_the_page_of_the_tree():
    replica = new_replica()
    one, two = new_sequence(*range(9)), new_sequence(*range(9))
    for sequence in (one, two):
        replica.admit(sequence, replica.cached(sequence), 12)
    free = replica.pages.num_free
    for sequence in (one, two):
        sequence.num_computed = 8
        replica.store(sequence)
    assert one.nodes == two.nodes
    assert replica.pages.num_free == free + 2
    assert replica._table[0, :2].tolist() == replica._table[1, :2].tolist()
    replica.check()


def test_growing_evicts_prefixes_and_trimming_gives_back():
    replica = new_replica(num_pages=5)
    one = new_sequence(*range(9))
    replica.admit(one, [], 9)
    one.num_computed = 8
    replica.store(one)
    replica.remove(one)
    assert replica.num_available == 4
    assert replica.pages.num_free == 2
    two = new_sequence(*range(50, 53))
    replica.admit(two, [], 3)
    replica.grow(two, 14)
    assert replica.num_available == 0
    assert replica.tree.num_pages == 0
    with pytest.raises(PageError):
        replica.grow(two, 17)
    replica.trim(two, 7)
    assert replica.capacity(two) == 8
    assert replica.pages.num_free == 2
    assert replica._table[0].tolist() == [*two.own, *[0] * 8]
    replica.check()


def test_a_trim_keeps_what_others_may_read():
    replica = new_replica()
    one = new_sequence(*range(9))
    replica.admit(one, [], 16)
    one.num_computed = 8
    replica.store(one)
    replica.trim(one, 0)
    assert (len(one.nodes), one.own) == (2, [])
    replica.check()


def test_a_removed_sequence_leaves_its_index_and_its_prefix():
    replica = new_replica()
    sequences = [new_sequence(*range(start, start + 9)) for start in (0, 100, 200)]
    for sequence in sequences:
        replica.admit(sequence, [], 12)
        sequence.num_computed = 8
        replica.store(sequence)
    assert replica.num_free_indices == 0
    assert replica.remove(sequences[1]) == 1
    assert not replica._table[1].any()
    assert len(replica.cached(new_sequence(*range(100, 109)))) == 2
    assert sequences[1].index == -1
    replica.check()
    again = new_sequence(7, 7)
    replica.admit(again, [], 2)
    assert again.index == 1


def test_running_sequences_stand_in_order_of_arrival():
    replica = new_replica()
    first, second, third = (new_sequence(1, 2) for _ in range(3))
    for sequence in (second, third, first):
        replica.admit(sequence, [], 2)
    assert replica.running == [first, second, third]


def test_without_reuse_nothing_is_kept():
    replica = new_replica(reuse=False)
    one = new_sequence(*range(9))
    replica.admit(one, replica.cached(one), 9)
    one.num_computed = 8
    replica.store(one)
    assert replica.tree.num_pages == 0
    replica.remove(one)
    assert replica.pages.num_free == replica.pages.num_usable
    assert replica.cached(new_sequence(*range(9))) == []


def test_check_finds_what_is_wrong():
    replica = new_replica()
    one, two = new_sequence(*range(5)), new_sequence(*range(5))
    for sequence in (one, two):
        replica.admit(sequence, [], 8)
    replica._table[0, 1] = 9
    with pytest.raises(PageError, match="page table of request"):
        replica.check()
    replica._table[0, 1] = one.own[1]
    replica.check()
    replica.running.remove(two)
    with pytest.raises(PageError):
        replica.check()
