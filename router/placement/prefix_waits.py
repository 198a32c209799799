"""Remembers how long requests have waited because only busy workers held what they begin with.

A prefix that only busy workers hold makes requests wait, although others are idle, which would have to compute it.
Whether a second copy pays depends on how often the prefix is wanted again, which nobody knows. So copies are bought
like skis that could also be rented: once the requests for a prefix have waited as long as a copy takes to compute.
Whatever comes next, they have then lost at most twice the time of the best choice in hindsight."""

from collections import OrderedDict

MAX_PREFIXES = 65_536
"""Beyond that the one whose requests waited longest ago is forgotten."""


class PrefixWaits:
    """Seconds waited for each prefix, less the time its further copies took, by the hash of its last block."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[int, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<PrefixWaits of {len(self)} prefixes>"

    def __len__(self) -> int:
        return len(self._seconds)

    def get(self, last_hash: int) -> float:
        return self._seconds.get(last_hash, 0.0)

    def put(self, last_hash: int, seconds: float) -> None:
        self._seconds[last_hash] = seconds
        self._seconds.move_to_end(last_hash)
        if len(self._seconds) > MAX_PREFIXES:
            self._seconds.popitem(last=False)
