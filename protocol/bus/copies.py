"""Sees to it that a cluster of brokers keeps three copies of each bucket that a process uses.

A bucket has fewer if it was made while its broker belonged to no cluster, or by hand. Whoever may change it has the
cluster make the rest; whoever may not says that they are missing, in its log and in a metric."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenbus.protocol import late_logger
from tokenbus.protocol.bus.bucket import BucketError, BucketLateError, Copies, StreamContents

if TYPE_CHECKING:
    from tokenbus.protocol.telemetry.metrics import Gauge

_INTERVAL_S = 10.0
_UNANSWERED_S = 300.0
"""A broker that forbids a question does not answer it, and both sides log it."""


class CopyKeeper:
    """Looks after the buckets of one process."""

    def __init__(
        self, buckets: Sequence[StreamContents], missing: "Gauge", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`missing` shows how many copies of a bucket are missing, by its name."""
        self._buckets = buckets
        self._gauge = missing
        self._clock = clock
        self._not_before: dict[str, float] = {}
        """When to ask again about a bucket that there was no answer about."""
        self._missing: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CopyKeeper of {len(self._buckets)} buckets, missing copies: {self._missing}>"

    async def run(self) -> None:
        """Looks at all buckets again and again, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Looks at all buckets once, and has missing copies made."""
        for bucket in self._buckets:
            if self._clock() < self._not_before.get(bucket.name, 0.0):
                continue
            try:
                copies = await bucket.copies()
            except BucketError as error:  # it is not there, or can't be reached: those who use it say so
                self._note_silence(bucket, error)
                continue
            problem = None
            if copies.num_missing:
                try:
                    copies = await bucket.complete_copies()
                except BucketError as error:
                    self._note_silence(bucket, error)
                    problem = str(error)
            self._note(bucket.name, copies, problem)

    def _note_silence(self, bucket: StreamContents, error: BucketError) -> None:
        if isinstance(error, BucketLateError):
            self._not_before[bucket.name] = self._clock() + _UNANSWERED_S

    def _note(self, name: str, copies: Copies, problem: str | None) -> None:
        missing, before = copies.num_missing, self._missing.get(name, 0)
        self._missing[name] = missing
        self._gauge.labels(name).set(missing)
        if missing and not before:
            late_logger.get_logger().warning("bucket_copies_missing", bucket=name, count=copies.num, error=problem)
        elif before and not missing:
            late_logger.get_logger().info("bucket_copied", bucket=name, count=copies.num)
