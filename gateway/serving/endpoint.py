"""Serves one path: admits, authenticates, logs and measures its requests, and sends their answers and errors."""

import contextlib
import dataclasses
import functools
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.admission.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.admission.tenants import Tenant, Tenants
from tokenbus.gateway.http import body, http_errors
from tokenbus.gateway.http.body import BodyMemory, HeldBody
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.http.response_writer import ResponseWriter
from tokenbus.gateway.serving import answering
from tokenbus.gateway.serving.catalog import Listing
from tokenbus.gateway.serving.dialect import (
    ApiEndpoint,
    Dialect,
    Parsed,
    ParsedGeneration,
    UnnamedModelError,
    UnreadRecordsError,
)
from tokenbus.gateway.serving.request_log import RequestLog
from tokenbus.gateway.storage.records import Records
from tokenbus.protocol.access.inquiries import Inquiries
from tokenbus.protocol.access.usage_store import UsageStore
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.http.connection_table import client_address
from tokenbus.protocol.http.http_server import disconnect_of
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors

_SANE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclasses.dataclass(kw_only=True)
class Services:
    """Everything shared by the endpoints of a gateway."""

    limit: ConcurrencyLimit
    tenants: Tenants
    aliases: Aliases
    bodies: BodyMemory
    broker: Bus
    metrics: GatewayMetrics
    tracer: tracing.Tracer
    records: Records
    usage: UsageStore
    parser: body.LargeBodyParser = dataclasses.field(default_factory=body.LargeBodyParser)
    inquiries: Inquiries = dataclasses.field(default_factory=lambda: Inquiries("this gateway"))
    """The accounts of those who ask about the system, and not a model."""
    clock: Callable[[], float] = time.monotonic

    @contextlib.contextmanager
    def answering(self, caller: Caller, request: Request) -> Iterator[None]:
        """Has a caller pay for the time of the block, in which an answer is made. Raises RequestError if they have had
        too many."""
        self.check_inquiries(caller, request)
        began = self.clock()
        try:
            yield
        finally:
            now = self.clock()
            self.inquiries.pay(_inquirer(caller, request), now - began, now)

    def check_inquiries(self, caller: Caller, request: Request) -> None:
        """Raises RequestError if a caller has had too many answers."""
        self.inquiries.check(_inquirer(caller, request), self.clock())


