"""Closes the connections that a key no longer gives their rights, wherever in the cluster they are.

Brokers say which connections they have, and close one when told to. Nothing is remembered in between: each answer is
judged by what keys allow when it arrives, so several instances do the same, and one that was away misses nothing."""

import asyncio
import contextlib
import zlib
from datetime import datetime

import structlog
from nats.aio.msg import Msg

from tokenbus.auth import callout_metrics, grants
from tokenbus.auth.answers import MAX_CONNECTION_S
from tokenbus.auth.brokers import ListedConnection
from tokenbus.auth.instance import Instance
from tokenbus.protocol import tasks
from tokenbus.protocol.access.keys import KeyRecord

CHECK_INTERVAL_S = 60.0
_PAUSE_S = 1.0
"""Time between two looks at the clock, and at whether keys are known by now."""
_MAX_NAMED = 64
"""With more users than this to look for, all connections are listed instead."""
_AGAIN_AFTER_S = (0.0, 0.25, 1.0, 3.0)
"""A client that another instance has let in just before a change may be listed only a moment later."""
_RENEWED_FROM, _RENEWED_UNTIL = 0.6, 0.85
"""The part of their time after which connections are renewed, each at another moment."""


class Revocations:
    """Looks for connections to close after each change of a key, and among all of them once a minute."""

    def __init__(self, instance: Instance) -> None:
        self._own = instance
        self._inbox = instance.brokers.bus.new_inbox()
        self._lost: set[str] = set()
        """Users that have lost their rights since the last look."""
        self._changed = asyncio.Event()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Revocations, {len(self._lost)} to look for>"

    async def open(self) -> None:
        """Begins to notice changes of keys."""
        await self._own.brokers.bus.subscribe(f"{self._inbox}.*", self._judge)
        self._own.ring.on_change.append(self._note)

    async def watch(self) -> None:
        """Looks for connections until cancelled."""
        checked_at = float("-inf")
        while True:
            now = self._own.clock()
            if now - checked_at >= CHECK_INTERVAL_S and not self._own.ring.is_silent(now):
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
        self._lost |= grants.all_users_of(before, self._own.prefix) - grants.users_of(
            after, self._own.prefix, self._own.now()
        )
        if self._lost:
            self._changed.set()

    async def _look_for(self, users: set[str]) -> None:
        for after_s in _AGAIN_AFTER_S:
            await asyncio.sleep(after_s)
            for user in users if len(users) <= _MAX_NAMED else [""]:
                self._ask(user)

    def _ask(self, user: str = "") -> None:
        """Asks all brokers for the connections of a user, or for all."""
        self._own.brokers.ask(f"{self._inbox}.{user or 'all'}", user)

    def _judge(self, message: Msg) -> None:
        """Closes those of a server's connections that must be, and asks for its next ones."""
        listing = self._own.brokers.read(message.data)
        if listing is None:
            return
        for one in listing.connections:
            reason = self._reason_to_close(one, listing.now)
            if reason is not None:
                self._close(listing.server_id, one, reason)
        if listing.following is not None:
            user = message.subject.rpartition(".")[2]
            self._own.brokers.ask(message.subject, "" if user == "all" else user, listing.server_id, listing.following)

    def _close(self, server: str, one: ListedConnection, reason: str) -> None:
        own, key_id = self._own, grants.key_id_of(one.authorized_user) or ""
        own.brokers.close(server, one.cid, f"{self._inbox}.kicked")
        own.metrics.kicks.labels(reason).inc()
        self._log.info("connection_kicked", key_id=key_id, reason=reason, cid=one.cid)
        if own.audit is not None and reason == callout_metrics.CHANGED:
            record = own.ring.get(key_id)
            tenant = record.tenant if record is not None else ""
            once = f"{server} {one.cid} {one.start}"  # other instances close it too
            own.audit.add("connection", "closed", tenant, key_id, once=once, cid=one.cid)

    def _reason_to_close(self, one: ListedConnection, now: datetime) -> str | None:
        """Returns the reason for which a connection must end, if there is one; `now` is by the broker's clock."""
        key_id = grants.key_id_of(one.authorized_user)
        if key_id is None or self._own.ring.is_silent(self._own.clock()):
            return None
        allowed = grants.users_of(self._own.ring.get(key_id), self._own.prefix, self._own.now())
        if one.authorized_user not in allowed:
            return callout_metrics.CHANGED
        # nats-py never comes back from a user that has expired, but it does from a connection that is closed.
        share = _RENEWED_FROM + (_RENEWED_UNTIL - _RENEWED_FROM) * zlib.crc32(f"{one.cid}{one.start}".encode()) / 2**32
        is_old = (now - one.start).total_seconds() > share * MAX_CONNECTION_S
        return callout_metrics.RENEWAL if is_old else None
