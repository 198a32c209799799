"""Where no key is needed, a stranger's name that leads to a gateway makes no page of theirs its own."""

import re

import httpx2
from starlette.routing import Route

from tests.support.gateway_app import GatewayApp


async def test_no_path_is_answered_under_a_strangers_name() -> None:
    app = GatewayApp().app
    paths = [re.sub(r"\{.*?\}", "x", route.path) for route in app.routes if isinstance(route, Route)]
    assert len(paths) > 200
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://evil.example") as http:
        for path in [*paths, "/nowhere"]:
            for method in ("GET", "HEAD", "POST", "OPTIONS", "DELETE"):
                assert (await http.request(method, path)).status_code == 403, (method, path)
        told = (await http.get("/v1/models")).json()["error"]
        assert (await http.get("/api/tags")).json() == {"error": told["message"]}, "in the form of the path"
    assert told["message"].endswith("or --allowed-origin https://evil.example if that name is yours")


async def test_a_name_that_is_ours_is_served_and_any_where_keys_are_needed() -> None:
    for app in (GatewayApp(allowed_origins=("https://evil.example",)).app, GatewayApp("one=acme").app):
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://evil.example") as http:
            assert (await http.get("/livez")).status_code == 200
