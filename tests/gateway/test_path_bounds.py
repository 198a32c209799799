"""What anyone may ask over HTTP costs others no more than docs/security.md says, and it says so of every path."""

import re
import zlib
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from tests.support.gateway_app import MODEL, GatewayApp
from tokenbus.gateway.routes import PathApp

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
HEADER = "| path | what bounds it |\n|---|---|\n"


def served_paths() -> set[str]:
    """Every path that does more than refuse; one of each that is also there without /v1, or with a slash at the end."""
    routes = [route for route in GatewayApp().app.routes if isinstance(route, Route)]
    served = [route for route in routes if not isinstance(route.app, PathApp) or route.app.served]
    paths = {re.sub(r":\w+}", "}", route.path).rstrip("/") or "/" for route in served}
    return {path for path in paths if f"/v1{path}" not in paths}


def test_every_path_has_its_bound_on_the_page() -> None:
    table = PAGE.partition(HEADER)[2].partition("\n\n")[0]
    told = [name for row in table.splitlines() for name in re.findall(r"`(/[^`]*)`", row.split("|")[1])]
    assert sorted(told) == sorted(served_paths())


def http_of(gateway: GatewayApp, address: str) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(gateway.app, client=(address, 1), raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", None),
        (f"/v1/models/{MODEL}", None),
        ("/api/tags", None),
        ("/api/ps", None),
        ("/api/show", {"model": MODEL}),
        ("/api/pull", {"model": MODEL}),
        ("/console/requests", None),
    ],
)
async def test_who_has_had_too_many_answers_is_told_when_to_ask_again_and_others_are_answered(
    path: str, body: dict[str, Any] | None
) -> None:
    gateway = GatewayApp()
    gateway.services.inquiries.pay("default 127.0.0.1", 0.3, 1_000.0)
    async with http_of(gateway, "127.0.0.1") as one, http_of(gateway, "127.0.0.2") as other:
        method = "GET" if body is None else "POST"
        refused = await one.request(method, path, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "you ask more than this gateway answers" in refused.text
        assert gateway.fleet.num_traced == 0
        assert (await other.request(method, path, json=body)).status_code == 200


async def test_stored_responses_are_read_in_the_places_and_the_memory_of_requests() -> None:
    gateway, name = GatewayApp(max_requests=1), f"resp_{'0' * 48}"
    assert await gateway.services.records.keep("default", {name: zlib.compress(b"x", 0) + bytes(2 << 20)})
    async with http_of(gateway, "127.0.0.1") as http:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            with gateway.services.limit.admit():
                assert (await http.request(method, f"/v1/responses/{name}{path}")).status_code == 503
        with gateway.services.bodies.holding() as held:
            held.add(33 << 20)
            assert (await http.get(f"/v1/responses/{name}")).status_code == 503
        assert (await http.get(f"/v1/responses/{name}")).content == b"x"
    assert (gateway.services.limit.num_open, gateway.services.bodies.held_bytes) == (0, 0)
