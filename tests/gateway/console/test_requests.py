"""Who sees whose requests in the console."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.requests import Request

from tokenbus.client.wire.trace_reader import Traces
from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.console.requests import RequestPages
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.protocol.access.keys import Role


class Empty:
    """Tenants without requests."""

    @contextlib.asynccontextmanager
    async def looking_at(self, name: str) -> AsyncIterator["Empty"]:
        yield self

    async def traces(self, asked: object) -> Traces:
        return Traces([], [], False)


@pytest.mark.parametrize(
    ("caller", "is_refused"),
    [
        (Caller("acme", "k1", Role.OPERATOR), False),
        (Caller("acme", role=Role.OPERATOR, actor="oidc:someone"), False),
        (Caller("acme", "k1", Role.USER), True),
        (Caller("acme", "k1", Role.VIEWER), True),
        (Caller("acme"), True),
    ],
)
async def test_operators_alone_see_requests_of_other_tenants(caller: Caller, *, is_refused: bool) -> None:
    async def identify(request: Request) -> Caller:
        return caller

    services: Any = MagicMock(tenants=Empty())
    pages = RequestPages(services, identify)
    for tenant, refused in (("acme", False), ("globex", is_refused)):
        request = Request({"type": "http", "headers": [], "query_string": f"tenant={tenant}".encode()})
        with pytest.raises(ApiError) if refused else contextlib.nullcontext():
            assert (await pages.recent(request)).status_code == 200
