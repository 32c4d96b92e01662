"""Where each node's KV is, and how it comes and goes between the device, the host and nothing.

Device pages that nobody holds go when others need them. What the host does not have by then is saved to it, in the
place of what the host's own policy gives up; where the host has no room, it is dropped. Ahead of time, once few pages
are free or reclaimable, what was given back longest ago is copied (Pensieve 4.3): a copied page stays usable, and is
reclaimed without work as long as the host has all that is on it.

Policy only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from mneme.replicas.forest.moves import Graft, LoadedPage, Moves, PendingMoves
from mneme.replicas.forest.nodes import DEVICE, HOST, Node, Root
from mneme.replicas.forest.owners import Owners
from mneme.replicas.forest.tier import Tier

_COPIES_PER_STEP = 64  # pages copied ahead of time, so that a step is not held up by choosing them


class OutOfPages(Exception):
    """No page is free and none is cached; the scheduler answers by suspending a sequence."""


class TieredPages:
    """Both tiers of one forest."""

    def __init__(
        self,
        device: Tier,
        host: Tier,
        owners: Owners,
        on_empty_root: Callable[[Root], None],
        *,
        copy_out_below: float,
    ) -> None:
        """`copy_out_below`: the share of device pages, free or reclaimable, under which copies are made."""
        self.device, self.host = device, host
        self._tiers = (device, host)
        self._owners = owners
        self._on_empty_root = on_empty_root
        self._moves = PendingMoves()
        self._copy_target = int(copy_out_below * device.num_pages)
        self._uncopied: dict[Node, None] = {}  # where given-back paths end, oldest first
        self._copying: Node | None = None  # how far up its path the present one is
        self.num_reclaimable = 0
        self.num_moved = {"saved": 0, "loaded": 0, "dropped": 0}  # pages

    @property
    def wants_copies(self) -> bool:
        """Whether copies should be made ahead of time, and there is something to copy."""
        is_short = len(self.device.free) + self.num_reclaimable < self._copy_target
        return is_short and self.host.num_pages > 0 and (bool(self._uncopied) or self._copying is not None)

    def is_fresh(self, page_id: int | None) -> bool:
        """Whether a device page got its present owner in the step that is being scheduled."""
        return self._moves.is_fresh(page_id)

    def hold(self, node: Node) -> None:
        node.refs += 1
        node.num_uses += 1
        if node.refs == 1:
            for tier in self._tiers:
                tier.hold(node)
            self._note(node)

    def release(self, nodes: list[Node]) -> None:
        """A path gave these nodes back, root first; what of them has no KV is gone."""
        for node in reversed(nodes):
            node.refs -= 1
            if node.refs == 0:
                for tier in self._tiers:
                    tier.release(node)
                self._note(node)
        for node in reversed(nodes):
            if not node.filled[DEVICE] and self.device.has(node) and not node.refs:
                self.device.remove(node)
            self.settle(node)
        for node in nodes:
            for tier in self._tiers:
                tier.offer_if_leaf(node)
        if self.host.num_pages:
            self._note_uncopied(nodes)

    def free(self, nodes: list[Node]) -> None:
        """The same for nodes that no forest has, because nothing is shared: nothing stays."""
        for node in nodes:
            node.refs = 0
            self.device.discard(node)

    def add(self, node: Node) -> None:
        """A page on the device for a node that is held; raises `OutOfPages`."""
        if not self.device.free:
            self.evict_one()
        page_id = self.device.free.pop()
        self.device.place(node, page_id)
        self._moves.take(page_id)
        host_page = node.pages[HOST]
        if host_page is not None:
            node.filled[DEVICE] = node.filled[HOST]
            self._moves.load(LoadedPage(host_page, page_id, node.start, node.filled[HOST]))

    def evict_one(self) -> None:
        leaf = self.device.choose()
        if leaf is None:
            raise OutOfPages
        self._save(leaf)
        self.drop(leaf, DEVICE)

    def drop(self, node: Node, index: int) -> None:
        """Forget what a tier has of a node that nobody holds."""
        cancelled = self._moves.cancel_load(node.pages[DEVICE])
        if index == DEVICE or cancelled:  # the load's target, or its source
            self.device.remove(node)
        host_page = node.pages[HOST]
        if index == HOST and host_page is not None:
            self._moves.forget_save(host_page)
            self.host.remove(node)
        if not any(node.filled):
            self.num_moved["dropped"] += 1
            for root in node.keepers or ():
                root.lose()
            node.keepers = None
        self._note(node)
        self.settle(node)

    def drop_everywhere(self, node: Node) -> None:
        """Forget what every tier has of a node, if nobody holds it."""
        for tier in self._tiers:
            if tier.has(node) and not node.refs:
                self.drop(node, tier.index)

    def graft(self, graft: Graft) -> None:
        """The KV of these pages comes from chunks, with the step that is being scheduled."""
        self._moves.graft(graft)

    def retract(self, nodes: Iterable[Node]) -> None:
        """What was said to be on these pages is not there, nor what was computed behind them; nobody holds any."""
        for node in nodes:
            self.drop_below(node)
            self.drop_everywhere(node)

    def drop_below(self, node: Node) -> None:
        """Drop everything under a node, leaves first."""
        for below in reversed(list(node.below_it())):
            self.drop_everywhere(below)

    def drop_up(self, node: Node, end: int | None = None) -> None:
        """From this node up, drop what nothing else is on; with `end`, where a prefix left it, tokens behind it are
        another's and stay."""
        while node.parent is not None and not (node.refs or node.children or node.claim is not None):
            if end is not None and node.end > end:
                return
            parent, end = node.parent, None if end is None else node.start
            self.drop_everywhere(node)
            node = parent

    def settle(self, node: Node) -> None:
        """Take what has neither KV nor anything behind it out of the forest, from this node up."""
        while node.parent is not None and not node.refs and not node.children:
            num_tokens = max(node.filled)
            if num_tokens:
                del node.tokens[num_tokens:]
                return
            node = self._detach(node, node.parent)
        if isinstance(node, Root):
            self._on_empty_root(node)

    def clear(self, index: int) -> None:
        """Drop every page of a tier that nobody holds."""
        while (leaf := self._tiers[index].choose()) is not None:
            self.drop(leaf, index)

    def forget_moves(self) -> None:
        self._moves.forget()

    def drain(self, *, can_copy: bool) -> Moves:
        """The moves of the step that was scheduled; loads go before copies that can wait (Pensieve 5.1)."""
        if can_copy and not self._moves.has_loads:
            self._copy_ahead()
        moves = self._moves.drain()
        self.num_moved["saved"] += len(moves.saves)
        self.num_moved["loaded"] += len(moves.loads)
        return moves

    def check(self, nodes: list[Node]) -> None:
        """Assert every invariant; `nodes` is the whole forest."""
        for tier in self._tiers:
            tier.check(nodes)
        assert self.num_reclaimable == sum(node.is_reclaimable for node in nodes)
        for node in nodes:
            assert node.is_reclaimable == self._is_reclaimable(node)
            if not node.refs:
                assert node.children or max(node.filled) == len(node.tokens), "tokens that lead nowhere"
                assert node.filled[DEVICE] or not self.device.has(node)
        assert all(node.parent is not None for node in self._uncopied)

    def _note_uncopied(self, nodes: list[Node]) -> None:
        """The ends of a path: its last node and, of a truncated one, the last of each kept run."""
        ends = [node for node, after in pairwise(nodes) if after.parent is not node] + nodes[-1:]
        for node in ends:
            self._uncopied.pop(node, None)
            if node.parent is not None:
                self._uncopied[node] = None

    def _copy_ahead(self) -> None:
        for _ in range(_COPIES_PER_STEP):
            node = self._next_to_copy()
            if node is None:
                return
            if not self._save(node):  # the host is full of what is in use
                self._uncopied.clear()
                self._copying = None
                return
            assert node.parent is not None
            self._copying = node.parent

    def _next_to_copy(self) -> Node | None:
        while self.wants_copies:
            node = self._copying
            if node is None:
                node = next(iter(self._uncopied))
                del self._uncopied[node]
            if node.parent is not None and not node.refs and self.device.has(node) and not node.is_reclaimable:
                return node
            self._copying = None  # above a copied one all were, and what is held is given back again
        return None

    def _save(self, node: Node) -> bool:
        """Let the host have all that the device has of an idle node; False if it has no room."""
        device_page = node.pages[DEVICE]
        assert device_page is not None
        if node.filled[HOST] == node.filled[DEVICE]:
            return True
        if not self.host.has(node):
            host_page = self._host_page()
            if host_page is None:
                return False
            self.host.place(node, host_page)
        host_page = node.pages[HOST]
        assert host_page is not None
        node.filled[HOST] = node.filled[DEVICE]
        self._moves.save(device_page, host_page)
        self._note(node)
        return True

    def _host_page(self) -> int | None:
        if not self.host.free:
            leaf = self.host.choose()
            if leaf is None:
                return None
            self.drop(leaf, HOST)
        return self.host.free.pop()

    def _detach(self, node: Node, parent: Node) -> Node:
        """Take a node without KV out of the forest; returns its former parent."""
        for tier in self._tiers:
            if tier.has(node):
                tier.remove(node)
        del parent.children[(node.start, node.tokens[0])]
        self._owners.move_up(node, parent)
        self._uncopied.pop(node, None)
        node.parent = None
        return parent

    def _note(self, node: Node) -> None:
        now = self._is_reclaimable(node)
        self.num_reclaimable += now - node.is_reclaimable
        node.is_reclaimable = now

    def _is_reclaimable(self, node: Node) -> bool:
        return not node.refs and self.device.has(node) and node.filled[HOST] >= node.filled[DEVICE]
