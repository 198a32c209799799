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
from tokenbus.gateway.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.openai import answer, chat_request, chat_response, error_responses
from tokenbus.gateway.openai.response_writer import ResponseWriter
from tokenbus.gateway.request_log import RequestLog
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors


class ChatCompletions:
    """An ASGI application: it watches for the client's end while it answers."""

    def __init__(
        self,
        concurrency_limit: ConcurrencyLimit,
        tenants: Tenants,
        broker: Bus,
        metrics: GatewayMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self._concurrency_limit = concurrency_limit
        self._tenants = tenants
        self._broker = broker
        self._metrics = metrics
        self._tracer = tracer

    def __repr__(self) -> str:
        return f"<Chat {self._concurrency_limit!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, request_id = Request(scope, receive), secrets.token_urlsafe(16)
        request_log, writer = RequestLog(request_id, self._metrics), ResponseWriter(send, request_id)
        known = {"http.request.method": "POST", "http.route": scope["path"], tracing.REQUEST_ID: request_id}
        span = tracing.start_span(self._tracer, f"POST {scope['path']}", "server", request.headers, known)
        try:
            with self._concurrency_limit.admit():
                await self._serve(request, writer, request_log, request_id, span)
        except body.ClientDisconnectedError:
            request_log.disconnected(is_answered=writer.is_complete)
        except error_responses.ApiError as error:
            await _refuse(error.response, writer, request_log)
        except errors.RequestError as error:
            await _refuse(error_responses.from_error(error.error), writer, request_log)
        except Exception:  # outermost frame of a request: it must be answered, and the others must not notice
            structlog.get_logger().exception("request_failed", request_id=request_id)
            await _refuse(error_responses.INTERNAL_ERROR, writer, request_log)
        finally:
            request_log.finished(writer.status)
            _end(span, writer.status)

    async def _serve(
        self, request: Request, writer: ResponseWriter, request_log: RequestLog, request_id: str, span: tracing.Span
    ) -> None:
        tenant = self._tenants.authenticate(request)
        request_log.set_tenant(tenant.name)
        wanted = await self._read(request, request_log, request_id)
        ask = functools.partial(tenant.client.generate, wanted.model, wanted.request, headers=span.headers())
        await body.cancel_on_disconnect(request.receive, self._answer(ask, wanted, writer, request_log))

    async def _read(self, request: Request, request_log: RequestLog, request_id: str) -> chat_request.ParsedChatRequest:
        """What is asked for; nothing else holds the body while it is answered."""
        payload = await body.read(request, self._broker.max_payload)
        wanted = chat_request.parse(payload, request_id)
        request_log.received(wanted, len(payload))
        return wanted

    async def _answer(
        self,
        ask: Callable[[], Stream],
        wanted: chat_request.ParsedChatRequest,
        writer: ResponseWriter,
        request_log: RequestLog,
    ) -> None:
        stream = ask()
        header = chat_response.CompletionHeader(f"chatcmpl-{stream.request_id}", int(time.time()), wanted.model)
        with self._concurrency_limit.track(stream):
            async with stream:  # leaving it cancels the request
                if wanted.stream:
                    events = chat_response.ChunkEncoder(header, include_usage=wanted.include_usage)
                    await answer.stream_response(stream, events, writer, request_log)
                else:
                    await answer.respond(stream, chat_response.CompletionBuilder(header), writer, request_log)


def _end(span: tracing.Span, status: int | None) -> None:
    span.set_attributes({"http.response.status_code": status})
    if status is None or status >= 500:
        span.set_error(str(status or "none"))
    span.end()


async def _refuse(response: error_responses.ErrorResponse, writer: ResponseWriter, request_log: RequestLog) -> None:
    """Where an answer has begun already it is cut off: uvicorn closes the connection."""
    request_log.set_code(response.code)
    if not writer.has_started:
        await writer.send_error(response)
