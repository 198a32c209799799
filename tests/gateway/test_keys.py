"""A fleet with keys, over HTTP with OpenAI's and Anthropic's own clients."""

import asyncio
import functools
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.admission.test_callers import made
from tests.support.system import Gateway, running_gateway, running_worker, up_with_output
from tokenbus.protocol.access import key_changes, keys
from tokenbus.protocol.access.key_source import BUCKET, KeySettings
from tokenbus.protocol.access.key_stores import BucketKeys
from tokenbus.protocol.access.keys import KeyLimits, Role
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.wire import subjects

MODEL = "slow"
HEARD_S = 1.0
"""The longest time from a change of a key until gateways and routers act on it."""


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Any]]:
    model = ["--engine", "sim", "--model", "steps-of-50ms", "--served-name", MODEL]
    with up_with_output("--keys", "--workers", "1", *model) as said:
        yield said


@pytest.fixture(scope="module")
def ending_gateway(said: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that ends the streams of a revoked key, and has a key of its own."""
    flags = ["--keys", "bucket", "--revoke-ends-streams"]
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(said["nats"], folder, *flags, TOKENBUS_API_KEYS="own=globex") as gateway:
        yield gateway


@pytest.fixture
async def store(said: dict[str, Any]) -> AsyncIterator[BucketKeys]:
    connection = await nats.connect(nats.BusSettings(url=said["nats"]), "test")
    store = KeySettings(BUCKET).store(connection, subjects.DEFAULT_PREFIX)
    assert isinstance(store, BucketKeys)
    yield store
    await connection.close()


def client_of(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


async def models_of(url: str, key: str) -> list[str]:
    async with client_of(url, key) as client:
        return [one.id async for one in client.models.list()]


async def message_from(url: str, **key: str) -> anthropic.types.Message:
    """Returns a message of two tokens, asked for with Anthropic's client."""
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), max_retries=0, **key) as claude:  # type: ignore[arg-type]
        return await claude.messages.create(model=MODEL, max_tokens=2, messages=[{"role": "user", "content": "x"}])


async def until(is_so: Callable[[], Any], limit_s: float = HEARD_S) -> None:
    """Asks again and again whether something is so. Fails if it is not within the limit."""
    deadline = time.monotonic() + limit_s
    while not await is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def is_known(url: str, key: str) -> bool:
    try:
        await models_of(url, key)
    except openai.AuthenticationError:
        return False
    return True


async def test_the_first_key_is_one_of_an_operator_and_serves_both_clients(said: dict[str, Any]) -> None:
    url, key = said["http"], said["key"]
    assert await models_of(url, key) == [MODEL]
    async with client_of(url, key) as client:
        made = await client.completions.create(model=MODEL, prompt="x", max_tokens=2)
        assert made.usage is not None
        assert made.usage.completion_tokens == 2
    for given in ({"api_key": key}, {"auth_token": key}):
        assert (await message_from(url, **given)).usage.output_tokens == 2


async def test_a_key_is_valid_as_soon_as_it_is_made_and_refused_within_a_second_of_its_revocation(
    said: dict[str, Any], store: BucketKeys
) -> None:
    url = said["http"]
    text, record = made(tenant="acme")
    assert not await is_known(url, text)
    await store.add(record)
    await until(lambda: is_known(url, text))
    async with client_of(url, text) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=30, stream=True)
        await anext(aiter(stream))
        await key_changes.change(store, record.id, lambda one: key_changes.revoked(one, time.time()))

        async def is_refused() -> bool:
            try:
                await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
            except openai.AuthenticationError as error:
                assert error.code == "invalid_api_key"
                assert record.id in error.message
                return True
            return False

        await until(is_refused)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length", "what was open has finished"
    with pytest.raises(anthropic.AuthenticationError, match="has been revoked"):
        await message_from(url, api_key=text)


async def test_a_key_uses_and_sees_only_the_models_of_its_patterns(said: dict[str, Any], store: BucketKeys) -> None:
    text, record = made(tenant="acme", models=("chat-*",))
    await store.add(record)
    await until(lambda: is_known(said["http"], text))
    assert await models_of(said["http"], text) == []
    async with client_of(said["http"], text) as client:
        with pytest.raises(openai.PermissionDeniedError) as raised:
            await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert raised.value.code == "forbidden"


async def test_a_viewer_sees_models_and_makes_no_requests(said: dict[str, Any], store: BucketKeys) -> None:
    text, record = made(tenant="acme", role=Role.VIEWER)
    await store.add(record)
    await until(lambda: is_known(said["http"], text))
    assert await models_of(said["http"], text) == [MODEL]
    async with client_of(said["http"], text) as client:
        with pytest.raises(openai.PermissionDeniedError, match="viewer"):
            await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    with pytest.raises(anthropic.PermissionDeniedError, match="viewer"):
        await message_from(said["http"], api_key=text)


