"""The HTTP routes of the gateway, and its error responses (decision 0031)."""

import asyncio
import collections
import functools
import importlib.metadata
import ipaddress
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenbus.gateway import openapi
from tokenbus.gateway.dialects import DIALECTS, dialect_of
from tokenbus.gateway.http import body, http_errors
from tokenbus.gateway.http.http_errors import ApiError, ErrorResponse
from tokenbus.gateway.serving.catalog import NO_MODELS, Listing
from tokenbus.gateway.serving.dialect import RecordResource, Report, Resource
from tokenbus.gateway.serving.endpoint import EndpointApp, Services
from tokenbus.gateway.usage import not_kept
from tokenbus.protocol.bus.bucket import BucketMissingError
from tokenbus.protocol.shared_answer import SharedAnswer
from tokenbus.protocol.wire import errors

_READY_TIMEOUT_S = 1.0
_MAX_MODEL_BODY_BYTES = 64 * 1024
_CLIENT_GONE = 499
_MAX_REPORTS = 4
"""Reports of usage that are made at a time; others wait."""
_encoder = msgspec.json.Encoder()


class Routes:
    """The endpoints that describe models and the gateway itself."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._usage_problem = SharedAnswer(self._ask_usage_problem)
        self._reports = asyncio.Semaphore(_MAX_REPORTS)

    def __repr__(self) -> str:
        return f"<Routes {self._services.limit!r}>"

    def paths(self) -> list[Route]:
        """Returns the routes of all paths. Where several resources have one path, a header chooses among them."""
        apps: dict[str, PathApp] = collections.defaultdict(PathApp)
        sharing: dict[str, list[Resource]] = {}
        for dialect in DIALECTS:
            for endpoint in dialect.endpoints:
                for path in dialect.paths_of(endpoint.path):
                    apps[path].served[endpoint.method] = EndpointApp(self._services, endpoint, dialect)
            for resource in dialect.resources:
                for path in dialect.paths_of(resource.path):
                    sharing.setdefault(path, []).append(resource)
            for record in dialect.records:
                for path in dialect.paths_of(record.path):
                    answer = functools.partial(self._record, record)
                    apps[path].served[record.method] = request_response(answer)
            for report in dialect.reports:
                for path in dialect.paths_of(report.path):
                    apps[path].served["GET"] = request_response(functools.partial(self._report, report))
            for refused in dialect.refused:
                for path in dialect.paths_of(refused.path):
                    apps[path].refused |= dict.fromkeys(refused.methods, refused.problem)
        for path, resources in sharing.items():
            method = "GET" if resources[0].body is None else "POST"
            apps[path].served[method] = request_response(functools.partial(self._resource, resources))
        own = {"/": self.home, "/health": self.health, "/livez": self.livez, "/readyz": self.readyz}
        for path, answer_get in {**own, "/openapi.json": self.openapi}.items():
            apps[path].served["GET"] = request_response(answer_get)
        return [
            Route(pattern.replace("{model}", "{model:path}"), apps[path])
            for path in sorted(apps, key=lambda path: "{" in path)  # "responses/compact" before "responses/{id}"
            for pattern in {path, path.rstrip("/") + "/"}
        ]

    async def _resource(self, sharing: Sequence[Resource], request: Request) -> Response:
        dialect = dialect_of(request.scope["path"], request.headers)
        resource = next((one for one in sharing if one in dialect.resources), sharing[0])
        if resource.is_public:
            return _json(resource.answer(NO_MODELS, ""))
        async with self._services.tenants.admitted(request, looks_on=True) as tenant:
            reply = await tenant.keyless_client.served()
        name, payload = request.path_params.get("model", "").removesuffix("/"), b""
        if resource.model_in is not None:
            try:
                with self._services.bodies.holding() as held:
                    read = body.read(request, _MAX_MODEL_BODY_BYTES, held, takes_any_type=dialect.takes_any_type)
                    payload = await read
            except body.ClientDisconnectedError:
                return Response(status_code=_CLIENT_GONE)  # no one reads it
        with self._services.answering(tenant.caller, request):
            name = name if resource.model_in is None else resource.model_in(payload)
            listing = Listing.of(reply).of_patterns(tenant.caller.models).with_aliases(self._services.aliases)
            return _json(resource.answer(listing, name))

    async def _record(self, resource: RecordResource, request: Request) -> Response:
        services = self._services
        async with services.tenants.admitted(request) as tenant:
            with services.limit.admit(), services.bodies.holding() as held:
                records = services.records.of(tenant.name, held)
                name, parser = request.path_params["id"], services.parser
                answered = await resource.answer(records, name, request.query_params, parser)
        return Response(answered, media_type="application/json")

    async def _report(self, report: Report, request: Request) -> Response:
        tenants = self._services.tenants
        async with tenants.admitted(request, looks_on=True) as tenant, tenant.reporting, self._reports:
            query = {name: request.query_params.getlist(name) for name in request.query_params}
            accept = request.headers.get("accept", "")
            try:
                answered, kind = await report.answer(self._services.usage, tenant.caller, query, accept, time.time())
            except BucketMissingError as error:
                raise ApiError(not_kept(await self._usage_problem.get())) from error
        return Response(answered, media_type=kind)

    async def _ask_usage_problem(self) -> str | None:
        async with self._services.tenants.gateway_client.view_fleet() as viewer:
            return await viewer.usage_problem()

    async def home(self, request: Request) -> Response:
        """Serves `GET /`: what this is, and where to find more; as a page for browsers, else in JSON."""
        about = openapi.About(version=importlib.metadata.version("tokenbus"))
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(_home_page(about), headers={"content-security-policy": "default-src 'none'"})
        return _json(about)

    async def livez(self, request: Request) -> Response:
        """Serves `GET /livez`: 200 while this process runs."""
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, request: Request) -> Response:
        """Serves `GET /readyz`: 200 while requests can be served, else 503 and the reason."""
        reason = await self.unready_reason()
        return Response(f"{reason or 'ok'}\n", status_code=503 if reason else 200, media_type="text/plain")

    async def health(self, request: Request) -> Response:
        """Serves `GET /health`, used by clients of other servers: `/readyz` in JSON."""
        reason = await self.unready_reason()
        told = openapi.Health(status="unavailable" if reason else "ok", reason=reason or UNSET)
        return Response(_encoder.encode(told), status_code=503 if reason else 200, media_type="application/json")

    async def openapi(self, request: Request) -> Response:
        """Serves `GET /openapi.json`, which describes all endpoints."""
        return Response(_openapi(), media_type="application/json")

    async def unready_reason(self) -> str:
        """Returns why requests can't be served, or an empty string if they can."""
        if self._services.limit.is_draining:
            return "shutting down"
        if not self._services.broker.is_connected:
            return "there is no connection to the broker"
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._services.tenants.gateway_client.served()
        except errors.RequestError as error:
            return error.error.message
        except TimeoutError:
            return "no router answers"
        return ""


