"""Clients' calls: requests with one reply and no stream. Each is answered once.

Each kind of call says how its body is checked and answered; everything else is the same for all. A call ends before it
is answered if its client cancels it or this router stops."""

import asyncio
import dataclasses
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, limits, messages, subjects
from tokenbus.router.access.limits import FREE, Ticket
from tokenbus.router.access.quota import Quota
from tokenbus.router.requests.flights.ends import RequestEnds

MAX_OPEN = 1_024
"""Maximum number of calls of one kind in one router, except those that are bounded by their memory."""
MAX_OPEN_BYTES = 64 * 1024 * 1024
"""Memory for those; a tenant may have at most a quarter of it, so that none can crowd out the others."""
MAX_TENANT_BYTES = MAX_OPEN_BYTES // 4
CALL_BYTES = 16 * 1024
"""The cost of a call in addition to the bytes of its message."""

Body = (
    messages.EmbedRequest
    | messages.RerankRequest
    | messages.TokenizeRequest
    | messages.DetokenizeRequest
    | messages.CacheRequest
)
PooledReply = messages.EmbedReply | messages.RerankReply
CountedReply = PooledReply | messages.CacheReply
"""Replies of kinds that count as requests, which tell what is left of limits."""
Reply = (
    messages.EmbedReply | messages.RerankReply | messages.TokenizeReply | messages.DetokenizeReply | messages.CacheReply
)
BodyT = TypeVar("BodyT", bound=Body)
WorkT = TypeVar("WorkT")


@dataclasses.dataclass(slots=True, eq=False)
class Call(Generic[BodyT, WorkT]):
    """A valid call, and where its reply goes."""

    request_id: str
    address: subjects.ModelAddress
    body: BodyT
    work: WorkT
    """The message for a worker."""
    reply: str
    encoding: codec.Encoding
    received_at: float
    num_bytes: int
    """The size of its message."""
    span: tracing.Span = tracing.NOOP_SPAN
    ticket: Ticket | None = FREE
    """Its charge; None while it waits to be."""
    ended_by: errors.Code = errors.Code.SHUTTING_DOWN
    """The error with which the call ends if its task is cancelled."""

    @property
    def key(self) -> str:
        return subjects.request_key(self.address.tenant, self.request_id)

    def remaining_s(self, timeout_ms: float | None) -> float:
        """Seconds until the call's deadline; less than 0 once it has passed."""
        return self.received_at + (timeout_ms or limits.DEFAULT_CALL_TIMEOUT_MS) / 1e3 - time.monotonic()


class CallKind(ABC, Generic[BodyT, WorkT]):
    """One kind of call."""

    operation: ClassVar[str]
    """The name of its subjects, in logs, and of the feature that a worker needs for it if it needs one."""
    otel_operation: ClassVar[str]
    bodies: ClassVar[codec.Decoder[Any]]
    replies: ClassVar[type[Reply]]
    names_adapters: ClassVar[bool] = True
    """Whether the name of a model with an adapter is allowed, and means the model."""
    counts: ClassVar[bool] = True
    """Whether it counts as a request against the limits of its key and tenant."""
    is_bounded_by_memory: ClassVar[bool] = False
    inputs_field: ClassVar[str | None] = None
    """The field of the request that is to blame if the reply is too large."""
    advice: ClassVar[str] = "ask for less at a time"

    @abstractmethod
    def check(self, body: BodyT) -> WorkT:
        """Returns the message for a worker. Raises RequestError for the first field that is not allowed."""

    @abstractmethod
    async def answer(self, call: Call[BodyT, WorkT]) -> Reply:
        """Returns the reply to a call. Raises RequestError; its task may be cancelled."""

    def count(self, code: str) -> None:
        """Counts a reply by its error code, or `ok`."""


