"""The tenants of a gateway: each has a client over one shared connection for as long as it makes requests."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from starlette.requests import Request

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.admission.callers import Caller, Callers
from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.protocol.wire import errors, subjects

_IDLE_S = 60.0
"""A tenant without requests for so long loses its client."""
_MAX_IDLE = 1_024
"""The most clients of tenants without requests."""
_MAX_KEYS = 1_024
"""The most keys of a tenant whose clients are kept; they are made again easily."""
_TEND_S = 5.0


class Tenant(NamedTuple):
    """The tenant of one request, and who sends it."""

    name: str
    client: WireClient
    """Makes the tenant's requests, with the key of this one."""
    keyless_client: WireClient
    """Knows what is served for all keys of the tenant."""
    caller: Caller
    reporting: asyncio.Lock
    """Reports of usage are made for each tenant one after another, since few are made at a time."""


class _OpenTenant:
    """A tenant that makes requests, or has made some a moment ago."""

    def __init__(self, client: WireClient) -> None:
        self.client = client
        self.num_requests = 0
        self.idle_since = 0.0
        self.reporting = asyncio.Lock()
        self._of_keys: dict[str, WireClient] = {}

    def client_of(self, key_id: str) -> WireClient:
        """Returns the client for requests with a key, or without one if it is empty."""
        if not key_id:
            return self.client
        if key_id not in self._of_keys:
            if len(self._of_keys) >= _MAX_KEYS:
                self._of_keys.clear()
            self._of_keys[key_id] = self.client.with_key(key_id)
        return self._of_keys[key_id]


class Tenants:
    """Any number of tenants, whose clients are opened with their first request."""

    def __init__(
        self,
        gateway_client: WireClient,
        settings: GatewaySettings,
        callers: Callers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gateway_client = gateway_client
        """The gateway's own client, for matters that concern no tenant. Closing it closes all clients."""
        self.callers = callers
        self._settings = settings
        self._clock = clock
        self._open: dict[str, _OpenTenant] = {}
        """The longest idle first."""
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self._open)}>"

    @contextlib.asynccontextmanager
    async def admitted(self, request: Request, *, looks_on: bool = False) -> AsyncIterator[Tenant]:
        """Yields the tenant of a request, until that has ended. One that only looks on asks nothing of a model.

        Raises ApiError if its key is refused, and RequestError if the broker is away."""
        caller = await self.callers.sender_of(request)
        if not looks_on:
            self.callers.check_requests(caller)
        async with self._in_use(caller.tenant) as found:
            yield Tenant(caller.tenant, found.client_of(caller.key_id), found.client, caller, found.reporting)

    @contextlib.asynccontextmanager
    async def looking_at(self, name: str) -> AsyncIterator[WireClient]:
        """Yields a client that looks at a tenant; the caller has checked who may. Raises RequestError if the broker is
        away."""
        async with self._in_use(name) as found:
            yield found.client

    @contextlib.asynccontextmanager
    async def _in_use(self, name: str) -> "AsyncIterator[_OpenTenant]":
        found = self._open.get(name) or await self._opened(name)
        found.num_requests += 1
        try:
            yield found
        finally:
            found.num_requests -= 1
            found.idle_since = self._clock()
            if self._open.get(name) is found:
                self._open[name] = self._open.pop(name)

    async def tend(self) -> None:
        """Releases the clients of idle tenants until cancelled."""
        while True:
            await asyncio.sleep(_TEND_S)
            await self.release_idle()

    async def release_idle(self) -> None:
        """Releases the clients of tenants that have made no request for a while, and those that are too many."""
        idle = [name for name, one in self._open.items() if not one.num_requests]
        too_many, since = len(idle) - _MAX_IDLE, self._clock() - _IDLE_S
        for number, name in enumerate(idle):
            found = self._open.get(name)
            if found is None or found.num_requests or (number >= too_many and found.idle_since > since):
                continue
            del self._open[name]
            if found.client is not self.gateway_client:
                await self.gateway_client.release_tenant(found.client)

    def end_streams(self, key_id: str) -> None:
        """Ends the open streams of a key that has been revoked."""
        error = errors.make_error(errors.Code.UNAUTHORIZED, f"the API key {key_id} has been revoked")
        for found in self._open.values():
            found.client.end_streams(key_id, error)

    async def _opened(self, name: str) -> _OpenTenant:
        async with self._opening:
            if name not in self._open:
                self._open[name] = _OpenTenant(await self._client_of(name))
            return self._open[name]

    async def _client_of(self, name: str) -> WireClient:
        """Raises RequestError."""
        settings = self._settings
        if name == settings.tenant and not settings.tenant_inbox:
            return self.gateway_client
        inbox = settings.tenant_inbox.replace(subjects.TENANT_PLACEHOLDER, subjects.encode_name(name))
        try:
            return await self.gateway_client.for_tenant(name, inbox)
        except ConnectionError as error:
            raise errors.request_error(errors.Code.NO_WORKER, str(error)) from error