def make_app(services: Services, routes: Routes, console: Sequence[Route], allowed_origins: Sequence[str]) -> Starlette:
    """Returns the ASGI application, with the routes of the console. Web pages from the allowed origins may use it."""
    check_host = functools.partial(services.tenants.callers.check_host, allowed_origins=allowed_origins)
    app = Starlette(
        routes=[*console, *routes.paths()],
        middleware=[Middleware(_CheckedHost, check_host=check_host), *_cors(allowed_origins)],
        exception_handlers=dict.fromkeys((ApiError, errors.RequestError, HTTPException, Exception), _on_error),
    )
    # A redirect would go to the host named by the client, bypassing the TLS of a proxy in front.
    app.router.redirect_slashes = False
    return app


class _CheckedHost:
    """Answers requests to names that may be strangers', before any route does."""

    def __init__(self, app: ASGIApp, check_host: Callable[..., None]) -> None:
        self._app = app
        self._check_host = check_host

    def __repr__(self) -> str:
        return f"<_CheckedHost {self._app!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = self._app
        try:
            self._check_host(Headers(scope=scope), is_on_network=_is_on_network(scope))
        except ApiError as error:
            answered = await _on_error(Request(scope), error)
        await answered(scope, receive, send)


def _is_on_network(scope: Scope) -> bool:
    """Whether a request has come to an address that other machines can reach."""
    try:
        return not ipaddress.ip_address(scope["server"][0]).is_loopback
    except (KeyError, TypeError, ValueError):
        return False


class PathApp:
    """The ASGI application of a path, which has an application for each method."""

    def __init__(self) -> None:
        self.served: dict[str, ASGIApp] = {}
        self.refused: dict[str, str] = {}
        """The methods that are known to clients and not served, and why."""

    def __repr__(self) -> str:
        return f"<PathApp {self._allowed()}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        app = self.served.get("GET" if method == "HEAD" else method)
        if app is not None:
            await app(scope, receive, send)
        elif method not in self.refused:
            raise ApiError(http_errors.unknown_path(405, method, scope["path"], self._allowed()))
        elif self.served:
            code = str(errors.Code.UNSUPPORTED)
            raise ApiError(ErrorResponse(405, code, self.refused[method], allow=self._allowed()))
        else:
            raise errors.request_error(errors.Code.UNSUPPORTED, self.refused[method])

    def _allowed(self) -> str:
        methods = {*(self.served or self.refused)}
        return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


@functools.cache
def _openapi() -> bytes:
    return _encoder.encode(openapi.document(importlib.metadata.version("tokenbus")))


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            response = error.response
        case errors.RequestError():
            response = http_errors.from_error(error.error)
        case HTTPException():
            response = http_errors.unknown_path(error.status_code, request.method, request.scope["path"])
        case _:
            structlog.get_logger().error("request_failed", exc_info=error)
            response = http_errors.INTERNAL_ERROR
    form = dialect_of(request.scope["path"], request.headers).errors
    return Response(form.encode(response), form.status_of(response), response.headers, media_type="application/json")


def _cors(allowed_origins: Sequence[str]) -> list[Middleware]:
    if not allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
    ]


def _home_page(about: openapi.About) -> str:
    links = "".join(f'<li><a href="{path}">{path}</a>' for path in about.links)
    return (
        f"<!doctype html><html lang=en><title>{about.name}</title><h1>{about.name} {about.version}</h1>"
        f"<p>{about.description}<ul>{links}</ul>"
    )


def _json(value: msgspec.Struct) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")
