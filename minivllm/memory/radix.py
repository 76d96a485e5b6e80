"""Chapter 5: the other way to find a prefix: a radix tree whose edges are runs of pages.

    block_size 2      prompts 1 2 3 4 5 6  and  1 2 3 4 9 9         and then 1 2 7 7

                      root                                          root
                       | (1 2) (3 4)                                 | (1 2)
                  +----+----+                                   +----+----+
            (5 6) |         | (9 9)                       (3 4) |         | (7 7)
                                                           +----+----+
                                                     (5 6) |         | (9 9)

A hash knows single blocks; a tree knows which follows which. So it shows at a glance what is shared, and it
evicts leaves only, page by page from the end: no block is kept that nobody can reach. It costs a split
where two prompts part. A page is a whole block; block_size 1 gives the token granularity of SGLang's
RadixAttention, where the idea comes from (Zheng et al., 2024, arXiv 2312.07104).

Each page has one place. A second block with an equal page stays out, and so does what that sequence
computes after it: who holds a page of the tree holds all pages above it. From this and from blocks being
freed tail first it follows that the page that is free for longest is the end of a leaf. So the pool's queue
is the order of eviction here too, and needs no search for a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Page: TypeAlias = tuple[str | None, tuple[int, ...]]  # cache_salt (in a first page), tokens


@dataclass(eq=False)
class Node:
    """A run of pages and their blocks; start: pages above it. Children by their first page."""

    parent: Node | None
    start: int
    pages: list[Page]
    block_ids: list[int]
    children: dict[Page, Node] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Pages down to its last."""
        return self.start + len(self.pages)


class RadixIndex:
    """Blocks by the path of pages that leads to them. Each salt has a tree of its own under the root.

    Invariant: who holds a block of the tree holds those above it. No node but the root is empty.
    """

    def __init__(self) -> None:
        self.root = Node(None, 0, [], [])
        self._node: dict[int, Node] = {}  # block -> the node that it stands in

    def make_key(self, parent: Page | None, page: Sequence[int], cache_salt: str | None) -> Page:
        """A page is its own name."""
        return (cache_salt if parent is None else None, tuple(page))

    def find(self, keys: Sequence[Page]) -> list[int]:
        """The blocks on the way down, as far as the pages agree."""
        found: list[int] = []
        node = self.root
        for i, page in enumerate(keys):
            if i == node.end:
                if page not in node.children:
                    break
                node = node.children[page]
            elif node.pages[i - node.start] != page:
                break
            found.append(node.block_ids[i - node.start])
        return found

    def insert(self, keys: Sequence[Page], block_ids: Sequence[int], i: int) -> None:
        """Put page i below page i - 1 of the same sequence, unless that one or an equal of this has no place.

        Takes O(1), and where the page leaves a run in its middle, O(its length) for the split.
        """
        node = self.root if i == 0 else self._node.get(block_ids[i - 1])
        if node is None:
            return  # the page above is a twin
        if i < node.end:
            if node.pages[i - node.start] == keys[i]:
                return  # a twin, or this very block, which a fork shares
            node = self._split(node, i)
        elif keys[i] in node.children:
            return
        if node.children or node is self.root:
            node.children[keys[i]] = Node(node, i, [], [])
            node = node.children[keys[i]]
        node.pages.append(keys[i])
        node.block_ids.append(block_ids[i])
        self._node[block_ids[i]] = node

    def remove(self, block_id: int) -> None:
        """Cut off the last page of a leaf."""
        node = self._node.pop(block_id)
        assert not node.children, "a page goes before one below it"
        last = node.block_ids.pop()
        assert last == block_id, "a page goes before one behind it"
        page = node.pages.pop()
        if not node.pages and node.parent is not None:
            del node.parent.children[page]

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._node

    def nodes(self) -> Iterator[Node]:
        """All nodes, each before those below it."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def check_integrity(self, ref_count: Sequence[int]) -> None:
        """Raise AssertionError unless tree and blocks agree, and nobody holds a page without those above."""
        found: dict[int, Node] = {}
        for node in self.nodes():
            assert len(node.pages) == len(node.block_ids), "pages and blocks disagree"
            assert bool(node.pages) == (node is not self.root), "a node is empty"
            assert all(child.parent is node and child.start == node.end for child in node.children.values())
            assert all(page == child.pages[0] for page, child in node.children.items())
            above = node.parent.block_ids[-1:] if node.parent else []
            counts = [ref_count[block] for block in [*above, *node.block_ids]]
            assert counts == sorted(counts, reverse=True), "a page is held without the one above it"
            found.update(dict.fromkeys(node.block_ids, node))
        assert found == self._node, "tree and blocks disagree"

    def _split(self, node: Node, i: int) -> Node:
        """Cut a run before page i; returns the upper half, which has the lower as its child."""
        at = i - node.start
        assert node.parent is not None
        upper = Node(node.parent, node.start, node.pages[:at], node.block_ids[:at], {node.pages[at]: node})
        node.parent.children[node.pages[0]] = upper
        node.parent, node.start = upper, i
        del node.pages[:at], node.block_ids[:at]
        self._node.update(dict.fromkeys(upper.block_ids, upper))
        return upper
