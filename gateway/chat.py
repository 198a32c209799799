"""`POST /v1/chat/completions`: one request from its body to its last event."""

import functools
import secrets
import time
from collections.abc import Callable

import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokenbus.client import Stream
from tokenbus.gateway import body
from tokenbus.gateway.door import Door
from tokenbus.gateway.journal import Journal
from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.openai import answer, asked, failures, told
from tokenbus.gateway.openai.reply import Reply
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.telemetry import traces
from tokenbus.protocol.wire import errors


class Chat:
    """An ASGI application: it watches for the client's end while it answers."""

    def __init__(
        self, door: Door, tenants: Tenants, broker: Bus, metrics: GatewayMetrics, traced: traces.Traces
    ) -> None:
        self._door = door
        self._tenants = tenants
        self._broker = broker
        self._metrics = metrics
        self._traces = traced

    def __repr__(self) -> str:
        return f"<Chat {self._door!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, request_id = Request(scope, receive), secrets.token_urlsafe(16)
        journal, reply = Journal(request_id, self._metrics), Reply(send, request_id)
        known = {"http.request.method": "POST", "http.route": scope["path"], traces.REQUEST_ID: request_id}
        span = self._traces.begin(f"POST {scope['path']}", "server", request.headers, known)
        try:
            with self._door.entered():
                await self._serve(request, reply, journal, request_id, span)
        except body.GoneError:
            journal.gone(is_answered=reply.is_complete)
        except failures.FailedError as error:
            await _refuse(error.failure, reply, journal)
        except errors.RequestError as error:
            await _refuse(failures.of_error(error.error), reply, journal)
        except Exception:  # outermost frame of a request: it must be answered, and the others must not notice
            structlog.get_logger().exception("request_failed", request_id=request_id)
            await _refuse(failures.BUG, reply, journal)
        finally:
            journal.ended(reply.status)
            _end(span, reply.status)

    async def _serve(
        self, request: Request, reply: Reply, journal: Journal, request_id: str, span: traces.Span
    ) -> None:
        tenant = self._tenants.of(request)
        journal.tenant(tenant.name)
        wanted = await self._read(request, journal, request_id)
        ask = functools.partial(tenant.client.generate, wanted.model, wanted.request, headers=span.headers())
        await body.unless_gone(request.receive, self._answer(ask, wanted, reply, journal))

    async def _read(self, request: Request, journal: Journal, request_id: str) -> asked.Asked:
        """What is asked for; nothing else holds the body while it is answered."""
        payload = await body.read(request, self._broker.max_payload)
        wanted = asked.read(payload, request_id)
        journal.came(wanted, len(payload))
        return wanted

    async def _answer(self, ask: Callable[[], Stream], wanted: asked.Asked, reply: Reply, journal: Journal) -> None:
        stream = ask()
        heading = told.Heading(f"chatcmpl-{stream.request_id}", int(time.time()), wanted.model)
        with self._door.holding(stream):
            async with stream:  # leaving it cancels the request
                if wanted.stream:
                    events = told.Events(heading, include_usage=wanted.include_usage)
                    await answer.in_events(stream, events, reply, journal)
                else:
                    await answer.whole(stream, told.Whole(heading), reply, journal)


def _end(span: traces.Span, status: int | None) -> None:
    span.add({"http.response.status_code": status})
    if status is None or status >= 500:
        span.fail(str(status or "none"))
    span.end()


async def _refuse(failure: failures.Failure, reply: Reply, journal: Journal) -> None:
    """Where an answer has begun already it is cut off: uvicorn closes the connection."""
    journal.failed(failure.code)
    if not reply.has_begun:
        await reply.fail(failure)
