"""Folds the entries of routers that are gone into one for each name, in steps that can stop anywhere. Pure.

The folded entry first *names* the others, with what they say, as pending: whoever adds up counts an entry that is still
there, or else what the folded one says of it. Then they are removed, each unless it was written again meanwhile. A
later fold, by when nobody adds up an earlier state of the bucket, makes them part of the sum, which keeps their names:
so a router that did not learn whether its write was successful can tell that it was."""

import datetime
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenbus.protocol.access import usage
from tokenbus.protocol.access.usage import FoldedShard, UsageName

QUIET_S = 3_600.0
"""An entry that has not been written for so long is final, if its day is over; its router may still be there."""
DAYS = 8
"""Days before today whose entries are folded; earlier ones were."""
_MAX_VALUE_BYTES = 48 * 1024
_ROOM_BYTES = 64
"""The size of a shard in the folded entry, in addition to what it says and its name."""


class StoredCounts(NamedTuple):
    """An entry of the bucket."""

    key: str
    value: bytes
    revision: int
    written_at: float
    """Unix time, by the broker's clock."""


class Fold(NamedTuple):
    """One step for one name."""

    key: str
    """That of the folded entry."""
    value: bytes
    revision: int
    """That it must have now; 0: it must not be there."""
    removed: list[tuple[str, int]]
    """The keys and revisions of entries to remove afterwards."""


def days_to_fold(today: str) -> list[str]:
    """Returns the days whose entries are folded on a day."""
    return [(usage.to_day(today) - datetime.timedelta(days=back)).isoformat() for back in range(1, DAYS + 1)]


def plan_folds(entries: Iterable[StoredCounts], now: float, quiet_s: float = QUIET_S) -> Iterator[Fold]:
    """Yields what is to be done for the entries of a day that is over. `now` is Unix time."""
    by_name: dict[UsageName, dict[str, StoredCounts]] = {}
    for entry in entries:
        try:
            name, shard = usage.parse_key(entry.key)
            usage.decode(entry.value)
        except ValueError:
            continue
        by_name.setdefault(name, {})[shard] = entry
    for name, shards in by_name.items():
        if (fold := _plan(name, shards, now - quiet_s)) is not None:
            yield fold


def _plan(name: UsageName, shards: dict[str, StoredCounts], final_before: float) -> Fold | None:
    folded = shards.pop(usage.FOLDED, None)
    if folded is not None and folded.written_at > final_before:
        return None
    known = usage.Stored({}) if folded is None else usage.decode(folded.value)
    rows, names, pending = known.rows, list(known.folded), dict[str, FoldedShard]()
    for shard, earlier in known.pending.items():
        if shard not in shards:
            usage.add_rows(rows, usage.to_rows(earlier.rows))
            names.append(shard)
        elif shards[shard].revision == earlier.revision:  # it was not removed
            pending[shard] = earlier
    final = {shard: one for shard, one in shards.items() if one.written_at <= final_before and shard not in pending}
    if folded is None and len(final) < 2:
        return None
    size = len(usage.encode(usage.Stored(rows, pending, names)))
    for shard, one in final.items():
        size += len(one.value) + len(shard) + _ROOM_BYTES
        if size > _MAX_VALUE_BYTES or shard in names:
            break
        pending[shard] = usage.shard_of(one.revision, usage.decode(one.value).rows)
    if not pending and not known.pending:
        return None
    removed = [(usage.entry_key(name, shard), one.revision) for shard, one in pending.items()]
    value = usage.encode(usage.Stored(rows, pending, names))
    return Fold(usage.entry_key(name, usage.FOLDED), value, 0 if folded is None else folded.revision, removed)
