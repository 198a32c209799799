"""The client that people use: it connects, belongs to one event loop, and takes its requests with it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.support.raw_client import PREFIX, RawClient
from tokenbus.cli.console import nats_server
from tokenbus.client import BrokerUnreachableError, Client, InvalidRequestError, RequestCancelledError, UnavailableError


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A broker where nothing is served."""
    nats = await nats_server.start(0, tmp_path / "nats.log")
    yield nats.url
    nats.stop()


class Silent:
    """Takes requests and cancels in place of a router, and answers none of them."""

    def __init__(self) -> None:
        self.asked = asyncio.Queue[dict[str, Any]]()
        self.cancelled = asyncio.Queue[str]()

    async def request(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            return await self.asked.get()

    async def cancel(self) -> str:
        async with asyncio.timeout(60):
            return await self.cancelled.get()

    @classmethod
    async def listen(cls, bare: RawClient) -> "Silent":
        silent = cls()

        async def take(message: Msg) -> None:
            silent.asked.put_nowait(json.loads(message.data))

        async def note(message: Msg) -> None:
            silent.cancelled.put_nowait(message.subject.removeprefix(f"{PREFIX}.cancel."))

        for operation in ("generate", "embed"):
            await bare.nats.subscribe(f"{PREFIX}.{operation}.>", cb=take)
        await bare.nats.subscribe(f"{PREFIX}.cancel.>", cb=note)
        await bare.settle()
        return silent


@pytest.fixture
async def silent(url: str) -> AsyncIterator[Silent]:
    bare = await RawClient.connect(url)
    yield await Silent.listen(bare)
    await bare.close()


@pytest.fixture
async def client(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setenv("TOKENBUS_NATS", url)
    async with asyncio.timeout(60), Client() as client:
        yield client


async def test_a_request_that_no_router_has_answered_yet_is_cancelled_with_its_task(
    client: Client, silent: Silent
) -> None:
    task = asyncio.create_task(client.generate("demo", prompt="hi", id="mine").text())
    assert (await silent.request())["prompt"] == "hi"
    task.cancel()
    assert await silent.cancel() == "default.mine.demo"


async def test_a_call_that_is_cancelled_cancels_its_request(client: Client, silent: Silent) -> None:
    task = asyncio.create_task(client.embed("demo", input=["a"], id="mine"))
    assert (await silent.request())["input"] == ["a"]
    task.cancel()
    assert await silent.cancel() == "mine"


async def test_closing_cancels_what_runs_and_says_so_to_its_readers(client: Client, silent: Silent) -> None:
    reader = asyncio.create_task(client.generate("demo", prompt="hi", id="mine").text())
    await silent.request()
    await client.close()
    with pytest.raises(RequestCancelledError, match="the client was closed"):
        await reader
    assert await silent.cancel() == "default.mine.demo"
    await client.close()


async def test_a_closed_client_can_be_opened_again(client: Client, silent: Silent) -> None:
    await client.close()
    with pytest.raises(RuntimeError, match="not connected: use `async with Client"):
        client.generate("demo", prompt="hi")
    async with client:
        client.generate("demo", prompt="again")
        assert (await silent.request())["prompt"] == "again"


async def test_a_client_may_be_connected_before_its_block(url: str, silent: Silent) -> None:
    async with await Client.connect(url) as client:
        client.generate("demo", prompt="hi")
        assert (await silent.request())["prompt"] == "hi"
    with pytest.raises(RuntimeError, match="not connected"):
        await client.models()


async def test_two_tasks_that_connect_a_client_at_once_make_one_connection(url: str) -> None:
    client = Client(url)
    results = await asyncio.gather(client.__aenter__(), client.__aenter__(), return_exceptions=True)
    assert results[0] is client
    assert isinstance(results[1], RuntimeError)
    await client.close()


async def test_another_event_loop_is_told_to_use_a_client_of_its_own(client: Client) -> None:
    async def elsewhere() -> None:
        await client.models()

    with pytest.raises(RuntimeError, match="belongs to another event loop: make a Client in each loop"):
        await asyncio.to_thread(asyncio.run, elsewhere())
    with pytest.raises(RuntimeError, match="needs a running event loop: use it in a coroutine, or use SyncClient"):
        await asyncio.to_thread(client.generate, "demo", prompt="hi")


async def test_where_nothing_listens_a_call_says_so(client: Client) -> None:
    with pytest.raises(UnavailableError, match="no router listens") as caught:
        await client.models()
    assert caught.value.retryable
    with pytest.raises(UnavailableError, match="no router listens"):
        await client.generate("demo", prompt="hi").text()
    assert not await client.cancel("unknown")


@pytest.mark.parametrize(("model", "said"), [("", "1 to 128"), ("x" * 129, "1 to 128")])
async def test_a_model_that_can_be_no_name_is_refused(client: Client, model: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        client.generate(model, prompt="hi")
    assert caught.value.param == "model"
    with pytest.raises(ValueError, match=said):
        await client.tokenize(model, prompt="hi")


async def test_a_mistake_in_a_call_is_named_before_anything_is_sent(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="did you mean input") as caught:
        await client.embed("demo", inptu="a")  # type: ignore[call-arg]
    assert caught.value.param == "inptu"
    with pytest.raises(InvalidRequestError, match="request: unknown field"):
        client.generate("demo", request={"prompt": "hi"})  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="an id is 1 to 128"):
        await client.cancel("not an id")


async def test_a_broker_that_is_away_is_an_error_of_its_own() -> None:
    with pytest.raises(BrokerUnreachableError, match="set --nats or TOKENBUS_NATS") as caught:
        await Client.connect("nats://127.0.0.1:1", connect_timeout_s=0.2)
    assert isinstance(caught.value, ConnectionError)


def test_options_are_checked_before_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="tenent: unknown field; did you mean tenant"):
        Client(tenent="acme")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="give only one of a NATS user, token"):
        Client(user="me", password="secret", token="t")
    with pytest.raises(ValueError, match="1 to 128"):
        Client(tenant="")
    monkeypatch.setenv("TOKENBUS_NATS_USER", "me")
    with pytest.raises(ValueError, match="set the variable TOKENBUS_NATS_PASSWORD"):
        Client()
    Client(token="t")
