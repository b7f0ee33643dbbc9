from __future__ import annotations

import pytest

from wedlm_jax.engine.scheduling.pages import TRASH_PAGE, PageError, Pages


def test_every_page_but_the_trash_page_is_given_out_once():
    pages = Pages(6, 4)
    taken = [*pages.take(2), *pages.take(3)]
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert TRASH_PAGE not in taken
    assert pages.num_free == 0


def test_more_than_there_are():
    pages = Pages(4, 4)
    with pytest.raises(PageError, match="4 pages were asked for, 3 are free"):
        pages.take(4)
    assert pages.num_free == 3
    assert pages.take(0) == []


def test_a_shared_page_is_free_after_its_last_holder():
    pages = Pages(3, 4)
    (page,) = pages.take(1)
    pages.share(page)
    assert pages.holders(page) == 2
    pages.drop(page)
    assert pages.num_free == 1
    pages.drop(page)
    assert pages.num_free == 2
    assert pages.holders(page) == 0


def test_free_pages_can_neither_be_shared_nor_freed():
    pages = Pages(3, 4)
    (page,) = pages.take(1)
    pages.drop(page)
    with pytest.raises(PageError, match="freed twice"):
        pages.drop(page)
    with pytest.raises(PageError, match="cannot be shared"):
        pages.share(page)
    with pytest.raises(PageError, match="freed twice"):
        pages.drop(TRASH_PAGE)


@pytest.mark.parametrize(("tokens", "needed"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_that_tokens_need(tokens, needed):
    assert Pages(3, 4).needed(tokens) == needed


def test_check_finds_leaks_and_unknown_holders():
    pages = Pages(4, 4)
    one, two = pages.take(2)
    pages.check({one: 1, two: 1})
    with pytest.raises(PageError, match=f"page {two} has 0 holders, and 1 are counted"):
        pages.check({one: 1})
    with pytest.raises(PageError, match=f"page {one} has 2 holders, and 1 are counted"):
        pages.check({one: 2, two: 1})
    pages._free.pop()  # a page that nobody has
    with pytest.raises(PageError, match="do not make up all pages"):
        pages.check({one: 1, two: 1})


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (4, 0)])
def test_no_pages_at_all(num_pages, page_size):
    with pytest.raises(ValueError, match="hold nothing"):
        Pages(num_pages, page_size)
