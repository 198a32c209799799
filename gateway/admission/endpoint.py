"""Serves one path: admits, authenticates, logs and measures its requests, and sends their errors."""

import abc
import re
import secrets
from collections.abc import Callable
from typing import Protocol

import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.admission.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.admission.request_log import RequestLog
from tokenbus.gateway.admission.tenants import Tenant, Tenants
from tokenbus.gateway.http import body, http_errors
from tokenbus.gateway.http.body_memory import BodyMemory, HeldBody
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.http.response_writer import ResponseWriter
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.http.disconnects import disconnect_of
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors

_SANE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Services:
    """Everything shared by the endpoints of a gateway."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        tenants: Tenants,
        aliases: Aliases,
        bodies: BodyMemory,
        broker: Bus,
        metrics: GatewayMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self.limit = limit
        self.tenants = tenants
        self.aliases = aliases
        self.bodies = bodies
        self.broker = broker
        self.metrics = metrics
        self.tracer = tracer
        self.parser = body.LargeBodyParser()

    def __repr__(self) -> str:
        return f"<Services {self.limit!r}>"


class ErrorForm(Protocol):
    """The form of an API's errors."""

    @property
    def error_body(self) -> Callable[[ErrorResponse], bytes]:
        """Returns the body of an error response."""
        ...

    @property
    def status_of(self) -> Callable[[ErrorResponse], int]:
        """Returns the status of an error response, where the API's differs from the wire's."""
        ...


class HttpExchange:
    """One admitted HTTP request, and the means to answer it."""

    def __init__(
        self,
        request: Request,
        held_body: HeldBody,
        request_id: str,
        tenant: Tenant,
        writer: ResponseWriter,
        log: RequestLog,
        span: tracing.Span,
    ) -> None:
        self.request = request
        self.held_body = held_body
        """The memory for the request's body."""
        self.request_id = request_id
        """The id of the request on the wire."""
        self.tenant = tenant
        self.writer = writer
        self.log = log
        self.span = span

    def __repr__(self) -> str:
        return f"<HttpExchange {self.request_id} of {self.tenant.name}>"


class Endpoint(abc.ABC):
    """The ASGI application of one path."""

    def __init__(self, services: Services, form: ErrorForm) -> None:
        self._services = services
        self._form = form

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._form!r}>"

    @abc.abstractmethod
    async def _serve(self, exchange: HttpExchange) -> None:
        """Answers a request. Raises ApiError or RequestError with the reason if it can't, and
        ClientDisconnectedError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, path = self._services, scope["path"].rstrip("/")
        request = Request(scope, receive)
        request_id, shown_id = request_ids(request.headers.get("x-request-id", ""))
        log, writer = RequestLog(request_id, services.metrics, path), ResponseWriter(send, shown_id)
        known = {"http.request.method": "POST", "http.route": path, tracing.REQUEST_ID: request_id}
        span = tracing.start_span(services.tracer, f"POST {path}", "server", request.headers, known)
        try:
            # around the whole request: draining waits for its end, and the library keeps it until then
            with services.limit.admit(), services.bodies.holding() as held:
                tenant = services.tenants.authenticate(request)
                log.set_tenant(tenant.name)
                await self._serve(HttpExchange(request, held, request_id, tenant, writer, log, span))
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

    async def _send_error(self, response: ErrorResponse, writer: ResponseWriter, log: RequestLog) -> None:
        """Sends an error. If a response has already started, it is cut off instead: uvicorn closes the connection."""
        log.set_code(response.code)
        if not writer.has_started:
            await writer.send_error(self._form.status_of(response), response, self._form.error_body)


def request_ids(given: str) -> tuple[str, str]:
    """Returns the request's id on the wire, and the one that the response shows.

    A valid id from the client is returned unchanged. On the wire it is only a prefix: the client may reuse it."""
    if _SANE_ID.fullmatch(given):
        return f"{given}-{secrets.token_hex(4)}", given
    made = secrets.token_urlsafe(16)
    return made, made