async def test_a_gateway_may_end_the_streams_of_a_revoked_key_and_of_no_other(
    said: dict[str, Any], store: BucketKeys, ending_gateway: Gateway
) -> None:
    url = ending_gateway.url
    texts, records = zip(*(made(tenant="acme") for _ in range(2)), strict=True)
    for text, record in zip(texts, records, strict=True):
        await store.add(record)
        await until(functools.partial(is_known, url, text))
    clients = [client_of(url, key) for key in (*texts, "own")]
    streams = [
        await one.completions.create(model=MODEL, prompt="x", max_tokens=40, stream=True, timeout=30) for one in clients
    ]
    for stream in streams:
        await anext(aiter(stream))
    revoked_at = time.monotonic()
    await key_changes.change(store, records[0].id, lambda one: key_changes.revoked(one, time.time()))
    with pytest.raises(openai.APIError, match=f"the API key {records[0].id} has been revoked"):
        async for _ in streams[0]:
            pass
    assert time.monotonic() - revoked_at < HEARD_S
    for stream in streams[1:]:
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
    for client in clients:
        await client.close()


async def test_logs_name_keys_by_their_ids_and_never_show_a_secret(
    said: dict[str, Any], store: BucketKeys, ending_gateway: Gateway, tmp_path: Path
) -> None:
    text, record = made(tenant="acme")
    await store.add(record)
    await until(lambda: is_known(ending_gateway.url, text))
    async with client_of(ending_gateway.url, text) as client:
        await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        await key_changes.change(store, record.id, lambda one: key_changes.rotated(one, keys.new_key(one.id), 0.0, 0.0))

        async def is_refused() -> bool:
            return not await is_known(ending_gateway.url, text)

        await until(is_refused)
    assert record.id in {line["key_id"] for line in ending_gateway.log("request_received")}
    assert text[14:] not in ending_gateway.text_log()
    assert ending_gateway.log("keys_refused")


async def test_a_key_sees_its_own_usage_as_its_answers_have_told_it(said: dict[str, Any], store: BucketKeys) -> None:
    text, record = made(tenant="initech")
    await store.add(record)
    await until(lambda: is_known(said["http"], text))
    async with client_of(said["http"], text) as client:
        answers = [
            await client.completions.create(model=MODEL, prompt="x" * number, max_tokens=number) for number in (1, 2, 3)
        ]
        answers.append(await client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=2, n=3))
        talk: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        chats = [await client.chat.completions.create(**talk, n=n) for n in (1, 5)]
        used = [one.usage for one in (*answers, *chats) if one.usage is not None]
        assert used[-2].prompt_tokens == used[-1].prompt_tokens

        async def is_counted() -> bool:
            report: Any = await client.get("/usage?group_by=tenant,key,model", cast_to=object)
            expected = {
                "tenant": "initech",
                "key": record.id,
                "model": MODEL,
                "requests": sum(len(one.choices) for one in (*answers, *chats)),
                "prompt_tokens": sum(one.prompt_tokens for one in used),
                "completion_tokens": sum(one.completion_tokens for one in used),
            }
            return any(one.items() >= expected.items() for one in report["data"])

        await until(is_counted, 20.0)


async def test_headers_tell_what_each_answer_has_left_of_a_limit_and_a_refusal_when_to_come_again(
    said: dict[str, Any], store: BucketKeys
) -> None:
    text, record = made(tenant="hooli", limits=KeyLimits(tokens_per_day=40, requests_per_minute=6_000))
    await store.add(record)
    await until(lambda: is_known(said["http"], text))
    with running_worker(said["nats"], "--model", "demo", "--threads", "1"):
        async with client_of(said["http"], text) as client:

            async def is_served() -> bool:
                return "demo" in await models_of(said["http"], text)

            await until(is_served, 60.0)
            embedded = await client.embeddings.with_raw_response.create(model="demo", input="the fox")
            left = 40 - embedded.parse().usage.total_tokens
            assert told(embedded.headers, "tokens") == (40, left)
            assert told(embedded.headers, "requests")[0] == 6_000
            theirs = await asyncio.to_thread(embedded_by_ollama, said["http"], text)
            left -= json.load(theirs)["prompt_eval_count"]
            assert told(theirs.headers, "tokens") == (40, left)

            async def use_up() -> None:
                while True:
                    await client.embeddings.create(model="demo", input="the fox and the owl")

            with pytest.raises(openai.RateLimitError) as refused:
                await use_up()
            headers = refused.value.response.headers
            assert told(headers, "tokens") == (40, 0)
            assert 0 < int(headers["retry-after"]) <= 86_400
            assert headers["x-should-retry"] == "true"


def embedded_by_ollama(url: str, key: str) -> Any:
    body = json.dumps({"model": "demo", "input": ["the fox"]}).encode()
    asked = urllib.request.Request(f"{url.removesuffix('/v1')}/api/embed", body, {"Authorization": f"Bearer {key}"})
    return urllib.request.urlopen(asked, timeout=60)


def told(headers: Mapping[str, str], unit: str) -> tuple[int, int]:
    """Returns a limit and what is left of it."""
    return int(headers[f"x-ratelimit-limit-{unit}"]), int(headers[f"x-ratelimit-remaining-{unit}"])
