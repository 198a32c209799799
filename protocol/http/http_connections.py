"""Which HTTP connections are open, from which addresses, and which gives way when there are too many; pure."""

import dataclasses
import enum
import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_IPV6_PREFIX = 64
"""Who has one address of IPv6 has as many as they like: all that share so many bits count as one."""


class Full(enum.StrEnum):
    """Why a connection is refused."""

    ADDRESS = "too_many_connections"
    """Its address has as many requests open as it may have connections."""
    ALL = "overloaded"
    """As many requests are open as there may be connections."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How many connections may be open."""

    total: int
    per_address: int = 0
    """0 is no bound."""


ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class Connections(Generic[ConnectionT]):
    """A connection waits for a request, or works on one. One that waits gives way to one that comes, the one that has
    waited longest first; so those that never finish a request push out each other, and a new one is always heard."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._address_of: dict[ConnectionT, str] = {}
        self._per_address: Counter[str] = Counter()
        self._waiting: dict[ConnectionT, None] = {}
        self._waiting_of: dict[str, dict[ConnectionT, None]] = {}

    def __repr__(self) -> str:
        return f"<Connections {len(self)} of {self.bounds.total}, {self.num_waiting} wait>"

    def __len__(self) -> int:
        return len(self._address_of)

    @property
    def num_waiting(self) -> int:
        """Those that have no request."""
        return len(self._waiting)

    def come(self, connection: ConnectionT, address: str) -> ConnectionT | Full | None:
        """Takes in a connection, which waits. Returns the one that must be closed for it, or why it can't be taken."""
        leaving: ConnectionT | None = None
        if address and 0 < self.bounds.per_address <= self._per_address[address]:
            leaving = next(iter(self._waiting_of.get(address, ())), None)
            if leaving is None:
                return Full.ADDRESS
        elif len(self) >= self.bounds.total:
            leaving = next(iter(self._waiting), None)
            if leaving is None:
                return Full.ALL
        if leaving is not None:
            self.leave(leaving)
        self._address_of[connection] = address
        self._per_address[address] += 1
        self.wait(connection)
        return leaving

    def wait(self, connection: ConnectionT) -> None:
        """It waits for a request from now on."""
        if connection in self._address_of:
            self._waiting[connection] = None
            self._waiting_of.setdefault(self._address_of[connection], {})[connection] = None

    def work(self, connection: ConnectionT) -> None:
        """It has a request."""
        self._waiting.pop(connection, None)
        address = self._address_of.get(connection)
        if address is not None and (waiting := self._waiting_of.get(address)) is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting_of[address]

    def leave(self, connection: ConnectionT) -> None:
        """It is open no more. May be said twice."""
        self.work(connection)
        address = self._address_of.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def check_integrity(self) -> None:
        """Raises AssertionError where the books disagree."""
        assert self._per_address == Counter(self._address_of.values()), self
        assert self._waiting.keys() <= self._address_of.keys(), self
        waiting_of = {(address, one) for address, those in self._waiting_of.items() for one in those}
        assert waiting_of == {(self._address_of[one], one) for one in self._waiting}, self
        assert all(self._waiting_of.values()), self


def address_of(host: str) -> str:
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
