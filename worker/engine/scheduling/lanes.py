"""The lanes that a scheduler borrows from a pool shared by several replicas (kv/ledger.py)."""

from typing import Protocol

from tokenbus.protocol.wire import codec, messages
from tokenbus.worker.engine.kv.ledger import KvUsage
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache


class LaneShare(Protocol):
    """A replica's part of the pool."""

    def request(self, used: int, idle: int, wanted: int) -> int:
        """Reports which lanes the replica holds and how many more it wants; returns how many it may hold."""
        ...

    def give_back(self, lanes: int) -> None:
        """Frees the memory of all lanes except these, which the replica holds, and reports it."""
        ...

    def usage(self) -> KvUsage | None:
        """Returns its part of a pool; None if it has all of its memory to itself."""
        ...


class BorrowedLanes:
    """Keeps a cache within the lanes that the pool lends.

    A step begins with `request`. Lanes to return are emptied by the step's KV ops, so the pool gets them back by
    `give_back` only once these are applied and the memory is free."""

    def __init__(self, share: LaneShare, cache: PrefixCache) -> None:
        self._share = share
        self._cache = cache
        self._told: tuple[int, int] = (0, 0)
        """The lanes taken, and the idle ones among them, as last reported to the pool."""
        self.are_awaited = False
        """Sequences wait but none runs, for lack of lanes: there is nothing to do until the pool calls."""
        self._reclaimed_idle = self._reclaimed_used = 0
        """The number of lanes emptied for other replicas since `take_reclaimed`."""

    def __repr__(self) -> str:
        return f"<BorrowedLanes of {self._share!r}>"

    def ask_again(self) -> None:
        """Records that the pool may now lend a different number of lanes."""
        self.are_awaited = False
        self._told = (-1, -1)

    @property
    def has_changed(self) -> bool:
        """Whether the pool must be asked again, or does not yet know which lanes are held."""
        return self._told != self._held

    def request(self, used: int, wanted: int) -> int:
        """Requests lanes; returns how many must be emptied."""
        lanes = self._cache.lanes
        lanes.limit = self._share.request(used, lanes.num_idle, wanted)
        return max(0, lanes.num_taken - lanes.limit)

    def empty_idle(self, count: int) -> int:
        """Empties up to `count` idle lanes; returns how many remain to be emptied."""
        emptied = min(count, self._cache.lanes.num_idle)
        for _ in range(emptied):
            self._cache.empty_idle_lane()
        self._reclaimed_idle += emptied
        return count - emptied

    def empty_preempted(self) -> None:
        """Empties the lane of a preempted sequence, if its computed blocks are cached there."""
        if self._cache.lanes.num_idle:
            self._cache.empty_idle_lane()
        self._reclaimed_used += 1

    def give_back(self) -> None:
        """Returns the memory of all emptied lanes."""
        self._share.give_back(self._cache.lanes.num_taken)
        self._told = self._held

    def take_reclaimed(self) -> tuple[int, int]:
        """Returns how many lanes, idle ones and those of preempted sequences, were emptied for other replicas since the
        last call."""
        reclaimed = (self._reclaimed_idle, self._reclaimed_used)
        self._reclaimed_idle = self._reclaimed_used = 0
        return reclaimed

    def usage(self) -> KvUsage | None:
        return self._share.usage()

    def add_to(self, load: messages.Load, max_num_seqs: int) -> messages.Load:
        """Returns a load that includes what the pool allows."""
        usage = self._share.usage()
        if usage is None:
            return load
        return codec.replace(
            load, max_running=min(max_num_seqs, max(1, usage.attainable_lanes)), kv_pool_bytes=usage.held_bytes
        )

    @property
    def _held(self) -> tuple[int, int]:
        return self._cache.lanes.num_taken, self._cache.lanes.num_idle
