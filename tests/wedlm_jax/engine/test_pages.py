"""Which prefixes leave the cache first. That no page is lost or shared by mistake,
test_scheduler_machine.py tests."""

from array import array

import pytest

from wedlm_jax.engine.pages import Pages, PrefixTree, page_key

SIZE = 2


def text_of(*tokens):
    return array("i", tokens)


def read(tree, pages, text):
    """A sequence computes a text, puts it into the tree as a replica would, and leaves."""
    nodes = tree.match(text, len(text))
    tree.hold(nodes)
    for start in range(SIZE * len(nodes), len(text) - SIZE + 1, SIZE):
        (page,) = pages.take(1)
        nodes.append(tree.add(nodes[-1] if nodes else None, page_key(text, start, SIZE), page))
    tree.let_go(nodes)


def new_tree():
    pages = Pages(20, SIZE)
    return PrefixTree(pages), pages


def test_the_least_recently_used_go_first_and_leaves_before_what_is_above():
    tree, pages = new_tree()
    old, new = text_of(1, 1, 2, 2), text_of(3, 3, 4, 4)
    for text in (old, new, old):
        read(tree, pages, text)
    assert tree.evict(1) == 1
    assert len(tree.match(new, 4)) == 1
    assert len(tree.match(old, 4)) == 2
    assert tree.evict(2) == 2
    assert tree.match(new, 4) == []
    assert len(tree.match(old, 4)) == 1


def test_entries_do_not_pile_up_without_pressure():
    tree, pages = new_tree()
    for turn in range(2000):
        read(tree, pages, text_of(1, 1, 2 + turn % 3, 2))
    assert len(tree._leaves) <= 2 * tree.num_pages + 65
    assert tree.evict(99) == 4


def test_too_few_pages_are_refused():
    for size in ((1, 4), (4, 0)):
        with pytest.raises(ValueError, match="expected at least 2 pages of at least 1 token"):
            Pages(*size)
