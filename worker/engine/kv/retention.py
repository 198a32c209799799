"""Retention: the cached prefixes that clients have asked to keep, and whose they are.

Keeping changes only the order of eviction: kept prefixes go last, but they do go if nothing else is left. So keeping
never delays a request. It is bounded, in the unit in which the cache counts (blocks, or bytes of checkpoints):

    capacity    |---- kept: at most a half ----|---------------- all else ----------------|
                |-- a tenant's: its share --|

Whatever exceeds a tenant's share, or half the capacity for all, is released: the least recently used first, and each
path from its end.

A session is a name that a tenant's client gives to a conversation. Its own nodes are those that no other session and no
request without a session has used; only these are evicted first when the session ends.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

_TOTAL_SHARE = 0.5
_CHECK_INTERVAL_S = 1.0
_SHARED = ("", "")
"""Owns what several sessions, or requests without a session, have used. No session has this key, since tenants have
names."""

SessionKey = tuple[str, str]
"""A tenant, and the name of one of its sessions."""


class CacheHint(NamedTuple):
    """A request's preferences for what it leaves in the cache."""

    session: SessionKey | None = None
    ttl_s: float | None = None
    """The time to keep it after the request has ended; 0: evicted first. None: no preference."""


NO_HINT = CacheHint()


class RetentionLimits(NamedTuple):
    """The limits on what clients may keep."""

    tenant_share: float = 0.25
    """The share of the cache that a tenant may keep; 0 turns keeping off."""
    max_ttl_s: float = 86_400.0
    """Longer times are cut to this."""


DEFAULT_LIMITS = RetentionLimits()


class CacheNode(Protocol):
    """A block or a checkpoint, which is kept as a whole."""

    kept_until: float
    owner: SessionKey | None


NodeT = TypeVar("NodeT", bound=CacheNode)


class Retention(Generic[NodeT]):
    """The kept nodes of one cache, and the nodes of each session.

    `size_of` says how much of `capacity` a node takes. `requeue` is called with a node whose place in the eviction
    order has changed."""

    def __init__(
        self,
        capacity: int,
        limits: RetentionLimits,
        size_of: Callable[[NodeT], int],
        requeue: Callable[[NodeT], None],
    ) -> None:
        self._max_total = int(capacity * _TOTAL_SHARE)
        self._max_of_tenant = min(self._max_total, int(capacity * limits.tenant_share))
        self._size_of = size_of
        self._requeue = requeue
        self._max_ttl_s = limits.max_ttl_s
        self._kept: dict[str, OrderedDict[NodeT, int]] = {}
        """The kept nodes of each tenant with their sizes, the first to be released first."""
        self._sizes: Counter[str] = Counter()
        self._tenants: dict[NodeT, str] = {}
        """The tenant for whom each node is kept."""
        self._owned: dict[SessionKey, dict[NodeT, None]] = {}
        self._now = 0.0
        self._check_at = float("inf")

    def __repr__(self) -> str:
        return f"<Retention of {len(self)} nodes, {len(self._owned)} sessions>"

    def __len__(self) -> int:
        return len(self._tenants)

    def mark(self, nodes: Iterable[NodeT], session: SessionKey | None) -> None:
        """Notes that a request, of a session or of none, has used nodes."""
        owner = session or _SHARED
        for node in nodes:
            if node.owner == owner or node.owner == _SHARED:
                continue
            is_new = node.owner is None
            self._disown(node)
            node.owner = owner if is_new else _SHARED
            if node.owner != _SHARED:
                self._owned.setdefault(node.owner, {})[node] = None

    def of_session(self, session: SessionKey) -> list[NodeT]:
        """Returns the nodes that only this session has used, in order of first use."""
        return list(self._owned.get(session, ()))

    def keep(self, tenant: str, path: Iterable[NodeT], ttl_s: float) -> None:
        """Keeps the nodes of a path, given in the order of release, for `ttl_s` from now on."""
        nodes = list(path)
        if not nodes or not self._max_of_tenant:
            return
        until = self._now + min(ttl_s, self._max_ttl_s)
        kept = self._kept.setdefault(tenant, OrderedDict())
        for node in nodes:
            if node not in kept:
                self._tenants[node] = tenant
                kept[node] = self._size_of(node)
                self._sizes[tenant] += kept[node]
            kept.move_to_end(node)
            node.kept_until = max(node.kept_until, until)
            self._requeue(node)
        self._check_at = min(self._check_at, until)
        while self._sizes[tenant] > self._max_of_tenant:
            self._release_and_requeue(next(iter(kept)))
        while self._sizes.total() > self._max_total:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._release_and_requeue(next(iter(self._kept[largest])))

    def release(self, node: NodeT) -> None:
        """Stops keeping a node, which the caller then reorders; does nothing for a node that is not kept."""
        tenant = self._tenants.pop(node, None)
        if tenant is None:
            return
        kept = self._kept[tenant]
        self._sizes[tenant] -= kept.pop(node)
        node.kept_until = 0.0
        if not kept:
            del self._kept[tenant], self._sizes[tenant]

    def forget(self, node: NodeT) -> None:
        """Notes that a node is gone."""
        self.release(node)
        self._disown(node)

    def expire(self, now: float) -> None:
        """Releases everything whose time to be kept is over; checks at most once a second."""
        self._now = now
        if now < self._check_at:
            return
        for kept in list(self._kept.values()):
            for node in [node for node in kept if node.kept_until <= now]:
                self._release_and_requeue(node)
        earliest = min((node.kept_until for node in self._tenants), default=float("inf"))
        self._check_at = max(earliest, now + _CHECK_INTERVAL_S)

    def check_integrity(self, nodes: Iterable[NodeT]) -> None:
        """Asserts that it holds exactly the nodes marked as kept, within its limits."""
        nodes = set(nodes)
        kept = {node: tenant for tenant, of_tenant in self._kept.items() for node in of_tenant}
        assert kept == self._tenants, kept
        assert set(kept) == {node for node in nodes if node.kept_until}, kept
        assert {tenant: sum(sizes.values()) for tenant, sizes in self._kept.items()} == self._sizes, self._sizes
        assert all(size <= self._max_of_tenant for size in self._sizes.values()), self._sizes
        assert self._sizes.total() <= self._max_total, self._sizes
        owned = {node: session for session, of_session in self._owned.items() for node in of_session}
        assert owned == {node: node.owner for node in nodes if node.owner not in (None, _SHARED)}, owned
        assert all(self._owned.values()), self._owned

    def _release_and_requeue(self, node: NodeT) -> None:
        self.release(node)
        self._requeue(node)

    def _disown(self, node: NodeT) -> None:
        if node.owner is None or node.owner == _SHARED:
            return
        owned = self._owned[node.owner]
        del owned[node]
        if not owned:
            del self._owned[node.owner]
        node.owner = None
