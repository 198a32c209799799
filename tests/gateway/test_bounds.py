"""A gateway refuses what it must, and reports its own state."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jwt
import pytest

from tests.support.http_stream import ENDLESS, post
from tests.support.system import Gateway, command, running_gateway
from tokenbus.cli.console import nats_server

HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


@pytest.fixture
def http(base_url: str) -> Any:
    with httpx2.Client(base_url=base_url, timeout=60) as client:
        yield client


def error_of(response: httpx2.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/json"
    return response.status_code, response.json()["error"]["code"]


def test_a_body_may_be_larger_than_the_broker_allows_up_to_a_limit(http: httpx2.Client) -> None:
    huge = HELLO | {"messages": [{"role": "user", "content": "x" * 8_400_000}]}
    assert error_of(http.post("chat/completions", json=huge)) == (413, "payload_too_large")
    large = HELLO | {"messages": [{"role": "user", "content": "x" * 8_000_000}]}
    assert error_of(http.post("chat/completions", json=large)) == (400, "context_length_exceeded")
    padded = HELLO | {"tools": [], "logit_bias": None, "max_tokens": 1, "user": "x" * 8_000_000}
    assert http.post("chat/completions", json=padded).status_code == 200


def test_a_body_that_does_not_say_that_it_is_json_is_refused(http: httpx2.Client) -> None:
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = http.post("chat/completions", content=body, headers={"Content-Type": kind})
        assert error_of(response) == (415, "unsupported_media_type")
    assert http.post("chat/completions", content=body, headers={"Content-Type": "Application/JSON; charset=utf-8"})


def test_a_path_that_is_not_there_is_an_error_in_the_same_shape(http: httpx2.Client) -> None:
    assert error_of(http.get("nowhere")) == (404, "unknown_url")
    assert error_of(http.get("chat/completions")) == (405, "unknown_url")


def test_a_path_with_another_method_says_which_it_has(http: httpx2.Client) -> None:
    assert http.get("chat/completions").headers["allow"] == "POST"
    assert set(http.delete("models").headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert http.options("responses/resp_0").headers["allow"] == "DELETE, GET, HEAD"


def test_a_method_that_is_known_and_not_served_is_refused_with_the_reason(http: httpx2.Client) -> None:
    listing = http.get("responses")
    assert (error_of(listing), listing.headers["allow"]) == ((405, "unsupported"), "POST")
    assert error_of(http.post("responses/compact")) == (400, "unsupported")
    assert error_of(http.get("responses/compact")) == (405, "unknown_url")


def test_a_trailing_slash_makes_no_difference(http: httpx2.Client) -> None:
    assert http.get("models/").json() == http.get("models").json()
    assert http.get("models/demo/").json() == http.get("models/demo").json()
    assert http.post("chat/completions/", json=HELLO | {"max_tokens": 1}).status_code == 200
    assert error_of(http.get("models/nobody/")) == error_of(http.get("models/nobody"))
    assert error_of(http.post("models/", json=HELLO)) == (405, "unknown_url")


def test_a_system_that_serves_is_live_and_ready(base_url: str) -> None:
    root = base_url.removesuffix("/v1")
    assert httpx2.get(f"{root}/livez").status_code == httpx2.get(f"{root}/readyz").status_code == 200


async def test_one_request_more_than_may_be_open_is_told_to_come_back(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, "--max-requests", "1") as gateway:
        async with post(gateway, ENDLESS | {"stream": True}) as first:
            await first.line("data: ")
            async with post(gateway, ENDLESS) as second:
                assert (await second.line("HTTP/1.1")).startswith("HTTP/1.1 503")
                assert await second.line("retry-after:") == "retry-after: 1"


async def test_made_up_tokens_take_no_place_of_requests_with_keys_while_the_issuer_is_slow(
    slow_url: str, tmp_path: Path
) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def keep_waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await answered.wait()
        writer.close()

    async with await asyncio.start_server(keep_waiting, "127.0.0.1", 0) as issuer:
        url = f"http://127.0.0.1:{issuer.sockets[0].getsockname()[1]}"
        flags = ["--max-requests", "1", "--oidc-issuer", url, "--oidc-audience", "tokenbus"]
        with running_gateway(slow_url, tmp_path, *flags, TOKENBUS_API_KEYS="own=default") as gateway:
            made_up = jwt.encode({"sub": "x"}, "s" * 32, headers={"kid": "made-up"})
            async with (
                post(gateway, ENDLESS, f"Authorization: Bearer {made_up}") as stranger,
                post(gateway, ENDLESS, f"Authorization: Bearer {made_up}"),
            ):
                await asked.wait()
                async with post(gateway, ENDLESS | {"max_tokens": 1}, "Authorization: Bearer own") as known:
                    assert (await known.line("HTTP/1.1")).startswith("HTTP/1.1 200")
                answered.set()
                assert (await stranger.line("HTTP/1.1")).startswith("HTTP/1.1 503")


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


async def test_each_request_leaves_two_lines_and_nothing_of_its_text(slow_gateway: Gateway) -> None:
    said = ENDLESS | {"messages": [{"role": "user", "content": "a-secret"}], "max_tokens": 2}
    ids = []
    for extra, status in (({}, "200"), ({"stream": True}, "200"), (TOOLS, "400"), ({"n": 0}, "400")):
        async with post(slow_gateway, said | extra) as one:
            assert (await one.line("HTTP/1.1")).split()[1] == status
            ids.append("default:" + (await one.line("x-request-id")).split()[1])
            await one.rest()
    finished = [await slow_gateway.ended(request_id) for request_id in ids]
    assert [line["request_id"] for line in slow_gateway.log("request_received") if line["request_id"] in ids] == ids
    assert [(line["status"], line["finish_reason"], line["code"], line["completion_tokens"]) for line in finished] == [
        (200, "length", None, 2),
        (200, "length", None, 2),
        (400, "error", "unsupported", 0),
        (400, None, "invalid_request", 0),
    ]
    assert "a-secret" not in slow_gateway.text_log()
    assert "simulated" not in slow_gateway.text_log()


async def test_a_gateway_without_a_router_is_live_and_not_ready(tmp_path: Path) -> None:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    try:
        with running_gateway(nats.url, tmp_path, "--metrics-port", "0") as gateway:
            (page,) = gateway.log("status_page")
            async with httpx2.AsyncClient() as http:
                for root in (gateway.url.removesuffix("/v1"), f"http://127.0.0.1:{page['port']}"):
                    assert (await http.get(f"{root}/livez")).status_code == 200
                    ready = await http.get(f"{root}/readyz")
                    assert (ready.status_code, ready.text) == (503, "no router listens on this broker\n")
                assert error_of(await http.post(f"{gateway.url}/chat/completions", json=HELLO)) == (503, "no_worker")
    finally:
        nats.stop()


def refused(*arguments: str) -> list[str]:
    """Returns the output of a command that does not start."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    return done.stderr.splitlines()


def test_a_port_that_is_taken_is_one_line_that_says_what_to_do(base_url: str, slow_url: str) -> None:
    port = str(urlsplit(base_url).port)
    (line,) = refused("gateway", "--nats", slow_url, "--port", port)
    assert line.endswith("pass --port 0 for a free port")
    *_, line = refused("up", "--port", "0", "--json", "--gateway-port", port)
    assert line.endswith("pass --gateway-port 0 for a free port, or --no-gateway")


def test_a_key_without_a_tenant_is_one_line_that_does_not_show_it(slow_url: str) -> None:
    (line,) = refused("gateway", "--nats", slow_url, "--api-key", "sk-secret=")
    assert "must be key=tenant" in line
    assert "sk-secret" not in line
