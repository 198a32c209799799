"""The application of a gateway with all its routes, and nothing behind them."""

from typing import Any
from unittest.mock import MagicMock

from starlette.applications import Starlette

from tokenbus.gateway.admission.callers import Callers
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.console.acts import ConsoleActs
from tokenbus.gateway.console.pages import ConsolePages
from tokenbus.gateway.routes import Routes, make_app


def app_of(*api_keys: str, allowed_origins: tuple[str, ...] = ()) -> Starlette:
    services: Any = MagicMock()
    services.tenants.callers = Callers(ApiKeys(list(api_keys)), None, GatewayMetrics())
    acts = ConsoleActs(services, None, None, is_allowed=True)
    pages = ConsolePages(services, MagicMock(), acts.parts_of)
    return make_app(services, Routes(services), acts.routes() + pages.routes(), allowed_origins)
