"""LLM inference workers behind a NATS broker: `from tokenbus import Client`.

An installed Tokenbus is this one package. In the repository its parts are folders beside it that are linked into it.
Importing it loads none of them: the public names are looked up when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenbus.client import Client as Client
    from tokenbus.client import RequestError as RequestError
    from tokenbus.client import Stream as Stream

__all__ = ["Client", "RequestError", "Stream"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tokenbus.client"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
