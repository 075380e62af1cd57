"""Which pages already hold the keys and values of a token prefix: a radix tree over page-sized chunks.

RadixAttention (arXiv 2312.07104, section 3) with one node per page. There is one tree per cache domain, so requests of
different domains can never meet. Page states and the order of eviction live in `PagePool`.

Every request holds a reference on each node from the root to its own end, also on nodes where another request's
equal page came first and its own page stayed private. References are given back deepest first. So an unheld node
has no held descendant, and stands behind all its descendants in the pool's order of last use: the oldest cached page
is always a leaf, and eviction is O(1).

Where all layers have a sliding window, a token sees the last `reach` pages before its own at most. A request holds no
more of its path, and a prefix is a hit when these are cached, whatever became of those before: a node may lose its
page and stay in the tree, as long as there is a page below it or a path ends at it.
"""

from collections.abc import Hashable, Sequence

from jaxserve.scheduler.page_need import ALL_PAGES
from jaxserve.scheduler.pages import NO_PAGE, PagePool


class Node:
    """A page of the tree, or NO_PAGE, and the chunk of tokens on the edge to it. Roots have no parent and no page."""

    __slots__ = ("children", "chunk", "domain", "num_ends", "page", "parent")

    def __init__(self, parent: "Node | None", chunk: tuple[int, ...], page: int, domain: Hashable) -> None:
        self.parent = parent
        self.chunk = chunk
        self.page = page
        self.domain = domain
        self.children: dict[tuple[int, ...], Node] = {}
        self.num_ends = 0  # requests whose path ends here


class PrefixCache:
    """Finds, extends and gives back paths. A path is the list of nodes from a root, one per full page after it.

    reach: how many pages at its end a request needs.
    """

    __slots__ = ("_nodes", "_page_size", "_pool", "_reach", "_roots")

    def __init__(self, pool: PagePool, page_size: int, reach: int = ALL_PAGES) -> None:
        self._pool = pool
        self._page_size = page_size
        self._reach = reach
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}  # page -> its node
        pool.on_evict = self._lose_page

    def longest_match(self, domain: Hashable, tokens: Sequence[int], max_tokens: int) -> list[Node]:
        """The longest path for tokens[:max_tokens], whole pages only, of which all pages that a token behind it sees
        are cached; a reference is taken on each of these."""
        node = self._roots.get(domain)
        if node is None:
            node = self._roots[domain] = Node(None, (), NO_PAGE, domain)
        path = [node]
        size, reach, num_cached, end = self._page_size, self._reach, 0, 1
        for start in range(0, max_tokens - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
            num_cached = num_cached + 1 if node.page != NO_PAGE else 0
            if num_cached >= min(len(path) - 1, reach):
                end = len(path)
        del path[end:]
        path[-1].num_ends += 1
        for page in self.pages_of(path):
            if page != NO_PAGE:
                self._pool.retain(page)
        return path

    def pages_of(self, path: list[Node]) -> list[int]:
        """The pages of a path that was just matched, NO_PAGE for those that no token behind it sees."""
        num_left = max(0, len(path) - 1 - self._reach)
        return [NO_PAGE] * num_left + [node.page for node in path[1 + num_left :]]

    def extend(self, path: list[Node], chunk: tuple[int, ...], page: int, *, beside_equal: bool) -> bool:
        """Appends the chunk, held in `page`, to the path. False: this path takes no more chunks.

        Where the chunk is cached already, its first page stays in the tree and `page` stays private. The path goes on
        over the first page if beside_equal, and so holds both; otherwise it ends. It also ends after a reset.
        """
        root, parent = path[0], path[-1]
        if self._roots.get(root.domain) is not root:
            return False
        node = parent.children.get(chunk)
        if node is None:
            node = parent.children[chunk] = Node(parent, chunk, NO_PAGE, root.domain)
        if node.page == NO_PAGE:
            node.page = page
            self._nodes[page] = node
            self._pool.keep(page)
        elif beside_equal:
            self._pool.retain(node.page)
        else:
            return False
        parent.num_ends -= 1
        node.num_ends += 1
        path.append(node)
        return True

    def release(self, path: list[Node], pages: Sequence[int]) -> None:
        """Gives back the path and the pages of a request, deepest first."""
        for index in range(len(pages) - 1, -1, -1):
            if pages[index] == NO_PAGE:
                break  # nor are there any before it
            self.release_page(path, pages, index)
        if path:
            path[-1].num_ends -= 1
            self._remove_unused(path[-1])

    def release_page(self, path: list[Node], pages: Sequence[int], index: int) -> None:
        """Gives back what a request holds of one page: its own, and the equal one of the tree."""
        page = pages[index]
        self._pool.release(page)
        if index + 1 < len(path) and path[index + 1].page != page:
            self._pool.release(path[index + 1].page)

    def reset(self) -> int:
        """Makes everything cached so far unmatchable; number of pages that became free."""
        forget = self._pool.forget
        num_freed = sum(forget(page) for page in self._nodes)
        self._nodes.clear()
        self._roots.clear()
        return num_freed

    def check_invariants(self) -> None:
        """Asserts that tree and index agree, that nothing unused stays and, where requests hold whole paths, that no
        held node stands below an unheld one."""
        stack = list(self._roots.values())
        num_nodes = 0
        while stack:
            node = stack.pop()
            for chunk, child in node.children.items():
                assert (child.parent, child.chunk) == (node, chunk)
                stack.append(child)
                if child.page == NO_PAGE:
                    assert self._reach != ALL_PAGES, "a page is lost"
                    assert child.children or child.num_ends, "a node without use"
                    continue
                assert self._nodes[child.page] is child
                held_above = node.parent is None or self._reach != ALL_PAGES or self._pool.references(node.page) > 0
                assert held_above or not self._pool.references(child.page), "a held page below an unheld one"
                num_nodes += 1
        assert num_nodes == len(self._nodes), "an indexed page is in no tree"

    def _lose_page(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert self._reach != ALL_PAGES or not node.children, "evicted a page whose continuation is still cached"
        node.page = NO_PAGE
        self._remove_unused(node)

    def _remove_unused(self, node: Node) -> None:
        """Removes the node if neither a page nor a path needs it, and those above that this leaves without use."""
        while node.page == NO_PAGE and not node.children and not node.num_ends:
            parent = node.parent
            if parent is None:
                # Cache salts make domains unbounded in number; an empty tree must not stay behind for each.
                if self._roots.get(node.domain) is node:
                    del self._roots[node.domain]
                return
            del parent.children[node.chunk]
            node = parent
