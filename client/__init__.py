"""The async Python client of a Tokenbus system: `async for chunk in client.generate("demo", prompt="...")`."""

from tokenbus.client.client import Client
from tokenbus.client.stream import Stream

__all__ = ["Client", "Stream"]

if __name__ != "tokenbus.client":
    raise ImportError("import tokenbus.client: it is no package of its own")
