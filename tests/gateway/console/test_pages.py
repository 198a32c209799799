"""The console's files and its stream of events, over HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from tests.support.http_stream import HttpStream
from tests.support.system import Gateway, running_gateway
from tokenbus.gateway.console.pages import FILES


@contextlib.asynccontextmanager
async def _stream(gateway: Gateway, *headers: str, host: str = "localhost") -> AsyncIterator[HttpStream]:
    place = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write("\r\n".join(["GET /console/stream HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode())
    one = HttpStream(reader, writer)
    try:
        yield one
    finally:
        await one.cut()


def _base(gateway: Gateway) -> str:
    return gateway.url.removesuffix("/v1")


async def _event(stream: HttpStream) -> dict[str, Any]:
    line = await stream.line("data: ")
    told: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return told


def test_every_file_of_the_page_is_served_and_only_asked_for_again_if_it_has_changed(slow_gateway: Gateway) -> None:
    sizes = 0
    for name, (_, media_type) in FILES.items():
        got = httpx.get(f"{_base(slow_gateway)}/console/{name}")
        assert (got.status_code, got.headers["content-type"]) == (200, media_type)
        assert "script-src 'self'" in got.headers["content-security-policy"]
        assert "unsafe" not in got.headers["content-security-policy"]
        sizes += len(got.content)
        again = httpx.get(f"{_base(slow_gateway)}/console/{name}", headers={"if-none-match": got.headers["etag"]})
        assert again.status_code == 304
    assert sizes <= 150_000
    assert httpx.get(f"{_base(slow_gateway)}/console").headers["location"] == "console/"
    assert httpx.get(f"{_base(slow_gateway)}/console/../../etc/passwd").status_code == 404
    assert httpx.get(f"{_base(slow_gateway)}/console/nothing.js").status_code == 404


def test_the_page_has_no_inline_script_or_style_and_nothing_from_elsewhere(slow_gateway: Gateway) -> None:
    page = httpx.get(f"{_base(slow_gateway)}/console/").text
    assert "<style" not in page
    assert "style=" not in page
    assert "://" not in page
    assert page.count("<script") == page.count('<script type="module" src="console.js"></script>') == 1
    scripts = [name for name in FILES if name.endswith(".js")]
    script = "".join(httpx.get(f"{_base(slow_gateway)}/console/{name}").text for name in scripts)
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(") if word in script]


async def test_a_page_sees_the_whole_fleet_and_then_what_changes(slow_gateway: Gateway) -> None:
    async with _stream(slow_gateway) as first:
        told = await _event(first)
        while not told["joined"]:
            told = await _event(first)
        assert [sheet["model"] for sheet in told["joined"]] == ["slow"]
        later = await _event(first)
        assert not later["whole"]
        assert later["seq"] == told["seq"] + 1
        async with _stream(slow_gateway) as second:
            told = await _event(second)
            assert told["whole"]
            assert [sheet["model"] for sheet in told["joined"]] == ["slow"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pages_of_other_origins_are_refused_even_where_no_key_is_needed(slow_gateway: Gateway, site: str) -> None:
    async with _stream(slow_gateway, f"Sec-Fetch-Site: {site}") as stream:
        assert "403" in await stream.line("HTTP/1.1")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example"])
async def test_without_keys_a_page_of_another_name_is_refused(slow_gateway: Gateway, host: str) -> None:
    async with _stream(slow_gateway, host=host) as stream:
        assert "403" in await stream.line("HTTP/1.1")


async def test_behind_a_proxy_a_gateway_without_keys_shows_nothing(slow_gateway: Gateway) -> None:
    async with _stream(slow_gateway, "X-Forwarded-For: 10.0.0.1") as stream:
        assert "403" in await stream.line("HTTP/1.1")


async def test_how_a_request_went_is_told_under_the_id_of_its_client(slow_gateway: Gateway) -> None:
    body = {"model": "slow", "prompt": "one two three", "max_tokens": 3}
    async with httpx.AsyncClient(timeout=60) as client:
        url, told = f"{_base(slow_gateway)}/console/requests", {}
        await client.post(f"{slow_gateway.url}/completions", json=body, headers={"x-request-id": "first-one"})
        async with asyncio.timeout(20):
            while told.get("request", {}).get("state") != "length":  # its router hears of the end after its client
                told = (await client.get(f"{url}/first-one")).json()
        assert told["request"]["completion_tokens"] == 3
        assert sum(told["request"]["gaps"][6:8]) == 2, "two gaps of about 50 ms"
        assert told["story"][-1].endswith("with 3 tokens (length).")
        recent = (await client.get(url)).json()
        assert recent["requests"][0]["id"] == told["request"]["id"]
        assert recent["requests"][0]["workers"] == [told["request"]["attempts"][0]["worker_id"]]
        assert (await client.get(f"{url}?failed=1")).json()["requests"] == []


@pytest.mark.parametrize("request_id", ["unknown", "%3Cscript%3E", "a/../b", "x" * 300, "*", "a%00b"])
def test_an_id_that_no_router_knows_or_that_none_can_have_is_not_found(slow_gateway: Gateway, request_id: str) -> None:
    got = httpx.get(f"{_base(slow_gateway)}/console/requests/{request_id}")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "not_found")
    assert got.headers["content-type"] == "application/json"


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "limit=ten", "slower_than_ms=-1", "slower_than_ms=nan"])
def test_a_filter_that_is_not_allowed_is_named(slow_gateway: Gateway, query: str) -> None:
    got = httpx.get(f"{_base(slow_gateway)}/console/requests?{query}")
    assert (got.status_code, got.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_tenant_can_not_tell_requests_of_another_from_unknown_ones(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, TOKENBUS_API_KEYS="sesame=acme,poppy=globex") as gateway:
        acme, globex = ({"authorization": f"Bearer {key}"} for key in ("sesame", "poppy"))
        body = {"model": "slow", "prompt": "hello", "max_tokens": 1}
        httpx.post(f"{gateway.url}/completions", json=body, headers={**acme, "x-request-id": "ours"}, timeout=60)
        url = f"{_base(gateway)}/console/requests"
        assert httpx.get(f"{url}/ours", headers=acme).status_code == 200
        seen = [httpx.get(f"{url}/{name}", headers=globex) for name in ("ours", "none")]
        assert [one.status_code for one in seen] == [404, 404]
        assert seen[0].text.replace("ours", "none") == seen[1].text
        assert httpx.get(url, headers=globex).json()["requests"] == []
        assert httpx.get(f"{url}?tenant=acme", headers=globex).status_code == 403
        assert httpx.get(url).status_code == 401


async def test_with_keys_the_fleet_is_shown_for_a_key_under_any_name(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, TOKENBUS_API_KEYS="sesame=acme") as gateway:
        async with _stream(gateway) as stream:
            assert "401" in await stream.line("HTTP/1.1")
        async with _stream(gateway, "Authorization: Bearer sesame", host="fleet.example") as stream:
            assert "200" in await stream.line("HTTP/1.1")
            assert (await _event(stream))["problem"] in ("", "no router answers")
        assert httpx.get(f"{_base(gateway)}/console/me").status_code == 401
        me = httpx.get(f"{_base(gateway)}/console/me", headers={"authorization": "Bearer sesame"}).json()
        assert (me["tenant"], me["role"], me["key_id"]) == ("acme", "user", "")
        assert "fleet" in me["can"]
