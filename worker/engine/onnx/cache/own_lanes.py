"""Keeps the tokens that a replica's rows hold within its memory.

The block pool counts a prefix that several lanes share once, but here each lane has its own copy, and a lane that
shrinks or moves leaves tokens for a moment. So there is memory for one context beyond the pool's tokens, and lanes are
given up, idle ones first, when the rows hold more than the pool may count:

    |------------- kv_tokens -------------|---- a context ----|
    |== running and cached prefixes ======:== copies of them =|
                                          ^ idle lanes go     ^ less the longest lane, which may be copied: running
                                                                lanes go too
"""

from tokenbus.worker.engine.kv.ledger import KvUsage
from tokenbus.worker.engine.onnx.cache.kv_cache import KvCache
from tokenbus.worker.engine.onnx.cache.lanes import LaneLengths


class OwnLanes:
    """The lane share of a replica whose memory is its own."""

    def __init__(self, cache: KvCache, lanes: LaneLengths, kv_tokens: int, context_length: int) -> None:
        self._cache = cache
        self._lanes = lanes
        self._kv_tokens = kv_tokens
        self._all_tokens = kv_tokens + context_length

    def __repr__(self) -> str:
        return f"<OwnLanes, {self._cache.held_tokens} of {self._all_tokens} tokens>"

    def request(self, used: int, idle: int, wanted: int) -> int:
        """Returns how many lanes may be held in the next step: one fewer than now while they hold too much, else as
        many more as may each copy the longest."""
        held, longest = self._cache.held_tokens, max(self._lanes.lengths)
        if (idle and held > self._kv_tokens) or (used > 1 and held + longest > self._all_tokens):
            return max(1, used + idle - 1)
        left = self._kv_tokens - held
        more = max(left // longest, left > 0) if longest else wanted
        return min(used + idle + more, len(self._lanes.lengths))

    def give_back(self, lanes: int) -> None:
        if 2 * self._cache.held_tokens > self._kv_tokens:
            self._cache.release_lanes()

    def usage(self) -> KvUsage | None:
        return None
