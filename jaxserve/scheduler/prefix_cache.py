"""Which pages already hold the keys and values of a token prefix: a radix tree over page-sized chunks.

RadixAttention (arXiv 2312.07104, section 3) with one node per page. There is one tree per cache domain, so requests of
different domains can never meet. Page states and the order of eviction live in `PagePool`.

Every request holds a reference on each node from the root to its own end, also on nodes where another request's
equal page came first and its own page stayed private. References are given back deepest first. So an unheld node
has no held descendant, and stands behind all its descendants in the pool's order of last use: the oldest cached page
is always a leaf, and eviction is O(1).
"""

from collections.abc import Hashable, Sequence

from jaxserve.scheduler.pages import PagePool


class Node:
    """A page of the tree and the chunk of tokens on the edge to it. Roots have no parent and page -1."""

    __slots__ = ("children", "chunk", "domain", "num_holders", "page", "parent")

    def __init__(self, parent: "Node | None", chunk: tuple[int, ...], page: int, domain: Hashable) -> None:
        self.parent = parent
        self.chunk = chunk
        self.page = page
        self.domain = domain
        self.children: dict[tuple[int, ...], Node] = {}
        self.num_holders = 0  # requests whose path starts here; counted at roots only


class PrefixCache:
    """Finds, extends and gives back paths. A path is the list of nodes from a root, one per full page after it."""

    __slots__ = ("_nodes", "_page_size", "_pool", "_roots")

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}  # page -> its node
        pool.on_evict = self._remove_leaf

    def longest_match(self, domain: Hashable, tokens: Sequence[int], max_tokens: int) -> list[Node]:
        """The longest cached path for tokens[:max_tokens], whole pages only; a reference is taken on each page."""
        node = self._roots.get(domain)
        if node is None:
            node = self._roots[domain] = Node(None, (), -1, domain)
        node.num_holders += 1
        path = [node]
        size = self._page_size
        for start in range(0, max_tokens - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            self._pool.retain(child.page)
            path.append(child)
            node = child
        return path

    def extend(self, path: list[Node], chunk: tuple[int, ...], page: int, *, beside_equal: bool) -> bool:
        """Appends the chunk, held in `page`, to the path. False: this path takes no more chunks.

        Where the chunk is known already, its first page stays in the tree and `page` stays private. The path goes on
        over the first page if beside_equal, and so holds both; otherwise it ends. It also ends after a reset.
        """
        root, parent = path[0], path[-1]
        if self._roots.get(root.domain) is not root:
            return False
        node = parent.children.get(chunk)
        if node is None:
            node = Node(parent, chunk, page, root.domain)
            parent.children[chunk] = node
            self._nodes[page] = node
            self._pool.keep(page)
        elif beside_equal:
            self._pool.retain(node.page)
        else:
            return False
        path.append(node)
        return True

    def release(self, path: list[Node], pages: Sequence[int]) -> None:
        """Gives back the path and the pages of a request, deepest first."""
        release = self._pool.release
        num_nodes = len(path) - 1
        for index in range(len(pages) - 1, -1, -1):
            page = pages[index]
            release(page)
            if index < num_nodes and path[index + 1].page != page:
                release(path[index + 1].page)
        if path:
            path[0].num_holders -= 1
            self._remove_unused_root(path[0])

    def reset(self) -> int:
        """Makes everything cached so far unmatchable; number of pages that became free."""
        forget = self._pool.forget
        num_freed = sum(forget(page) for page in self._nodes)
        self._nodes.clear()
        self._roots.clear()
        return num_freed

    def check_invariants(self) -> None:
        """Asserts that tree and index agree and that no held node stands below an unheld one."""
        stack = list(self._roots.values())
        num_nodes = 0
        while stack:
            node = stack.pop()
            for chunk, child in node.children.items():
                assert (child.parent, child.chunk, self._nodes[child.page]) == (node, chunk, child)
                held_above = node.parent is None or self._pool.references(node.page) > 0
                assert held_above or not self._pool.references(child.page), "a held page below an unheld one"
                num_nodes += 1
                stack.append(child)
        assert num_nodes == len(self._nodes), "an indexed page is in no tree"

    def _remove_leaf(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert not node.children, "evicted a page whose continuation is still cached"
        assert node.parent is not None
        del node.parent.children[node.chunk]
        if node.parent.parent is None:
            self._remove_unused_root(node.parent)

    def _remove_unused_root(self, root: Node) -> None:
        # Cache salts make domains unbounded in number; an empty tree must not stay behind for each.
        if not root.children and not root.num_holders and self._roots.get(root.domain) is root:
            del self._roots[root.domain]
