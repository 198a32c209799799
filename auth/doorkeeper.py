"""Answers brokers that ask whether a client may connect."""

import asyncio
import time
from collections.abc import Callable

import structlog
from nats.aio.msg import Msg

from tokenbus.auth import callout_metrics, callout_requests, grants
from tokenbus.auth.answers import CalloutAnswers
from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.auth.callout_requests import BadCalloutError, Callout
from tokenbus.auth.seeds import Seeds
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.access.key_ring import KeyRefusedError, KeyRing
from tokenbus.protocol.bus.bus import Bus

_SUBJECT = "$SYS.REQ.USER.AUTH"
_QUEUE = "tokenbus-auth"
_XKEY = "Nats-Server-Xkey"
REFUSAL_DELAY_S = 0.5
"""The time until a client hears that it is kept out: one that tries again and again is answered twice a second."""
MAX_DELAYED = 1_024
"""Refusals that may wait at a time. Further ones are not sent; the broker then ends the connection by itself."""


class Doorkeeper:
    """One of several instances that share the questions of all brokers."""

    def __init__(
        self,
        bus: Bus,
        ring: KeyRing,
        seeds: Seeds,
        answers: CalloutAnswers,
        prefix: str,
        metrics: CalloutMetrics,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        audit: AuditWriter | None = None,
    ) -> None:
        """`bus` is a connection to the account that brokers ask in; `prefix` is that of all subjects."""
        self._audit = audit
        self._bus = bus
        self._ring = ring
        self._seeds = seeds
        self._answers = answers
        self._prefix = prefix
        self._metrics = metrics
        self._now = now
        self._clock = clock
        self._num_delayed = 0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Doorkeeper {self._ring!r}, {self._num_delayed} refusals wait>"

    async def open(self) -> None:
        """Begins to answer."""
        self._subscription = await self._bus.subscribe(_SUBJECT, self._receive, queue=_QUEUE)

    async def close(self) -> None:
        """Leaves further questions to other instances."""
        await self._bus.unsubscribe(self._subscription)

    def _receive(self, message: Msg) -> None:
        began = self._clock()
        sealed_by = (message.headers or {}).get(_XKEY, "")
        try:
            callout = callout_requests.read(message.data, sealed_by, message.reply, self._seeds, self._now())
        except BadCalloutError as error:
            self._metrics.connects.labels(callout_metrics.BAD_REQUEST).inc()
            self._log.warning("callout_refused", error=str(error))
            return
        try:
            outcome = self._answer(callout, message.reply)
        except ValueError as error:  # of a broker's key with which nothing can be sealed
            self._log.warning("callout_refused", error=str(error))
            outcome = callout_metrics.BAD_REQUEST
        self._metrics.connects.labels(outcome).inc()
        self._metrics.seconds.observe(self._clock() - began)

    def _answer(self, callout: Callout, reply: str) -> str:
        """Answers, or will; returns the outcome."""
        if not callout.is_client:
            return self._refuse(callout, reply, callout_metrics.NOT_A_CLIENT, "only NATS clients are let in by keys")
        if not callout.key:
            return self._refuse(callout, reply, callout_metrics.NO_KEY, "the client has sent no API key")
        now = self._now()
        try:
            record = self._ring.find(callout.key, now, self._clock())
        except KeyRefusedError as error:
            return self._refuse(callout, reply, error.problem, str(error))
        grant = grants.grant_of(record, keys.digest_of(callout.key), self._prefix)
        self._bus.publish(reply, self._answers.let_in(callout, grant, now))
        self._log.debug("connect_allowed", key_id=record.id, tenant=record.tenant, address=callout.host)
        return callout_metrics.ALLOWED

    def _refuse(self, callout: Callout, reply: str, outcome: str, reason: str) -> str:
        key_id = keys.id_of(callout.key) or ""
        self._log.warning("connect_refused", key_id=key_id, address=callout.host, reason=outcome, error=reason)
        if self._num_delayed >= MAX_DELAYED:
            return callout_metrics.FLOOD
        # who knows no key could fill the log otherwise
        if self._audit is not None and (claimed := self._ring.get(key_id)) is not None:
            self._audit.add("connection", "refused", claimed.tenant, key_id, reason=str(outcome), address=callout.host)
        answer = self._answers.refuse(callout, reason, self._now())
        self._num_delayed += 1
        asyncio.get_running_loop().call_later(REFUSAL_DELAY_S, self._send_refusal, reply, answer)
        return outcome

    def _send_refusal(self, reply: str, answer: bytes) -> None:
        self._num_delayed -= 1
        try:
            self._bus.publish(reply, answer)
        except (ConnectionError, RuntimeError) as error:  # the broker ends the client's connection by itself
            self._log.warning("reply_not_sent", error=str(error))
