"""On whose behalf a request is made: the tenant of its API key, and the client that asks for that tenant."""

from typing import NamedTuple

from starlette.requests import Request

from tokenbus.client import Client
from tokenbus.gateway.keys import ApiKeys
from tokenbus.gateway.openai.error_responses import INVALID_API_KEY, TENANT_STARTING, ApiError
from tokenbus.gateway.settings import GatewaySettings
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import subjects


class Tenant(NamedTuple):
    name: str
    client: Client


class Tenants:
    """All there are, over one connection."""

    def __init__(self, own: Client, settings: GatewaySettings) -> None:
        self.gateway_client = own
        """Of the gateway itself: to ask what concerns no tenant, and to close, which closes all."""
        self._settings = settings
        self._keys = settings.keys
        self._clients: dict[str, Client] = {}

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self._clients)}>"

    @classmethod
    async def create(cls, connection: Bus, settings: GatewaySettings, tracer: tracing.Tracer) -> "Tenants":
        """All those of the keys, known from the start."""
        own = await Client.from_connection(connection, tenant=settings.tenant, prefix=settings.prefix, tracer=tracer)
        tenants = cls(own, settings)
        await tenants.set_keys(settings.keys)
        return tenants

    async def set_keys(self, keys: ApiKeys) -> None:
        """Other keys, from now on; what is open goes on. Raises what keeps a tenant that is new from asking."""
        settings = self._settings
        self._keys = keys  # before anything is waited for: a key that was taken away is gone at once
        for name in keys.tenants - self._clients.keys():
            if name == settings.tenant and not settings.tenant_inbox:
                self._clients[name] = self.gateway_client
            else:
                inbox = settings.tenant_inbox.replace(subjects.TENANT_PLACEHOLDER, subjects.encode_name(name))
                self._clients[name] = await self.gateway_client.for_tenant(name, inbox)

    def authenticate(self, request: Request) -> Tenant:
        """Who asks. Raises ApiError."""
        name = self._keys.tenant_of(request.headers.get("authorization", ""))
        if name is None:
            raise ApiError(INVALID_API_KEY)
        client = self._clients.get(name)
        if client is None:
            raise ApiError(TENANT_STARTING)
        return Tenant(name, client)
