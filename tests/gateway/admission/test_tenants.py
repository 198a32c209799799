"""Keys belong to their tenants while keys change."""

import asyncio
from typing import Any, cast

import pytest
from starlette.requests import Request

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.gateway.admission.tenants import Tenants
from tokenbus.gateway.http.http_errors import INVALID_API_KEY, TENANT_STARTING, ApiError


def asked_with(key: str) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]})


class Broker:
    """Stands in for a client that makes others for tenants, once a test lets it, or never."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_away = False
        self.released: list[Any] = []

    async def for_tenant(self, tenant: str, inbox_prefix: str = "") -> Any:
        await self.may_answer.wait()
        if self.is_away:
            raise ConnectionError("the broker is away")
        return tenant

    async def release_tenant(self, other: Any) -> None:
        self.released.append(other)


def tenants_over(broker: Broker, keys: ApiKeys) -> Tenants:
    return Tenants(cast(WireClient, broker), GatewaySettings(api_keys=keys))


def refusal(tenants: Tenants, key: str) -> object:
    with pytest.raises(ApiError) as raised:
        tenants.authenticate(asked_with(key))
    return raised.value.response


async def test_a_key_that_is_taken_away_is_gone_before_the_broker_knows_of_a_new_one() -> None:
    broker, old = Broker(), ApiKeys(["old=acme"])
    tenants = tenants_over(broker, old)
    await tenants.set_keys(old)
    assert tenants.authenticate(asked_with("old")).name == "acme"
    broker.may_answer.clear()
    using = asyncio.create_task(tenants.set_keys(ApiKeys(["new=other"])))
    await asyncio.sleep(0)
    assert refusal(tenants, "old") == INVALID_API_KEY
    assert refusal(tenants, "new") == TENANT_STARTING
    broker.may_answer.set()
    await using
    assert tenants.authenticate(asked_with("new")).name == "other"
    await asyncio.sleep(0)
    assert broker.released == ["acme"], "nobody can use its client any more"


async def test_a_tenant_that_can_not_be_made_known_leaves_the_others_and_is_tried_again() -> None:
    broker = Broker()
    tenants = tenants_over(broker, ApiKeys(["old=acme"]))
    await tenants.set_keys(ApiKeys(["old=acme"]))
    broker.is_away = True
    with pytest.raises(ConnectionError):
        await tenants.set_keys(ApiKeys(["old=acme", "new=other"]))
    assert tenants.authenticate(asked_with("old")).name == "acme"
    assert refusal(tenants, "new") == TENANT_STARTING
    broker.is_away = False
    await tenants.set_keys(ApiKeys(["old=acme", "new=other"]))
    assert tenants.authenticate(asked_with("new")).name == "other"
