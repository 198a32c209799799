"""Sends digests of this router's fleet to those who have asked for them within the last seconds.

While nobody looks, nothing is computed or kept. All viewers get the same digests, each encoded once; one who is new or
has missed something gets everything at the next digest."""

import asyncio
import collections
import secrets
import time
from collections.abc import Callable, Sequence

import structlog

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, Outgoing
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.wire import codec, errors, limits, messages
from tokenbus.protocol.wire.fleet import FLEET_DIGEST_S, FLEET_VIEW_S, MAX_FLEET_VIEWS
from tokenbus.router.fleet.digests import FleetDigests
from tokenbus.router.fleet.fleet import Fleet


class _View:
    """One reply subject to which digests go."""

    def __init__(self, tenant: str, encoding: codec.Encoding, expires_at: float) -> None:
        self.tenant = tenant
        self.encoding = encoding
        self.expires_at = expires_at
        self.needs_whole = True


class FleetViewers:
    """All who look at the fleet of one router."""

    def __init__(
        self,
        bus: Bus,
        replies: ReplySender,
        fleet: Fleet,
        router_id: str,
        stats: Callable[[float], messages.RouterStats],
        queues: Callable[[], Sequence[messages.ModelQueue]],
        limits_seen_by: Callable[[str, str, bool], list[messages.ClientLimits]],
    ) -> None:
        """`stats` returns this router's state at a time, `queues` the models of which requests wait in it, and
        `limits_seen_by` the limits that a viewer may see, given its tenant, its key's id and whether it is an
        operator."""
        self._bus = bus
        self._replies = replies
        self._fleet = fleet
        self._router_id = router_id
        self._stats = stats
        self._queues = queues
        self._limits_seen_by = limits_seen_by
        self._views: dict[str, _View] = {}
        """By reply subject."""
        self._digests: FleetDigests | None = None
        self._timer: asyncio.Handle | None = None

    def __repr__(self) -> str:
        return f"<FleetViewers, {len(self._views)}>"

    def __len__(self) -> int:
        return len(self._views)

    def ask(
        self,
        reply: str,
        asked: messages.FleetRequest,
        encoding: codec.Encoding,
        tenant: str,
        key_id: str,
        *,
        is_operator: bool,
    ) -> None:
        """Answers a viewer, or sends it digests for the next seconds. Raises RequestError if there are too many."""
        now = time.monotonic()
        if asked.router_id is None:
            limits = self._limits_seen_by(tenant, key_id, is_operator)
            told = messages.FleetDigest(router_id=self._router_id, router=self._stats(now), limits=limits)
            self._send(reply, told, encoding)
        elif asked.router_id == self._router_id:
            self._add(reply, asked, encoding, tenant, now)

    def refuse(self, reply: str, encoding: codec.Encoding, error: errors.Error) -> None:
        """Answers a viewer with an error."""
        self._send(reply, messages.FleetDigest(router_id=self._router_id, error=error), encoding)

    def close(self) -> None:
        """Sends no more digests."""
        if self._timer is not None:
            self._timer.cancel()
        self._views.clear()

    def _send(self, reply: str, digest: messages.FleetDigest, encoding: codec.Encoding) -> None:
        self._replies.send(reply, codec.encode(digest, encoding), codec.content_headers(encoding))

    def _add(self, reply: str, asked: messages.FleetRequest, encoding: codec.Encoding, tenant: str, now: float) -> None:
        view = self._views.get(reply)
        if view is None:
            if len(self._views) >= MAX_FLEET_VIEWS:
                self._make_room(tenant)
            view = self._views[reply] = _View(tenant, encoding, 0.0)
        view.encoding, view.expires_at = encoding, now + FLEET_VIEW_S
        view.needs_whole |= asked.whole
        if self._timer is None:
            self._digests = FleetDigests(self._fleet, secrets.token_hex(8))
            self._timer = asyncio.get_running_loop().call_soon(self._show)

    def _make_room(self, tenant: str) -> None:
        """Shows no more to the newest viewer of the tenant that has most, unless `tenant` would then have as many: then
        it raises RequestError."""
        counts = collections.Counter(view.tenant for view in self._views.values())
        ((most, num_views),) = counts.most_common(1)
        if num_views <= counts[tenant] + 1:
            raise errors.RequestError(
                errors.make_error(
                    errors.Code.OVERLOADED,
                    f"{MAX_FLEET_VIEWS} others look at the fleet of this router: that is the limit",
                    retry_after_ms=1e3 * FLEET_VIEW_S,
                )
            )
        del self._views[next(reply for reply, view in reversed(self._views.items()) if view.tenant == most)]

    def _show(self) -> None:
        """Sends a digest to each viewer, and goes on as long as there is one."""
        now = time.monotonic()
        self._views = {reply: view for reply, view in self._views.items() if view.expires_at > now}
        if not self._views or self._digests is None:
            self._timer = self._digests = None
            return
        self._timer = asyncio.get_running_loop().call_later(FLEET_DIGEST_S, self._show)
        try:
            self._digests.update(self._stats(now), self._queues(), now)
            self._send_digests(self._digests)
        except Exception:  # outermost frame of a timer
            structlog.get_logger().exception("digest_failed")

    def _send_digests(self, digests: FleetDigests) -> None:
        most = self._bus.max_payload - limits.MESSAGE_RESERVE_BYTES
        encoded: dict[tuple[bool, codec.Encoding], list[bytes]] = {}
        for reply, view in self._views.items():
            form = (view.needs_whole, view.encoding)
            if form not in encoded:
                encoded[form] = (digests.whole if view.needs_whole else digests.changes)(most, view.encoding)
            headers = codec.content_headers(view.encoding)
            try:
                self._bus.publish_all([Outgoing(reply, payload, headers=headers) for payload in encoded[form]])
                view.needs_whole = False
            except (OutboundBufferLimitError, ConnectionError):
                view.needs_whole = True
