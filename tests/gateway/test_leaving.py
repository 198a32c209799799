"""When a client, somebody else, or the gateway itself ends a request before its time."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.support.http_stream import ENDLESS, post
from tests.support.system import Gateway, running_gateway
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.worker.streams.holds import Patience


@pytest.fixture
async def client(slow_url: str) -> AsyncIterator[WireClient]:
    async with await WireClient.connect(slow_url) as client:
        yield client


async def num_running(client: WireClient) -> int:
    reply = await client.models()
    return sum(card.load.running for card in reply.cards if card.load)


async def until_running(client: WireClient, count: int) -> float:
    """Waits until so many requests run; gives the seconds that it took."""
    began = time.monotonic()
    async with asyncio.timeout(60):
        while await num_running(client) != count:
            await asyncio.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [True, False], ids=["in a stream", "while waiting"])
async def test_a_client_that_goes_away_cancels_its_request_before_its_worker_could_miss_it(
    client: WireClient, slow_gateway: Gateway, stream: bool
) -> None:
    async with post(slow_gateway, ENDLESS | {"stream": stream}) as one:
        if stream:
            await one.line("data: ")
        await until_running(client, 1)
        request_id = slow_gateway.log("request_received")[-1]["request_id"]
    assert await until_running(client, 0) < Patience().gone_after_s
    finished = await slow_gateway.ended(request_id)
    assert (finished["finish_reason"], finished["disconnect"]) == ("cancelled", "gone")
    assert finished["status"] == (200 if stream else None)


async def test_leaving_the_loop_of_the_openai_client_cancels_too(client: WireClient, slow_gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=slow_gateway.url, api_key="none") as other:
        async with await other.chat.completions.create(**ENDLESS, stream=True) as stream:
            async for _ in stream:
                break
        assert await until_running(client, 0) < Patience().gone_after_s


async def test_the_openai_client_raises_when_somebody_else_cancels_its_stream(
    client: WireClient, slow_gateway: Gateway
) -> None:
    async with openai.AsyncOpenAI(base_url=slow_gateway.url, api_key="none") as other:
        stream = await other.chat.completions.create(**ENDLESS, stream=True)
        assert await client.cancel(stream.response.headers["x-request-id"])
        with pytest.raises(openai.APIError) as raised:
            async for _ in stream:
                pass
    assert raised.value.code == "cancelled"


async def test_a_gateway_killed_with_9_leaves_nothing_running(
    client: WireClient, slow_url: str, tmp_path: Path
) -> None:
    with running_gateway(slow_url, tmp_path) as gateway:
        async with post(gateway, ENDLESS | {"stream": True}), post(gateway, ENDLESS):
            await until_running(client, 2)
            gateway.process.kill()
            await until_running(client, 0)


async def test_sigterm_takes_nothing_new_and_lets_streams_finish(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path) as gateway:
        async with post(gateway, ENDLESS | {"stream": True, "max_tokens": 20}) as one:
            await one.line("data: ")
            gateway.process.send_signal(signal.SIGTERM)
            rest = await one.rest()
        assert '"finish_reason":"length"' in rest
        assert "data: [DONE]" in rest
        with pytest.raises(OSError):
            async with post(gateway, ENDLESS):
                pass
        assert gateway.process.wait(timeout=60) == 0


async def test_after_the_grace_a_stream_ends_with_an_error_and_done(
    client: WireClient, slow_url: str, tmp_path: Path
) -> None:
    with running_gateway(slow_url, tmp_path, "--grace-s", "0.3") as gateway:
        async with post(gateway, ENDLESS | {"stream": True}) as streamed, post(gateway, ENDLESS) as waiting:
            await streamed.line("data: ")
            await until_running(client, 2)
            gateway.process.send_signal(signal.SIGTERM)
            *_, error, done = [line for line in (await streamed.rest()).splitlines() if line.startswith("data: ")]
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert done == "data: [DONE]"
            assert (await waiting.line("HTTP/1.1")).startswith("HTTP/1.1 503")
            assert gateway.process.wait(timeout=60) == 0
    await until_running(client, 0)


async def test_keys_are_tenants_and_a_cancel_by_their_tenant_ends_a_stream_with_an_error(
    client: WireClient, slow_url: str, tmp_path: Path
) -> None:
    keys = {"TOKENBUS_API_KEYS": "sk-one=acme, sk-two=default"}
    with running_gateway(slow_url, tmp_path, **keys) as gateway:
        async with post(gateway, ENDLESS, "Authorization: Bearer sk-three") as refused:
            assert await refused.line("HTTP/1.1") == "HTTP/1.1 401 Unauthorized"
        acme = await WireClient.connect(slow_url, tenant="acme")
        async with acme, post(gateway, ENDLESS | {"stream": True}, "Authorization: Bearer sk-one") as one:
            request_id = (await one.line("x-request-id: ")).partition(" ")[2]
            assert await client.cancel(request_id, timeout_s=0.5) is False
            assert await acme.cancel(request_id) is True
            error = await one.line('data: {"error"')
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "cancelled"
            assert await one.line("data: ") == "data: [DONE]"
    assert "sk-" not in gateway.text_log()
    assert gateway.log("request_finished")[-1]["request_id"] == f"acme:{request_id}"
