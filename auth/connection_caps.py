"""Holds keys to the number of connections that they may have, wherever in the cluster these are.

Brokers do not say how many connections a user has before it is let in, so they are counted a moment after each
connect: the newest beyond the limit are closed, and further ones are refused at once while there are as many as there
may be. All instances judge by the same order, so they close the same ones."""

import asyncio
from datetime import datetime
from typing import NamedTuple

import structlog
from nats.aio.msg import Msg

from tokenbus.auth import callout_metrics, grants
from tokenbus.auth.instance import Instance
from tokenbus.protocol import tasks
from tokenbus.protocol.access.keys import KeyRecord

_SETTLE_S = 0.1
"""A connection may be listed only a moment after it was let in."""
_ANSWERS_S = 0.4
"""Time for the answers of all brokers."""
_FULL_S = 1.0
"""Further connections are refused for this time after the last count, which each of them repeats."""
MAX_KEYS = 4_096
"""Keys that are counted at a time. Those of others are let in, and counted at their next connect."""


class _Counted(NamedTuple):
    start: datetime
    server: str
    cid: int


class ConnectionCaps:
    """The limits of connections, as one instance holds them."""

    def __init__(self, instance: Instance, settle_s: float = _SETTLE_S, answers_s: float = _ANSWERS_S) -> None:
        self._own = instance
        self._settle_s = settle_s
        self._answers_s = answers_s
        self._inbox = instance.brokers.bus.new_inbox()
        self._counts: dict[str, set[_Counted]] = {}
        """The connections found so far, by the id of each key that is being counted."""
        self._again: set[str] = set()
        """Those of them that have to be counted once more, since there was another connect meanwhile."""
        self._full_until: dict[str, float] = {}
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<ConnectionCaps, {len(self._counts)} keys being counted>"

    async def open(self) -> None:
        """Begins to hear the answers of brokers, and of limits that were lowered."""
        await self._own.brokers.bus.subscribe(f"{self._inbox}.*", self._take)
        self._own.ring.on_change.append(self._note)

    def is_full(self, record: KeyRecord) -> bool:
        """Whether a key has as many connections as it may have; it is asked at each connect, which is counted."""
        if not record.limits.connections:
            return False
        is_full = self._own.clock() < self._full_until.get(record.id, 0.0)
        self._count(record.id)
        return is_full

    def _note(self, before: KeyRecord | None, after: KeyRecord | None) -> None:
        if before is not None and after is not None and before.limits.connections != after.limits.connections:
            self._full_until.pop(after.id, None)
            self._count(after.id)

    def _count(self, key_id: str) -> None:
        if key_id in self._counts:
            self._again.add(key_id)
        elif len(self._counts) < MAX_KEYS:
            self._counts[key_id] = set()
            tasks.background("count connections", self._hold(key_id))

    async def _hold(self, key_id: str) -> None:
        """Counts a key's connections and closes those that are too many."""
        await asyncio.sleep(self._settle_s)
        for user in grants.users_of(self._own.ring.get(key_id), self._own.prefix, self._own.now()):
            self._own.brokers.ask(f"{self._inbox}.{key_id}", user)
        await asyncio.sleep(self._answers_s)
        found, record, now = sorted(self._counts.pop(key_id)), self._own.ring.get(key_id), self._own.clock()
        self._full_until = {one: until for one, until in self._full_until.items() if until > now}
        if key_id in self._again:
            self._again.remove(key_id)
            self._count(key_id)
        if record is None or not (most := record.limits.connections):
            return
        if len(found) >= most:
            self._full_until[key_id] = now + _FULL_S
        for one in found[most:]:
            self._close(record, one)

    def _close(self, record: KeyRecord, one: _Counted) -> None:
        own, reason = self._own, callout_metrics.TOO_MANY
        own.brokers.close(one.server, one.cid, f"{self._inbox}.closed")
        own.metrics.kicks.labels(reason).inc()
        self._log.info("connection_kicked", key_id=record.id, reason=reason, cid=one.cid)
        if own.audit is not None:
            once = f"{one.server} {one.cid} {one.start}"  # other instances close it too
            own.audit.add("connection", "closed", record.tenant, record.id, once=once, cid=one.cid, reason=reason)

    def _take(self, message: Msg) -> None:
        key_id = message.subject.rpartition(".")[2]
        found = self._counts.get(key_id)
        if found is None or (listing := self._own.brokers.read(message.data)) is None:
            return
        for one in listing.connections:
            if grants.key_id_of(one.authorized_user) == key_id:
                found.add(_Counted(one.start, listing.server_id, one.cid))
        if listing.following is not None:
            self._own.brokers.ask(
                message.subject, listing.connections[-1].authorized_user, listing.server_id, listing.following
            )
