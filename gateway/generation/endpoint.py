"""Serves an endpoint that generates: one request from its body to its last event, in the words of its dialect."""

import functools
import re
import secrets
import time
from collections.abc import Callable

import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokenbus.client.choices import Choices
from tokenbus.gateway.aliases import Aliases
from tokenbus.gateway.generation.answer_events import AnswerReader
from tokenbus.gateway.generation.dialect import Dialect, EventEncoder, ParsedRequest, ResponseHead
from tokenbus.gateway.http import body, http_errors
from tokenbus.gateway.http.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.http.response_writer import ResponseWriter
from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.request_log import RequestLog
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.http.disconnects import disconnect_of
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors

STATUS_HOLD_S = 10.0
"""A streamed response starts with its first event, or after this time; until then an error can still set the status."""
_SANE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Services:
    """Everything that the endpoints of a gateway share."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        tenants: Tenants,
        aliases: Aliases,
        broker: Bus,
        metrics: GatewayMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self.limit = limit
        self.tenants = tenants
        self.aliases = aliases
        self.broker = broker
        self.metrics = metrics
        self.tracer = tracer

    def __repr__(self) -> str:
        return f"<Services {self.limit!r}>"


class GenerationEndpoint:
    """The ASGI application of one endpoint; watches for the client's disconnect during the response."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._services = services
        self._dialect = dialect

    def __repr__(self) -> str:
        return f"<GenerationEndpoint {self._dialect!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        request = Request(scope, receive)
        request_id, shown_id = request_ids(request.headers.get("x-request-id", ""))
        log, writer = RequestLog(request_id, services.metrics, scope["path"]), ResponseWriter(send, shown_id)
        known = {"http.request.method": "POST", "http.route": scope["path"], tracing.REQUEST_ID: request_id}
        span = tracing.start_span(services.tracer, f"POST {scope['path']}", "server", request.headers, known)
        try:
            with services.limit.admit():  # around the whole request: draining waits for its end
                await self._serve(request, writer, log, request_id, span)
        except body.ClientDisconnectedError:
            pass  # nobody is left to answer
        except http_errors.ApiError as error:
            await self._send_error(error.response, writer, log)
        except errors.RequestError as error:
            await self._send_error(http_errors.from_error(error.error), writer, log)
        except Exception:  # outermost frame of a request: it must be answered, and the others must not notice
            structlog.get_logger().exception("request_failed", request_id=request_id)
            await self._send_error(http_errors.INTERNAL_ERROR, writer, log)
        finally:
            log.finished(writer.status, disconnect_of(scope))
            span.set_attributes({"http.response.status_code": writer.status})
            if writer.status is None or writer.status >= 500:
                span.set_error(str(writer.status or "none"))
            span.end()

    async def _serve(
        self, request: Request, writer: ResponseWriter, log: RequestLog, request_id: str, span: tracing.Span
    ) -> None:
        tenant = self._services.tenants.authenticate(request)
        log.set_tenant(tenant.name)
        parsed = await self._read(request, log, request_id)
        served_as = self._services.aliases.resolve(parsed.model, parsed.request.session_id or request_id)
        submit = functools.partial(
            tenant.client.generate_choices, served_as, parsed.request, parsed.n, headers=span.headers()
        )
        await body.cancel_on_disconnect(request.receive, self._respond(submit, parsed, writer, log))

    async def _read(self, request: Request, log: RequestLog, request_id: str) -> ParsedRequest:
        # In a method of its own, so that nothing holds the body while the request is served.
        payload = await body.read(request, self._services.broker.max_payload)
        parsed = self._dialect.parse(payload, request.headers, request_id)
        log.received(parsed.model, stream=parsed.stream, body_bytes=len(payload))
        return parsed

    async def _respond(
        self, submit: Callable[[], Choices], parsed: ParsedRequest, writer: ResponseWriter, log: RequestLog
    ) -> None:
        choices = submit()
        head = ResponseHead(choices.request_id, int(time.time()), parsed.model)
        with self._services.limit.track(choices):
            async with choices:  # leaving the block cancels the request
                if parsed.stream:
                    await stream_response(
                        choices,
                        parsed.n,
                        parsed.encoder(head),
                        parsed.error_body,
                        writer,
                        log,
                        streamed_errors=self._dialect.streamed_errors,
                    )
                else:
                    encode = functools.partial(parsed.encode_whole, head)
                    await respond(choices, parsed.n, encode, parsed.error_body, writer, log)

    async def _send_error(self, response: ErrorResponse, writer: ResponseWriter, log: RequestLog) -> None:
        """Sends an error. If a response has started already it is cut off instead: uvicorn closes the connection."""
        log.set_code(response.code)
        if not writer.has_started:
            await writer.send_error(response, self._dialect.error_body(response))


def request_ids(given: str) -> tuple[str, str]:
    """Returns the request's id on the wire, and the one that the response shows.

    A sane id of the client's is shown to it as it was. On the wire it is a prefix: the client may use it again."""
    if _SANE_ID.fullmatch(given):
        return f"{given}-{secrets.token_hex(4)}", given
    made = secrets.token_urlsafe(16)
    return made, made


async def respond(
    choices: Choices,
    n: int,
    encode: Callable[[list[AnswerReader]], bytes],
    error_body: Callable[[ErrorResponse], bytes],
    writer: ResponseWriter,
    log: RequestLog,
) -> None:
    """Waits for the ends of all answers, and sends one response or error."""
    answers = [AnswerReader() for _ in range(n)]
    async for number, chunk in choices.chunks():
        log.on_chunk(chunk)
        answers[number].read(chunk)
        response = http_errors.from_terminal(chunk)
        if response is not None:
            await writer.send_error(response, error_body(response))
            return
    await writer.send_json(200, encode(answers))


async def stream_response(
    choices: Choices,
    n: int,
    encoder: EventEncoder,
    error_body: Callable[[ErrorResponse], bytes],
    writer: ResponseWriter,
    log: RequestLog,
    hold_s: float = STATUS_HOLD_S,
    streamed_errors: frozenset[str] = frozenset(),
) -> None:
    """Sends the answers as events, or one error if it comes before the first event and is not to be streamed."""
    answers = [AnswerReader() for _ in range(n)]
    num_open = n
    async for number, chunk in choices.chunks():
        log.on_chunk(chunk)
        events = answers[number].read(chunk)
        encoded = encoder.encode(number, events) if events else []
        response = http_errors.from_terminal(chunk)
        if response is not None:
            if writer.has_started or encoded or response.code in streamed_errors:
                await writer.send_events(*encoded, *encoder.fail(response), last=True)
            else:
                await writer.send_error(response, error_body(response))
            return
        if chunk.finish_reason is not None:
            num_open -= 1
            encoded += [] if num_open else encoder.end()
        if encoded:
            await writer.send_events(*encoded, last=not num_open)
        # Workers and routers send empty chunks while a request waits, and these drive the comments: no timer is needed.
        elif not chunk.tokens and log.age_s >= hold_s:
            await writer.send_events(encoder.keep_alive())