class ClientCalls:
    """The calls that one router has received and not answered."""

    def __init__(self, replies: ReplySender, tracer: tracing.Tracer, ends: RequestEnds, quota: Quota) -> None:
        self._replies = replies
        self._tracer = tracer
        self._ends = ends
        self._quota = quota
        self._open: dict[Call[Any, Any], asyncio.Task[None]] = {}
        self._by_key: dict[str, list[Call[Any, Any]]] = {}
        """The same calls. Clients may use an id for several at a time."""
        self._num_open: Counter[str] = Counter()
        """Open calls by operation."""
        self._open_bytes: Counter[str] = Counter()
        """The cost of each tenant's calls that are bounded by their memory."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<ClientCalls, {len(self._open)} open>"

    def admit_call(self, kind: CallKind[BodyT, WorkT], call: Call[BodyT, WorkT], headers: tracing.Headers) -> None:
        """Takes a call. Raises RequestError(overloaded) if too many are open, or a limit of its client is used up."""
        if not self._has_room(kind, call):
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_000.0))
        if kind.counts:
            call.ticket, _ = self._quota.admit(call.address, call.num_bytes // 4, 0)
        model = call.address.model
        self._log.info("call_received", request_id=call.request_id, op=kind.operation, model=model)
        known = {
            tracing.MODEL: model,
            tracing.OPERATION: kind.otel_operation,
            tracing.REQUEST_ID: call.request_id,
        }
        call.span = tracing.start_span(self._tracer, "route", "server", headers, known, call.received_at)
        self._num_open[kind.operation] += 1
        if kind.is_bounded_by_memory:
            self._open_bytes[call.address.tenant] += _cost_bytes(call)
        self._by_key.setdefault(call.key, []).append(call)
        self._open[call] = task = tasks.background("call", self._carry(kind, call))
        task.add_done_callback(lambda _: self._ended(kind, call))

    def cancel(self, key: str, model: str | None) -> bool:
        """Ends a client's calls with this id for a model, or for any if None is named, and returns whether there were
        any."""
        found = [one for one in self._by_key.get(key, ()) if model in (None, one.address.model)]
        for call in found:
            call.ended_by = errors.Code.CANCELLED
            self._open[call].cancel()
        return bool(found)

    async def drain(self) -> None:
        """Returns when every call was answered."""
        while self._open:
            await asyncio.wait(self._open.values())

    async def shut_down(self) -> None:
        """Answers the open calls with an error."""
        open_tasks = list(self._open.values())
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)

    def refuse(
        self, kind: CallKind[Any, Any], subject: str, encoding: codec.Encoding, request_id: str, error: errors.Error
    ) -> None:
        """Answers a call that can't be taken."""
        self._log.info("call_refused", request_id=request_id, op=kind.operation, code=error.code, param=error.param)
        self._send(kind, subject, encoding, kind.replies(id=request_id, error=error))

    async def _carry(self, kind: CallKind[BodyT, WorkT], call: Call[BodyT, WorkT]) -> None:
        try:
            if call.ticket is None:
                remaining_s = call.remaining_s(getattr(call.body, "timeout_ms", None))
                call.ticket, _ = await self._quota.admitted(call.address, call.num_bytes // 4, 0, remaining_s)
            reply = await kind.answer(call)
        except errors.RequestError as error:
            reply = kind.replies(id=call.request_id, error=error.error)
        except Exception:  # outermost frame of a call: the client gets a reply whatever went wrong
            self._log.exception("request_failed", request_id=call.request_id)
            reply = kind.replies(id=call.request_id, error=errors.make_error(errors.Code.INTERNAL))
        self._finish(kind, call, reply)

    def _ended(self, kind: CallKind[Any, Any], call: Call[Any, Any]) -> None:
        """Forgets a call whose task is done; answers it if the task was cancelled, perhaps before it began."""
        was_cancelled = self._open.pop(call).cancelled()
        self._num_open[kind.operation] -= 1
        if kind.is_bounded_by_memory:
            self._open_bytes[call.address.tenant] -= _cost_bytes(call)
            self._open_bytes += Counter()  # drops entries that are not above 0
        same_id = self._by_key[call.key]
        same_id.remove(call)
        if not same_id:
            del self._by_key[call.key]
        if was_cancelled:
            self._finish(kind, call, kind.replies(id=call.request_id, error=errors.make_error(call.ended_by)))

    def _finish(self, kind: CallKind[Any, Any], call: Call[Any, Any], reply: Reply) -> None:
        usage = reply.usage if isinstance(reply, PooledReply) and not reply.error else None
        if call.ticket is not None:
            self._quota.close(call.ticket, call.address, usage.prompt_tokens if usage else 0)
        if isinstance(reply, CountedReply):
            told = self._quota.report(call.address)
            reply = codec.replace(reply, rate_limits=codec.unset_if_none(told))
        reply = self._send(kind, call.reply, call.encoding, reply)
        code = reply.error.code if reply.error else None
        if code is not None:
            call.span.set_error(str(code))
        call.span.end()
        kind.count(code or "ok")
        self._ends.tell_call(kind.operation, call.address, call.request_id, code, usage if code is None else None)
        self._log.info(
            "call_finished",
            request_id=call.request_id,
            op=kind.operation,
            model=call.address.model,
            code=code,
            prompt_tokens=usage.prompt_tokens if usage and code is None else None,
            total_ms=round((time.monotonic() - call.received_at) * 1e3, 1),
        )

    def _has_room(self, kind: CallKind[Any, Any], call: Call[Any, Any]) -> bool:
        if not kind.is_bounded_by_memory:
            return self._num_open[kind.operation] < MAX_OPEN
        cost = _cost_bytes(call)
        of_tenant = self._open_bytes[call.address.tenant]
        return self._open_bytes.total() + cost <= MAX_OPEN_BYTES and of_tenant + cost <= MAX_TENANT_BYTES

    def _send(self, kind: CallKind[Any, Any], subject: str, encoding: codec.Encoding, reply: Reply) -> Reply:
        """Publishes a reply, or an error in its place if it is too large for the broker, and returns what it sent."""
        headers = codec.error_headers(reply.error) if reply.error else None
        try:
            self._replies.send(subject, codec.encode(reply, encoding), headers)
        except PayloadTooLargeError as problem:
            text = f"{problem}: {kind.advice}"
            error = errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, text, param=kind.inputs_field)
            return self._send(kind, subject, encoding, kind.replies(id=reply.id, error=error))
        return reply


def _cost_bytes(call: Call[Any, Any]) -> int:
    return CALL_BYTES + call.num_bytes
