"""Follows one worker's numbered event log: notices gaps, and joins snapshot and log together without one; pure."""

from collections import deque
from typing import NamedTuple

from tokenbus.protocol.wire import internal

MAX_BUFFERED = 1_024
"""Events that wait for a snapshot; with more it is asked for again."""


class AppliedSnapshot(NamedTuple):
    """A snapshot, complete, and the events after it."""

    running: dict[str, internal.RunningRequest]
    events: tuple[internal.Events, ...]
    runs: tuple[internal.BlockRun, ...]
    """Blocks that the worker held at the snapshot."""
    requested_at: float
    """What the router did after this time may not show in the snapshot."""


class EventLog:
    """One life of one worker. It is behind from a gap on until a snapshot has closed it.

    live:    event seq + 1 --> applied           event seq + n --> behind, buffered
    behind:  event         --> buffered          last part     --> live, snapshot and later events applied
    """

    def __init__(self) -> None:
        self.seq: int | None = None
        self.is_behind = True
        self.num_lost = 0
        """Events that never came."""
        self._buffer: deque[internal.Events] = deque()
        self._parts: dict[int, internal.SnapshotPart] = {}
        self._first_asked_at: float | None = None
        self._asked_at = 0.0

    def __repr__(self) -> str:
        return f"<EventLog {self.seq}{' behind' if self.is_behind else ''}>"

    def receive(self, events: internal.Events) -> tuple[internal.Events, ...]:
        """The events to be applied now, in order: this one, or none."""
        if self.seq is None and events.seq == 0:
            self.is_behind = False
        last = -1 if self.seq is None else self.seq
        if events.seq <= last:
            return ()
        if events.seq > last + 1 and not self.is_behind:
            self.num_lost += events.seq - last - 1
            self.mark_behind()
        self.seq = events.seq
        if not self.is_behind:
            return (events,)
        if len(self._buffer) >= MAX_BUFFERED:
            self.mark_behind()
        self._buffer.append(events)
        return ()

    def mark_behind(self) -> None:
        """Something may have been missed: only a snapshot asked for from now on tells."""
        self.is_behind = True
        self._buffer.clear()
        self._parts.clear()
        self._first_asked_at = None

    def request_snapshot(self, now: float, interval_s: float) -> bool:
        """Whether to ask for a snapshot now."""
        if not self.is_behind or (self._first_asked_at is not None and now - self._asked_at < interval_s):
            return False
        self._asked_at = now
        if self._first_asked_at is None:
            self._first_asked_at = now
        return True

    def receive_part(self, part: internal.SnapshotPart) -> AppliedSnapshot | None:
        """The snapshot, with the last of its parts, if the events behind it are there without a gap."""
        if not self.is_behind or self._first_asked_at is None or not 0 <= part.part < part.parts:
            return None
        if any((known.seq, known.parts) != (part.seq, part.parts) for known in self._parts.values()):
            self._parts.clear()
        self._parts[part.part] = part
        if len(self._parts) < part.parts:
            return None
        later = tuple(events for events in self._buffer if events.seq > part.seq)
        runs = tuple(run for number in sorted(self._parts) for run in self._parts[number].runs)
        running = {one.id: one for known in self._parts.values() for one in known.running}
        asked_at = self._first_asked_at
        if [events.seq for events in later] != list(range(part.seq + 1, part.seq + 1 + len(later))):
            self.mark_behind()
            return None
        self.mark_behind()
        self.is_behind = False
        self.seq = later[-1].seq if later else part.seq
        return AppliedSnapshot(running, later, runs, asked_at)
