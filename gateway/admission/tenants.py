"""Finds a request's tenant by its API key, and the NATS client that makes that tenant's requests."""

from typing import NamedTuple

from starlette.requests import Request

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.gateway.http.http_errors import INVALID_API_KEY, TENANT_STARTING, ApiError
from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import OwnedBus
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import subjects


class Tenant(NamedTuple):
    name: str
    client: WireClient


class Tenants:
    """The tenants of a gateway, each with a client over one shared connection."""

    def __init__(self, gateway_client: WireClient, settings: GatewaySettings) -> None:
        self.gateway_client = gateway_client
        """The gateway's own client, for matters that concern no tenant. Closing it closes all clients."""
        self._settings = settings
        self._keys = settings.api_keys
        self._clients: dict[str, WireClient] = {}

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self._clients)}>"

    @classmethod
    async def create(cls, connection: OwnedBus, settings: GatewaySettings, tracer: tracing.Tracer) -> "Tenants":
        """Opens a client for each tenant that has a key."""
        client = await WireClient.from_connection(
            connection, tenant=settings.tenant, prefix=settings.prefix, tracer=tracer
        )
        tenants = cls(client, settings)
        await tenants.set_keys(settings.api_keys)
        return tenants

    async def set_keys(self, keys: ApiKeys) -> None:
        """Replaces the keys; open requests continue. Raises ConnectionError if a new tenant's inbox can't be opened."""
        settings = self._settings
        self._keys = keys  # before the first await, so that a revoked key is invalid at once
        for name in keys.tenants - self._clients.keys():
            if name == settings.tenant and not settings.tenant_inbox:
                self._clients[name] = self.gateway_client
            else:
                inbox = settings.tenant_inbox.replace(subjects.TENANT_PLACEHOLDER, subjects.encode_name(name))
                self._clients[name] = await self.gateway_client.for_tenant(name, inbox)
        for name in self._clients.keys() - keys.tenants:
            client = self._clients.pop(name)
            if client is not self.gateway_client:
                tasks.background("release a tenant", self.gateway_client.release_tenant(client))

    def authenticate(self, request: Request) -> Tenant:
        """Returns a request's tenant. Raises ApiError if its key is unknown, or too new to have a client."""
        name = self._keys.tenant_of(request.headers)
        if name is None:
            raise ApiError(INVALID_API_KEY)
        client = self._clients.get(name)
        if client is None:
            raise ApiError(TENANT_STARTING)
        return Tenant(name, client)
