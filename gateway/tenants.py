"""On whose behalf a request is made: the tenant of its API key, and the client that asks for that tenant."""

from typing import NamedTuple

from starlette.requests import Request

from tokenbus.client import Client
from tokenbus.gateway.keys import Keys
from tokenbus.gateway.openai.failures import NO_KEY, NOT_YET, FailedError
from tokenbus.gateway.settings import GatewaySettings
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.telemetry import traces
from tokenbus.protocol.wire import subjects


class Tenant(NamedTuple):
    name: str
    client: Client


class Tenants:
    """All there are, over one connection."""

    def __init__(self, own: Client, settings: GatewaySettings) -> None:
        self.own = own
        """Of the gateway itself: to ask what concerns no tenant, and to close, which closes all."""
        self._settings = settings
        self._keys = settings.keys
        self._clients: dict[str, Client] = {}

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self._clients)}>"

    @classmethod
    async def over(cls, connection: Bus, settings: GatewaySettings, traced: traces.Traces) -> "Tenants":
        """All those of the keys, known from the start."""
        own = await Client.over(connection, tenant=settings.tenant, prefix=settings.prefix, traced=traced)
        tenants = cls(own, settings)
        await tenants.use(settings.keys)
        return tenants

    async def use(self, keys: Keys) -> None:
        """Other keys, from now on; what is open goes on. Raises what keeps a tenant that is new from asking."""
        settings = self._settings
        self._keys = keys  # before anything is waited for: a key that was taken away is gone at once
        for name in keys.tenants - self._clients.keys():
            if name == settings.tenant and not settings.tenant_inbox:
                self._clients[name] = self.own
            else:
                inbox = settings.tenant_inbox.replace(subjects.TENANT_PLACE, subjects.name_to_token(name))
                self._clients[name] = await self.own.for_tenant(name, inbox)

    def of(self, request: Request) -> Tenant:
        """Who asks. Raises FailedError."""
        name = self._keys.tenant_of(request.headers.get("authorization", ""))
        if name is None:
            raise FailedError(NO_KEY)
        client = self._clients.get(name)
        if client is None:
            raise FailedError(NOT_YET)
        return Tenant(name, client)
