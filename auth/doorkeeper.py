"""Answers brokers that ask whether a client may connect."""

import asyncio

import structlog
from nats.aio.msg import Msg

from tokenbus.auth import callout_metrics, callout_requests, grants
from tokenbus.auth.answers import CalloutAnswers
from tokenbus.auth.callout_requests import BadCalloutError, Callout
from tokenbus.auth.connection_caps import ConnectionCaps
from tokenbus.auth.instance import Instance
from tokenbus.auth.seeds import Seeds
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import KeyRefusedError
from tokenbus.protocol.access.refusal_records import RefusalRecords

_SUBJECT = "$SYS.REQ.USER.AUTH"
_QUEUE = "tokenbus-auth"
_XKEY = "Nats-Server-Xkey"
REFUSAL_DELAY_S = 0.5
"""The time until a client hears that it is kept out: one that tries again and again is answered twice a second."""
MAX_DELAYED = 1_024
"""Refusals that may wait at a time. Further ones are not sent; the broker then ends the connection by itself."""


class Doorkeeper:
    """One of several instances that share the questions of all brokers."""

    def __init__(self, instance: Instance, seeds: Seeds, answers: CalloutAnswers, caps: ConnectionCaps) -> None:
        self._own = instance
        self._bus = instance.brokers.bus
        self._seeds = seeds
        self._answers = answers
        self._caps = caps
        self._records = None if instance.audit is None else RefusalRecords(instance.audit)
        self._num_delayed = 0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Doorkeeper {self._own.ring!r}, {self._num_delayed} refusals wait>"

    async def open(self) -> None:
        """Begins to answer."""
        self._subscription = await self._bus.subscribe(_SUBJECT, self._receive, queue=_QUEUE)

    async def close(self) -> None:
        """Leaves further questions to other instances."""
        await self._bus.unsubscribe(self._subscription)

    def _receive(self, message: Msg) -> None:
        began = self._own.clock()
        sealed_by = (message.headers or {}).get(_XKEY, "")
        try:
            callout = callout_requests.read(message.data, sealed_by, message.reply, self._seeds, self._own.now())
        except BadCalloutError as error:
            self._own.metrics.connects.labels(callout_metrics.BAD_REQUEST).inc()
            self._log.warning("callout_refused", error=str(error))
            return
        try:
            outcome = self._answer(callout, message.reply)
        except ValueError as error:  # of a broker's key with which nothing can be sealed
            self._log.warning("callout_refused", error=str(error))
            outcome = callout_metrics.BAD_REQUEST
        self._own.metrics.connects.labels(outcome).inc()
        self._own.metrics.seconds.observe(self._own.clock() - began)

    def _answer(self, callout: Callout, reply: str) -> str:
        """Answers, or will; returns the outcome."""
        if not callout.is_client:
            return self._refuse(callout, reply, callout_metrics.NOT_A_CLIENT, "only NATS clients are let in by keys")
        if not callout.key:
            return self._refuse(callout, reply, callout_metrics.NO_KEY, "the client has sent no API key")
        now = self._own.now()
        try:
            record = self._own.ring.find(callout.key, now, self._own.clock())
        except KeyRefusedError as error:
            return self._refuse(callout, reply, error.problem, str(error))
        if self._caps.is_full(record):
            problem = f"the API key {record.id} has the {record.limits.connections} connections that it may have"
            return self._refuse(callout, reply, callout_metrics.TOO_MANY, problem)
        grant = grants.grant_of(record, keys.digest_of(callout.key), self._own.prefix)
        self._bus.publish(reply, self._answers.let_in(callout, grant, now))
        self._log.debug("connect_allowed", key_id=record.id, tenant=record.tenant, address=callout.host)
        return callout_metrics.ALLOWED

    def _refuse(self, callout: Callout, reply: str, outcome: str, reason: str) -> str:
        key_id = keys.id_of(callout.key) or ""
        self._log.warning("connect_refused", key_id=key_id, address=callout.host, reason=outcome, error=reason)
        if self._num_delayed >= MAX_DELAYED:
            return callout_metrics.FLOOD
        if self._records is not None and (claimed := self._own.ring.get(key_id)) is not None:
            self._records.add(claimed, str(outcome), self._own.clock(), address=callout.host)
        answer = self._answers.refuse(callout, reason, self._own.now())
        self._num_delayed += 1
        asyncio.get_running_loop().call_later(REFUSAL_DELAY_S, self._send_refusal, reply, answer)
        return outcome

    def _send_refusal(self, reply: str, answer: bytes) -> None:
        self._num_delayed -= 1
        try:
            self._bus.publish(reply, answer)
        except (ConnectionError, RuntimeError) as error:  # the broker ends the client's connection by itself
            self._log.warning("reply_not_sent", error=str(error))
