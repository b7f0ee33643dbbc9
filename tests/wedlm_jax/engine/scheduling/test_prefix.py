"""The tree against a slow reference: a set of texts that end with a page."""

from array import array

import hypothesis.strategies as st
from hypothesis import given, settings

from wedlm_jax.engine.scheduling.pages import Pages, PrefixTree, page_key

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


def test_full_pages_within_the_limit_match():
    tree, pages = new_tree()
    reader = Reader(tree, pages, text_of(1, 2, 3, 4, 5))
    assert len(reader.nodes) == 2
    assert tree.match(text_of(1, 2, 3, 4, 5, 6), 6) == reader.nodes
    assert tree.match(text_of(1, 2, 3, 4), 4) == reader.nodes
    assert tree.match(text_of(1, 2, 3, 4), 3) == reader.nodes[:1]
    assert tree.match(text_of(1, 2, 3, 9), 4) == reader.nodes[:1]
    assert tree.match(text_of(9, 2, 3, 4), 4) == []
    assert tree.match(text_of(3, 4), 2) == []  # the same page behind another text


def test_the_same_text_takes_one_page():
    tree, pages = new_tree()
    text = text_of(1, 2, 3, 4)
    one = Reader(tree, pages, text)
    (page,) = pages.take(1)
    node = tree.add(None, page_key(text, 0, SIZE), page)
    assert node is one.nodes[0]
    assert pages.holders(page) == 0
    assert pages.holders(node.page) == 3  # the tree and two sequences
    assert tree.num_pages == 2


def test_what_a_sequence_holds_is_never_evicted():
    tree, pages = new_tree()
    one, two = (Reader(tree, pages, text_of(1, 2, *tail)) for tail in ((3, 4), (5, 6)))
    one.end()
    assert tree.num_evictable == 1
    assert tree.evict(9) == 1
    assert tree.match(text_of(1, 2, 5, 6), 4) == two.nodes
    assert tree.match(text_of(1, 2, 3, 4), 4) == two.nodes[:1]
    two.end()
    assert tree.num_evictable == 2
    assert tree.evict(9) == 2
    assert pages.num_free == pages.num_usable


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
        assert set(tree.held()) >= held_pages
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
