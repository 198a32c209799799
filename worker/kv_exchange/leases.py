"""Leases of KV blocks: which worker may read which of this one's blocks, and until when."""

import secrets
from typing import NamedTuple

from tokenbus.protocol.wire import limits
from tokenbus.worker.contract.contract import CachedPrefix

MAX_LEASES = 2
LEASE_S = 10.0
"""A lease ends when nothing has been read for this long."""
UNREAD_S = 2.0
"""The same before the first read: its reader may never have heard of it."""
REMOTE_PREFILL_LEASE_S = 2.0
"""The same for a remote prefill: its reader asks several times a second, and its result is of no use to others."""


class Lease(NamedTuple):
    """Blocks `first` to `end` of a prefix, readable by one other worker."""

    name: str
    prefix: CachedPrefix
    first: int
    end: int
    is_remote_prefill: bool = False
    """Whether this worker computes its blocks."""


class Leases:
    """The leases granted by a worker. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._used_at: dict[str, float] = {}
        self._unread: set[str] = set()

    def __repr__(self) -> str:
        return f"<Leases {len(self)} of {MAX_LEASES} and {limits.MAX_REMOTE_PREFILLS}>"

    def __len__(self) -> int:
        return len(self._leases)

    def num_free(self, *, is_remote_prefill: bool) -> int:
        """Returns how many more leases of a kind may be granted."""
        return (limits.MAX_REMOTE_PREFILLS if is_remote_prefill else MAX_LEASES) - sum(
            one.is_remote_prefill is is_remote_prefill for one in self._leases.values()
        )

    def grant(
        self, prefix: CachedPrefix, first: int, end: int, now: float, *, is_remote_prefill: bool = False
    ) -> Lease:
        """Grants a lease with an unguessable name."""
        assert self.num_free(is_remote_prefill=is_remote_prefill) > 0, self
        lease = Lease(secrets.token_hex(16), prefix, first, end, is_remote_prefill)
        self._leases[lease.name], self._used_at[lease.name] = lease, now
        self._unread.add(lease.name)
        return lease

    def use(self, name: str, now: float) -> Lease | None:
        """Returns a lease that has not ended, and extends it."""
        self.expire(now)
        if name in self._leases:
            self._used_at[name] = now
            self._unread.discard(name)
        return self._leases.get(name)

    def end(self, name: str) -> None:
        """Ends a lease, if there is one with that name."""
        self._leases.pop(name, None)
        self._used_at.pop(name, None)
        self._unread.discard(name)

    def expire(self, now: float) -> None:
        """Ends unused leases."""
        for lease in list(self._leases.values()):
            if now - self._used_at[lease.name] >= self._limit_s(lease):
                self.end(lease.name)

    def _limit_s(self, lease: Lease) -> float:
        if lease.is_remote_prefill:
            return REMOTE_PREFILL_LEASE_S
        return UNREAD_S if lease.name in self._unread else LEASE_S

    def names(self) -> set[str]:
        return set(self._leases)
