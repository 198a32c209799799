"""Keeps track of open HTTP connections, and chooses the one to evict when a limit is reached."""

import dataclasses
import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from tokenbus.protocol.http import refusals
from tokenbus.protocol.http.refusals import HttpRefusal

_IPV6_PREFIX = 64
"""Anyone with one IPv6 address has as many as they like, so all addresses that share this prefix count as one."""


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """The maximum number of open connections."""

    total: int
    per_address: int = 0
    """0 means no limit."""


ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class ConnectionTable(Generic[ConnectionT]):
    """Open connections by client address, each either idle (waiting for a request) or busy (serving one).

    At the limit, a new connection evicts the longest idle one. So connections that never complete a request evict each
    other, and a new client always gets through unless all connections are busy."""

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
        """The number of connections without a request."""
        return len(self._idle)

    def add(self, connection: ConnectionT, address: str) -> ConnectionT | HttpRefusal | None:
        """Adds an idle connection. Returns the one that the caller must close to make room, or the refusal if
        all are busy."""
        evicted: ConnectionT | None = None
        # The address's limit comes first, so that a client with many connections evicts its own.
        if address and 0 < self.limits.per_address <= self._per_address[address]:
            evicted = next(iter(self._idle_by_address.get(address, ())), None)
            if evicted is None:
                return refusals.TOO_MANY_PER_ADDRESS
        elif len(self) >= self.limits.total:
            evicted = next(iter(self._idle), None)
            if evicted is None:
                return refusals.TOO_MANY
        if evicted is not None:
            self.remove(evicted)
        self._addresses[connection] = address
        self._per_address[address] += 1
        self.mark_idle(connection)
        return evicted

    def mark_idle(self, connection: ConnectionT) -> None:
        """Marks a connection as waiting for a request; does nothing if it is not in the table."""
        if connection in self._addresses:
            self._idle[connection] = None
            self._idle_by_address.setdefault(self._addresses[connection], {})[connection] = None

    def mark_busy(self, connection: ConnectionT) -> None:
        """Marks a connection as working on a request."""
        self._idle.pop(connection, None)  # dicts keep insertion order: the first entry has been idle longest
        address = self._addresses.get(connection)
        if address is not None and (waiting := self._idle_by_address.get(address)) is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._idle_by_address[address]

    def remove(self, connection: ConnectionT) -> None:
        """Removes a connection, if it is in the table."""
        self.mark_busy(connection)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def check_integrity(self) -> None:
        """Raises AssertionError if the indexes contradict each other."""
        assert self._per_address == Counter(self._addresses.values()), self
        assert self._idle.keys() <= self._addresses.keys(), self
        waiting_of = {(address, one) for address, those in self._idle_by_address.items() for one in those}
        assert waiting_of == {(self._addresses[one], one) for one in self._idle}, self
        assert all(self._idle_by_address.values()), self


def client_address(host: str) -> str:
    """Returns the unit by which a host's connections are counted: an IPv4 address or IPv6 network, or '' for
    neither."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
