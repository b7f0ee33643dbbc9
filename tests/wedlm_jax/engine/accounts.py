"""Checks the bookkeeping of requests, sequences and pages against who really holds what."""

from collections import Counter

from wedlm_jax.engine.pages import TRASH_PAGE


def check_accounts(scheduler):
    for replica in scheduler._replicas:
        check_replica(replica)
    waits = {sequence.number for sequence in scheduler._waiting}
    runs = {sequence.number for sequence in scheduler._running}
    assert not waits & runs
    assert waits | runs == scheduler._sequences.keys(), "a request is lost"


def check_replica(replica):
    shared = pages_of(replica.tree)
    assert len(set(shared)) == len(shared) == replica.tree.num_pages
    holders, own = Counter(shared), Counter()
    for sequence in replica.running:
        pages = [node.page for node in sequence.nodes]
        holders.update(pages)
        own.update(sequence.own)
        row = replica._row(sequence).tolist()
        used = [*pages, *sequence.own]
        assert row == used + [0] * (len(row) - len(used)), f"the page table of {sequence.number}"
    assert set(own.values()) <= {1}
    assert not own.keys() & holders.keys(), "a page of one sequence is held by another"
    check_pages(replica.pages, holders + own)
    alone = sum(replica.pages.holders(page) == 1 for page in shared)
    assert alone == replica.tree.num_evictable
    indices = [*replica._free_indices, *(sequence.index for sequence in replica.running)]
    first, count = replica._first, len(replica._table)
    assert sorted(indices) == list(range(first, first + count)), "free or taken, exactly once"


def check_pages(pages, holders):
    """``holders``: the number of holders of each page that has any."""
    for page in range(pages.num_pages):
        assert pages.holders(page) == holders.get(page, 0), f"the holders of page {page}"
    free = [page for page in range(TRASH_PAGE + 1, pages.num_pages) if not holders.get(page)]
    assert sorted(pages._free) == free, "either free or held, exactly once"


def pages_of(tree):
    """Lists the pages that the prefix tree holds."""
    found, nodes = [], list(tree._root.children.values())
    while nodes:
        node = nodes.pop()
        found.append(node.page)
        nodes.extend(node.children.values())
    return found
