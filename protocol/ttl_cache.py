"""A cache whose entries expire after a time, and whose oldest entries are evicted when it is full."""

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

ValueT = TypeVar("ValueT")


class _Entry(NamedTuple, Generic[ValueT]):
    value: ValueT
    weight: int
    put_at: float


class TTLCache(Generic[ValueT]):
    """Keeps each value for `ttl_s` seconds of the caller's clock, and values of at most `capacity` total weight."""

    def __init__(self, ttl_s: float, capacity: int) -> None:
        assert capacity > 0, capacity
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._weight = 0
        self._entries: OrderedDict[str, _Entry[ValueT]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<TTLCache {len(self._entries)} entries, {self._weight} of {self._capacity}>"

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: str, value: ValueT, now: float, weight: int = 1) -> None:
        """Stores a value, replacing an older one. A value heavier than the capacity is not stored."""
        self.pop(key)
        self.expire(now)
        if weight > self._capacity:
            return
        while self._weight + weight > self._capacity:
            self.pop(next(iter(self._entries)))
        self._entries[key] = _Entry(value, weight, now)
        self._weight += weight

    def get(self, key: str, now: float) -> ValueT | None:
        entry = self._entries.get(key)
        return entry.value if entry is not None and now - entry.put_at < self._ttl_s else None

    def values(self, now: float) -> list[ValueT]:
        """Returns all values that have not expired, oldest first."""
        return [entry.value for entry in self._entries.values() if now - entry.put_at < self._ttl_s]

    def pop(self, key: str) -> None:
        """Removes a value, if present."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._weight -= entry.weight

    def clear(self) -> None:
        self._entries.clear()
        self._weight = 0

    def expire(self, now: float) -> None:
        """Removes all expired values."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.put_at < self._ttl_s:
                return
            self.pop(key)

    def check_integrity(self) -> None:
        """Raises AssertionError if the weights don't add up or the entries are out of order."""
        assert self._weight == sum(entry.weight for entry in self._entries.values()) <= self._capacity
        times = [entry.put_at for entry in self._entries.values()]
        assert times == sorted(times), times
