"""Closes the connections that a key no longer gives their rights, wherever in the cluster they are.

Brokers say which connections they have, and close one when told to. Nothing is remembered in between: each answer is
judged by what keys allow when it arrives, so several instances do the same, and one that was away misses nothing."""

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable
from datetime import datetime

import msgspec
import structlog
from nats.aio.msg import Msg

from tokenbus.auth import callout_metrics, grants
from tokenbus.auth.answers import MAX_CONNECTION_S
from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.protocol import tasks
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus.bus import Bus

CHECK_INTERVAL_S = 60.0
_PAUSE_S = 1.0
"""Time between two looks at the clock, and at whether keys are known by now."""
_PAGE = 2_048
"""Connections that a broker lists at a time."""
_MAX_NAMED = 64
"""With more users than this to look for, all connections are listed instead."""
_AGAIN_AFTER_S = (0.0, 0.25, 1.0, 3.0)
"""A client that another instance has let in just before a change may be listed only a moment later."""
_RENEWED_FROM, _RENEWED_UNTIL = 0.6, 0.85
"""The part of their time after which connections are renewed, each at another moment."""


class ListedConnection(msgspec.Struct):
    cid: int
    start: datetime
    authorized_user: str = ""


class _Listing(msgspec.Struct):
    server_id: str
    now: datetime
    total: int = 0
    offset: int = 0
    connections: list[ListedConnection] = []


class _Reply(msgspec.Struct):
    data: _Listing | None = None


_replies = msgspec.json.Decoder(_Reply)


class Revocations:
    """Looks for connections to close after each change of a key, and among all of them once a minute."""

    def __init__(
        self,
        bus: Bus,
        ring: KeyRing,
        account: str,
        prefix: str,
        metrics: CalloutMetrics,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        audit: AuditWriter | None = None,
    ) -> None:
        """`bus` is a connection to the system account, `account` the account of the clients."""
        self._audit = audit
        self._bus = bus
        self._ring = ring
        self._account = account
        self._prefix = prefix
        self._metrics = metrics
        self._now = now
        self._clock = clock
        self._inbox = bus.new_inbox()
        self._lost: set[str] = set()
        """Users that have lost their rights since the last look."""
        self._changed = asyncio.Event()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Revocations in {self._account}, {len(self._lost)} to look for>"

    async def open(self) -> None:
        """Begins to notice changes of keys."""
        await self._bus.subscribe(f"{self._inbox}.*", self._judge)
        self._ring.on_change.append(self._note)

    async def watch(self) -> None:
        """Looks for connections until cancelled."""
        checked_at = float("-inf")
        while True:
            now = self._clock()
            if now - checked_at >= CHECK_INTERVAL_S and not self._ring.is_silent(now):
                checked_at = now
                self._ask()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._changed.wait()
            self._changed.clear()
            if self._lost:
                lost, self._lost = self._lost, set()
                tasks.background("revocation", self._look_for(lost))

    def _note(self, before: KeyRecord | None, after: KeyRecord | None) -> None:
        self._lost |= grants.all_users_of(before, self._prefix) - grants.users_of(after, self._prefix, self._now())
        if self._lost:
            self._changed.set()

    async def _look_for(self, users: set[str]) -> None:
        for after_s in _AGAIN_AFTER_S:
            await asyncio.sleep(after_s)
            for user in users if len(users) <= _MAX_NAMED else [""]:
                self._ask(user)

    def _ask(self, user: str = "", server: str = "PING", offset: int = 0) -> None:
        """Asks for the connections of a user, or of all, from an offset on; one server, or all of them."""
        asked: dict[str, object] = {"auth": True, "acc": self._account, "sort": "cid", "limit": _PAGE, "offset": offset}
        if user:
            asked["user"] = user
        subject = f"{server}.CONNZ"
        self._send(subject, asked, f"{self._inbox}.{user or 'all'}")

    def _judge(self, message: Msg) -> None:
        """Closes those of a server's connections that must be, and asks for its next ones."""
        try:
            listing = _replies.decode(message.data).data
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self._log.error("nats_error", error=f"a list of connections can't be decoded: {error}")
            return
        if listing is None:
            return
        for one in listing.connections:
            reason = self._reason_to_close(one, listing.now)
            if reason is not None:
                # Without a reply subject a broker does nothing; its answer is not needed.
                self._send(f"{listing.server_id}.KICK", {"cid": one.cid}, f"{self._inbox}.kicked")
                self._metrics.kicks.labels(reason).inc()
                key_id = grants.key_id_of(one.authorized_user)
                self._log.info("connection_kicked", key_id=key_id, reason=reason, cid=one.cid)
                if self._audit is not None and reason == callout_metrics.CHANGED:
                    record = self._ring.get(key_id or "")
                    tenant = record.tenant if record is not None else ""
                    once = f"{listing.server_id} {one.cid} {one.start}"  # other instances close it too
                    self._audit.add("connection", "closed", tenant, key_id or "", once=once, cid=one.cid)
        following = listing.offset + len(listing.connections)
        if listing.connections and following < listing.total:
            user = message.subject.rpartition(".")[2]
            self._ask("" if user == "all" else user, listing.server_id, following)

    def _reason_to_close(self, one: ListedConnection, now: datetime) -> str | None:
        """Returns the reason for which a connection must end, if there is one; `now` is by the broker's clock."""
        key_id = grants.key_id_of(one.authorized_user)
        if key_id is None or self._ring.is_silent(self._clock()):
            return None
        allowed = grants.users_of(self._ring.get(key_id), self._prefix, self._now())
        if one.authorized_user not in allowed:
            return callout_metrics.CHANGED
        # nats-py never comes back from a user that has expired, but it does from a connection that is closed.
        share = _RENEWED_FROM + (_RENEWED_UNTIL - _RENEWED_FROM) * zlib.crc32(f"{one.cid}{one.start}".encode()) / 2**32
        is_old = (now - one.start).total_seconds() > share * MAX_CONNECTION_S
        return callout_metrics.RENEWAL if is_old else None

    def _send(self, subject: str, asked: dict[str, object], reply: str) -> None:
        try:
            self._bus.publish(f"$SYS.REQ.SERVER.{subject}", msgspec.json.encode(asked), reply)
        except (ConnectionError, RuntimeError) as error:  # the next check repeats it
            self._log.warning("reply_not_sent", error=str(error))
