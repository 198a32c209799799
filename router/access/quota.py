"""Leases what this router needs of limits from a bucket that all routers share, and shares them out without one.

While the bucket can be reached, each window and each set of slots is leased from its record by compare-and-set. When it
can't, or has just been made, each router takes an even share, by the number of routers that are heard of:

    leases --the bucket fails in window w--> nothing more in w, then shares --it is back in v--> leases from v + 1

What others have leased in w is unknown, so that a router that fell back at once could exceed the limit. A bucket that
was made in window v knows nothing of what was leased from the one before it: leases begin in v + 2, when every router
has noticed. Each router tells the others once a second that it is there, and whether it leases: those that lease leave
their shares to those that can't.

Windows are those of the broker's clock, which is read from the time of an entry that this router has just put: routers'
own clocks may step."""

import asyncio
import contextlib
import random
import secrets
import time
from typing import NamedTuple

import msgspec
import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.access.usage_store import unix_time_of
from tokenbus.protocol.bus.bucket import (
    Bucket,
    BucketConflictError,
    BucketError,
    BucketFullError,
    BucketLimits,
    BucketMissingError,
    Entry,
)
from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import errors, messages, subjects
from tokenbus.router.access.lease_queue import LeaseQueue
from tokenbus.router.access.limits import FREE, Account, Limits, Throttled, Ticket, Wanted
from tokenbus.router.access.slots import SlotRecord
from tokenbus.router.access.windows import DAY_S, WINDOW_S, Record, decoded
from tokenbus.router.telemetry.metrics import RouterMetrics

BUCKET_LIMITS = BucketLimits(max_bytes=256 * 1024 * 1024, max_age_s=2 * DAY_S)
_TICK_S = 1.0
_PROBE_S = 2.0
_ALIVE_S = 3.5
"""A router that has not been heard of for this long is gone."""
_MAX_ROUTERS = 1_024
_MAX_TRIES = 6
_JITTER_S = 0.002
_MAX_PAUSE_S = 0.02
_WAIT_S = 2.0
"""A request waits for a lease for at most this long."""
_NEVER = 2**62
_CLOCK = "clock"

_TELL_S = 60.0
_SHARES = b"shares"
_HEARD_S = 1.5
"""Time within which the others hear that this router takes shares."""
_PAUSED_S = 2.5


class _Heard(NamedTuple):
    at: float
    shares: bool


_records = msgspec.msgpack.Decoder(Record)
_slots = msgspec.msgpack.Decoder(SlotRecord)
_encoder = msgspec.msgpack.Encoder()


