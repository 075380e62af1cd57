"""Which pages already hold the keys and values of a token prefix: a radix tree over page-sized chunks.

RadixAttention (arXiv 2312.07104, section 3) with one node per page. There is one tree per cache domain, so requests of
different domains can never meet. Page states and the order of eviction live in `PagePool`.

Every request holds a reference on each node from the root to its own end, also on nodes where another request came
first, still holds its page, and the request's own equal page stayed private. References are given back deepest first.
So an unheld node has no held descendant, and stands behind all its descendants in the pool's order of last use: the
oldest cached page is always a leaf, and eviction is O(1).

Layers with a sliding window see the last `reach` pages before a token's own at most. A request holds no more of its
path for them, and a prefix is a hit when these are cached, whatever became of those before: a node may lose that page
and stay in the tree. Where other layers see all tokens, a node has a page (a set of pages, one for each page table) for
either kind, and without the page of the layers that see everything the other one is of no use: it goes with it. Where
all layers have a window, a node stays as long as there is a page below it or a path ends at it.
"""

from collections.abc import Hashable, Sequence

from jaxserve.scheduler.page_need import ALL_PAGES
from jaxserve.scheduler.pages import NO_PAGE, PagePool


class Node:
    """A page for each kind of layers, NO_PAGE where it is gone, and the chunk of tokens on the edge to them.

    Roots have no parent and no pages.
    """

    __slots__ = ("children", "chunk", "domain", "num_ends", "pages", "parent")

    def __init__(self, parent: "Node | None", chunk: tuple[int, ...], pages: list[int], domain: Hashable) -> None:
        self.parent = parent
        self.chunk = chunk
        self.pages = pages
        self.domain = domain
        self.children: dict[tuple[int, ...], Node] = {}
        self.num_ends = 0  # requests whose path ends here


