"""The tree of prefixes against a slow reference, a set of texts that end with a page; and checks
that find wrong accounts, on which the scheduler's state machine relies."""

from array import array

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.wedlm_jax.engine.accounts import check_pages, check_replica, pages_of
from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.pages import (
    TRASH_PAGE,
    PageError,
    Pages,
    PrefixTree,
    page_key,
)
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.params import SamplingParams

SIZE = 2


def text_of(*tokens):
    return array("i", tokens)


class Reader:
    """A sequence that computes a text and puts it into the tree, as a replica would."""

    def __init__(self, tree, pages, text):
        self.tree, self.pages = tree, pages
        self.nodes = tree.match(text, len(text))
        self.reused = len(self.nodes)
        tree.hold(self.nodes)
        for start in range(SIZE * self.reused, len(text) - SIZE + 1, SIZE):
            if not pages.num_free:
                tree.evict(1)
            (page,) = pages.take(1)
            above = self.nodes[-1] if self.nodes else None
            self.nodes.append(tree.add(above, page_key(text, start, SIZE), page))

    def end(self):
        self.tree.let_go(self.nodes)


def new_tree(num_pages=20):
    pages = Pages(num_pages, SIZE)
    return PrefixTree(pages), pages


def test_the_least_recently_used_go_first_and_leaves_before_what_is_above():
    tree, pages = new_tree()
    old, new = text_of(1, 1, 2, 2), text_of(3, 3, 4, 4)
    for text in (old, new, old):
        Reader(tree, pages, text).end()
    assert tree.evict(1) == 1
    assert len(tree.match(new, 4)) == 1
    assert len(tree.match(old, 4)) == 2
    assert tree.evict(2) == 2
    assert tree.match(new, 4) == []
    assert len(tree.match(old, 4)) == 1


def test_entries_do_not_pile_up_without_pressure():
    tree, pages = new_tree()
    for turn in range(2000):
        Reader(tree, pages, text_of(1, 1, 2 + turn % 3, 2)).end()
    assert len(tree._leaves) <= 2 * tree.num_pages + 65
    assert tree.evict(99) == 4


@given(st.data())
@settings(max_examples=8 * settings.default.max_examples)
def test_against_a_set_of_texts(data):
    tree, pages = new_tree(7)
    texts = set()
    readers = []
    for _ in range(data.draw(st.integers(1, 25))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=6))
        text, held = text_of(*tokens), sum(len(reader.nodes) for reader in readers)
        if held + len(tokens) // SIZE <= pages.num_usable:
            reader = Reader(tree, pages, text)
            known = [tuple(tokens[:end]) in texts for end in range(SIZE, len(tokens) + 1, SIZE)]
            assert reader.reused == (known.index(False) if False in known else len(known))
            readers.append(reader)
        if readers and data.draw(st.booleans()):
            readers.pop(data.draw(st.integers(0, len(readers) - 1))).end()
        if data.draw(st.booleans()):
            tree.evict(data.draw(st.integers(0, 3)))
        texts = _texts(tree)
        held_pages = {node.page for reader in readers for node in reader.nodes}
        assert set(pages_of(tree)) >= held_pages
        assert tree.num_evictable == tree.num_pages - len(held_pages)
        assert pages.num_free + tree.num_pages == pages.num_usable
    for reader in readers:
        reader.end()
    assert tree.evict(99) == len(texts)
    assert pages.num_free == pages.num_usable


def _texts(tree):
    """Every text that ends with a page of the tree."""
    found = set()
    todo = [(tree._root, ())]
    while todo:
        node, above = todo.pop()
        for child in node.children.values():
            text = (*above, *memoryview(child.key).cast("i"))
            found.add(text)
            todo.append((child, text))
    return found


# --- what is wrong is found --------------------------------------------------------------


def test_free_pages_can_neither_be_shared_nor_freed_nor_taken_twice():
    pages = Pages(3, 4)
    (page,) = pages.take(1)
    pages.drop(page)
    for free in (page, TRASH_PAGE):
        with pytest.raises(PageError, match="freed twice"):
            pages.drop(free)
        with pytest.raises(PageError, match="cannot be shared"):
            pages.share(free)
    with pytest.raises(PageError, match="3 pages were requested, but only 2 are free"):
        pages.take(3)
    for size in ((1, 4), (4, 0)):
        with pytest.raises(ValueError, match="expected at least 2 pages of at least 1 token"):
            Pages(*size)


def test_check_finds_leaks_and_unknown_holders():
    pages = Pages(4, 4)
    one, two = pages.take(2)
    check_pages(pages, {one: 1, two: 1})
    with pytest.raises(AssertionError, match=f"the holders of page {two}"):
        check_pages(pages, {one: 1})
    with pytest.raises(AssertionError, match=f"the holders of page {one}"):
        check_pages(pages, {one: 2, two: 1})
    pages._free.pop()  # a page that nobody has
    with pytest.raises(AssertionError, match="either free or held"):
        check_pages(pages, {one: 1, two: 1})


def test_check_finds_wrong_tables_and_lost_sequences():
    table = np.zeros((3, 10), np.int32)
    replica = Replica(0, num_sequences=3, num_pages=12, page_size=4, table=table)
    one, two = (SequenceState(Request(n, range(5), SamplingParams()), n) for n in range(2))
    for sequence in (one, two):
        replica.admit(sequence, [], 8)
    check_replica(replica)
    table[0, 1] = 9
    with pytest.raises(AssertionError, match="the page table of 0"):
        check_replica(replica)
    table[0, 1] = one.own[1]
    replica.running.remove(two)
    with pytest.raises(AssertionError):
        check_replica(replica)
