"""On whose behalf a request is made: the tenant of its API key, and the client that asks for that tenant."""

from typing import NamedTuple

from starlette.requests import Request

from client import Client
from gateway.failures import NO_KEY, FailedError
from gateway.keys import Keys
from protocol import subjects
from protocol.bus import Bus


class Tenant(NamedTuple):
    name: str
    client: Client


class Tenants:
    """All there are, over one connection."""

    def __init__(self, keys: Keys, clients: dict[str, Client]) -> None:
        self._keys = keys
        self._clients = clients

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self._clients)}>"

    @classmethod
    async def over(cls, connection: Bus, keys: Keys, prefix: str = subjects.DEFAULT_PREFIX) -> "Tenants":
        first, *others = sorted(keys.tenants)
        client = await Client.over(connection, tenant=first, prefix=prefix)
        return cls(keys, {first: client} | {name: await client.for_tenant(name) for name in others})

    @property
    def any_client(self) -> Client:
        """The first: to ask what concerns no tenant, and to close, which closes all."""
        return next(iter(self._clients.values()))

    def of(self, request: Request) -> Tenant:
        """Who asks. Raises FailedError(401)."""
        name = self._keys.tenant_of(request.headers.get("authorization", ""))
        if name is None:
            raise FailedError(NO_KEY)
        return Tenant(name, self._clients[name])
