"""The sums of what one router has seen end, until they are saved and their day is over. Pure.

Each counter is one shard of the bucket: its value is the whole sum, and its revision the one that this router has
written last. So a value may be written again after an answer that did not arrive, and a shard that another router has
folded away meanwhile is noticed: the counter then continues as another shard, without what was saved."""

import dataclasses
import itertools
from collections.abc import Iterator

from tokenbus.protocol.access import usage
from tokenbus.protocol.access.usage import Counts, UsageKind, UsageName

MAX_ROWS = 65_536
"""Rows of all counters; what has none of its own beyond that is counted together, as `usage.OTHER`."""
MAX_KINDS = 128
"""Rows of one counter, of which each operation may have one more: with the longest names they fit in a value."""


@dataclasses.dataclass(slots=True, eq=False)
class UsageCounter:
    """One sum."""

    name: UsageName
    shard: str
    rows: usage.Rows = dataclasses.field(default_factory=dict)
    revision: int = 0
    """The revision of its entry; 0 if it has none."""
    sent: bytes = b""
    """The last value that the bucket has, or may have, since no answer arrived."""
    is_changed: bool = False
    """Whether the bucket may lack something."""
    changed_at: float = 0.0
    """When the first count that is not saved was made."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether it may have an entry without knowing it."""
        return not self.revision and bool(self.sent)

    @property
    def key(self) -> str:
        return usage.entry_key(self.name, self.shard)


class UsageCounters:
    """All counters of one router. Times are monotonic seconds."""

    def __init__(self, incarnation: str, max_rows: int = MAX_ROWS) -> None:
        """`incarnation` names this process in its shards: no other process may have the same."""
        self._incarnation = incarnation
        self._max_rows = max_rows
        self._numbers = itertools.count()
        self._counters: dict[UsageName, UsageCounter] = {}
        self._num_rows = 0
        self.num_other = 0
        """Requests that were counted as `usage.OTHER`, since there were too many names."""

    def __repr__(self) -> str:
        return f"<UsageCounters {len(self._counters)}, {self._num_rows} rows>"

    def __len__(self) -> int:
        return len(self._counters)

    def count(self, name: UsageName, kind: UsageKind, counts: Counts, now: float) -> None:
        """Adds one request."""
        counter = self._counters.get(name)
        if counter is not None and kind not in counter.rows and len(counter.rows) >= MAX_KINDS:
            kind = UsageKind(kind.operation, usage.OTHER)
        if counter is None or kind not in counter.rows:
            if self._num_rows >= self._max_rows:
                self.num_other += 1
                name, kind = UsageName(name.day, "", "", ""), UsageKind(kind.operation)
                counter = self._counters.get(name)
            if counter is None:
                counter = self._counters[name] = UsageCounter(name, self._new_shard())
            if kind not in counter.rows:
                counter.rows[kind] = Counts()
                self._num_rows += 1
        counter.rows[kind].add(counts)
        if not counter.is_changed:
            counter.is_changed, counter.changed_at = True, now

    def unsaved(self) -> list[UsageCounter]:
        """Returns the counters with something that may not be saved, the oldest first."""
        return sorted((one for one in self._counters.values() if one.is_changed), key=lambda one: one.changed_at)

    def oldest_unsaved_at(self) -> float | None:
        """Returns when the oldest count was made that may not be saved."""
        return min((one.changed_at for one in self._counters.values() if one.is_changed), default=None)

    def saved(self, counter: UsageCounter, revision: int, value: bytes, now: float) -> None:
        """Notes that the bucket has accepted a value. What was counted since it was made is not saved."""
        counter.revision, counter.sent = revision, value
        counter.is_changed = usage.encode_rows(counter.rows) != value
        counter.changed_at = now

    def maybe_saved(self, counter: UsageCounter, value: bytes) -> None:
        """Notes that no answer to a write arrived."""
        counter.sent = value

    def found(self, counter: UsageCounter, revision: int, value: bytes) -> None:
        """Takes over what the entry says, since a write whose answer did not arrive was successful."""
        counter.revision, counter.sent = revision, value

    def not_there(self, counter: UsageCounter) -> None:
        """Notes that the counter has no entry, and that it is in no other: all of it is to be written."""
        counter.revision, counter.sent = 0, b""

    def folded_away(self, counter: UsageCounter) -> None:
        """Continues a counter whose entry another router has added to others: what was sent is in their sum. The last
        write without an answer counts as successful, since nothing may be counted twice."""
        sent = usage.decode(counter.sent).rows if counter.sent else {}
        for kind, counts in sent.items():
            counter.rows[kind].subtract(counts)
        self._start_over(counter)

    def bucket_made_again(self, now: float) -> None:
        """Notes that all entries are gone: what is still known is written again."""
        for counter in self._counters.values():
            self._start_over(counter)
            if not counter.is_changed:
                counter.is_changed, counter.changed_at = True, now

    def forget_before(self, day: str) -> None:
        """Forgets the counters of earlier days that are saved."""
        for name in [one.name for one in self._counters.values() if one.name.day < day and not one.is_changed]:
            self._num_rows -= len(self._counters.pop(name).rows)

    def check_integrity(self) -> None:
        assert self._num_rows == sum(len(one.rows) for one in self._counters.values())
        assert len({one.shard for one in self._counters.values()}) == len(self._counters)
        assert all(one.is_changed or one.revision for one in self._counters.values())
        assert all(name == one.name for name, one in self._counters.items())

    def __iter__(self) -> Iterator[UsageCounter]:
        return iter(self._counters.values())

    def _start_over(self, counter: UsageCounter) -> None:
        counter.shard, counter.revision, counter.sent = self._new_shard(), 0, b""

    def _new_shard(self) -> str:
        return f"{self._incarnation}-{next(self._numbers)}"
