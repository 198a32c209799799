"""A request that names no model waits until it is known which one is meant, and can be given up meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from tests.support.raw_client import PREFIX, RawClient
from tokenbus.cli.console import nats_server
from tokenbus.client import Client, InvalidRequestError, RequestCancelledError, UnavailableError

CHAT, EMBEDDER = ["generate", "chat"], ["embed"]


class Router:
    """Answers `models` requests when a test lets it, and every completion with one chunk."""

    def __init__(self, bare: RawClient) -> None:
        self._bare = bare
        self.served = {"demo": CHAT}
        self.num_asked = 0
        self.has_been_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.subjects: list[str] = []
        """The subjects of all other requests, without the prefix."""

    async def listen(self) -> None:
        await self._bare.nats.subscribe(f"{PREFIX}.models.>", cb=self._list)
        await self._bare.nats.subscribe(f"{PREFIX}.models", cb=self._list)
        for operation in ("generate", "cancel", "cache"):
            await self._bare.nats.subscribe(f"{PREFIX}.{operation}.>", cb=self._take)
        await self._bare.settle()

    async def _list(self, message: Msg) -> None:
        self.num_asked += 1
        self.has_been_asked.set()
        await self.may_answer.wait()
        models = [{"model": name, "context_length": 512, "features": has} for name, has in self.served.items()]
        await message.respond(json.dumps({"models": models, "limits": {"max_request_bytes": 1 << 20}}).encode())

    async def _take(self, message: Msg) -> None:
        self.subjects.append(message.subject.removeprefix(f"{PREFIX}."))
        if message.reply:
            request_id = json.loads(message.data).get("id") or "r"
            terminal = {"attempt": 1, "finish_reason": "stop", "worker_id": "w"}
            is_completion = self.subjects[-1].startswith("generate")
            await message.respond(json.dumps({"id": request_id} | (terminal if is_completion else {})).encode())


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    nats = await nats_server.start(0, tmp_path / "nats.log")
    yield nats.url
    nats.stop()


@pytest.fixture
async def router(url: str) -> AsyncIterator[Router]:
    bare = await RawClient.connect(url)
    router = Router(bare)
    await router.listen()
    yield router
    router.may_answer.set()
    await bare.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with asyncio.timeout(60), Client(url) as client:
        yield client


async def test_the_only_model_that_generates_is_meant_and_asked_for_once(client: Client, router: Router) -> None:
    router.served["bge"] = EMBEDDER
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(client.generate(prompt="hi").text())
        group.create_task(client.keep_session(session_id="s"))
    assert sorted(router.subjects) == ["cache.demo", *["generate.demo"] * 5]
    assert router.num_asked == 1


async def test_with_several_models_the_stream_raises_an_error_that_names_them(client: Client, router: Router) -> None:
    router.served["other"] = CHAT
    with pytest.raises(InvalidRequestError, match="several models are served: demo, other") as caught:
        await client.generate(prompt="hi").text()
    assert caught.value.param == "model"
    assert router.subjects == []


async def test_without_any_model_the_stream_says_so(client: Client, router: Router) -> None:
    router.served.clear()
    with pytest.raises(UnavailableError, match="no model is being served"):
        await client.generate(prompt="hi").text()


async def test_a_request_that_is_given_up_before_its_model_is_known_is_never_sent(
    client: Client, router: Router
) -> None:
    router.may_answer.clear()
    cancelled, closed, left = (client.generate(prompt="hi") for _ in range(3))
    await router.has_been_asked.wait()
    cancelled.cancel()
    assert (await cancelled.answer()).finish_reason == "cancelled"
    await closed.aclose()
    await client.close()
    with pytest.raises(RequestCancelledError, match="closed"):
        await left.text()
    router.may_answer.set()
    assert router.subjects == []
