"""The async Python client of a Tokenbus system: `async for chunk in client.generate("demo", prompt="...")`."""

from tokenbus.client.client import Client
from tokenbus.client.stream import Stream
from tokenbus.protocol.wire.errors import RequestError

__all__ = ["Client", "RequestError", "Stream"]

if __name__ != "tokenbus.client":
    raise ImportError("import tokenbus.client: it is not a top-level package")
