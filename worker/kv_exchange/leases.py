"""Leases of KV blocks: which worker may read which of this one's blocks, and until when."""

import dataclasses
import secrets

from tokenbus.protocol.wire import limits
from tokenbus.worker.contract.contract import CachedPrefix

MAX_LEASES = 2
LEASE_S = 10.0
"""A lease ends when nothing has been read for this long."""
UNREAD_S = 2.0
"""The same before the first read: its reader may never have heard of it."""
REMOTE_PREFILL_LEASE_S = 2.0
"""The same for a remote prefill: its reader asks several times a second, and its result is of no use to others."""


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """Blocks `first` to `end` of a prefix, readable by one other worker."""

    name: str
    prefix: CachedPrefix
    first: int
    end: int
    is_remote_prefill: bool
    """Whether this worker computes its blocks."""
    used_at: float
    limit_s: float
    """The time without a read after which it ends."""


class Leases:
    """The leases granted by a worker. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __repr__(self) -> str:
        return f"<Leases {len(self)} of {MAX_LEASES} and {limits.MAX_REMOTE_PREFILLS}>"

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, name: str) -> bool:
        return name in self._leases

    def num_free(self, *, is_remote_prefill: bool) -> int:
        """Returns how many more leases of a kind may be granted."""
        most = limits.MAX_REMOTE_PREFILLS if is_remote_prefill else MAX_LEASES
        return most - sum(one.is_remote_prefill is is_remote_prefill for one in self._leases.values())

    def grant(
        self, prefix: CachedPrefix, first: int, end: int, now: float, *, is_remote_prefill: bool = False
    ) -> Lease:
        """Grants a lease with an unguessable name."""
        assert self.num_free(is_remote_prefill=is_remote_prefill) > 0, self
        limit_s = REMOTE_PREFILL_LEASE_S if is_remote_prefill else UNREAD_S
        lease = Lease(secrets.token_hex(16), prefix, first, end, is_remote_prefill, now, limit_s)
        self._leases[lease.name] = lease
        return lease

    def use(self, name: str, now: float) -> Lease | None:
        """Returns a lease that has not ended, and extends it."""
        self.expire(now)
        lease = self._leases.get(name)
        if lease is not None:
            lease.used_at = now
            lease.limit_s = REMOTE_PREFILL_LEASE_S if lease.is_remote_prefill else LEASE_S
        return lease

    def end(self, name: str) -> None:
        """Ends a lease, if there is one with that name."""
        self._leases.pop(name, None)

    def expire(self, now: float) -> None:
        """Ends unused leases."""
        self._leases = {name: one for name, one in self._leases.items() if now - one.used_at < one.limit_s}
