"""Who comes next: by arrival and priority, so that nobody waits for ever."""

import heapq
from collections.abc import Iterator

from tokenbus.worker.engine.scheduling.sequence import Sequence


def priority_key(sequence: Sequence, priority_s: float) -> tuple[float, int]:
    """What orders sequences: a priority of n counts like having come n times `priority_s` seconds later.

    The order of two never changes while they wait, and whoever waits is overtaken for a bounded time only."""
    return sequence.arrived_at + sequence.priority * priority_s, sequence.seq_no


class WaitingQueue:
    """Sequences without a lane, in the order in which they are to get one."""

    def __init__(self, priority_s: float) -> None:
        self._priority_s = priority_s
        self._heap: list[tuple[tuple[float, int], Sequence]] = []

    def __repr__(self) -> str:
        return f"<WaitingQueue of {len(self._heap)}>"

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._heap)

    @property
    def first(self) -> Sequence:
        return self._heap[0][1]

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (priority_key(sequence, self._priority_s), sequence))

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[1]

    def remove(self, sequence: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[1] is not sequence]
        heapq.heapify(self._heap)
