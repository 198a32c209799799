"""The application of a gateway with all its routes, over a fleet that serves one model and does nothing."""

from typing import Any, Self
from unittest.mock import MagicMock

from starlette.applications import Starlette

from tokenbus.client.wire.trace_reader import Traces
from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.admission.callers import Callers
from tokenbus.gateway.admission.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.gateway.admission.tenants import Tenants
from tokenbus.gateway.console.acts import ConsoleActs
from tokenbus.gateway.console.pages import ConsolePages
from tokenbus.gateway.http.body import BodyMemory
from tokenbus.gateway.routes import Routes, make_app
from tokenbus.gateway.serving.endpoint import Services
from tokenbus.gateway.storage.record_store import MemoryStore, StorageLimits
from tokenbus.gateway.storage.records import Records
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import messages

MODEL = "demo"


class Fleet:
    """Stands in for the clients of all tenants."""

    def __init__(self) -> None:
        self.num_traced = 0

    async def for_tenant(self, tenant: str, inbox_prefix: str = "") -> Self:
        return self

    def with_key(self, key_id: str) -> Self:
        return self

    async def served(self) -> messages.ModelsReply:
        served = messages.ServedModel(model=MODEL, context_length=512, features=["generate"], adapters=[], workers=[])
        return messages.ModelsReply(models=[served], limits=messages.ServerLimits(max_request_bytes=1))

    async def traces(self, asked: messages.TraceRequest) -> Traces:
        self.num_traced += 1
        return Traces([], [], False)


class GatewayApp:
    """A gateway's application and what it shares."""

    def __init__(self, *api_keys: str, allowed_origins: tuple[str, ...] = (), max_requests: int = 8) -> None:
        settings = GatewaySettings(api_keys=ApiKeys(list(api_keys)))
        metrics, self.fleet, storage = GatewayMetrics(), Fleet(), StorageLimits(60.0, 64 << 20)
        client: Any = self.fleet
        self.services = Services(
            limit=ConcurrencyLimit(max_requests),
            tenants=Tenants(client, settings, Callers(settings.api_keys, None, metrics)),
            aliases=Aliases(),
            bodies=BodyMemory(1 << 20),
            broker=MagicMock(),
            metrics=metrics,
            tracer=tracing.NoopTracer(),
            records=Records(MemoryStore(storage), storage, metrics),
            usage=MagicMock(),
            clock=lambda: 1_000.0,
        )
        acts = ConsoleActs(self.services, None, None, is_allowed=True)
        pages = ConsolePages(self.services, MagicMock(), acts.parts_of)
        routes = acts.routes() + pages.routes()
        self.app: Starlette = make_app(self.services, Routes(self.services), routes, allowed_origins)
