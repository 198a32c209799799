"""Which HTTP connections are open, from which addresses, and which gives way when there are too many; pure."""

import dataclasses
import enum
import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_IPV6_PREFIX = 64
"""Who has one address of IPv6 has as many as they like: all that share so many bits count as one."""


class LimitReached(enum.StrEnum):
    """Why a connection is refused."""

    PER_ADDRESS = "too_many_connections"
    """Its address has as many requests open as it may have connections."""
    TOTAL = "overloaded"
    """As many requests are open as there may be connections."""


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """How many connections may be open."""

    total: int
    per_address: int = 0
    """0 is no bound."""


ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class ConnectionTable(Generic[ConnectionT]):
    """A connection waits for a request, or works on one. One that waits gives way to one that comes, the one that has
    waited longest first; so those that never finish a request push out each other, and a new one is always heard."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._addresses: dict[ConnectionT, str] = {}
        self._per_address: Counter[str] = Counter()
        self._idle: dict[ConnectionT, None] = {}
        self._idle_by_address: dict[str, dict[ConnectionT, None]] = {}

    def __repr__(self) -> str:
        return f"<ConnectionTable {len(self)} of {self.limits.total}, {self.num_idle} wait>"

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def num_idle(self) -> int:
        """Those that have no request."""
        return len(self._idle)

    def add(self, connection: ConnectionT, address: str) -> ConnectionT | LimitReached | None:
        """Takes in a connection, which waits. Returns the one that must be closed for it, or why it can't be taken."""
        leaving: ConnectionT | None = None
        if address and 0 < self.limits.per_address <= self._per_address[address]:
            leaving = next(iter(self._idle_by_address.get(address, ())), None)
            if leaving is None:
                return LimitReached.PER_ADDRESS
        elif len(self) >= self.limits.total:
            leaving = next(iter(self._idle), None)
            if leaving is None:
                return LimitReached.TOTAL
        if leaving is not None:
            self.remove(leaving)
        self._addresses[connection] = address
        self._per_address[address] += 1
        self.mark_idle(connection)
        return leaving

    def mark_idle(self, connection: ConnectionT) -> None:
        """It waits for a request from now on."""
        if connection in self._addresses:
            self._idle[connection] = None
            self._idle_by_address.setdefault(self._addresses[connection], {})[connection] = None

    def mark_busy(self, connection: ConnectionT) -> None:
        """It has a request."""
        self._idle.pop(connection, None)
        address = self._addresses.get(connection)
        if address is not None and (waiting := self._idle_by_address.get(address)) is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._idle_by_address[address]

    def remove(self, connection: ConnectionT) -> None:
        """It is open no more. May be said twice."""
        self.mark_busy(connection)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def check_integrity(self) -> None:
        """Raises AssertionError where the books disagree."""
        assert self._per_address == Counter(self._addresses.values()), self
        assert self._idle.keys() <= self._addresses.keys(), self
        waiting_of = {(address, one) for address, those in self._idle_by_address.items() for one in those}
        assert waiting_of == {(self._addresses[one], one) for one in self._idle}, self
        assert all(self._idle_by_address.values()), self


def client_address(host: str) -> str:
    """What counts as one address: one of IPv4, or a network of IPv6; nothing for what is no address of IP."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