class EndpointApp:
    """The ASGI application of one endpoint; watches for a client disconnect until the response is complete."""

    def __init__(self, services: Services, endpoint: ApiEndpoint[Any], dialect: Dialect) -> None:
        self._services = services
        self._endpoint = endpoint
        self._form = dialect.errors
        self._takes_any_type = dialect.takes_any_type

    def __repr__(self) -> str:
        return f"<EndpointApp {self._endpoint.path}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, path = self._services, self._endpoint.path
        request = Request(scope, receive)
        request_id, shown_id = request_ids(request.headers.get("x-request-id", ""))
        log = RequestLog(request_id, services.metrics, path)
        writer = ResponseWriter(send, shown_id, self._endpoint.event_type, self._form.limit_headers)
        method = self._endpoint.method
        known = {"http.request.method": method, "http.route": path, tracing.REQUEST_ID: request_id}
        span = tracing.start_span(services.tracer, f"{method} {path}", "server", request.headers, known)
        try:
            # who is not known takes no place of one who is, however long it takes to find that out
            async with services.tenants.admitted(request) as tenant:
                log.tenant, log.key_id = tenant.name, tenant.caller.key_id or tenant.caller.actor or None
                span.set_attributes({tracing.KEY_ID: log.key_id})
                # around the rest of the request: draining waits for its end, and the library keeps it until then
                with services.limit.admit(), services.bodies.holding() as held:
                    parsed = await self._parse(request, held, log, tenant)
                    await self._answer(parsed, request, tenant, writer, log, span)
        except body.ClientDisconnectedError:
            pass  # no one is left to answer
        except http_errors.ApiError as error:
            await self._send_error(error.response, writer, log)
        except errors.RequestError as error:
            await self._send_error(http_errors.from_error(error.error), writer, log)
        except Exception:  # outermost frame of a request: it must be answered, and others must not be affected
            structlog.get_logger().exception("request_failed", request_id=request_id)
            await self._send_error(http_errors.INTERNAL_ERROR, writer, log)
        finally:
            log.finished(writer.status, disconnect_of(scope))
            span.set_attributes({"http.response.status_code": writer.status})
            if writer.status is None or writer.status >= 500:
                span.set_error(str(writer.status or "none"))
            span.end()

    async def _parse(self, request: Request, held: HeldBody, log: RequestLog, tenant: Tenant) -> Parsed:
        # In a separate method, so that nothing holds the body while the request is served.
        if self._endpoint.method == "GET":
            payload = msgspec.json.encode(dict(request.query_params))
        else:
            max_bytes = self._services.bodies.max_body_bytes
            payload = await body.read(request, max_bytes, held, takes_any_type=self._takes_any_type)
        parse = functools.partial(self._endpoint.parse, payload, request.headers, log.request_id)
        parser, records = self._services.parser, self._services.records.of(tenant.name, held)
        default, earlier = self._services.aliases.default, dict[str, bytes | None]()
        while True:
            parse_with = functools.partial(parse, default, earlier, self._services.records.max_record_bytes)
            try:
                parsed = await parser.parse(parse_with, len(payload), expands=any(earlier.values()))
                break
            # Only then is it asked what is served, or stored. The same body is read again, with that.
            except UnnamedModelError:
                default = await tenant.client.default_model(self._endpoint.feature)
            except UnreadRecordsError as unread:
                for name in unread.names:
                    earlier[name] = await records.read(name)
        if isinstance(parsed, ParsedGeneration):
            log.received(parsed.model, stream=parsed.stream, body_bytes=len(payload))
        else:
            log.received(parsed.model, body_bytes=len(payload))
        return parsed

    async def _answer(
        self,
        parsed: Parsed,
        request: Request,
        tenant: Tenant,
        writer: ResponseWriter,
        log: RequestLog,
        span: tracing.Span,
    ) -> None:
        session = parsed.requests[0].session_id if isinstance(parsed, ParsedGeneration) else None
        served_as = self._services.aliases.resolve(parsed.model, session or log.request_id)
        records, limit = self._services.records.of(tenant.name), self._services.limit
        exchange = answering.HttpExchange(tenant.client, served_as, span.headers(), limit, writer, log, records)
        if isinstance(parsed, ParsedGeneration):
            work = answering.generate(parsed, self._endpoint, exchange)
        else:
            work = answering.call(parsed, exchange)
        try:
            await body.cancel_on_disconnect(request.receive, work)
        except http_errors.ApiError as error:
            response = await self._with_names(error.response, tenant)
            raise http_errors.ApiError(parsed.named(response)) from error
        except errors.RequestError as refused:
            response = await self._with_names(http_errors.from_error(refused.error), tenant)
            raise http_errors.ApiError(parsed.named(response)) from refused

    async def _with_names(self, response: ErrorResponse, tenant: Tenant) -> ErrorResponse:
        """Adds the models that a caller may name to the refusal of one that is not there."""
        if response.code != errors.Code.MODEL_NOT_FOUND:
            return response
        try:
            reply = await tenant.keyless_client.served()
        except errors.RequestError:
            return response
        listing = Listing.of(reply).of_patterns(tenant.caller.models).with_aliases(self._services.aliases)
        return response._replace(message=f"{response.message}; {listing.names()}")

    async def _send_error(self, response: ErrorResponse, writer: ResponseWriter, log: RequestLog) -> None:
        """Sends an error. If a response has already started, it is cut off instead: uvicorn closes the connection."""
        log.code = response.code
        if not writer.has_started:
            await writer.send_error(self._form.status_of(response), response, self._form.encode)


def _inquirer(caller: Caller, request: Request) -> str:
    """Names who asks: by their key, by who a token says they are or, without either, by their address."""
    if caller.key_id:
        return f"key {caller.key_id}"
    host = request.client.host if request.client else ""
    return f"{caller.tenant} {caller.actor or client_address(host)}"


def request_ids(given: str) -> tuple[str, str]:
    """Returns the request's id on the wire, and the one that the response shows.

    A valid id from the client is returned unchanged. On the wire it is only a prefix: the client may reuse it."""
    if _SANE_ID.fullmatch(given):
        return f"{given}-{secrets.token_hex(4)}", given
    made = secrets.token_urlsafe(16)
    return made, made
