"""Follows one worker's numbered event log: detects gaps, and closes them with a snapshot.

Events are numbered without gaps, from 1, or from 0 by workers of earlier versions. An event whose number is too high
means that some were lost: from then on events are buffered, and a snapshot is requested. A snapshot arrives in parts
and says after which event it was taken. The state is complete again once all parts have arrived and the buffered events
continue at exactly the next number.

An event precedes the chunks with its tokens. It is *sealed* once something has arrived that the worker sent after these
chunks: then they have reached the broker too. An event with tokens proves nothing about the one before it, since the
tokens of one step may take several events, and the chunks of all of them follow the last.

When the worker is lost, this decides whether the router knows exactly what the client of a stream has received
(`doubt`). `last_seq` is the event with the last token that the router knows, `end_seq` the last event of the
incarnation, once its successor has named it:

    events    0 ---- last_seq ---- sealed_seq ---- seq ----- end_seq
              the router has       their chunks    arrived   may still arrive
              its token            are out

    behind, or seq before end_seq    no: the missing events may have tokens that the client has
    last_seq after sealed_seq        no: the worker may have ended between the event and its chunks
    otherwise                        yes

A client that does not stream gets only a terminal, so the second line does not count for its request. Until
`Worker.settled_at` more may arrive, and a no may become a yes."""

import math
from collections import deque
from typing import NamedTuple

from tokenbus.protocol.wire import codec, internal

MAX_BUFFERED = 1_024
"""Events that may wait for a snapshot; beyond that all are dropped and a new snapshot is requested."""
MAX_BUFFERED_BYTES = 16 * 1024 * 1024
"""The same in bytes, as sent."""

MAX_PARTS = 16_384
"""The most parts of one snapshot. No worker has requests or blocks for more."""
MAX_SNAPSHOT_BYTES = 128 * 1024 * 1024
"""The most bytes of its parts, as sent. Any more are ignored, so such a snapshot never closes a gap."""
_MAX_LOST = 2**53
"""Lost events are counted up to this: clients are shown the number, and a worker may claim any."""


class AppliedSnapshot(NamedTuple):
    """A complete snapshot and the events that follow it."""

    running: dict[str, internal.RunningRequest]
    events: tuple[internal.Events, ...]
    runs: tuple[internal.BlockRun, ...]
    """The blocks cached by the worker at the time of the snapshot."""
    requested_at: float
    """When it was first requested: anything the router did later may be missing from it."""
    seq: int
    """The last event before the snapshot."""
    ends: tuple[internal.StreamEnd, ...] = ()
    """The ends of requests for which the router has asked."""


