"""Leases of KV blocks: who may read which blocks of this worker, and until when; pure."""

import secrets
from typing import NamedTuple

from tokenbus.worker.contract import CachedPrefix

MAX_LEASES = 2
LEASE_S = 10.0
"""A lease ends when nothing was read for this long."""


class Lease(NamedTuple):
    """The blocks `first` to `end` of a prefix, which one other worker may read."""

    name: str
    prefix: CachedPrefix
    first: int
    end: int


class Leases:
    """The leases that a worker has granted. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._used_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Leases {len(self)} of {MAX_LEASES}>"

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, prefix: CachedPrefix, first: int, end: int, now: float) -> Lease:
        """Grants a lease, whose name nobody can guess."""
        assert len(self) < MAX_LEASES, self
        lease = Lease(secrets.token_hex(16), prefix, first, end)
        self._leases[lease.name], self._used_at[lease.name] = lease, now
        return lease

    def use(self, name: str, now: float) -> Lease | None:
        """Returns a lease that has not ended, and prolongs it."""
        self.expire(now)
        if name in self._leases:
            self._used_at[name] = now
        return self._leases.get(name)

    def end(self, name: str) -> None:
        """Ends a lease, if there is one with that name."""
        self._leases.pop(name, None)
        self._used_at.pop(name, None)

    def expire(self, now: float) -> None:
        """Ends the leases that nobody uses any more."""
        for name in [name for name, used_at in self._used_at.items() if now - used_at >= LEASE_S]:
            self.end(name)

    def names(self) -> set[str]:
        return set(self._leases)
