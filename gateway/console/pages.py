"""Serves the console: its files, who the viewer is, and the stream of events that its page reads.

The page is not secret; what it shows is. With API keys the page sends the reader's key in a header and keeps it in its
memory only. Without keys the fleet is shown to readers on this machine alone, and only under its loopback name: a page
from elsewhere whose name leads here must not read it."""

import functools
import hashlib
import importlib.resources
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.console.access import FOREIGN, HEADERS, PRIVATE, check_local, private_json
from tokenbus.gateway.console.requests import RequestPages
from tokenbus.gateway.console.viewers import ConsoleViewers
from tokenbus.gateway.http.http_errors import ApiError, ErrorResponse
from tokenbus.gateway.http.response_writer import EVENT_STREAM
from tokenbus.gateway.serving.endpoint import Services
from tokenbus.protocol.access.keys import Role

FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "console.css": ("console.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
} | {
    f"{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
    for name in (
        "chat",
        "console",
        "dom",
        "fleet",
        "keys",
        "live",
        "operate",
        "picture",
        "requests",
        "session",
        "usage",
    )
}
"""The files of the page, by their paths below `/console/`."""
_FILE_HEADERS = HEADERS | {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
_OWN_SITES = ("same-origin", "none")


class Viewer(msgspec.Struct, frozen=True, kw_only=True):
    """Who looks at the page, and which parts of it they may use."""

    tenant: str
    role: Role
    key_id: str
    """Empty for a viewer without a key of the fleet."""
    name: str
    """The name of the key."""
    can: tuple[str, ...]
    """The parts that they may use, by their names in the page's address."""


class ConsolePages:
    """The console of one gateway."""

    def __init__(
        self, services: Services, viewers: ConsoleViewers, acts_of: Callable[[Caller], tuple[str, ...]]
    ) -> None:
        """`acts_of` returns the parts of the page with which a caller may do something."""
        self._services = services
        self._acts_of = acts_of
        self._viewers = viewers
        self._requests = RequestPages(services, self._identify)

    def __repr__(self) -> str:
        return f"<ConsolePages {self._viewers!r}>"

    def routes(self) -> list[Route]:
        return [
            Route("/console", self.redirect),
            Route("/console/stream", self.stream),
            Route("/console/me", self.me),
            *self._requests.routes(),
            Route("/console/{file}", self.file),
            Route("/console/", self.file),
        ]

    async def redirect(self, request: Request) -> Response:
        """Serves `GET /console`, whose page has relative paths."""
        return RedirectResponse("console/", status_code=308)

    async def file(self, request: Request) -> Response:
        """Serves a file of the page. Raises ApiError for a path that there is not."""
        name = request.path_params.get("file", "")
        if name not in FILES:
            raise ApiError(ErrorResponse(404, "not_found", f"the console has no file {name[:100]!r}"))
        content, digest = _content(name)
        headers = {**_FILE_HEADERS, "etag": f'"{digest}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=FILES[name][1], headers=headers)

    async def me(self, request: Request) -> Response:
        """Serves `GET /console/me`: who the viewer is. Raises ApiError for those who may see nothing."""
        caller = await self._identify(request)
        ring = self._services.tenants.callers.ring
        record = ring.get(caller.key_id) if ring is not None else None
        viewer = Viewer(
            tenant=caller.tenant,
            role=caller.role,
            key_id=caller.key_id,
            name=record.name if record is not None else "",
            can=(
                "fleet",
                "requests",
                *(() if caller.role is Role.VIEWER else ("chat",)),
                *self._acts_of(caller),
                "usage",
            ),
        )
        return private_json(viewer)

    async def stream(self, request: Request) -> Response:
        """Serves `GET /console/stream`: the events of the fleet. Raises ApiError for those who may not see them."""
        caller = await self._identify(request)
        self._viewers.check_room(caller.key_id)

        async def is_over() -> bool:
            return self._services.limit.is_draining or not await self._may_still_look(request)

        events = self._viewers.events(caller.key_id, is_over)
        return StreamingResponse(events, media_type=EVENT_STREAM, headers=PRIVATE | {"x-accel-buffering": "no"})

    async def _identify(self, request: Request) -> Caller:
        """Returns who looks. Raises ApiError for those who may see nothing."""
        callers = self._services.tenants.callers
        if request.headers.get("sec-fetch-site", "same-origin") not in _OWN_SITES:
            raise ApiError(FOREIGN)
        if callers.allows_anonymous:
            check_local(request)
        return await callers.sender_of(request)

    async def _may_still_look(self, request: Request) -> bool:
        """Whether the reader's key is still valid."""
        try:
            await self._services.tenants.callers.sender_of(request)
        except ApiError:
            return False
        return True


@functools.cache
def _content(name: str) -> tuple[bytes, str]:
    """Returns a file and its digest."""
    path = importlib.resources.files("tokenbus.gateway.console") / "static" / FILES[name][0]
    content = path.read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:16]