class WorkerEventLog:
    """The event log of one incarnation of a worker.

    live:    event seq + 1 --> applied           event seq + n --> behind, buffered
    behind:  event         --> buffered          last part     --> live, snapshot and later events applied
    """

    def __init__(self, first_seq: int = 0) -> None:
        """`first_seq` is the number of the worker's first event."""
        self._first_seq = first_seq
        self.seq: int | None = None
        self.sealed_seq = -1
        """Everything that belongs to this event and earlier ones has reached the broker."""
        self.end_seq: int | None = None
        self.is_behind = True
        self.num_lost = 0
        """Events that never arrived."""
        self._buffer: deque[internal.Events] = deque()
        self._buffered_bytes = 0
        self._parts: dict[int, internal.SnapshotPart] = {}
        self._snapshot_bytes = 0
        self._first_requested_at: float | None = None
        self._requested_at = 0.0

    def __repr__(self) -> str:
        return f"<WorkerEventLog {self.seq}{' behind' if self.is_behind else ''}>"

    def receive(self, events: internal.Events) -> tuple[internal.Events, ...]:
        """Receives an event; returns it if it is to be applied now, or nothing if it is old or must wait."""
        if self.seq is None and events.seq == self._first_seq:
            self.is_behind = False  # followed from its first event on, so nothing is missing
        last = self._first_seq - 1 if self.seq is None else self.seq
        if events.seq <= last:
            return ()
        if events.seq > last + 1 and not self.is_behind:
            self._lose(events.seq - last - 1)
        self.seq = events.seq
        if not events.token_ids:
            self.sealed_seq = events.seq - 1
        if not self.is_behind:
            return (events,)
        size = len(codec.encode(events))
        if len(self._buffer) >= MAX_BUFFERED or self._buffered_bytes + size > MAX_BUFFERED_BYTES:
            self.mark_behind()  # discards them all: a snapshot from now on is newer anyway
        self._buffer.append(events)
        self._buffered_bytes += size
        return ()

    def confirm(self, seq: int) -> bool:
        """Receives the number of the last event, from a worker that has published nothing since; returns False for a
        number that it can't have."""
        last = self._first_seq - 1 if self.seq is None else self.seq
        if seq < last:
            return False
        if seq == last:
            self.sealed_seq = seq
        elif not self.is_behind:
            self._lose(seq - last)
        return True

    def _lose(self, num_events: int) -> None:
        self.num_lost = min(self.num_lost + num_events, _MAX_LOST)
        self.mark_behind()

    def seal(self, seq: int) -> None:
        """Records that everything that belongs to an event has reached the broker."""
        if self.seq is not None:
            self.sealed_seq = max(self.sealed_seq, min(seq, self.seq))

    def doubt(self, last_seq: int, *, is_streamed: bool) -> str:
        """Returns why the client of a stream may have received other tokens than those in the log up to event
        `last_seq`: `behind`, `no_end` or `not_sealed`. Empty if it has received, or will receive, exactly these."""
        if self.is_behind:
            return "behind"
        if self.end_seq is not None and (self.seq is None or self.seq < self.end_seq):
            return "no_end"
        return "not_sealed" if is_streamed and last_seq > self.sealed_seq else ""

    def mark_behind(self) -> None:
        """Records that something may have been missed: only a snapshot requested from now on can close the gap."""
        self.is_behind = True
        self._buffer.clear()
        self._parts.clear()
        self._buffered_bytes = self._snapshot_bytes = 0
        self._first_requested_at = None

    @property
    def requested_at(self) -> float:
        """When a snapshot that can close the gap was last requested; minus infinity if none was."""
        return -math.inf if self._first_requested_at is None else self._requested_at

    def request_snapshot(self, now: float, interval_s: float) -> bool:
        """Returns whether to request a snapshot now: only when behind, and at most once in `interval_s`."""
        if not self.is_behind or (self._first_requested_at is not None and now - self._requested_at < interval_s):
            return False
        self._requested_at = now
        if self._first_requested_at is None:
            self._first_requested_at = now
        return True

    def receive_part(self, part: internal.SnapshotPart) -> AppliedSnapshot | None:
        """Receives a part; returns the snapshot if this part completes it and the buffered events continue it without a
        gap."""
        if not self.is_behind or self._first_requested_at is None or not 0 <= part.part < part.parts:
            return None
        if part.parts > MAX_PARTS:
            return None
        known = next(iter(self._parts.values()), part)
        if (known.seq, known.parts) != (part.seq, part.parts):
            self._parts.clear()  # these parts belong to an older snapshot
            self._snapshot_bytes = 0
        size = len(codec.encode(part))
        if part.part in self._parts or self._snapshot_bytes + size > MAX_SNAPSHOT_BYTES:
            return None
        self._parts[part.part] = part
        self._snapshot_bytes += size
        if len(self._parts) < part.parts:
            return None
        later = tuple(events for events in self._buffer if events.seq > part.seq)
        runs = tuple(run for number in sorted(self._parts) for run in self._parts[number].runs)
        running = _join([one for number in sorted(self._parts) for one in self._parts[number].running])
        ends = tuple(end for part in self._parts.values() for end in part.ends)
        requested_at = self._first_requested_at
        if [events.seq for events in later] != list(range(part.seq + 1, part.seq + 1 + len(later))):
            self.mark_behind()
            return None
        self.mark_behind()  # discards buffer and parts
        self.is_behind = False
        self.seq = later[-1].seq if later else part.seq
        # a snapshot is sent after the chunks of the event before it
        sealed_seq = max(part.seq, *(events.seq - 1 for events in later if not events.token_ids), self.sealed_seq)
        self.sealed_seq = min(sealed_seq, self.seq)
        return AppliedSnapshot(running, later, runs, requested_at, part.seq, ends)


def _join(pieces: list[internal.RunningRequest]) -> dict[str, internal.RunningRequest]:
    """Returns the running requests by id. One with many tokens arrives in several pieces, in order."""
    by_id: dict[str, list[internal.RunningRequest]] = {}
    for piece in pieces:
        by_id.setdefault(piece.id, []).append(piece)
    return {name: _join_one(found) for name, found in by_id.items()}


def _join_one(pieces: list[internal.RunningRequest]) -> internal.RunningRequest:
    if len(pieces) == 1:
        return pieces[0]
    token_ids, logprobs = b"".join(one.token_ids for one in pieces), b"".join(one.logprobs for one in pieces)
    return codec.replace(pieces[0], token_ids=token_ids, logprobs=logprobs)
