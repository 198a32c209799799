"""Saves what a router has counted every few seconds, and folds the entries of routers that are gone once a day.

While the bucket can't be reached or is full, the counts stay in memory; a bucket that is gone is made again."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

import structlog

from tokenbus.protocol.access import usage
from tokenbus.protocol.access.usage import Counts, UsageKind, UsageName
from tokenbus.protocol.access.usage_store import UsageStore, unix_time_of
from tokenbus.protocol.bus.bucket import (
    Bucket,
    BucketConflictError,
    BucketError,
    BucketMissingError,
    Entry,
)
from tokenbus.router.usage import folding
from tokenbus.router.usage.broker_clock import BrokerClock
from tokenbus.router.usage.counters import UsageCounter, UsageCounters

SAVE_INTERVAL_S = 4.0
"""With the time of a write, this is what a killed router loses: at most 5 s."""
_CHECK_INTERVAL_S = 60.0
_FOLD_INTERVAL_S = 86_400.0
_AT_ONCE = 64
_CLOSE_ATTEMPTS = 3
_CLOSE_S = 3.0
"""A stopping router tries so long to save what it has."""


class UsageWriter:
    """Counts for one router, and keeps the bucket up to date."""

    def __init__(
        self,
        bucket: Bucket,
        incarnation: str,
        num_days: int,
        rng: random.Random,
        save_interval_s: float = SAVE_INTERVAL_S,
        quiet_s: float = folding.QUIET_S,
    ) -> None:
        """`incarnation` names this process, and no other. Entries are kept for `num_days` days, and folded if they were
        not written for `quiet_s`."""
        self.counters = UsageCounters(incarnation)
        self.on_failure: Callable[[], None] = lambda: None
        """Called when something could not be saved."""
        self._store = UsageStore(bucket)
        self._bucket = bucket
        self._num_days = num_days
        self._save_interval_s = save_interval_s
        self._quiet_s = quiet_s
        self._clock = BrokerClock(time.time(), time.monotonic())
        self._created: str | None = None
        """When the bucket was made, once known."""
        self._checked_at = float("-inf")
        self._fold_at = time.monotonic() + rng.uniform(1.0, _FOLD_INTERVAL_S)  # not all routers at the same time
        self.problem = ""
        """Why the last attempt to save failed; empty if it did not."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<UsageWriter {self.counters!r}>"

    @property
    def today(self) -> str:
        """The day, by the broker's clock."""
        return usage.day_at(self._clock.at(time.monotonic()))

    def count(self, tenant: str, key: str, model: str, kind: UsageKind, counts: Counts) -> None:
        """Counts a request that has ended now."""
        now = time.monotonic()
        self.counters.count(UsageName(usage.day_at(self._clock.at(now)), tenant, key, model), kind, counts, now)

    def unsaved_s(self) -> float:
        """Returns for how long the oldest count has not been saved."""
        oldest = self.counters.oldest_unsaved_at()
        return 0.0 if oldest is None else time.monotonic() - oldest

    async def run(self) -> None:
        """Saves and folds until cancelled."""
        while True:
            await self.save()
            if time.monotonic() >= self._fold_at:
                self._fold_at = time.monotonic() + _FOLD_INTERVAL_S
                await self.fold()
            await asyncio.sleep(self._save_interval_s)

    async def close(self) -> None:
        """Saves what is left, if that can be done soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                for _ in range(_CLOSE_ATTEMPTS):  # the first finds out which of the last writes were successful
                    await self.save()
                    if not self.counters.unsaved():
                        break
        if num_left := len(self.counters.unsaved()):
            self._log.error("usage_lost", count=num_left)

    async def save(self) -> None:
        """Writes all that has changed; what can't be written stays for the next time."""
        try:
            if not self._bucket.is_reachable:
                raise BucketError("the broker can't be reached")
            if time.monotonic() - self._checked_at >= _CHECK_INTERVAL_S:
                await self._check_bucket()
            unsaved = self.counters.unsaved()
            for start in range(0, len(unsaved), _AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    saves = [group.create_task(self._save(one)) for one in unsaved[start : start + _AT_ONCE]]
                for error in filter(None, (save.result() for save in saves)):
                    raise error
        except BucketError as error:
            self.on_failure()
            if isinstance(error, BucketMissingError):
                self._checked_at = float("-inf")
            if not self.problem:
                self._log.error("usage_not_saved", error=str(error))
            self.problem = str(error) or type(error).__name__
            return
        if self.problem:
            self._log.info("usage_saved")
        self.problem = ""
        self.counters.forget_before(self.today)

    async def fold(self) -> None:
        """Folds the entries of the last days, as far as other routers have not."""
        try:
            for day in folding.days_to_fold(self.today):
                found = (await self._bucket.changes(keys=usage.pattern_of(day))).entries
                stored = [_to_stored(one, one.value) for one in found if one.value is not None]
                for fold in folding.plan_folds(stored, self._clock.at(time.monotonic()), self._quiet_s):
                    await self._carry_out(fold)
        except BucketError as error:
            self._log.warning("usage_not_folded", error=str(error))

    async def _carry_out(self, fold: folding.Fold) -> None:
        with contextlib.suppress(BucketConflictError):  # another router folds the same
            await self._bucket.update(fold.key, fold.value, fold.revision)
            for key, revision in fold.removed:
                await self._bucket.purge(key, revision)

    async def _check_bucket(self) -> None:
        """Makes the bucket if it is gone, and learns the broker's time. Raises BucketError."""
        await self._store.create(self._num_days)
        await self._note_bucket()
        self._checked_at = time.monotonic()

    async def _note_bucket(self) -> bool:
        """Returns whether the bucket is another one than before. Raises BucketError."""
        told, now = await self._bucket.broker_time(), time.monotonic()
        with contextlib.suppress(ValueError):  # a broker of an earlier version does not tell its time
            self._clock.observe(unix_time_of(told), now)
        state = await self._bucket.state()
        is_other = self._created not in (None, state.created)
        if is_other:
            self.counters.bucket_made_again(now)
        self._created = state.created
        return is_other

    async def _save(self, counter: UsageCounter) -> BucketError | None:
        """Writes one counter; returns the error if the bucket did not take it."""
        try:
            if counter.is_in_doubt:
                await self._resolve(counter)
            value = usage.encode_rows(counter.rows)
            try:
                revision = await self._bucket.update(counter.key, value, counter.revision)
            except BucketConflictError:
                await self._resolve(counter)  # it is written the next time
                return None
            except BucketError:
                self.counters.maybe_saved(counter, value)
                raise
        except BucketError as error:
            return error
        self.counters.saved(counter, revision, value, time.monotonic())
        return None

    async def _resolve(self, counter: UsageCounter) -> None:
        """Finds out what the bucket has of a counter. Raises BucketError."""
        entry = await self._bucket.get(counter.key)
        if entry is not None and entry.value is not None:
            self.counters.found(counter, entry.revision, entry.value)
        elif not await self._note_bucket():
            folded = await self._bucket.get(usage.entry_key(counter.name, usage.FOLDED))
            if folded is not None and folded.value is not None and _names(folded.value, counter.shard):
                self.counters.folded_away(counter)
            else:
                self.counters.not_there(counter)


def _names(value: bytes, shard: str) -> bool:
    """Whether a folded entry has a shard in it."""
    try:
        stored = usage.decode(value)
    except ValueError:
        return False
    return shard in stored.pending or shard in stored.folded


def _to_stored(entry: Entry, value: bytes) -> folding.StoredCounts:
    try:
        written_at = unix_time_of(entry.written_at)
    except ValueError:
        written_at = float("inf")
    return folding.StoredCounts(entry.key, value, entry.revision, written_at)
