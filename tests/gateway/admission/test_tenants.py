"""Any number of tenants has clients while they make requests, and no longer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from starlette.requests import Request

from tests.gateway.admission.test_callers import NOW, made, ring_of
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.admission.callers import Callers
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.gateway.admission.tenants import Tenant, Tenants
from tokenbus.gateway.http.http_errors import INVALID_API_KEY, VIEWER, ApiError
from tokenbus.protocol.access.keys import KeyRecord, Role
from tokenbus.protocol.wire import errors


class Client:
    """Stands in for the client of a tenant, or of one of its keys."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.ended: list[str] = []

    def with_key(self, key_id: str) -> "Client":
        return Client(*self.names, key_id)

    def end_streams(self, key_id: str, error: errors.Error) -> None:
        self.ended.append(key_id)


class Broker(Client):
    """Stands in for the gateway's client, which makes others for tenants once a test lets it, or never."""

    def __init__(self) -> None:
        super().__init__("gateway")
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_away = False
        self.opened: list[str] = []
        self.released: list[str] = []

    async def for_tenant(self, tenant: str, inbox_prefix: str = "") -> Any:
        await self.may_answer.wait()
        if self.is_away:
            raise ConnectionError("the broker is away")
        self.opened.append(tenant)
        return Client(tenant)

    async def release_tenant(self, other: Any) -> None:
        self.released.append(other.names[0])


class Stage:
    def __init__(self, api_keys: ApiKeys, *records: KeyRecord) -> None:
        self.broker = Broker()
        self.clock = 1_000.0
        callers = Callers(
            api_keys,
            ring_of(*records) if records else None,
            GatewayMetrics(),
            now=lambda: NOW,
            clock=lambda: self.clock,
        )
        client = cast(WireClient, self.broker)
        self.tenants = Tenants(client, GatewaySettings(api_keys=api_keys), callers, lambda: self.clock)

    def admitted(self, key: str, *, looks_on: bool = False) -> contextlib.AbstractAsyncContextManager[Tenant]:
        request = Request({"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]})
        return self.tenants.admitted(request, looks_on=looks_on)

    async def refusal(self, key: str) -> object:
        with pytest.raises(ApiError) as raised:
            async with self.admitted(key):
                pass
        return raised.value.response


def names_of(tenant: Tenant) -> tuple[str, ...]:
    return cast(Client, tenant.client).names


async def test_a_tenant_is_opened_once_for_all_who_come_at_once() -> None:
    stage = Stage(ApiKeys(["one=acme", "two=acme"]))
    stage.broker.may_answer.clear()

    async def use(key: str) -> tuple[str, ...]:
        async with stage.admitted(key) as tenant:
            return names_of(tenant)

    using = [asyncio.create_task(use(key)) for key in ("one", "two", "one")]
    await asyncio.sleep(0)
    stage.broker.may_answer.set()
    assert await asyncio.gather(*using) == [("acme",)] * 3
    assert stage.broker.opened == ["acme"]


async def test_a_tenant_that_can_not_be_opened_is_refused_and_tried_again() -> None:
    stage = Stage(ApiKeys(["old=acme"]))
    stage.broker.is_away = True
    with pytest.raises(errors.RequestError) as raised:
        async with stage.admitted("old"):
            pass
    assert raised.value.error.code is errors.Code.NO_WORKER
    stage.broker.is_away = False
    async with stage.admitted("old") as tenant:
        assert names_of(tenant) == ("acme",)


async def test_a_tenant_without_requests_is_released_after_a_minute_and_opened_again() -> None:
    stage = Stage(ApiKeys(["old=acme", "other=other"]))
    async with stage.admitted("old"):
        stage.clock += 100
        await stage.tenants.release_idle()
    stage.clock += 59
    await stage.tenants.release_idle()
    assert stage.broker.released == []
    stage.clock += 1
    async with stage.admitted("other"):
        await stage.tenants.release_idle()
        assert stage.broker.released == ["acme"]
    async with stage.admitted("old"):
        assert stage.broker.opened == ["acme", "other", "acme"]


async def test_of_too_many_idle_tenants_the_longest_idle_are_released_first() -> None:
    stage = Stage(ApiKeys([f"key{number}=tenant{number}" for number in range(1_030)]))
    for number in range(1_030):
        async with stage.admitted(f"key{number}"):
            stage.clock += 0.001
    async with stage.admitted("key0"), stage.admitted("key2"):
        await stage.tenants.release_idle()
    assert stage.broker.released == ["tenant1", "tenant3", "tenant4", "tenant5"]


async def test_a_key_of_the_fleet_names_its_tenant_and_itself_in_requests() -> None:
    text, record = made(tenant="acme")
    stage = Stage(ApiKeys(()), record)
    async with stage.admitted(text) as tenant:
        assert (tenant.name, tenant.caller.key_id) == ("acme", record.id)
        assert names_of(tenant) == ("acme", record.id)
        first = tenant.client
    async with stage.admitted(text) as tenant:
        assert tenant.client is first, "it knows what is served"
    assert await stage.refusal("none") == INVALID_API_KEY


async def test_a_viewer_looks_on_and_makes_no_requests() -> None:
    text, record = made(role=Role.VIEWER)
    stage = Stage(ApiKeys(()), record)
    assert await stage.refusal(text) == VIEWER
    async with stage.admitted(text, looks_on=True) as tenant:
        assert tenant.caller.role is Role.VIEWER


async def test_streams_of_a_revoked_key_end_at_every_tenant_that_is_open() -> None:
    text, record = made(tenant="acme")
    stage = Stage(ApiKeys(["old=other"]), record)

    @contextlib.asynccontextmanager
    async def both() -> AsyncIterator[list[Client]]:
        async with stage.admitted(text), stage.admitted("old") as other:
            yield [cast(Client, stage.tenants._open["acme"].client), cast(Client, other.client)]

    async with both() as clients:
        stage.tenants.end_streams(record.id)
        assert [client.ended for client in clients] == [[record.id], [record.id]]