class PrefixCache:
    """Finds, extends and gives back paths. A path is the list of nodes from a root, one per full page after it.

    reaches: of each kind of layers, how many pages at its path's end a request needs.
    """

    __slots__ = ("_nodes", "_page_size", "_pool", "_reaches", "_roots", "_windowed")

    def __init__(self, pool: PagePool, page_size: int, reaches: tuple[int, ...] = (ALL_PAGES,)) -> None:
        self._pool = pool
        self._page_size = page_size
        self._reaches = reaches
        self._windowed = [(kind, reach) for kind, reach in enumerate(reaches) if reach != ALL_PAGES]
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}  # page -> its node
        pool.on_evict = self._lose_page

    def longest_match(self, domain: Hashable, tokens: Sequence[int], max_tokens: int) -> list[Node]:
        """The longest path for tokens[:max_tokens], whole pages only, of which all pages that a token behind it sees
        are cached; a reference is taken on each of these."""
        node = self._roots.get(domain)
        if node is None:
            node = self._roots[domain] = Node(None, (), [NO_PAGE] * len(self._reaches), domain)
        path = [node]
        size, windowed, end = self._page_size, self._windowed, 1
        num_cached = [0] * len(self._reaches)
        for start in range(0, max_tokens - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
            for kind, _ in windowed:
                num_cached[kind] = num_cached[kind] + 1 if node.pages[kind] != NO_PAGE else 0
            if all(num_cached[kind] >= min(len(path) - 1, reach) for kind, reach in windowed):
                end = len(path)
        del path[end:]
        path[-1].num_ends += 1
        for pages in self.pages_of(path):
            for page in pages:
                if page != NO_PAGE:
                    self._pool.retain(page)
        return path

    def pages_of(self, path: list[Node]) -> list[list[int]]:
        """The pages of a path that was just matched, by kind; NO_PAGE for those that no token behind it sees."""
        found = []
        for kind, reach in enumerate(self._reaches):
            num_left = max(0, len(path) - 1 - reach)
            found.append([NO_PAGE] * num_left + [node.pages[kind] for node in path[1 + num_left :]])
        return found

    def extend(self, path: list[Node], chunk: tuple[int, ...], pages: list[int], *, beside_equal: bool) -> bool:
        """Appends the chunk, held in `pages`, to the path. False: this path takes no more chunks.

        Where somebody holds an equal page in the tree, that one stays there and the path's own stays private. The path
        goes on over the first page if beside_equal, and so holds both; otherwise it ends. One that nobody holds gives
        way to the path's own. The path also ends after a reset.
        """
        root, parent = path[0], path[-1]
        if self._roots.get(root.domain) is not root:
            return False
        node = parent.children.get(chunk)
        if node is None:
            node = parent.children[chunk] = Node(parent, chunk, pages, root.domain)
            for page in pages:
                self._nodes[page] = node
                self._pool.keep(page)
        elif beside_equal or not any(self._is_held(page) for page in node.pages):
            self._join(node, pages)
        else:
            return False
        parent.num_ends -= 1
        node.num_ends += 1
        path.append(node)
        return True

    def _join(self, node: Node, pages: list[int]) -> None:
        """Puts pages into a node that is there, except beside those that somebody holds: these are held once more."""
        for kind, page in enumerate(pages):
            equal = node.pages[kind]
            if self._is_held(equal):
                self._pool.retain(equal)
                continue
            if equal != NO_PAGE:
                self._forget(equal)
            node.pages[kind] = page
            self._nodes[page] = node
            self._pool.keep(page)

    def _is_held(self, page: int) -> bool:
        return page != NO_PAGE and self._pool.references(page) > 0

    def _forget(self, page: int) -> None:
        del self._nodes[page]
        self._pool.forget(page)

    def release(self, path: list[Node], tables: Sequence[Sequence[int]]) -> None:
        """Gives back the path and the pages of a request, deepest first."""
        for kind, pages in enumerate(tables):
            for index in range(len(pages) - 1, -1, -1):
                if pages[index] == NO_PAGE:
                    break  # nor are there any before it
                self.release_page(path, kind, pages[index], index)
        if path:
            path[-1].num_ends -= 1
            self._remove_unused(path[-1])

    def leave_page(self, path: list[Node], kind: int, page: int, index: int) -> None:
        """Gives back what a request holds at one index, whose page left the window.

        It can still serve prompts that end or turn off the path within its reach. Where none has so far, it is evicted
        before all others: a long generation would else put pages that nobody will want again before whole prompts.
        """
        in_reach = path[index + 1 : index + 1 + self._reaches[kind]]
        self.release_page(path, kind, page, index, evict_first=all(len(node.children) <= 1 for node in in_reach))

    def release_page(self, path: list[Node], kind: int, page: int, index: int, *, evict_first: bool = False) -> None:
        """Gives back what a request holds at one index for one kind of layers: its own page, and the equal one of the
        tree."""
        self._pool.release(page, evict_first=evict_first)
        if index + 1 < len(path) and path[index + 1].pages[kind] != page:
            self._pool.release(path[index + 1].pages[kind], evict_first=evict_first)

    def reset(self) -> int:
        """Makes everything cached so far unmatchable; number of pages that became free."""
        forget = self._pool.forget
        num_freed = sum(forget(page) for page in self._nodes)
        self._nodes.clear()
        self._roots.clear()
        return num_freed

    def check_invariants(self) -> None:
        """Asserts that tree and index agree, that nothing unused stays and, of pages that requests hold along their
        whole paths, that no held one stands below an unheld one."""
        stack = list(self._roots.values())
        num_pages = 0
        while stack:
            node = stack.pop()
            for chunk, child in node.children.items():
                assert (child.parent, child.chunk) == (node, chunk)
                stack.append(child)
                has_page = [page != NO_PAGE for page in child.pages]
                assert any(has_page) or child.children or child.num_ends, "a node without use"
                for kind, page in enumerate(child.pages):
                    assert has_page[kind] or self._reaches[kind] != ALL_PAGES, "a page is lost"
                    assert not has_page[kind] or self._nodes[page] is child
                    is_bound = self._reaches[kind] == ALL_PAGES and node.parent is not None
                    held_above = not is_bound or self._is_held(node.pages[kind])
                    assert held_above or not self._is_held(page), "a held page below an unheld one"
                num_pages += sum(has_page)
        assert num_pages == len(self._nodes), "an indexed page is in no tree"

    def _lose_page(self, page: int) -> None:
        node = self._nodes.pop(page)
        kind = node.pages.index(page)
        node.pages[kind] = NO_PAGE
        if self._reaches[kind] == ALL_PAGES:
            assert not node.children, "evicted a page whose continuation is still cached"
            for other in node.pages:
                assert not self._is_held(other), "evicted a page under a request's path"
                if other != NO_PAGE:
                    self._forget(other)
            node.pages = [NO_PAGE] * len(node.pages)
        self._remove_unused(node)

    def _remove_unused(self, node: Node) -> None:
        """Removes the node if neither a page nor a path needs it, and those above that this leaves without use."""
        while not node.children and not node.num_ends and set(node.pages) == {NO_PAGE}:
            parent = node.parent
            if parent is None:
                # Cache salts make domains unbounded in number; an empty tree must not stay behind for each.
                if self._roots.get(node.domain) is node:
                    del self._roots[node.domain]
                return
            del parent.children[node.chunk]
            node = parent