class Quota:
    """The limits of one router's clients, which all routers enforce together."""

    def __init__(
        self,
        limits: Limits,
        bus: Bus,
        names: subjects.Subjects,
        router_id: str,
        bucket: Bucket | None,
        metrics: RouterMetrics,
        rng: random.Random,
    ) -> None:
        """Without a bucket, limits are always shared out."""
        self._limits = limits
        self._bus = bus
        self._names = names
        self._router_id = router_id
        self._name = secrets.token_hex(4)
        """Names this process in records: an id may be that of an earlier one."""
        self._bucket = bucket
        self._metrics = metrics
        self._rng = rng
        self._offset_s = time.time() - time.monotonic()
        self._others: dict[str, _Heard] = {}
        self._ticked_at: float | None = None
        self._quiet_until = 0.0
        """Nothing is leased until the other routers have been heard."""
        self._resumed_in = -1
        """The window in which this process ran again after a pause: routers that take shares did not count it."""
        self._tell_at = 0.0
        self._created = ""
        self._others_lease = False
        """Whether other routers may have leased what this one does not know of."""
        self._leases_from, self._shares_from = _NEVER, 0
        self._known_from = 0
        """The window since which what routers take is in their records, after they had taken shares; 0 if always."""
        self._probed_at = -_PROBE_S
        self._had_leases = False
        """Whether limits were leased at the last tick."""
        self._leases = LeaseQueue(limits.wanted, self._lease)
        self._log = structlog.get_logger()
        limits.on_wanted = self._leases.start_some

    def __repr__(self) -> str:
        return f"<Quota {self._limits!r}, {'leases' if self.is_leasing else 'shares'} of {self.num_routers} routers>"

    @property
    def now(self) -> float:
        """The broker's Unix time, as far as it is known."""
        return time.monotonic() + self._offset_s

    @property
    def num_routers(self) -> int:
        """The routers that are heard of, this one included."""
        alive = time.monotonic() - _ALIVE_S
        return 1 + sum(one.at > alive for one in self._others.values())

    @property
    def _is_paused(self) -> bool:
        """Whether this process has not run for a while."""
        return self._ticked_at is not None and time.monotonic() - self._ticked_at > _PAUSED_S

    @property
    def _num_sharing(self) -> int:
        """The other routers that take even shares."""
        alive = time.monotonic() - _ALIVE_S
        return sum(one.at > alive and one.shares for one in self._others.values())

    @property
    def is_leasing(self) -> bool:
        """Whether the bucket is used."""
        return self._window >= self._leases_from

    @property
    def _window(self) -> int:
        return int(self.now // WINDOW_S)

    def admit(
        self, address: subjects.ModelAddress, num_prompt: int, most: int | None
    ) -> tuple[Ticket | None, messages.RateLimits | None]:
        """Charges a request with `num_prompt` tokens whose answer has at most `most`, and returns its ticket with what
        its client is told; no ticket if a lease has to be waited for. Raises RequestError(overloaded)."""
        charged, told = self._charge(address, num_prompt, most)
        return (None, None) if isinstance(charged, Wanted) else (charged, told)

    async def admitted(
        self, address: subjects.ModelAddress, num_prompt: int, most: int | None, remaining_s: float | None = None
    ) -> tuple[Ticket, messages.RateLimits | None]:
        """Does the same, and waits for leases of the client's own limits. Raises RequestError(overloaded) if they take
        too long, and RequestError(deadline_exceeded) if the `remaining_s` of the request pass before."""
        now, pause_s = time.monotonic(), 0.0
        until = now + _WAIT_S if remaining_s is None else now + min(_WAIT_S, remaining_s)
        while True:
            charged, told = self._charge(address, num_prompt, most)
            if not isinstance(charged, Wanted):
                return charged, told
            if time.monotonic() >= until:
                if remaining_s is not None and remaining_s < _WAIT_S:
                    raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
                problem = "the limits of this client can't be read at the moment"
                raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, problem, retry_after_ms=1_000.0))
            await self._leases.wait_for(charged.accounts, until)
            if pause_s:
                await asyncio.sleep(min(self._rng.uniform(pause_s / 2, pause_s), until - time.monotonic()))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S) or _JITTER_S

    def _charge(
        self, address: subjects.ModelAddress, num_prompt: int, most: int | None
    ) -> tuple[Ticket | Wanted, messages.RateLimits | None]:
        """Raises RequestError(overloaded)."""
        if not self._limits.has_any(address):
            return FREE, None
        now = self.now
        if self._is_paused:
            self._resume(now)
        charged = self._limits.admit(address, num_prompt, most, now)
        if isinstance(charged, Throttled):
            self._metrics.throttled.labels(charged.account.unit).inc()
            raise self._refusal(charged, address, now)
        return charged, None if isinstance(charged, Wanted) else self._limits.report(address, now)

    def adopt(self, address: subjects.ModelAddress, num_charged: int) -> Ticket:
        """Counts a request that another router has charged."""
        return self._limits.adopt(address, num_charged, self.now)

    def close(
        self, ticket: Ticket, address: subjects.ModelAddress, num_tokens: int | None, completion: int = 0
    ) -> None:
        """Corrects a charge when its request has ended, or leaves it as it is for the next guardian (None)."""
        self._limits.close(ticket, address, num_tokens, completion)

    def report(self, address: subjects.ModelAddress) -> messages.RateLimits | None:
        """Returns what a client has left of its limits, for an answer; None if it has none."""
        return self._limits.report(address, self.now) if self._limits.has_any(address) else None

    def seen_by(self, tenant: str, key_id: str, *, is_operator: bool) -> list[messages.ClientLimits]:
        """Returns the limits that a viewer of the fleet may see: its own, or for operators those that refuse most."""
        if not self._limits.are_used:
            return []
        return self._limits.most_refused(self.now) if is_operator else self._limits.seen_by(tenant, key_id, self.now)

    @property
    def num_throttled(self) -> int:
        """The requests that limits have refused in the last minute."""
        return self._limits.refusals.count(self.now)

    @property
    def is_sharing(self) -> bool:
        """Whether limits are shared out evenly since their bucket can't be reached."""
        return self._limits.are_used and self._bucket is not None and not self.is_leasing

    def _refusal(self, throttled: Throttled, address: subjects.ModelAddress, now: float) -> errors.RequestError:
        wait_ms = round(throttled.retry_after_s * 1e3, 1)
        error = errors.make_error(errors.Code.OVERLOADED, throttled.reason, retry_after_ms=wait_ms)
        return errors.RequestError(msgspec.structs.replace(error, rate_limits=self._limits.report(address, now)))

    async def open(self) -> None:
        """Begins to hear of other routers, and looks for the bucket, if any client has limits."""
        if self._limits.are_used:
            await self._tick()

    async def run(self) -> None:
        """Makes itself known, and renews what is held, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._limits.are_used:
                await self._tick()

    def _resume(self, now: float) -> None:
        """Begins again after this process was paused: the others have not heard of it, nor it of them."""
        self._ticked_at = time.monotonic()
        self._quiet_until = self._ticked_at + _HEARD_S
        self._resumed_in = int(now // WINDOW_S)
        self._beat()
        self._shares_from = int((now + _HEARD_S) // WINDOW_S) + 1
        for share in self._limits.windows.values():
            share.drop_share()

    async def _tick(self) -> None:
        if self._is_paused:
            self._resume(self.now)
        if self._ticked_at is None:
            self._quiet_until = time.monotonic() + _HEARD_S / 2
            await self._bus.subscribe(self._names.all_routers, self._on_router)
        self._ticked_at = time.monotonic()
        was_leasing = self.is_leasing
        self._beat()
        if self._bucket is not None and time.monotonic() - self._probed_at >= _PROBE_S:
            await self._probe(self._bucket)
        self._metrics.quota_leasing.set(self.is_leasing)
        self._others_lease |= self.is_leasing
        if self.is_leasing != was_leasing:
            self._beat()  # the others leave shares to routers that do not lease
        if self.is_leasing and not self._had_leases:
            self._limits.want_days()  # so that a new bucket is told what is known of them
        self._had_leases = self.is_leasing
        for share in self._limits.windows.values():
            share.tick(self.num_routers, self.now)
        for account in self._limits.due(self.now):
            self._limits.wanted[account] = None
        if self._limits.wanted:
            self._leases.start_some()

    def _on_router(self, message: Msg) -> None:
        router = message.subject.rpartition(".")[2]
        now = time.monotonic()
        if router == subjects.escape(self._router_id):
            return
        if router not in self._others:
            self._others = {name: one for name, one in self._others.items() if now - one.at < _ALIVE_S}
            if len(self._others) >= _MAX_ROUTERS:
                return
            self._beat()  # a new one counts this one too, at once
        self._others[router] = _Heard(now, message.data == _SHARES)

    def _beat(self) -> None:
        with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
            self._bus.publish(self._names.router_beat(self._router_id), b"" if self.is_leasing else _SHARES)

    async def _probe(self, bucket: Bucket) -> None:
        """Reads the broker's clock, and finds out whether the bucket is there and is the same one."""
        self._probed_at = time.monotonic()
        try:
            if self._leases_from == _NEVER:
                await bucket.create(BUCKET_LIMITS)
            state = await bucket.state()
            began_at = time.monotonic()
            await bucket.put(_CLOCK, b"")
            entry = await bucket.get(_CLOCK)
            if entry is not None:
                self._offset_s = unix_time_of(entry.written_at) - (began_at + time.monotonic()) / 2
        except BucketError as error:
            if not self._created:
                self._others_lease = not isinstance(error, BucketMissingError)  # the broker may have no JetStream
            self._failed(error)
            return
        if state.created != self._created:
            was_known, self._created = bool(self._created), state.created
            self._begin_leasing(unix_time_of(state.created), is_first=not was_known)
        elif self._leases_from == _NEVER:
            self._begin_leasing(unix_time_of(state.created), is_first=False)

    def _begin_leasing(self, created_at: float, *, is_first: bool) -> None:
        made, window = int(created_at // WINDOW_S), self._window
        self._leases_from = max(made + 2, window if is_first and not self._limits.windows else window + 1)
        if not is_first and made + 2 > window:
            self._shares_from = max(self._shares_from, window + 1)
        if not is_first:
            self._known_from = self._leases_from
        pause_s = max(0.0, self._leases_from * WINDOW_S - self.now)
        self._log.info("quota_leased", pause_s=round(pause_s, 1))
        for share in self._limits.windows.values():
            share.end_shares(WINDOW_S)

    def _failed(self, error: BucketError) -> None:
        if self._leases_from != _NEVER:
            # a router that has leased in this window does not know what others still have of it
            self._shares_from = int((self.now + _HEARD_S) // WINDOW_S) + 1
            self._leases_from = _NEVER
            self._beat()
            self._metrics.quota_fallbacks.inc()
            self._log.error("quota_unreachable", error=str(error), routers=self.num_routers)

    async def _lease(self, account: Account) -> None:
        windows, slots = self._limits.windows.get(account), self._limits.slots.get(account)
        share = windows or slots
        if share is None:
            return
        try:
            if (quiet_s := self._quiet_until - time.monotonic()) > 0:
                await asyncio.sleep(quiet_s)
            if not self.is_leasing or self._bucket is None or (self._num_sharing and self._window == self._resumed_in):
                self._share_out(account)
                return
            has_failed = False
            for attempt in range(_MAX_TRIES):
                try:
                    if await self._try(self._bucket, account):
                        return
                except BucketConflictError:
                    self._metrics.quota_conflicts.inc()
                except BucketFullError as error:
                    if time.monotonic() >= self._tell_at:
                        self._tell_at = time.monotonic() + _TELL_S
                        self._log.error("quota_unreachable", error=str(error), routers=self.num_routers)
                    self._share_out(account, was_read=True)
                    return
                except BucketError:
                    if has_failed:
                        raise
                    has_failed = True  # only the answer may have been lost: then the lease is found in the record
                await asyncio.sleep(self._rng.uniform(0, _JITTER_S * 2**attempt))
        except BucketError as error:
            self._failed(error)
            self._share_out(account)
        finally:
            share.asked_at = None
            if slots is not None and slots.has_ended:
                slots.has_ended = False
                self._limits.wanted[account] = None

    async def _try(self, bucket: Bucket, account: Account) -> bool:
        """Leases once; returns False to try again. Raises BucketError."""
        key = f"{account.scope}.{account.unit}"
        entry = await bucket.get(key)
        if entry is None and (state := await bucket.state()).created != self._created:
            raise BucketError(f"the bucket was made again at {state.created}")
        value = None if entry is None else entry.value
        if (slots := self._limits.slots.get(account)) is not None:
            held = slots.lease(decoded(_slots, value), self._name, self.num_routers, self.now)
            await self._store(bucket, key, entry, held.record)
            slots.take(held, self.now)
        elif (share := self._limits.windows.get(account)) is not None:
            share.roll(self.now)
            record = decoded(_records, value)
            share.observe(record, self.now)
            if not share.needs_lease:
                if (corrected := share.corrected(record)) is not None:
                    await self._store(bucket, key, entry, corrected)
                return True  # otherwise it was only read
            leased = share.lease(record, self._name, self.num_routers, self._num_sharing, self._known_from)
            if leased is None:
                return False
            if leased.is_new:
                await self._store(bucket, key, entry, leased.record)
            share.take(leased)
        self._metrics.quota_leases.labels(account.unit).inc()
        return True

    async def _store(self, bucket: Bucket, key: str, entry: Entry | None, record: msgspec.Struct) -> None:
        value = _encoder.encode(record)
        if entry is None:
            await bucket.create_entry(key, value)
        else:
            await bucket.update(key, value, entry.revision)

    def _share_out(self, account: Account, *, was_read: bool = False) -> None:
        """Takes an even share of what is left; at once if the record was just read, but can't be stored."""
        share = self._limits.windows.get(account)
        if share is not None:
            share.roll(self.now)
            if was_read or self._window >= self._shares_from:
                is_alone = self.num_routers == 1 and not self._others_lease
                is_outage = self._others_lease and not was_read
                share.share_out(self.num_routers, self.now, is_outage=is_outage, is_alone=is_alone)
            else:
                share.is_full = True
        elif (slots := self._limits.slots.get(account)) is not None:
            slots.share_out(self.num_routers, self.now)
