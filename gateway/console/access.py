"""Checks who may read the console's answers, and keeps each in one page by its headers."""

import ipaddress

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenbus.gateway.http.http_errors import ApiError, ErrorResponse

HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of all answers."""
PRIVATE = HEADERS | {"cache-control": "no-store"}
"""Headers of answers that only one viewer may see."""
FOREIGN = ErrorResponse(403, "forbidden", "a page of another origin may not use the console")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_OF_PROXIES = ("x-forwarded-for", "x-forwarded-host", "x-real-ip", "forwarded", "via")
_NOT_LOCAL = ErrorResponse(
    403,
    "forbidden",
    "without API keys the console shows the fleet only on this machine, under localhost: start the gateway with --keys "
    "(docs/keys.md) or TOKENBUS_API_KEYS, or reach it through a tunnel to its port",
)


def private_json(value: object, status: int = 200) -> Response:
    """Returns an answer that only this viewer may see."""
    return Response(msgspec.json.encode(value), status, PRIVATE, media_type="application/json")


def check_local(request: Request) -> None:
    """Raises ApiError for a request that does not come from a browser on this machine, under its loopback name."""
    host = request.headers.get("host", "").lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    address = request.client.host if request.client else ""
    try:
        is_local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_local = False
    if not is_local or name not in _LOOPBACK_NAMES or any(one in request.headers for one in _OF_PROXIES):
        raise ApiError(_NOT_LOCAL)
