"""Serves how single requests went: those of the viewer's tenant, or of any tenant to operators.

The routers know it; this gateway only asks them, and says it in sentences. No text of a request is involved."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.client.wire import trace_story
from tokenbus.client.wire.trace_reader import RoutedTrace, Traces, bare_id
from tokenbus.client.wire.trace_story import TraceSpan
from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.console.access import private_json
from tokenbus.gateway.http.http_errors import ApiError, ErrorResponse
from tokenbus.gateway.serving.endpoint import Services
from tokenbus.protocol.wire import messages, subjects
from tokenbus.protocol.wire.traces import MAX_TRACES, first_token_ms

_DEFAULT_LIMIT = 50


class ShownRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a row of the list."""

    id: str
    model: str
    received_at_ms: int
    state: str
    code: str
    workers: list[str]
    """Those that have accepted it, in order."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_ms: float | None
    total_ms: float


class ShownRequests(msgspec.Struct, frozen=True, kw_only=True):
    """The recent requests of a tenant, the latest first."""

    tenant: str
    requests: list[ShownRequest]
    truncated: bool
    routers: list[str]
    """The routers that have answered."""


class ShownWay(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one request."""

    tenant: str
    router_id: str
    request: messages.RequestTrace
    first_token_ms: float | None
    story: list[str]
    spans: list[TraceSpan]


class RequestPages:
    """The requests of one gateway's tenants, for the console."""

    def __init__(self, services: Services, identify: Callable[[Request], Awaitable[Caller]]) -> None:
        """`identify` returns who looks, and raises ApiError for those who may see nothing."""
        self._services = services
        self._identify = identify

    def __repr__(self) -> str:
        return f"<RequestPages of {self._services.tenants!r}>"

    def routes(self) -> list[Route]:
        return [
            Route("/console/requests", self.recent),
            Route("/console/requests/{request_id:path}", self.one),
        ]

    async def recent(self, request: Request) -> Response:
        """Serves `GET /console/requests`: the latest ones, with `failed`, `slower_than_ms`, `limit` and, for operators,
        `tenant`. Raises ApiError and RequestError."""
        query = request.query_params
        asked = messages.TraceRequest(
            failed=query.get("failed", "") not in ("", "0", "false"),
            slower_than_ms=_number(query.get("slower_than_ms"), "slower_than_ms", 0, 1e12),
            limit=int(_number(query.get("limit"), "limit", 1, MAX_TRACES) or _DEFAULT_LIMIT),
        )
        caller, tenant, found = await self._ask(request, asked)
        with self._services.answering(caller, request):
            shown = [_row(one) for one in found.requests]
            body = ShownRequests(tenant=tenant, requests=shown, truncated=found.truncated, routers=found.router_ids)
            return private_json(body)

    async def one(self, request: Request) -> Response:
        """Serves `GET /console/requests/{id}`: how one request went. Raises ApiError and RequestError."""
        given = request.path_params["request_id"]
        request_id = bare_id(given)
        if not subjects.is_request_id(request_id):
            raise _unknown(given)
        caller, tenant, found = await self._ask(request, messages.TraceRequest(id=request_id))
        if (known := found.named(request_id)) is None:
            raise _unknown(given)
        router_id, trace = known
        with self._services.answering(caller, request):
            body = ShownWay(
                tenant=tenant,
                router_id=router_id,
                request=trace,
                first_token_ms=first_token_ms(trace),
                story=trace_story.story(trace, router_id),
                spans=trace_story.spans(trace),
            )
            return private_json(body)

    async def _ask(self, request: Request, asked: messages.TraceRequest) -> tuple[Caller, str, Traces]:
        caller = await self._identify(request)
        name = request.query_params.get("tenant") or caller.tenant
        if name != caller.tenant and not caller.is_operator:
            raise ApiError(ErrorResponse(403, "forbidden", "only operators see requests of other tenants", "tenant"))
        try:
            subjects.encode_name(name)
        except ValueError as error:
            raise ApiError(ErrorResponse(400, "invalid_request", f"tenant: {error}", "tenant")) from error
        self._services.check_inquiries(caller, request)  # before routers have the work
        async with self._services.tenants.looking_at(name) as client:
            return caller, name, await client.traces(asked)


def _row(one: RoutedTrace) -> ShownRequest:
    trace = one.trace
    return ShownRequest(
        id=trace.id,
        model=trace.model,
        received_at_ms=trace.received_at_ms,
        state=trace.state,
        code=trace.code,
        workers=[attempt.worker_id for attempt in trace.attempts if attempt.accepted_ms is not None],
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        completion_tokens=trace.completion_tokens,
        first_token_ms=first_token_ms(trace),
        total_ms=trace.total_ms,
    )


def _number(text: str | None, name: str, least: float, most: float) -> float | None:
    """Reads a number in a query. Raises ApiError unless it is one, and in its range."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        problem = f"{name}: must be a number from {least:,.0f} to {most:,.0f}, got {text[:50]!r}"
        raise ApiError(ErrorResponse(400, "invalid_request", problem, name))
    return value


def _unknown(request_id: str) -> ApiError:
    problem = (
        f"no router knows a request {request_id[:150]!r} of this tenant: each remembers its last 4,096 requests "
        "until it is restarted"
    )
    return ApiError(ErrorResponse(404, "not_found", problem, "id"))
