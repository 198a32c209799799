"""Serves `POST /v1/chat/completions`: one request from its body to its last event."""

import functools
import secrets
import time
from collections.abc import Callable

import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokenbus.client import Stream
from tokenbus.gateway import body
from tokenbus.gateway.body_memory import BodyMemory, HeldBody
from tokenbus.gateway.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.openai import chat_request, chat_response, error_responses
from tokenbus.gateway.openai.chat_request import ParsedChatRequest
from tokenbus.gateway.openai.chat_response import ChunkEncoder, CompletionBuilder
from tokenbus.gateway.openai.error_responses import ErrorResponse
from tokenbus.gateway.openai.response_writer import ResponseWriter
from tokenbus.gateway.request_log import RequestLog
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.http.disconnects import disconnect_of
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors

STATUS_HOLD_S = 10.0
"""A streamed response starts with its first text, or after this time; until then an error can still set the status."""


class ChatCompletions:
    """The ASGI application of this endpoint; watches for the client's disconnect during the response."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        tenants: Tenants,
        bodies: BodyMemory,
        metrics: GatewayMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self._limit = limit
        self._tenants = tenants
        self._bodies = bodies
        self._metrics = metrics
        self._tracer = tracer

    def __repr__(self) -> str:
        return f"<ChatCompletions {self._limit!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, request_id = Request(scope, receive), secrets.token_urlsafe(16)
        log, writer = RequestLog(request_id, self._metrics), ResponseWriter(send, request_id)
        known = {"http.request.method": "POST", "http.route": scope["path"], tracing.REQUEST_ID: request_id}
        span = tracing.start_span(self._tracer, f"POST {scope['path']}", "server", request.headers, known)
        try:
            # around the whole request: draining waits for its end, and until then the library keeps it
            with self._limit.admit(), self._bodies.holding() as held:
                await self._serve(request, held, writer, log, span)
        except body.ClientDisconnectedError:
            pass  # nobody is left to answer
        except error_responses.ApiError as error:
            await _send_error(error.response, writer, log)
        except errors.RequestError as error:
            await _send_error(error_responses.from_error(error.error), writer, log)
        except Exception:  # outermost frame of a request: it must be answered, and the others must not notice
            structlog.get_logger().exception("request_failed", request_id=request_id)
            await _send_error(error_responses.INTERNAL_ERROR, writer, log)
        finally:
            log.finished(writer.status, disconnect_of(scope))
            span.set_attributes({"http.response.status_code": writer.status})
            if writer.status is None or writer.status >= 500:
                span.set_error(str(writer.status or "none"))
            span.end()

    async def _serve(
        self, request: Request, held: HeldBody, writer: ResponseWriter, log: RequestLog, span: tracing.Span
    ) -> None:
        tenant = self._tenants.authenticate(request)
        log.set_tenant(tenant.name)
        parsed = await self._read(request, held, log)
        submit = functools.partial(tenant.client.generate, parsed.model, parsed.request, headers=span.headers())
        await body.cancel_on_disconnect(request.receive, self._respond(submit, parsed, writer, log))

    async def _read(self, request: Request, held: HeldBody, log: RequestLog) -> ParsedChatRequest:
        # In a method of its own, so that nothing holds the body while the request is served.
        payload = await body.read(request, self._bodies.max_body_bytes, held)
        parsed = chat_request.parse(payload, log.request_id)
        log.received(parsed, len(payload))
        return parsed

    async def _respond(
        self, submit: Callable[[], Stream], parsed: ParsedChatRequest, writer: ResponseWriter, log: RequestLog
    ) -> None:
        stream = submit()
        header = chat_response.CompletionHeader(f"chatcmpl-{stream.request_id}", int(time.time()), parsed.model)
        with self._limit.track(stream):
            async with stream:  # leaving the block cancels the request
                if parsed.stream:
                    encoder = ChunkEncoder(header, include_usage=parsed.include_usage)
                    await stream_response(stream, encoder, writer, log)
                else:
                    await respond(stream, CompletionBuilder(header), writer, log)


async def respond(stream: Stream, builder: CompletionBuilder, writer: ResponseWriter, log: RequestLog) -> None:
    """Waits for the end of a stream, and sends one chat completion or error."""
    async for chunk in stream:
        log.on_chunk(chunk)
        builder.add(chunk)
    response = error_responses.from_terminal(chunk)
    if response is None:
        await writer.send_json(200, builder.build(chunk))
    else:
        await writer.send_error(response)


async def stream_response(
    stream: Stream, encoder: ChunkEncoder, writer: ResponseWriter, log: RequestLog, hold_s: float = STATUS_HOLD_S
) -> None:
    """Sends a stream's chunks as events, or one error if it fails before its first text."""
    async for chunk in stream:
        log.on_chunk(chunk)
        response = error_responses.from_terminal(chunk)
        if response is not None and not writer.has_started and not (chunk.text or chunk.reasoning or chunk.tool_calls):
            await writer.send_error(response)
            return
        if events := encoder.encode(chunk):
            await writer.send_events(*events, last=chunk.finish_reason is not None)
        # Workers and routers send empty chunks while a request waits, and these drive the comments: no timer is needed.
        elif not chunk.tokens and log.age_s >= hold_s:
            await writer.send_events(chat_response.KEEP_ALIVE)


async def _send_error(response: ErrorResponse, writer: ResponseWriter, log: RequestLog) -> None:
    """Sends an error. If a response has started already it is cut off instead: uvicorn closes the connection."""
    log.set_code(response.code)
    if not writer.has_started:
        await writer.send_error(response)
